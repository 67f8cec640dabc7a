"""Which network a `model_type` is, and how one gets its weights. Imports an architecture only when chosen."""

import importlib
from pathlib import Path

import torch
from torch import Tensor, nn

from headrace_shard.attention.base import AttentionBackend
from headrace_shard.checkpoint.config import ModelConfig
from headrace_shard.checkpoint.weights import Checkpoint, listed
from headrace_shard.errors import CheckpointError, OutOfMemory
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.layers.linear import Linear
from headrace_shard.layers.native import NativeLayer
from headrace_shard.models.base import CausalLM

__all__ = ["NETWORKS", "CausalLM", "load_model"]

NETWORKS = {
    "llama": "headrace_shard.models.llama:LlamaForCausalLM",
    "mistral": "headrace_shard.models.llama:LlamaForCausalLM",
    "qwen2": "headrace_shard.models.llama:LlamaForCausalLM",
}
"""`model_type` of config.json to "module:Class"."""


def load_model(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    kernels: DenseKernels | None = None,
) -> CausalLM:
    """The network of `config` with the weights of `folder`, converted to `dtype`, on `device`.

    With `kernels` its layers compute with them, else in plain torch.

    It still needs a cache (`bind_cache`). Raises CheckpointError when tensors are missing, superfluous or of
    another shape, OutOfMemory when the device cannot hold them.
    """
    module, _, class_name = NETWORKS[config.model_type].partition(":")
    network: type[CausalLM] = getattr(importlib.import_module(module), class_name)
    checkpoint = Checkpoint(folder)
    with torch.device("meta"):
        model = network(config)
    try:
        _allocate(model, dtype, device)
    except RuntimeError as error:
        raise OutOfMemory(f"no memory on {device} for the weights of {folder} in {dtype}") from error
    _fill(model, checkpoint, is_tied=config.tie_word_embeddings)
    if kernels is not None:
        # Layer by layer, so that no more than one weight is there twice.
        for layer in model.modules():
            if isinstance(layer, NativeLayer):
                layer.use(kernels)
    model.backend = backend
    return model.eval()


def _allocate(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter memory, uninitialised, and move the tables that are computed."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _fill(model: CausalLM, checkpoint: Checkpoint, *, is_tied: bool) -> None:
    """Copy every tensor to its place, a joined product's to its rows; nothing is left over or left out."""
    places = _places(model)
    if missing := sorted(set(places) - checkpoint.names):
        raise CheckpointError(f"{checkpoint.folder}: the weights lack tensors: {listed(missing)}")
    unknown = sorted(
        name for name in checkpoint.names - set(places) if not _is_redundant(name, is_tied=is_tied)
    )
    if unknown:
        raise CheckpointError(
            f"{checkpoint.folder}: the weights hold tensors that config.json does not account for: "
            f"{listed(unknown)}"
        )
    for name, place in places.items():
        tensor = checkpoint.tensor(name)
        if tensor.shape != place.shape:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has shape {list(tensor.shape)}, "
                f"config.json makes it {list(place.shape)}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} holds {tensor.dtype}, "
                "so it is quantised, which is not supported; take the unquantised checkpoint"
            )
        place.copy_(tensor)


def _places(model: CausalLM) -> dict[str, Tensor]:
    """Tensor name in checkpoints to the memory that it fills."""
    parts: dict[str, list[tuple[str, int]]] = {}
    for name, (packed_name, part) in model.packed_modules.items():
        parts.setdefault(packed_name, []).append((name, part))
    places: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        parent, _, own_name = path.rpartition(".")
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Linear) and own_name in parts:
                for name, part in parts[own_name]:
                    places[f"{parent}.{name}.{kind}"] = parameter.data[module.rows(part)]
            else:
                places[f"{path}.{kind}"] = parameter.data
    return places


def _is_redundant(name: str, *, is_tied: bool) -> bool:
    """Whether a checkpoint may hold this tensor although the network does not use it."""
    return name.endswith(".rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")
