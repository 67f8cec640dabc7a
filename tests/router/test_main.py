"""`headrace-router` as a process: start, what can go wrong at it, draining."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.running import WAIT_SECONDS
from tests.tiny import make_tokenizer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RouterProcess:
    """A router that was started by hand."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.port = free_port()
        self.log = folder / f"router-{self.port}.log"
        command = [
            *(sys.executable, "-m", "headrace_router", "--hostname", "127.0.0.1", "--port", str(self.port)),
            *("--tokenizer-name", str(folder), "--model-id", "tiny", *args),
        ]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=WAIT_SECONDS, trust_env=False
        )

    def wait_for_status(self, path: str, status: int) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get(path).status_code == status:
                    return
            time.sleep(0.02)
        raise AssertionError(f"{path} was never {status}:\n{self.log.read_text()}")

    def end(self) -> tuple[int, str]:
        """Exit status and everything printed."""
        status = self.process.wait(WAIT_SECONDS)
        return status, self.log.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path)


@contextlib.contextmanager
def started(folder: Path, *args: str) -> Iterator[RouterProcess]:
    router = RouterProcess(folder, *args)
    try:
        yield router
    finally:
        router.client.close()
        router.process.kill()
        router.process.wait()


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[str]:
    """The address of a scripted shard in a process of its own, whose steps take 20 ms."""
    address = f"unix://{tmp_path}/shard"
    command = [sys.executable, "-m", "tests.fake_shard", "--address", address, "--step-seconds", "0.02"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        try:
            yield address
        finally:
            process.kill()


class Stream(threading.Thread):
    """A stream that is read to its end."""

    def __init__(self, router: RouterProcess, num_tokens: int) -> None:
        super().__init__()
        self.text = ""
        self.has_begun = threading.Event()
        self._url = f"http://127.0.0.1:{router.port}/v1/completions"
        self._body: dict[str, Any] = {
            "prompt": "a",
            "max_tokens": num_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        self.start()
        assert self.has_begun.wait(WAIT_SECONDS)

    def run(self) -> None:
        client = httpx.Client(timeout=WAIT_SECONDS, trust_env=False)
        with client, client.stream("POST", self._url, json=self._body) as response:
            for part in response.iter_text():
                self.has_begun.set()
                self.text += part


def test_healthy_once_the_shard_is_warm(folder: Path, shard: str) -> None:
    with started(folder, "--shard", shard) as router:
        router.wait_for_status("/health", 200)
        router.process.send_signal(signal.SIGINT)
        status, said = router.end()
    assert status == 0, said
    assert f"http://127.0.0.1:{router.port}" in said and "KV cache" in said
    assert "Traceback" not in said


def test_the_port_answers_while_the_shard_is_away(folder: Path) -> None:
    with started(folder, "--shard", f"unix://{folder}/nobody") as router:
        router.wait_for_status("/health", 503)
        router.wait_for_status("/live", 200)
        assert router.client.post("/generate", json={"inputs": "a"}).status_code == 503
        router.process.send_signal(signal.SIGTERM)
        status, said = router.end()
    assert status == 0 and "Traceback" not in said, said


def test_streams_end_whole_while_draining(folder: Path, shard: str) -> None:
    with started(folder, "--shard", shard) as router:
        router.wait_for_status("/health", 200)
        streams = [Stream(router, 60) for _ in range(3)]
        router.process.send_signal(signal.SIGTERM)
        router.wait_for_status("/ready", 503)
        refused = router.client.post("/generate", json={"inputs": "a"})
        assert refused.status_code == 503 and refused.headers["connection"] == "close"
        for stream in streams:
            stream.join(WAIT_SECONDS)
            assert stream.text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in stream.text
        status, said = router.end()
    assert status == 0 and "Traceback" not in said, said


@pytest.mark.parametrize("is_hurried", [True, False])
def test_streams_that_take_too_long_end_with_an_error(folder: Path, shard: str, is_hurried: bool) -> None:
    limit = "60" if is_hurried else "0.2"
    with started(folder, "--shard", shard, "--graceful-termination-timeout", limit) as router:
        router.wait_for_status("/health", 200)
        stream = Stream(router, 450)
        router.process.send_signal(signal.SIGTERM)
        if is_hurried:
            router.wait_for_status("/ready", 503)
            router.process.send_signal(signal.SIGTERM)
        stream.join(WAIT_SECONDS)
        status, said = router.end()
    assert status == 0 and "Traceback" not in said, said
    assert stream.text.endswith("data: [DONE]\n\n") and '"error"' in stream.text


def test_metrics_on_a_port_of_their_own(folder: Path) -> None:
    port = free_port()
    with started(folder, "--prometheus-port", str(port)) as router:
        router.wait_for_status("/live", 200)
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)
        assert page.status_code == 200 and "tgi_request_count" in page.text
        assert httpx.get(f"http://127.0.0.1:{port}/info", trust_env=False).status_code == 404


def test_a_port_in_use_is_one_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(folder, "--hostname", "127.0.0.1", "--port", str(port))
    assert f"--port {port}" in said and "in use" in said


def test_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    assert "tokenizer.json" in refusal(tmp_path, "--port", "0")
    assert "nowhere" in refusal(tmp_path / "nowhere", "--port", "0")


def test_limits_that_cannot_be_met_are_one_line(folder: Path, shard: str) -> None:
    said = refusal(folder, "--port", "0", "--shard", shard, "--max-total-tokens", "100000")
    assert "--max-total-tokens" in said and "512" in said


def test_a_fault_of_the_loop_ends_the_process(
    folder: Path, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python imports this module, if it is there, before anything else.
    (folder / "sitecustomize.py").write_text(
        "from headrace_router.batcher import Batcher\n"
        "async def serve(self, client): raise RuntimeError('the loop is broken')\n"
        "Batcher._serve = serve\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with started(folder, "--shard", shard) as router:
        status, output = router.end()
    assert status == 1 and "the loop that serves requests has failed" in output
    assert output.splitlines()[-1] == "headrace-router: error: RuntimeError: the loop is broken"


def test_usage_errors_exit_with_two(folder: Path) -> None:
    command = [sys.executable, "-m", "headrace_router", "--tokenizer-name", str(folder), "--nope"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--nope" in done.stderr


def refusal(folder: Path, *args: str) -> str:
    """The one line on standard error with which the router refuses to start."""
    command = [sys.executable, "-m", "headrace_router", "--tokenizer-name", str(folder), *args]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, env=os.environ | {"COLUMNS": "80"}
    )
    assert done.returncode == 1, done
    assert done.stderr.startswith("headrace-router: error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr
