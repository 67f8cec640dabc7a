"""Models from the Hub, fetched from a small hub on loopback."""

import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from headrace_launcher.config import LauncherConfig
from headrace_launcher.errors import StartError

from tests.launcher.test_model_files import found

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama", "torch_dtype": "float16"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "README.md": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
    "consolidated.safetensors": b"not wanted",
    "training_args.bin": b"not wanted",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """One model, `org/good`, a gated one, and nothing else."""

    protocol_version = "HTTP/1.1"
    paths: list[str]
    tokens: set[str | None]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.tokens.add(self.headers.get("authorization"))
        status, headers, body = self._answer(self.path.split("?")[0])
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def _answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path == "/api/models/org/good/revision/main":
            siblings = [{"rfilename": name} for name in FILES]
            return 200, {}, json.dumps({"id": "org/good", "sha": COMMIT, "siblings": siblings}).encode()
        if path == f"/api/models/org/good/tree/{COMMIT}":
            tree = [{"type": "file", "path": n, "size": len(b), "oid": etag(b)} for n, b in FILES.items()]
            return 200, {}, json.dumps(tree).encode()
        if path.startswith(f"/org/good/resolve/{COMMIT}/"):
            body = FILES[path.split("/", 5)[5]]
            return 200, {"etag": f'"{etag(body)}"', "x-repo-commit": COMMIT}, body
        code = "RepoNotFound"
        if path.startswith("/api/models/org/good/revision/"):
            code = "RevisionNotFound"
        if "gated" in path:
            return 403, {"x-error-code": "GatedRepo"}, b""
        return 404, {"x-error-code": code}, b""

    def log_message(self, format: str, *args: object) -> None:
        """The tests print nothing."""


def etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def hub() -> Iterator[http.server.ThreadingHTTPServer]:
    Hub.paths, Hub.tokens = [], set()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def environment(hub: http.server.ThreadingHTTPServer, **more: str) -> dict[str, str]:
    return os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}", **more}


def test_the_wanted_files_of_a_model(hub: http.server.ThreadingHTTPServer, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    config = LauncherConfig(model_id="org/good", huggingface_hub_cache=str(cache), hf_token="hf_secret")
    files = found(config, environment(hub), tmp_path)
    assert files.folder.is_relative_to(cache)
    assert files.name == "org/good" and files.dtype == "float16"
    assert files.revision == COMMIT, "main is not what the Hub will call it tomorrow"
    names = {str(path.relative_to(files.folder)) for path in files.folder.rglob("*") if path.is_file()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    assert "Bearer hf_secret" in Hub.tokens
    offline = environment(hub, HF_HUB_OFFLINE="1")
    Hub.paths.clear()
    assert found(config, offline, tmp_path).folder == files.folder
    assert Hub.paths == []


@pytest.mark.parametrize(
    ("model_id", "revision", "words"),
    [
        ("org/missing", None, "no such model on the Hub, or a private one"),
        ("org/good", "no-such-branch", "the model has no revision 'no-such-branch'"),
        ("org/gated", None, "set HF_TOKEN"),
        ("org/--bad", None, "neither a folder nor a file nor a model id of the Hub"),
    ],
)
def test_what_the_hub_refuses(
    model_id: str, revision: str | None, words: str, hub: http.server.ThreadingHTTPServer, tmp_path: Path
) -> None:
    config = LauncherConfig(model_id=model_id, revision=revision, huggingface_hub_cache=str(tmp_path))
    with pytest.raises(StartError, match=f"^--model-id {model_id}: .*{words}") as failure:
        found(config, environment(hub), tmp_path)
    assert "\n" not in str(failure.value)
