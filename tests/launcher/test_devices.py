"""What the start-up lines say about the processors."""

from pathlib import Path

import pytest
from headrace_launcher.devices import describe, num_visible_gpus


@pytest.mark.parametrize(
    ("environment", "num_gpus"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,3,5"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 1),
    ],
)
def test_visible_gpus(environment: dict[str, str], num_gpus: int, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_visible_gpus(environment, tmp_path) == num_gpus


def test_description() -> None:
    assert describe("cpu", {"CUDA_VISIBLE_DEVICES": "0"}).startswith("a CPU of ")
    assert describe("auto", {"CUDA_VISIBLE_DEVICES": ""}).startswith("a CPU of ")
    assert describe("auto", {"CUDA_VISIBLE_DEVICES": "4"}) == "a GPU"
    assert describe("cuda", {"CUDA_VISIBLE_DEVICES": "4,5"}).startswith("the first of 2 GPUs")
