"""Loading a model for a shard: who computes afterwards, and on how many threads."""

import subprocess
import sys
from pathlib import Path

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


def test_loading_leaves_no_team_of_threads_behind(tmp_path: Path) -> None:
    """OpenMP counts them for ever, and lets threads that wait go to sleep at once when it counts too many."""
    folder = make_checkpoint(tmp_path, hidden_size=256, intermediate_size=512, num_heads=4, dtype="bfloat16")
    command = [sys.executable, "-c", LOAD, str(folder)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.split() == ["3", "1", "0"]
