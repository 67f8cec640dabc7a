"""Which processors a shard will find, without asking torch: for the start-up lines. Decides nothing."""

import os
from collections.abc import Mapping
from pathlib import Path


def num_visible_gpus(environment: Mapping[str, str], device_folder: Path = Path("/dev")) -> int:
    """GPUs that a CUDA program started from here may use: the visibility variables, else the device files."""
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        listed = environment.get(name)
        if listed is None or listed in ("all", "void"):
            continue
        # Both say "none" by an empty list, by -1 or by the word.
        return len([item for item in listed.split(",") if item.strip() not in ("", "-1", "none")])
    return len([path for path in device_folder.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


def describe(device: str, environment: Mapping[str, str]) -> str:
    """What `--device` comes down to, in words."""
    num_gpus = 0 if device == "cpu" else num_visible_gpus(environment)
    if num_gpus == 0 and device != "cuda":
        num_cores = len(os.sched_getaffinity(0))
        return f"a CPU of {num_cores} cores" if num_cores > 1 else "a CPU of 1 core"
    if num_gpus > 1:
        return f"the first of {num_gpus} GPUs (this version uses one)"
    return "a GPU"
