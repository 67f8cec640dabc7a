"""Tensors of a model folder, memory-mapped. Knows names and files, and no network.

The two layouts of the Hugging Face hub: `model.safetensors`, or numbered files beside
`model.safetensors.index.json`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace_shard.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Checkpoint:
    """All tensors of a folder by name. Opening reads the headers only."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError when files are missing, damaged or not those of the index."""
        self.folder = folder
        self._files: dict[str, Any] = {}
        """Tensor name to open file."""
        index = _read_index(folder)
        for path in sorted(set(index.values())) if index else [_single_file(folder)]:
            file = _open(path)
            self._files |= dict.fromkeys(file.keys(), file)
        if missing := sorted(set(index) - set(self._files)):
            raise CheckpointError(
                f"{folder}: {INDEX_FILE} names tensors that no file holds: {listed(missing)}"
            )

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU in its stored dtype; its memory is the file, so copy it before writing.

        Raises CheckpointError when there is none of that name.
        """
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing from the weights")
        tensor: Tensor = file.get_tensor(name)
        return tensor


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the first tensor, for folders whose config.json does not name one."""
    checkpoint = Checkpoint(folder)
    return checkpoint.tensor(min(checkpoint.names)).dtype


def listed(names: list[str], num_shown: int = 3) -> str:
    """Names for an error message, the first few of many."""
    rest = len(names) - num_shown
    return ", ".join(names[:num_shown]) + (f" and {rest} more" if rest > 0 else "")


def _read_index(folder: Path) -> dict[str, Path]:
    path = folder / INDEX_FILE
    if not path.exists():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): folder / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors index: {error!r}") from error
    if not index:
        raise CheckpointError(f"{path} names no tensor")
    if absent := sorted({file.name for file in index.values() if not file.exists()}):
        raise CheckpointError(f"{folder}: weight files named by {INDEX_FILE} are missing: {listed(absent)}")
    return index


def _single_file(folder: Path) -> Path:
    path = folder / SINGLE_FILE
    if path.exists():
        return path
    others = sorted(file.name for file in folder.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
    found = f"; there is {listed(others)}, which is not read: convert it to safetensors" if others else ""
    raise CheckpointError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{found}")


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not fully downloaded: {error}") from error
