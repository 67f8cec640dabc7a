"""GGUF files written from tiny checkpoints come back as the checkpoints they were made of."""

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from headrace_shard.attention.sdpa import SdpaBackend
from headrace_shard.checkpoint import gguf
from headrace_shard.checkpoint.config import load_config
from headrace_shard.checkpoint.gguf import convert
from headrace_shard.checkpoint.weights import Checkpoint
from headrace_shard.errors import CheckpointError, StartError, UnsupportedModel
from headrace_shard.layers.rotary import inverse_frequencies
from headrace_shard.models import NETWORKS, load_model
from tokenizers import Tokenizer

from tests.tiny import CHAT_TEMPLATE, make_checkpoint, random_weights

PARTS = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
TEXTS = ("The water turns the wheel.", "<|im_start|>user\nü 水车 12  34<|im_end|>\n", "")

Change = Callable[[GGUFWriter], None]


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    part = PARTS[next(part for part in PARTS if stem.endswith(part))]
    return f"blk.{stem.split('.')[2]}.{part}.{kind}" if ".layers." in stem else f"{part}.{kind}"


def neighbouring(array: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp's order of rotary pairs, as its converter makes it from a checkpoint."""
    return array.reshape(num_heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: Path,
    folder: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    pre: str = "gpt-2",
    change: Change | None = None,
) -> Path:
    """The checkpoint of `folder` as a GGUF, matrices quantised as `kind`; `change` may add to the writer."""
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    write_gguf_tokenizer(writer, folder, pre)
    for name, array in random_weights(config).items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            array = neighbouring(array, config[key])
        if array.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf_tokenizer(writer: GGUFWriter, folder: Path, pre: str) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
        ("qwen2", {"model_type": "qwen2"}),
    ],
)
def test_a_checkpoint_survives_the_way_there_and_back(
    tmp_path: Path, architecture: str, options: dict[str, Any]
) -> None:
    original = make_checkpoint(tmp_path / "original", dtype="bfloat16", **options)
    source = write_gguf(tmp_path / "model.gguf", original, architecture=architecture)
    target = tmp_path / "deep" / "target"
    convert(source, target)
    before, after = Checkpoint(original), Checkpoint(target)
    assert before.names == after.names
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.names)
    expected, config = load_config(original, NETWORKS), load_config(target, NETWORKS)
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    fields = vars(config) | {"rms_norm_eps": expected.rms_norm_eps}
    assert fields == vars(expected)
    load_model(target, config, torch.float32, torch.device("cpu"), SdpaBackend())
    tokenizers = [Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (original, target)]
    for text in TEXTS:
        ids = [tokenizer.encode(text).ids for tokenizer in tokenizers]
        assert ids[0] == ids[1]
        decoded = [tokenizer.decode(ids[0], skip_special_tokens=False) for tokenizer in tokenizers]
        assert decoded == [text, text]
    assert {path.name for path in tmp_path.joinpath("deep").iterdir()} == {"target"}


def test_what_can_be_converted_can_be_loaded() -> None:
    assert {model_type for model_type, _ in gguf._ARCHITECTURES.values()} <= NETWORKS.keys()


def test_tokenizer_config_keeps_template_and_named_tokens(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "original"))
    convert(source, tmp_path / "target")
    config = json.loads((tmp_path / "target" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(GGMLQuantizationType.Q8_0, 0.02), (GGMLQuantizationType.Q4_1, 0.2)]
)
def test_quantised_weights_come_back_near(
    tmp_path: Path, kind: GGMLQuantizationType, tolerance: float
) -> None:
    original = make_checkpoint(tmp_path / "original")
    convert(write_gguf(tmp_path / "model.gguf", original, kind=kind), tmp_path / "target")
    before, after = Checkpoint(original), Checkpoint(tmp_path / "target")
    for name in before.names:
        exact = before.tensor(name)
        difference = (after.tensor(name).float() - exact).abs().max() / exact.abs().max()
        assert difference < tolerance, name


def test_every_id_that_ends_a_turn_is_an_eos_id(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 0
        writer.add_eot_token_id(20)

    source = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "original"), change=change)
    convert(source, tmp_path / "target")
    # 0 as the metadata say, 20 likewise, 2 since it is the control token <|im_end|>.
    assert load_config(tmp_path / "target", NETWORKS).eos_token_ids == (0, 20, 2)


