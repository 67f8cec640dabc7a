"""config.json and generation_config.json become one `ModelConfig`, or an error. Imports no transformers.

Everything that would change what the network computes is read or refused here; behind it the type is trusted.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace_shard.checkpoint.weights import stored_dtype
from headrace_shard.errors import CheckpointError, UnsupportedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. The last three fields are used by "llama3" only."""

    rope_type: str
    """ "linear" or "llama3"."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family."""

    model_type: str
    vocab_size: int
    """Rows of embedding and output layer."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """The longest context the model was made for, as the checkpoint states it."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether query, key and value have biases."""
    attention_output_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
    """What the weights are stored in."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence: config.json's, then generation_config.json's."""


def load_config(folder: Path, model_types: Collection[str]) -> ModelConfig:
    """Read the folder's configuration, of one of the `model_types` that have a network.

    Raises CheckpointError when files or fields are missing or ill-formed, UnsupportedModel when headrace
    has no network of the kind they describe.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give one with config.json and safetensors weights")
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return parse_config(folder / "config.json", config, generation, model_types)


def parse_config(
    path: Path, config: Mapping[str, Any], generation: Mapping[str, Any], model_types: Collection[str]
) -> ModelConfig:
    """The same from the contents of the two files; `path` is what errors name."""
    fields = _Fields(path, config)
    _refuse_unsupported(fields, model_types)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{fields.path}: {num_heads} heads do not divide into {num_kv_heads} key heads, "
            f"or head_dim {head_dim} is odd"
        )
    is_qwen2 = fields.model_type == "qwen2"
    rope = _rope_parameters(fields)
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope, fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        attention_bias=is_qwen2 or fields.boolean("attention_bias"),
        attention_output_bias=not is_qwen2 and fields.boolean("attention_bias"),
        mlp_bias=fields.boolean("mlp_bias"),
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(fields, _Fields(path.with_name("generation_config.json"), generation)),
    )


class _Fields:
    """Typed access to a JSON object, with errors that name file and field. A null counts as absent."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = {key: value for key, value in values.items() if value is not None}
        self.prefix = prefix

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", ""))

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.wrong(key, value, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        # Python's JSON knows NaN and Infinity, which no network does.
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def words(self, key: str) -> list[str]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.wrong(key, value, "a list of names")
        return value

    def part(self, key: str) -> "_Fields":
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return _Fields(self.path, value, f"{self.prefix}{key}.")

    def wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        found = "is missing" if value is None else f"is {value!r}"
        return CheckpointError(f"{self.path}: {self.prefix}{key} {found}, it must be {wanted}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; it is not a model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, it must be a JSON object")
    return value


def _refuse_unsupported(fields: _Fields, model_types: Collection[str]) -> None:
    values, path = fields.values, fields.path
    if fields.model_type not in model_types:
        supported = ", ".join(model_types)
        raise UnsupportedModel(
            f"{path}: model_type {fields.model_type!r} is not supported; supported are {supported}"
        )
    if "quantization_config" in values:
        method = fields.part("quantization_config").values.get("quant_method", "unnamed")
        raise UnsupportedModel(
            f"{path}: weights quantised with {method!r} are not supported; take the unquantised checkpoint"
        )
    architectures = fields.words("architectures")
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise UnsupportedModel(
            f"{path}: architectures is {architectures}; only ...ForCausalLM generates text"
        )
    if (activation := values.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"{path}: hidden_act {activation!r} is not supported; supported is silu")
    window, max_positions = _sliding_window(fields), fields.integer("max_position_embeddings")
    if window is not None and window < max_positions:
        raise UnsupportedModel(
            f"{path}: sliding_window {window}, shorter than the context of {max_positions}, is not "
            f"supported; set max_position_embeddings to {window} to serve shorter contexts"
        )


def _sliding_window(fields: _Fields) -> int | None:
    """Tokens that some layer sees at most, or None if all layers see everything."""
    if "sliding_window" not in fields.values:
        return None
    if "layer_types" in fields.values:
        slides = "sliding_attention" in fields.words("layer_types")
    elif fields.model_type == "qwen2":
        first = fields.integer("max_window_layers", 28, minimum=0)
        slides = fields.boolean("use_sliding_window") and first < fields.integer("num_hidden_layers")
    else:
        slides = True
    return fields.integer("sliding_window") if slides else None


def _rope_parameters(fields: _Fields) -> _Fields:
    """The rotary fields in one place: `rope_parameters`, or the older `rope_theta` beside `rope_scaling`."""
    if "rope_parameters" in fields.values:
        return fields.part("rope_parameters")
    scaling = fields.part("rope_scaling")
    scaling.values.setdefault("rope_theta", fields.number("rope_theta", 10000.0))
    return scaling


def _rope_scaling(rope: _Fields, fields: _Fields) -> RopeScaling | None:
    rope_type = rope.values.get("rope_type", rope.values.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        supported = ", ".join(_ROPE_TYPES)
        raise UnsupportedModel(
            f"{rope.path}: rope type {rope_type!r} is not supported; supported are {supported}"
        )
    for place in (rope, fields):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"{rope.path}: partial_rotary_factor other than 1 is not supported")
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return RopeScaling(rope_type=rope_type, factor=rope.number("factor"))
    return RopeScaling(
        rope_type=rope_type,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings"),
    )


def _dtype(fields: _Fields) -> torch.dtype:
    name = fields.values.get("dtype", fields.values.get("torch_dtype"))
    if name is None:
        name = str(stored_dtype(fields.path.parent)).removeprefix("torch.")
    if name not in _DTYPES:
        supported = ", ".join(_DTYPES)
        raise UnsupportedModel(f"{fields.path}: dtype {name!r} is not supported; supported are {supported}")
    return _DTYPES[name]


def _eos_token_ids(*places: _Fields) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for fields in places:
        value = fields.values.get("eos_token_id", [])
        for token_id in value if isinstance(value, list) else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise fields.wrong("eos_token_id", value, "a token id or a list of them")
            ids[token_id] = None
    return tuple(ids)
