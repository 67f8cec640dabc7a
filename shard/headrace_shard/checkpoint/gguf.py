"""A GGUF file, quantised or not, becomes a model folder: bf16 safetensors, config and tokenizer.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Architectures are those of the native
networks, mixtures of experts excepted; everything in the file that would change the network is translated or
refused before the long work begins. Imports no transformers.
"""

import json
import logging
import os
import re
import shutil
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from headrace_shard.checkpoint.config import parse_config
from headrace_shard.checkpoint.gguf_tokenizer import write_tokenizer
from headrace_shard.checkpoint.weights import SINGLE_FILE
from headrace_shard.errors import CheckpointError, UnsupportedModel

logger = logging.getLogger(__name__)

# Architecture of the file to model_type and architecture of config.json.
_ARCHITECTURES = {"llama": ("llama", "LlamaForCausalLM"), "qwen2": ("qwen2", "Qwen2ForCausalLM")}

_ROPE_FREQUENCIES = "rope_freqs.weight"

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")

# What Llama 3.1 and its successors were trained with; a GGUF holds only the factors that result.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert(source: Path, target: Path) -> None:
    """Read the GGUF file `source` and write the model folder `target`.

    The folder appears whole or not at all. Raises CheckpointError when the file is missing, damaged or not a
    GGUF, or `target` exists or cannot be written; UnsupportedModel when its network or tokenizer is not
    implemented.
    """
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already; remove it or choose another folder")
    reader = _open(source)
    metadata = {field.name: field.contents() for field in reader.fields.values()}
    config = _config(source, metadata, reader.tensors)
    parse_config(source, config, {}, [config["model_type"]])
    try:
        _write(source, target, reader.tensors, metadata, config)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error


def _write(
    source: Path, target: Path, tensors: list[ReaderTensor], metadata: dict[str, Any], config: dict[str, Any]
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        special = write_tokenizer(source, metadata, folder)
        generation = {
            "bos_token_id": special.bos_id,
            "eos_token_id": special.eos_ids[0] if len(special.eos_ids) == 1 else special.eos_ids,
            "pad_token_id": special.pad_id,
        }
        generation = {key: value for key, value in generation.items() if value is not None}
        _write_json(folder / "config.json", config | generation)
        _write_json(folder / "generation_config.json", generation)
        _write_weights(source, tensors, config, folder / SINGLE_FILE)
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open(source: Path) -> GGUFReader:
    try:
        if not source.is_file():
            raise CheckpointError(f"{source} is not a file; give a GGUF file")
        with source.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{source} is not a GGUF file: it does not begin with the letters GGUF")
        return GGUFReader(source)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror or error}") from error
    # The reader checks little: whatever is cut off shows as an index, shape or value that makes no sense.
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source} is truncated or damaged: {error}") from error


def _config(source: Path, metadata: dict[str, Any], tensors: list[ReaderTensor]) -> dict[str, Any]:
    """config.json of the file's network."""
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{source}: GGUF architecture {architecture!r} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    model_type, class_name = _ARCHITECTURES[architecture]

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise CheckpointError(f"{source}: the metadata lack {architecture}.{key}")
        return found

    if metadata.get(f"{architecture}.expert_count"):
        raise UnsupportedModel(f"{source}: mixtures of experts are not supported")
    shapes = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in tensors}
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{source}: tensor token_embd.weight is missing")
    if model_type == "llama" and len({f"blk.0.attn_{part}.bias" in shapes for part in ("q", "output")}) > 1:
        raise UnsupportedModel(f"{source}: biases on a part of the attention are not supported")
    num_heads, hidden_size = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length", hidden_size // num_heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{source}: rotary embedding over part of a head is not supported")
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(source, metadata, tensors),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "sliding_window": metadata.get(f"{architecture}.attention.sliding_window"),
        "use_sliding_window": f"{architecture}.attention.sliding_window" in metadata,
    }
    return {key: entry for key, entry in config.items() if entry is not None}


def _rope_scaling(
    source: Path, metadata: dict[str, Any], tensors: list[ReaderTensor]
) -> dict[str, Any] | None:
    architecture = metadata["general.architecture"]
    for tensor in tensors:
        if tensor.name == _ROPE_FREQUENCIES:
            factors = _tensor(dequantize(tensor.data, tensor.tensor_type))
            theta = metadata.get(f"{architecture}.rope.freq_base", 10000.0)
            return _llama3_scaling(source, factors, theta)
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    # Other kinds are refused by `parse_config`, under the name they have here.
    return {"rope_type": kind, "factor": metadata.get(f"{architecture}.rope.scaling.factor")}


def _llama3_scaling(source: Path, factors: Tensor, theta: float) -> dict[str, Any]:
    """The parameters that give these divisors of the rotary frequencies, [D/2]."""
    factor = round(float(factors.max()), 3)
    exponents = torch.arange(len(factors), dtype=torch.float64) / len(factors)
    turns = _LLAMA3_ROPE["original_max_position_embeddings"] / (2 * torch.pi * theta**exponents)
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if not torch.allclose(factors.double(), expected, rtol=1e-3):
        raise UnsupportedModel(f"{source}: {_ROPE_FREQUENCIES} are not the factors of a Llama 3.1 scaling")
    return {"rope_type": "llama3", "factor": factor} | _LLAMA3_ROPE


def _write_weights(source: Path, tensors: list[ReaderTensor], config: dict[str, Any], path: Path) -> None:
    """Dequantise tensor by tensor into one safetensors file, so that memory holds one at a time."""
    kept = {_name(source, tensor.name): tensor for tensor in tensors if tensor.name != _ROPE_FREQUENCIES}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in kept.items():
        shape = [int(size) for size in reversed(tensor.shape)]
        offsets = [end, end := end + 2 * int(np.prod(shape))]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    logger.info("converting %s: %d tensors, %.2f GiB in bf16", source, len(kept), end / 2**30)
    last_report = time.monotonic()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, (name, tensor) in enumerate(kept.items(), 1):
            file.write(_values(source, name, tensor, config).view(torch.uint8).numpy().data)
            if time.monotonic() - last_report > 5:
                last_report = time.monotonic()
                logger.info("converting %s: %d of %d tensors", source, number, len(kept))
    logger.info("converted %s", source)


def _name(source: Path, name: str) -> str:
    """A tensor's name in a model folder."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None or match["part"] not in _NAMES:
        raise UnsupportedModel(f"{source}: tensor {name!r} belongs to a network that is not supported")
    prefix = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{prefix}{_NAMES[match['part']]}.{match['kind']}"


def _values(source: Path, name: str, tensor: ReaderTensor, config: dict[str, Any]) -> Tensor:
    try:
        array = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise UnsupportedModel(f"{source}: tensor {tensor.name!r} is quantised as {kind}, unknown") from error
    if config["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
        key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        array = _halved(array, config[key])
    return _tensor(array).to(torch.bfloat16)


def _tensor(array: Any) -> Tensor:
    # Float32 data come as a read-only view of the file, which torch does not take.
    return torch.from_numpy(np.require(array, requirements=("C", "W")))


def _halved(array: Any, num_heads: int) -> Any:
    """Undo the order of llama.cpp, where rotary pairs are neighbours: pair i becomes rows i and i + D/2."""
    return array.reshape(num_heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
