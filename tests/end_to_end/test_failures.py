"""What happens to requests and processes when something is told to stop, or dies."""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.server import Server, free_port, gone, running

WAIT_SECONDS = 30.0
"""After which a test gives up, far beyond what anything here takes."""

ERROR_SECONDS = 5.0
"""Within which the requests of a dead shard end: a promise to users, so a wait may not be longer."""


def stream(server: Server, num_tokens: int, started: threading.Semaphore | None = None) -> list[str]:
    """The data lines of a streamed completion; `started` is released at the first one."""
    body = {"prompt": "hello", "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    lines: list[str] = []
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
                if started is not None and len(lines) == 1:
                    started.release()
    return lines


def choices(lines: list[str]) -> list[object]:
    return [json.loads(line)["choices"] for line in lines[:-1]]


def test_streams_end_whole_after_sigterm(tiny_folder: Path, tmp_path: Path) -> None:
    num_tokens = 300
    with running(tmp_path, "--model-id", str(tiny_folder)) as server, ThreadPoolExecutor(8) as pool:
        processes = server.processes()
        assert len(processes) >= 3
        started = threading.Semaphore(0)
        streams = [pool.submit(stream, server, num_tokens, started) for _ in range(8)]
        for _ in range(8):
            assert started.acquire(timeout=WAIT_SECONDS)
        server.send_signal(signal.SIGTERM)
        for future in streams:
            lines = future.result(WAIT_SECONDS)
            assert lines[-1] == "[DONE]"
            reasons = [json.loads(line)["choices"][0]["finish_reason"] for line in lines[:-1]]
            assert reasons[-1] == "length" and reasons[:-1] == [None] * (len(reasons) - 1)
        assert server.process.wait(30) == 0
        assert gone(processes)


def test_killed_launcher_leaves_no_process(tiny_folder: Path, tmp_path: Path) -> None:
    with running(tmp_path, "--model-id", str(tiny_folder)) as server:
        processes = server.processes()
        server.send_signal(signal.SIGKILL)
        server.process.wait(10)
        assert gone(processes)


def test_killed_shard_ends_requests_and_comes_back(tiny_folder: Path, tmp_path: Path) -> None:
    with running(tmp_path, "--model-id", str(tiny_folder)) as server, ThreadPoolExecutor(2) as pool:
        first = stream(server, 5)
        started = threading.Semaphore(0)
        streamed = pool.submit(stream, server, 1900, started)
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 1900, "stop": ["no such text"]}}
        plain = pool.submit(lambda: server.client.post("/generate", json=body))
        assert started.acquire(timeout=WAIT_SECONDS)
        server.child("headrace_shard").kill()
        lines = streamed.result(ERROR_SECONDS)
        assert lines[-1] == "[DONE]" and "error" in json.loads(lines[-2])
        answer = plain.result(ERROR_SECONDS)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        server.wait_ready()
        assert choices(stream(server, 5)) == choices(first)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace_launcher", "--hostname", "127.0.0.1", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--no-such-flag"], 2, "--no-such-flag"),
        (["--port", "70000"], 2, "--port"),
        (["--model-id", "/no/such/folder"], 1, "/no/such/folder"),
        (["--model-id", "/no/such/model.gguf"], 1, "/no/such/model.gguf"),
        (["--num-shard", "0"], 2, "--num-shard"),
    ],
)
def test_bad_start_says_so_in_one_line(args: list[str], status: int, words: str) -> None:
    ended = run("--port", str(free_port()), *args)
    assert ended.returncode == status, ended.stderr + ended.stdout
    lines = [line for line in ended.stderr.splitlines() if words in line]
    assert len(lines) == 1
    assert "Traceback" not in ended.stderr + ended.stdout
