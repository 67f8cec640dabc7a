"""The whole launcher as a user starts it, with the fakes as its children."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from headrace_launcher.serve import SAME_SIGNAL_SECONDS

from tests.launcher.fakes import Fakes, is_running, wait_until


class Launched:
    """`headrace` with the fakes, its output in a file; `wrapper` is a command that runs it."""

    def __init__(
        self,
        fakes: Fakes,
        folder: Path,
        port: int,
        *argv: str,
        wrapper: tuple[str, ...] = (),
        **variables: str,
    ) -> None:
        self.fakes = fakes
        self.port = port
        self.log_path = folder / "log"
        command = [*wrapper, sys.executable, "-P", "-m", "headrace_launcher"]
        command += ["--hostname=127.0.0.1", f"--port={port}", *argv]
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=fakes.environment(**variables)
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_ready(self) -> None:
        wait_until(lambda: "ready on http://" in self.log or self.process.poll() is not None, "ready")
        assert "ready on http://" in self.log, self.log

    def end(self, *numbers: signal.Signals) -> int:
        for number in numbers:
            self.process.send_signal(number)
        return self.process.wait(30)

    def pids(self) -> list[int]:
        return [pid for name in ("shard", "router") for pid in self.fakes.pids(f"{name} starts")]


@pytest.fixture
def launch(fakes: Fakes, tmp_path: Path, model: Path, free_port: int) -> Iterator[Any]:
    launched: list[Launched] = []

    def start(*argv: str, **variables: Any) -> Launched:
        if not any(arg.startswith("--model-id") for arg in argv):
            argv = (f"--model-id={model}", *argv)
        launched.append(Launched(fakes, tmp_path, free_port, *argv, **variables))
        return launched[-1]

    yield start
    for one in launched:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(30)


def ended(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "headrace_launcher", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["--bogus", "1"], 2, "unrecognized arguments: --bogus 1"),
        (["serve", "--bogus"], 2, "unrecognized arguments: --bogus"),
        (["bogus"], 2, "unrecognized arguments: bogus"),
        (["--port", "eighty"], 2, "--port: expected a whole number, got 'eighty'"),
        (["--num-shard", "4"], 2, "--num-shard: this version runs a model on one shard, got 4"),
        (["--port", "0", "--model-id", "/no/such/folder"], 1, "--model-id /no/such/folder: no such folder"),
        (["download", "--model-id", "/no/such.gguf"], 1, "--model-id /no/such.gguf: no such file"),
        (["--port", "0", "--hostname", "203.0.113.9"], 1, "--hostname 203.0.113.9: no such address"),
    ],
)
def test_errors_are_one_line(argv: list[str], status: int, words: str) -> None:
    result = ended(*argv)
    assert result.returncode == status
    assert result.stderr.startswith(f"headrace: error: {words}") and result.stderr.count("\n") == 1


def test_version_and_help() -> None:
    assert re.fullmatch(r"headrace \d+\.\d+\.\d+\n", ended("--version").stdout)
    shown = ended("download", "--help").stdout
    assert "--model-id" in shown and shown.startswith("usage: headrace download ")
    assert "prints the folder it is in and ends" in " ".join(shown.split())


def test_a_port_in_use_starts_nothing(fakes: Fakes, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = ["--hostname", "127.0.0.1", "--port", port, "--model-id", str(model)]
        result = ended(*argv, env=fakes.environment())
    assert result.returncode == 1
    assert result.stderr.startswith(f"headrace: error: --port {port}: another program listens there")
    assert fakes.events() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_in_order(number: signal.Signals, launch: Any) -> None:
    launched = launch()
    launched.wait_ready()
    assert launched.end(number) == 0
    assert launched.fakes.events()[-3:] == ["router told to end", "router drained", "shard told to end"]
    assert not any(is_running(pid) for pid in launched.pids())


def test_a_second_signal_ends_it_at_once(launch: Any) -> None:
    launched = launch(FAKE_ROUTER="stubborn")
    launched.wait_ready()
    launched.process.send_signal(signal.SIGTERM)
    launched.process.send_signal(signal.SIGTERM)  # the same wish, told twice
    launched.fakes.wait_for("router told to end")
    assert all(is_running(pid) for pid in launched.pids())
    time.sleep(2 * SAME_SIGNAL_SECONDS)
    assert launched.end(signal.SIGTERM) == 0
    assert "router drained" not in launched.fakes.events()
    assert not any(is_running(pid) for pid in launched.pids())


def test_a_drain_has_a_limit(launch: Any, tmp_path: Path) -> None:
    launched = launch("-g", "0", FAKE_ROUTER="stubborn")
    launched.wait_ready()
    assert launched.end(signal.SIGTERM) == 0
    assert launched.fakes.events()[-1] == "shard told to end"
    assert not any(is_running(pid) for pid in launched.pids())


def test_a_killed_launcher_leaves_nothing(launch: Any) -> None:
    launched = launch()
    launched.wait_ready()
    assert launched.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not any(is_running(pid) for pid in launched.pids()), "the end of the children")


def test_a_killed_launchers_folder_goes_at_the_next_start(launch: Any) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        killed = launch(TMPDIR=temporary)
        killed.wait_ready()
        killed.end(signal.SIGKILL)
        (left,) = Path(temporary).glob("headrace-*")
        wait_until(lambda: not any(is_running(pid) for pid in killed.pids()), "the end of the children")
        launched = launch(TMPDIR=temporary)
        launched.wait_ready()
        (folder,) = Path(temporary).glob("headrace-*")
        assert folder != left
        assert launched.end(signal.SIGTERM) == 0
        assert list(Path(temporary).glob("headrace-*")) == []


UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0,
    reason="this user may not make a process namespace",
)
def test_as_process_one_it_reaps_and_stops(launch: Any) -> None:
    launched = launch(wrapper=UNSHARE, FAKE_SHARD="orphans")
    launched.wait_ready()
    top = psutil.Process(launched.process.pid).children()[0]
    launched.fakes.wait_for("shard orphan ends")
    wait_until(lambda: len(top.children(recursive=True)) == 2, "the orphan to be reaped")
    top.send_signal(signal.SIGTERM)
    assert launched.process.wait(30) == 0
    assert launched.fakes.events()[-1] == "shard told to end"


def test_a_signal_while_the_shard_loads(launch: Any) -> None:
    launched = launch(FAKE_SHARD="slow")
    launched.fakes.wait_for("shard starts")
    launched.fakes.wait_for("router serves")
    assert launched.end(signal.SIGTERM) == 0
    assert not any(is_running(pid) for pid in launched.pids())


def test_a_signal_while_a_file_is_converted(launch: Any, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    argv = [f"--model-id={tmp_path / 'a.gguf'}", f"--model-cache={tmp_path / 'cache'}"]
    launched = launch(*argv, FAKE_SHARD="slow")
    launched.fakes.wait_for("shard converts")
    assert launched.end(signal.SIGINT) == 0
    assert not is_running(launched.fakes.pids("shard converts")[0])
    assert launched.fakes.events() == ["shard converts"]


def test_a_signal_while_modules_are_imported(tmp_path: Path) -> None:
    # An import that lasts until somebody writes to the pipe.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "asyncio.py").write_text(f"open({str(pipe)!r}).read()\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "headrace_launcher"]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process,
        pipe.open("w"),
    ):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors == ""


def test_a_refusal_is_told_once(launch: Any) -> None:
    launched = launch(FAKE_SHARD="refuses")
    assert launched.process.wait(30) == 1
    assert launched.log.count("no such weights") == 1
    last = launched.log.splitlines()[-1]
    assert last == "headrace: error: the shard did not start, exit status 1: no such weights"


def test_a_shard_that_fails_is_quoted(launch: Any) -> None:
    launched = launch(FAKE_SHARD="fails")
    assert launched.process.wait(30) == 1
    last = launched.log.splitlines()[-1]
    assert last == "headrace: error: the shard did not start, exit status 3: the weights are upside down"


def test_lines_are_readable_and_name_their_process(launch: Any) -> None:
    launched = launch("--disable-custom-kernels")
    launched.wait_ready()
    launched.end(signal.SIGTERM)
    assert "2026-01-01T00:00:00.000Z INFO  shard    loading\n" in launched.log
    assert re.search(r"WARN  shard    a bare line on standard error\n", launched.log)
    assert len(re.findall(r"WARN  launcher --disable-custom-kernels is ignored", launched.log)) == 1
    assert re.search(r"INFO  launcher files .*/model: llama, bfloat16 weights", launched.log)


def test_lines_are_json_when_asked(launch: Any) -> None:
    launched = launch("--json-output")
    launched.wait_ready()
    launched.end(signal.SIGTERM)
    lines = [json.loads(line) for line in launched.log.splitlines()]
    assert {line["process"] for line in lines} == {"launcher", "shard"}
    assert {"level": "INFO", "process": "shard", "target": "shard", "message": "loading"}.items() <= next(
        line.items() for line in lines if line["message"] == "loading"
    )


def test_children_see_their_settings_and_no_others(launch: Any, tmp_path: Path, free_port: int) -> None:
    keys = "a-secret\nb,secret"
    launched = launch("--dtype=float32", "--max-n=9", API_KEY=keys, PORT="1", HF_TOKEN="another-secret")
    launched.wait_ready()
    shard, router = (json.loads((tmp_path / f"{name}-seen.json").read_text()) for name in ("shard", "router"))
    assert "--dtype=float32" in shard["argv"] and "--max-n=9" in router["argv"]
    assert f"--port={free_port}" in router["argv"]
    assert f"--model-path={tmp_path / 'model'}" in shard["argv"]
    assert f"--model-id={tmp_path / 'model'}" in router["argv"]
    assert router["environment"]["HEADRACE_API_KEY"] == keys
    for child in (shard, router):
        assert "another-secret" not in str(child)
        assert not {"PORT", "API_KEY"} & child["environment"].keys()
    for key in keys.split("\n"):
        assert key not in str(shard) + str(router["argv"]) + launched.log


def test_a_socket_prefix_that_another_server_uses(
    launch: Any, fakes: Fakes, model: Path, tmp_path: Path
) -> None:
    launched = launch(f"--shard-uds-path={tmp_path / 'socket'}")
    launched.wait_ready()
    assert (tmp_path / "socket-0").is_socket()
    argv = ["--port=0", f"--model-id={model}", f"--shard-uds-path={tmp_path / 'socket'}"]
    result = ended(*argv, env=fakes.environment())
    assert result.returncode == 1 and "another server uses it" in result.stderr
    assert launched.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("prefix", ["/no/such/folder/socket", "/tmp/" + "x" * 200])
def test_a_socket_prefix_that_cannot_be(prefix: str, model: Path) -> None:
    result = ended("--port=0", f"--model-id={model}", f"--shard-uds-path={prefix}")
    assert result.returncode == 1
    assert result.stderr.startswith(f"headrace: error: --shard-uds-path {prefix}: ")


def test_download_prints_the_folder(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    argv = ["download", f"--model-id={tmp_path / 'a.gguf'}", f"--model-cache={tmp_path / 'cache'}"]
    result = ended(*argv, env=fakes.environment())
    assert result.returncode == 0, result.stderr
    # And nothing else, so that a script may say $(headrace download).
    (line,) = result.stdout.splitlines()
    folder = Path(line)
    assert folder.parent == tmp_path / "cache" and (folder / "config.json").exists()


def test_the_environment_report(launch: Any) -> None:
    launched = launch("--env")
    launched.wait_ready()
    assert re.search(r"INFO  launcher headrace .*, Python 3", launched.log)
    assert len(re.findall(r"headrace \d+\.\d+\.\d+", launched.log)) == 1
    assert "GPU" in launched.log and "GiB of memory" in launched.log
