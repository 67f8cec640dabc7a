"""The program itself, as a process: starting, refusing to start, stopping."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import pytest
from headrace_proto import shard_pb2 as pb
from headrace_proto.shard_pb2_grpc import ShardStub

from tests.tiny import make_checkpoint

TIMEOUT_SECONDS = 60.0


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "headrace_shard", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=TIMEOUT_SECONDS)


def starting(*arguments: object) -> AbstractContextManager["subprocess.Popen[str]"]:
    """A shard that is killed at the end if it still runs."""
    return started(command(*arguments))


@contextmanager
def started(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A process that is killed at the end if it still runs."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_ready(target: str) -> pb.InfoResponse:
    backoff = [(f"grpc.{kind}_reconnect_backoff_ms", 100) for kind in ("initial", "min", "max")]
    with grpc.insecure_channel(target, options=backoff) as channel:
        stub = ShardStub(channel)
        stub.Health(pb.HealthRequest(), timeout=TIMEOUT_SECONDS, wait_for_ready=True)
        return stub.Info(pb.InfoRequest(), timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_a_signal_comes(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    address = tmp_path / "shard"
    with starting(
        "--model-path", folder, "--listen", f"unix://{address}", "--attention", "sdpa", "--num-threads", 1
    ) as process:
        info = wait_until_ready(f"unix:{address}")
        assert "threads: 1, as asked" in info.notes
        process.send_signal(number)
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0
    assert errors == ""
    assert f"listening on unix://{address}" in output
    assert "dtype: float32, the checkpoint's" in output
    assert not address.exists()


def test_restarts_where_it_was_killed(folder: Path, tmp_path: Path) -> None:
    address = tmp_path / "shard"
    arguments = ("--model-path", folder, "--listen", f"unix://{address}", "--attention", "sdpa")
    instances = []
    for _ in range(2):
        with starting(*arguments) as process:
            instances.append(wait_until_ready(f"unix:{address}").instance)
            process.kill()
            process.communicate(timeout=TIMEOUT_SECONDS)
        assert address.is_socket()
    assert instances[0] != instances[1]


def test_second_shard_on_an_address_is_refused(folder: Path, tmp_path: Path) -> None:
    address = tmp_path / "shard"
    arguments = ("--model-path", folder, "--listen", f"unix://{address}", "--attention", "sdpa")
    with starting(*arguments):
        wait_until_ready(f"unix:{address}")
        refused = run(*arguments)
        wait_until_ready(f"unix:{address}")
    assert refused.returncode == 1
    assert refused.stderr == (
        f"headrace-shard: error: --listen: another process listens on {address}; "
        "stop it or give another path\n"
    )


def test_of_two_shards_that_start_at_once_one_is_refused(folder: Path, tmp_path: Path) -> None:
    address = tmp_path / "shard"
    # Both find the address free, then read a model; the second is held up there until the first listens.
    slow = make_checkpoint(tmp_path / "slow")
    config = (slow / "config.json").read_text()
    (slow / "config.json").unlink()
    os.mkfifo(slow / "config.json")
    arguments = ("--listen", f"unix://{address}", "--attention", "sdpa")
    with (
        starting("--model-path", slow, *arguments) as second,
        (slow / "config.json").open("w") as pipe,
        starting("--model-path", folder, *arguments),
    ):
        first = wait_until_ready(f"unix:{address}")
        pipe.write(config)
        pipe.close()
        _, errors = second.communicate(timeout=TIMEOUT_SECONDS)
        assert second.returncode == 1 and "another process listens on" in errors
        assert wait_until_ready(f"unix:{address}").instance == first.instance


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_the_model_is_read(tmp_path: Path, number: signal.Signals) -> None:
    # Reading a pipe that nobody writes to lasts for ever; opening it for writing waits for the reader.
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with (
        starting("--model-path", tmp_path, "--listen", f"unix://{tmp_path}/shard") as process,
        pipe.open("w"),
    ):
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0
    assert errors == ""


def test_signal_while_a_package_is_imported_that_catches_everything(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    package = tmp_path / "packages" / "torch" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text(
        f"try:\n    open({str(pipe)!r}).read()\nexcept BaseException as error:\n    raise ImportError\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parents[1]))
    with (
        starting("--model-path", folder, "--listen", f"unix://{tmp_path}/shard") as process,
        pipe.open("w"),
    ):
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0
    assert errors == ""


LOSING = """
import torch
from headrace_shard import __main__, engine, runner

