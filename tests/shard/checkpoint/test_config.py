"""config.json and generation_config.json to ModelConfig, and what is refused."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from headrace_shard.checkpoint.config import RopeScaling, load_config
from headrace_shard.errors import CheckpointError, StartError, UnsupportedModel
from headrace_shard.models import NETWORKS

from tests.tiny import make_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def with_config(folder: Path, **changes: Any) -> Path:
    """A checkpoint with keys of config.json replaced; None takes a key out."""
    make_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_field_of_a_llama(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path, dtype="bfloat16", tie_word_embeddings=False, attention_bias=True, eos_token_ids=(2, 7)
    )
    config = load_config(folder, NETWORKS)
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("llama", 384, 64)
    assert (config.intermediate_size, config.num_layers, config.max_positions) == (128, 2, 512)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 10000.0, None)
    assert (config.tie_word_embeddings, config.mlp_bias) == (False, False)
    assert config.attention_bias and config.attention_output_bias
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == (2, 7)


def test_caller_says_which_networks_there_are(tmp_path: Path) -> None:
    folder = with_config(tmp_path, model_type="wheel")
    assert load_config(folder, ["wheel"]).model_type == "wheel"
    with pytest.raises(UnsupportedModel, match=r"'wheel' is not supported; supported are llama, mill$"):
        load_config(folder, ["llama", "mill"])


def test_absent_fields_have_the_defaults_of_llama(tmp_path: Path) -> None:
    folder = with_config(
        tmp_path, num_key_value_heads=None, head_dim=None, rope_theta=None, tie_word_embeddings=None
    )
    config = load_config(folder, NETWORKS)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert not config.tie_word_embeddings


def test_eos_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    folder = with_config(tmp_path, eos_token_id=[5, 2])
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert load_config(folder, NETWORKS).eos_token_ids == (5, 2, 9)
    (folder / "generation_config.json").unlink()
    assert load_config(folder, NETWORKS).eos_token_ids == (5, 2)


def test_qwen2_has_biases_on_query_key_and_value_only(tmp_path: Path) -> None:
    config = load_config(make_checkpoint(tmp_path, model_type="qwen2"), NETWORKS)
    assert config.attention_bias and not config.attention_output_bias


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_both_names(tmp_path: Path, key: str) -> None:
    folder = with_config(tmp_path, **({"dtype": None} | {key: "float16"}))
    assert load_config(folder, NETWORKS).dtype == torch.float16


def test_absent_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype="bfloat16", num_files=2)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path, NETWORKS).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_rope_in_the_older_and_the_newer_place(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = load_config(with_config(tmp_path, **fields), NETWORKS)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )


def test_linear_rope_under_its_older_key(tmp_path: Path) -> None:
    config = load_config(with_config(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}), NETWORKS)
    assert config.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma3_text"},
            "'gemma3_text' is not supported; supported are llama, mistral, qwen2",
        ),
        ({"model_type": None}, "model_type '' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq' are not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only ...ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"model_type": "mistral", "sliding_window": 128},
            "sliding_window 128, shorter than the context of 512",
        ),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 128,
                "max_window_layers": 1,
            },
            "sliding_window 128",
        ),
        (
            {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window 128",
        ),
    ],
)
def test_unsupported_networks_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message) as raised:
        load_config(with_config(tmp_path, **changes), NETWORKS)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 512},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 128},
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 128,
            "max_window_layers": 2,
        },
        {"sliding_window": 128, "layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_windows_that_hide_nothing_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert load_config(with_config(tmp_path, **changes), NETWORKS).max_positions == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two', it must be an integer of at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, it must be a positive number"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"architectures": 7}, "architectures is 7, it must be a list of names"),
        ({"architectures": "LlamaForCausalLM"}, "it must be a list of names"),
        ({"sliding_window": 4, "layer_types": 5}, "layer_types is 5, it must be a list of names"),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": "a",
            },
            "max_window_layers is 'a', it must be an integer of at least 0",
        ),
        ({"attention_bias": "no"}, "attention_bias is 'no', it must be true or false"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', it must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"num_key_value_heads": 3}, "4 heads do not divide into 3"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
    ],
)
def test_ill_formed_fields_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_config(with_config(tmp_path, **changes), NETWORKS)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        load_config(tmp_path / "nowhere", NETWORKS)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_config(tmp_path, NETWORKS)


@pytest.mark.parametrize("text", ["{", "[]", '"llama"', '{"a":' * 100_000])
def test_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartError, match=r"config\.json"):
        load_config(tmp_path, NETWORKS)


def test_reading_a_config_imports_no_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    code = (
        "import sys; from pathlib import Path; from headrace_shard.checkpoint.config import load_config; "
        "from headrace_shard.models import NETWORKS; load_config(Path(sys.argv[1]), NETWORKS); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
