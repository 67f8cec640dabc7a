"""One flag each: the router's, the shard's, the launcher's own, and those of TGI that are not served."""

from typing import Any

import pytest
from headrace_launcher.config import IgnoredSettings, LauncherConfig, RefusedSettings
from headrace_proto.settings import (
    SettingsError,
    fields_of,
    flag_of,
    load,
    pick,
    to_argv,
    to_environment,
)
from headrace_router.config import RouterConfig, RouterSettings
from headrace_shard.config import ShardConfig, ShardSettings


def loaded(*argv: str, **environment: str) -> LauncherConfig:
    return load(LauncherConfig, argv, environment, program="headrace")


def test_every_setting_of_router_and_shard_is_one_of_the_launcher() -> None:
    names = {field.name for field, _ in fields_of(LauncherConfig)}
    for settings in (RouterSettings, ShardSettings):
        assert {field.name for field, _ in fields_of(settings)} <= names


def test_children_get_what_the_launcher_was_given() -> None:
    config = loaded("--max-best-of", "7", "--dtype=float32", "--json-output", "-p", "80")
    router = pick(RouterConfig, config, tokenizer_name="folder")
    shard = pick(ShardConfig, config, model_path="folder")
    assert (router.max_best_of, router.port, router.json_output) == (7, 80, True)
    assert (shard.dtype, shard.json_output) == ("float32", True)


def test_keys_reach_the_router_as_secrets() -> None:
    for config in (loaded("--api-key=a,b", "--api-key", "c"), loaded(API_KEY="a,b\nc\n")):
        router = pick(RouterConfig, config, tokenizer_name="folder")
        assert router.api_key == ("a,b", "c")
        assert to_argv(router) == ["--tokenizer-name=folder"]
        assert to_environment(router) == {"HEADRACE_API_KEY": "a,b\nc"}
        assert to_environment(pick(ShardConfig, config, model_path="folder")) == {}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-shard", "2"], "--num-shard: this version runs a model on one shard, got 2"),
        (["--num-shard", "0"], "--num-shard: must be at least 1, got 0"),
        (["--sharded", "true"], "--sharded"),
        (["--sharded"], "--sharded"),
        (["--quantize", "awq"], "--quantize: quantised weights are not supported, got awq"),
        (["--speculate", "3"], "--speculate: speculative decoding is not supported, got 3"),
        (["--max-input-tokens", "9", "--max-total-tokens", "9"], "--max-input-tokens: must be less"),
        (["--max-input-tokens", "9", "--max-input-length", "8"], "--max-input-length: given twice"),
        (
            ["--max-step-slowdown", "0.5"],
            "--max-step-slowdown: must be at least 1, or 0 for no bound, got 0.5",
        ),
        (["--api-key", "a", "--api-key", ""], "--api-key: must not be empty"),
        (["--ngrok-bogus"], "unrecognized arguments: --ngrok-bogus"),
    ],
)
def test_refused_with_the_flag_in_the_message(argv: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match="^" + words) as failure:
        loaded(*argv)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "argv", [["--num-shard", "1"], ["--sharded", "false", "--num-shard", "4"], ["--speculate", "0"]]
)
def test_one_shard_and_no_speculation_are_fine(argv: list[str]) -> None:
    assert loaded(*argv).warnings() == []


def test_a_list_of_numbers_is_taken_as_text_generation_inference_takes_it() -> None:
    for config in (loaded("--cuda-graphs", "1,2,4"), loaded(CUDA_GRAPHS="1,2,4")):
        assert config.cuda_graphs == (1, 2, 4)


def sample(field: Any) -> str:
    kind = str(field.type)
    if field.name == "usage_stats":
        return "off"
    return "true" if "bool" in kind else "2" if "int" in kind or "float" in kind else "text"


@pytest.mark.parametrize(
    "field", [field for field, _ in fields_of(IgnoredSettings)], ids=lambda field: field.name
)
def test_settings_without_meaning_give_one_warning(field: Any) -> None:
    flag = flag_of(field.name)
    for config in (loaded(flag, sample(field)), loaded(**{field.name.upper(): sample(field)})):
        (warning,) = config.warnings()
        assert warning.startswith(f"{flag} is ignored: ")


@pytest.mark.parametrize(
    "field", [field for field, _ in fields_of(RefusedSettings)], ids=lambda field: field.name
)
def test_settings_that_would_change_the_answer_are_refused(field: Any) -> None:
    for argv, environment in (([flag_of(field.name), sample(field)], {}), ([], {field.name.upper(): "2"})):
        with pytest.raises(SettingsError, match=f"^{flag_of(field.name)}: "):
            loaded(*argv, **environment)


def test_a_pod_that_sets_hostname_is_not_heard() -> None:
    assert loaded(HOSTNAME="pod-7").hostname == "0.0.0.0"
    assert loaded(HEADRACE_HOSTNAME="127.0.0.1").hostname == "127.0.0.1"