def fail(self, inputs):
    {fault}

runner.Runner.forward = fail
{patch}
__main__.main()
"""
"""A shard whose device is lost by its first step."""

DEVICES = [
    pytest.param(
        "cpu",
        "raise torch.AcceleratorError('CUDA error: an illegal memory access')",
        "engine.is_lost = lambda device: True",
        id="cpu",
    ),
    pytest.param(
        "cuda",
        "torch.zeros(1, device='cuda')[torch.tensor([10**6], device='cuda')]; torch.cuda.synchronize()",
        "",
        id="cuda",
        marks=pytest.mark.gpu,
    ),
]


@pytest.mark.parametrize(("device", "fault", "patch"), DEVICES)
def test_lost_device_ends_the_process(
    folder: Path, tmp_path: Path, device: str, fault: str, patch: str
) -> None:
    code = LOSING.format(fault=fault, patch=patch)
    arguments = ["--model-path", folder, "--device", device, "--listen", f"unix://{tmp_path}/shard"]
    with (
        started([sys.executable, "-c", code, *map(str, arguments), "--attention", "sdpa"]) as process,
        grpc.insecure_channel(f"unix:{tmp_path}/shard") as channel,
    ):
        wait_until_ready(f"unix:{tmp_path}/shard")
        request = pb.WarmupRequest(max_step_tokens=16, max_step_sequences=4)
        with pytest.raises(grpc.RpcError) as caught:
            ShardStub(channel).Warmup(request, timeout=TIMEOUT_SECONDS)
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert process.returncode == 1
    *before, line = errors.splitlines()
    assert line.startswith("headrace-shard: error: the device is lost, this process must be replaced: ")
    # What the CUDA runtime itself prints of an assertion is not ours.
    assert not before or device == "cuda"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-path", "x", "--no-such-flag", "1"], "--no-such-flag"),
        ([], "--model-path is required"),
        (["--model-path", "x", "--dtype", "int8"], "--dtype: expected one of auto, float32"),
        (
            ["--model-path", "x", "--listen", "localhost:80"],
            "--listen: expected unix:///path or tcp://host:port",
        ),
    ],
)
def test_usage_error_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_missing_folder_is_one_line_and_status_1(tmp_path: Path) -> None:
    result = run("--model-path", tmp_path / "missing", "--listen", f"unix://{tmp_path}/shard")
    assert result.returncode == 1
    assert result.stderr.startswith(f"headrace-shard: error: {tmp_path}/missing is not a folder")
    assert result.stderr.count("\n") == 1


def test_unsupported_model_is_one_line_and_status_1(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", extra_config={"model_type": "mamba"})
    result = run("--model-path", tmp_path / "model", "--listen", f"unix://{tmp_path}/shard")
    assert result.returncode == 1
    assert "'mamba' is not supported" in result.stderr
    assert result.stderr.count("\n") == 1


def test_gpu_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command("--model-path", folder, "--device", "cuda", "--listen", f"unix://{tmp_path}/shard"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=hidden,
    )
    assert result.returncode == 1
    assert result.stderr == (
        "headrace-shard: error: --device cuda: torch finds no GPU on this machine; use --device cpu\n"
    )


def test_convert_refuses_a_missing_file(tmp_path: Path) -> None:
    result = run("convert", tmp_path / "missing.gguf", tmp_path / "target")
    assert result.returncode == 1
    assert "missing.gguf" in result.stderr
    assert result.stderr.count("\n") == 1


def test_convert_needs_two_arguments(tmp_path: Path) -> None:
    result = run("convert", tmp_path)
    assert result.returncode == 2
    assert "target" in result.stderr


def test_usage_needs_neither_torch_nor_grpc() -> None:
    code = "import sys, headrace_shard.__main__; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_SECONDS).returncode == 0
