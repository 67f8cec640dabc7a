"""What is chosen for a model and why, and refusals before anything is read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from headrace_shard import loading
from headrace_shard.config import ShardSettings
from headrace_shard.errors import StartError, UnsupportedDevice
from headrace_shard.loading import load

from tests.tiny import make_checkpoint

LOAD = """
import os, sys
from pathlib import Path
from headrace_shard.config import ShardSettings
from headrace_shard.loading import load
import torch
before = len(os.listdir("/proc/self/task"))
loaded = load(Path(sys.argv[1]), ShardSettings(num_threads=3))
print(loaded.num_threads, torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before)
"""


def test_auto_takes_what_checkpoint_and_machine_have(tmp_path: Path) -> None:
    loaded = load(make_checkpoint(tmp_path, dtype="bfloat16"), ShardSettings(device="cpu", attention="sdpa"))
    assert loaded.dtype == torch.bfloat16
    assert "dtype: bfloat16, the checkpoint's" in loaded.notes
    assert 1 <= loaded.num_threads <= len(os.sched_getaffinity(0))
    assert f"threads: {loaded.num_threads}, the cores this process may use" in loaded.notes


def test_what_is_asked_for_is_taken(folder: Path) -> None:
    settings = ShardSettings(device="cpu", attention="sdpa", dtype="float16", num_threads=1)
    loaded = load(folder, settings)
    parameters = list(loaded.model.parameters())
    assert all(parameter.dtype == torch.float16 for parameter in parameters)
    assert loaded.weight_bytes == sum(parameter.nbytes for parameter in parameters)
    assert "dtype: float16, as asked (the checkpoint's is float32)" in loaded.notes
    assert "attention: sdpa, plain torch, as asked" in loaded.notes
    assert "layers: plain torch, as the attention" in loaded.notes
    assert "threads: 1, as asked" in loaded.notes


def test_native_attention_brings_native_layers(folder: Path) -> None:
    loaded = load(folder, ShardSettings(device="cpu", attention="cpu"))
    assert "layers: native kernels, as the attention" in loaded.notes
    assert loaded.weight_bytes == sum(parameter.nbytes for parameter in loaded.model.parameters())


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_host_bytes", lambda: 2**17)
    with pytest.raises(StartError, match=r"need 0\.\d MiB in float32, but only 0\.1 MiB of memory"):
        load(folder, ShardSettings(device="cpu", attention="sdpa"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedDevice, match="torch finds no GPU"):
        load(folder, ShardSettings(device="cuda"))


def test_loading_leaves_no_team_of_threads_behind(tmp_path: Path) -> None:
    """OpenMP counts them for ever, and lets threads that wait go to sleep at once when it counts too many."""
    folder = make_checkpoint(tmp_path, hidden_size=256, intermediate_size=512, num_heads=4, dtype="bfloat16")
    command = [sys.executable, "-c", LOAD, str(folder)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.split() == ["3", "1", "0"]
