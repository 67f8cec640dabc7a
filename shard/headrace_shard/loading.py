"""From settings to a model that is ready to compute: which device, number format, attention, and why.

Every choice leaves one line in `notes`, which the log and Info tell. Executes nothing.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace_shard.attention.base import AttentionBackend, pick
from headrace_shard.checkpoint.config import ModelConfig, load_config
from headrace_shard.config import ShardSettings
from headrace_shard.errors import StartError, UnsupportedDevice
from headrace_shard.kernels import build
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.machine import available_host_bytes, num_usable_cores, spelled
from headrace_shard.models import NETWORKS, CausalLM, load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device, its cache not bound."""

    model: CausalLM
    config: ModelConfig
    backend: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    num_threads: int
    """Threads that compute on a CPU; every thread that computes must set them."""
    weight_bytes: int
    notes: tuple[str, ...]
    """What was decided and why, "name: value, why" each."""


@torch.inference_mode()
def load(folder: Path, settings: ShardSettings) -> LoadedModel:
    """Read the model in `folder`. Raises StartError or OutOfMemory when files or device will not do."""
    started = time.perf_counter()
    config = load_config(folder, NETWORKS)
    device, device_note = _device(settings.device)
    dtype, dtype_note = _dtype(settings.dtype, config)
    backend, attention_note = pick(settings, device)
    num_threads = settings.num_threads or num_usable_cores()
    # GNU's OpenMP keeps the threads of everybody who has once called on some, and lets nobody wait for others
    # without going to sleep when they are more than there are cores: the thread that computes must be alone.
    torch.set_num_threads(1)
    _check_room(folder, config, dtype, device)
    kernels = DenseKernels(build.for_machine(settings.cxx)) if backend.name == "cpu" else None
    model = load_model(folder, config, dtype, device, backend, kernels)
    weight_bytes = sum(tensor.nbytes for tensor in model.parameters())
    seconds = time.perf_counter() - started
    notes = [device_note, dtype_note, attention_note]
    if device.type == "cpu":
        why = "as asked" if settings.num_threads else "the cores this process may use"
        layers = "native kernels" if kernels is not None else "plain torch"
        notes.append(f"layers: {layers}, as the attention")
        notes.append(f"threads: {num_threads}, {why}")
    notes.append(f"weights: {spelled(weight_bytes)}, read in {seconds:.1f} s")
    return LoadedModel(
        model=model,
        config=config,
        backend=backend,
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        weight_bytes=weight_bytes,
        notes=tuple(notes),
    )


def name_of(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _device(name: str) -> tuple[torch.device, str]:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UnsupportedDevice("--device cuda: torch finds no GPU on this machine; use --device cpu")
    if name == "auto":
        reason = "a GPU is there" if has_gpu else "no GPU is there"
        name = "cuda" if has_gpu else "cpu"
    else:
        reason = "as asked"
    return torch.device(name, 0) if name == "cuda" else torch.device(name), f"device: {name}, {reason}"


def _dtype(name: str, config: ModelConfig) -> tuple[torch.dtype, str]:
    own = name_of(config.dtype)
    if name == "auto":
        return config.dtype, f"dtype: {own}, the checkpoint's"
    dtype: torch.dtype = getattr(torch, name)
    return dtype, f"dtype: {name}, as asked (the checkpoint's is {own})"


def _check_room(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """The kernel would end the process without a word if the weights were read and did not fit."""
    if device.type != "cpu":
        return
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    needed = size * dtype.itemsize // config.dtype.itemsize
    available = available_host_bytes()
    if needed > available:
        raise StartError(
            f"the weights of {folder} need {spelled(needed)} in {name_of(dtype)}, but only "
            f"{spelled(available)} of memory are available; take a smaller model or --dtype bfloat16"
        )