def test_factors_of_llama_3_become_its_rope_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = make_checkpoint(
        tmp_path / "original",
        rope_scaling=scaling,
        rope_theta=500000.0,
        head_dim=64,
        num_heads=1,
        num_kv_heads=1,
    )
    config = load_config(original, NETWORKS)
    factors = inverse_frequencies(64, 5e5, None) / inverse_frequencies(64, 5e5, config.rope_scaling)

    def change(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())

    convert(write_gguf(tmp_path / "model.gguf", original, change=change), tmp_path / "target")
    assert load_config(tmp_path / "target", NETWORKS).rope_scaling == config.rope_scaling

    def spoil(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors.numpy()[::-1].copy())

    with pytest.raises(UnsupportedModel, match=r"not the factors of a Llama 3\.1 scaling"):
        convert(write_gguf(tmp_path / "spoilt.gguf", original, change=spoil), tmp_path / "other")


REFUSALS: dict[str, tuple[dict[str, Any], Change | None]] = {
    "GGUF architecture 'gemma3' is not supported; supported are llama, qwen2": (
        {"architecture": "gemma3"},
        None,
    ),
    "mixtures of experts": ({}, lambda writer: writer.add_expert_count(8)),
    "rotary embedding over part of a head": ({}, lambda writer: writer.add_rope_dimension_count(8)),
    "rope type 'yarn' is not supported": (
        {},
        lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"),
    ),
    "sliding_window 64, shorter": ({}, lambda writer: writer.add_sliding_window(64)),
    "pre-tokenizer 'mystery' is not supported": ({"pre": "mystery"}, None),
    "GGUF tokenizer 'bert' is not supported": (
        {},
        lambda writer: writer.kv_data[0].update({"tokenizer.ggml.model": _text("bert")}),
    ),
    "tensor 'blk.0.attn_q_norm.weight' belongs to a network": (
        {},
        lambda writer: writer.add_tensor("blk.0.attn_q_norm.weight", np.ones(16, dtype=np.float32)),
    ),
    "biases on a part of the attention": (
        {},
        lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(64, dtype=np.float32)),
    ),
}


def _text(value: str) -> Any:
    writer = GGUFWriter(None, "llama")
    writer.add_string("text", value)
    return writer.kv_data[0]["text"]


@pytest.mark.parametrize("message", REFUSALS)
def test_what_is_not_supported_is_refused_and_leaves_nothing(tmp_path: Path, message: str) -> None:
    options, change = REFUSALS[message]
    source = write_gguf(
        tmp_path / "model.gguf", make_checkpoint(tmp_path / "original"), change=change, **options
    )
    with pytest.raises(UnsupportedModel, match=message) as raised:
        convert(source, tmp_path / "target")
    assert str(source) in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "original"}


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.gguf is not a file"):
        convert(tmp_path / "nothing.gguf", tmp_path / "target")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file"])
def test_another_kind_of_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        convert(tmp_path / "model.gguf", tmp_path / "target")


@pytest.mark.parametrize("share", [0.00002, 0.0001, 0.01, 0.05, 0.5, 0.999])
def test_truncated_file(tmp_path: Path, share: float) -> None:
    source = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "original"))
    content = source.read_bytes()
    source.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(StartError, match=r"truncated or damaged|is not a GGUF file") as raised:
        convert(source, tmp_path / "target")
    assert "\n" not in str(raised.value)


def test_target_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(CheckpointError, match="target exists already"):
        convert(tmp_path / "model.gguf", tmp_path / "target")


@pytest.mark.parametrize("name", ["model.gguf/target", "x" * 300])
def test_target_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    source = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "original"))
    with pytest.raises(CheckpointError, match=rf"{name} cannot be written: [A-Z]\w+") as raised:
        convert(source, tmp_path / name)
    assert "\n" not in str(raised.value)


def test_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", make_checkpoint(tmp_path / "original"))
    # Behind the size to which a file may grow there is an error as behind the end of a disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="target cannot be written: File too large"):
            convert(source, tmp_path / "target")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "original"}


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        convert(tmp_path / ("x" * 300), tmp_path / "target")
