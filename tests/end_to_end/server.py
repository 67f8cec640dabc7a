"""A whole headrace (launcher, shard, router) on loopback, for tests: start, look inside, stop."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_SECONDS = 120.0
"""A bound, not an expectation: the first start on a machine also compiles the kernels."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A running server; `log` holds what it printed. `module` is what to start: the whole, or a router."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        env: dict[str, str] | None = None,
        module: str = "headrace_launcher",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        command = [
            sys.executable,
            "-m",
            module,
            "--hostname",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *args],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | (env or {}),
                start_new_session=True,
            )

    def wait_ready(self, timeout_seconds: float = READY_SECONDS) -> None:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(
            f"not ready (exit status {self.process.poll()}):\n{self.log.read_text()[-3000:]}"
        )

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics under its name and labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return {m[1]: float(m[2]) for line in lines if (m := re.fullmatch(r"(\w+(?:\{.*\})?) (\S+)", line))}

    def num_steps(self, metrics: dict[str, float]) -> float:
        return sum(v for k, v in metrics.items() if k.startswith("tgi_batch_inference_count{"))

    def wait_metrics(self, wanted: dict[str, float], timeout_seconds: float = 20.0) -> dict[str, float]:
        """Scrapes until every wanted sample has its value; the scrape in which they had."""
        return self.wait_for(
            lambda found: all(found.get(name) == value for name, value in wanted.items()),
            f"{wanted}",
            timeout_seconds,
        )

    def wait_for(
        self,
        condition: Callable[[dict[str, float]], bool],
        what: str,
        timeout_seconds: float = 20.0,
    ) -> dict[str, float]:
        """Scrapes until the samples fulfil the condition; the scrape in which they did."""
        deadline = time.monotonic() + timeout_seconds
        while not condition(found := self.metrics()):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}, found {found}")
            time.sleep(0.005)
        return found

    def processes(self) -> list[psutil.Process]:
        """The launcher and all below it."""
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def child(self, word: str) -> psutil.Process:
        """The child process whose command line holds a word."""
        for process in self.processes()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(word in part for part in process.cmdline()[:4]):
                    return process
        raise AssertionError(f"no child with {word!r}:\n{self.log.read_text()[-3000:]}")

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM, and SIGKILL for what is left after a while."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return self.process.wait(10)
        finally:
            self.client.close()


@contextlib.contextmanager
def running(
    folder: Path, *args: str, env: dict[str, str] | None = None, module: str = "headrace_launcher"
) -> Iterator[Server]:
    """A server that is ready, and gone afterwards."""
    server = Server(folder, *args, env=env, module=module)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def gone(processes: list[psutil.Process], timeout_seconds: float = 10.0) -> bool:
    """Whether all of the processes end in time (zombies of somebody else's are gone too)."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if not any(is_alive(process) for process in processes):
            return True
        time.sleep(0.02)
    return False


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def generate(server: Server, inputs: str, **parameters: Any) -> dict[str, Any]:
    """One request on the native face with details."""
    body = {"inputs": inputs, "parameters": {"details": True, **parameters}}
    answer = server.client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
