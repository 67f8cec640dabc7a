"""Makes a real Llama checkpoint with a real tokenizer in a folder, in a moment and without torch.

The weights are random (the same for the same arguments); names, shapes and files are those of the Hugging
Face layout, so that transformers reads the folder as well as headrace does. The tokenizer is a byte-level BPE
that knows every byte, three special tokens and a ChatML template.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
"""Token ids 0, 1 and 2."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "The water turns the wheel and the wheel turns the stone. A headrace brings the water to the mill.",
    "def serve(request): return [token for token in request.tokens if token.is_visible]",
    "Wer das Wasser leitet, der treibt die Mühle. Où est la bibliothèque ? 水车 🌊",
)

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Arrays = dict[str, npt.NDArray[np.float32]]


def make_checkpoint(
    folder: Path,
    *,
    model_type: str = "llama",
    dtype: str = "float32",
    vocab_size: int = 384,
    num_layers: int = 2,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    max_positions: int = 512,
    tie_word_embeddings: bool = True,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    eos_token_ids: tuple[int, ...] = (2,),
    num_files: int = 1,
    seed: int = 0,
    extra_config: dict[str, Any] | None = None,
) -> Path:
    """Write config, weights and tokenizer to `folder` (made if missing) and return it.

    The tokenizer fills the default `vocab_size`; of a larger one the last ids have no text.

    `dtype` is "float32", "bfloat16" or "float16"; `num_files` above 1 gives an indexed checkpoint;
    `extra_config` overrides keys of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim or hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": tie_word_embeddings,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "bos_token_id": 1,
        "eos_token_id": eos_token_ids[0] if len(eos_token_ids) == 1 else list(eos_token_ids),
        "pad_token_id": 2,
    } | (extra_config or {})  # fmt: skip
    _write_configs(folder, config)
    write_weights(folder, random_weights(config, seed), dtype=dtype, num_files=num_files)
    make_tokenizer(folder, vocab_size=vocab_size)
    return folder


def make_tokenizer(
    folder: Path, *, vocab_size: int = 384, chat_template: str | None = CHAT_TEMPLATE, adds_bos: bool = False
) -> Path:
    """Write tokenizer.json and tokenizer_config.json to `folder`; `adds_bos` puts id 1 before every text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{IM_START} $A", pair=None, special_tokens=[(IM_START, 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": IM_END,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    _write_json(
        folder / "tokenizer_config.json", config | ({"chat_template": chat_template} if chat_template else {})
    )
    return folder


def random_weights(config: dict[str, Any], seed: int = 0) -> Arrays:
    """Tensors of the checkpoint described by `config`, by name; large enough that logits differ clearly."""
    random = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    qkv_bias = config["attention_bias"] or config["model_type"] == "qwen2"
    linears = {
        "self_attn.q_proj": (query, hidden, qkv_bias),
        "self_attn.k_proj": (key, hidden, qkv_bias),
        "self_attn.v_proj": (key, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, query, config["attention_bias"]),
        "mlp.gate_proj": (inner, hidden, config["mlp_bias"]),
        "mlp.up_proj": (inner, hidden, config["mlp_bias"]),
        "mlp.down_proj": (hidden, inner, config["mlp_bias"]),
    }

    def normal(*shape: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    arrays: Arrays = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=0.3)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{prefix}{norm}.weight"] = 1 + normal(hidden, scale=0.1)
        for name, (rows, columns, has_bias) in linears.items():
            arrays[f"{prefix}{name}.weight"] = normal(rows, columns, scale=1.5 / columns**0.5)
            if has_bias:
                arrays[f"{prefix}{name}.bias"] = normal(rows, scale=0.2)
    arrays["model.norm.weight"] = 1 + normal(hidden, scale=0.1)
    if not config["tie_word_embeddings"]:
        arrays["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=1 / hidden**0.5)
    return arrays


def write_weights(folder: Path, arrays: Arrays, *, dtype: str = "float32", num_files: int = 1) -> None:
    """Write `arrays` as model.safetensors, or as `num_files` numbered files with an index."""
    names = list(arrays)
    if num_files == 1:
        _write_safetensors(folder / "model.safetensors", arrays, dtype)
        return
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        part = names[number::num_files]
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        _write_safetensors(folder / file, {name: arrays[name] for name in part}, dtype)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_configs(folder: Path, config: dict[str, Any]) -> None:
    _write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)


def _write_safetensors(path: Path, arrays: Arrays, dtype: str) -> None:
    # The format is a JSON header behind its length, then the data; written here since numpy has no bfloat16.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    end = 0
    for name, array in arrays.items():
        blob = _bytes(array, dtype)
        offsets = [end, end := end + len(blob)]
        header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": array.shape, "data_offsets": offsets}
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def _bytes(array: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype != "bfloat16":
        return array.astype(dtype).tobytes()
    bits = array.view(np.uint32)
    # bfloat16 is the upper half of float32, rounded to nearest even.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
