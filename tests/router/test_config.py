"""Settings of the router that contradict each other or themselves."""

import pytest
from headrace_proto.settings import SettingsError, load, to_argv, to_environment
from headrace_router.config import RouterConfig, RouterSettings


def loaded(*argv: str, **environment: str) -> RouterSettings:
    return load(RouterSettings, argv, environment, program="headrace-router")


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(SettingsError, match="--api-key: must not be empty"):
        RouterConfig(tokenizer_name="folder", api_key=("key", ""))


@pytest.mark.parametrize("environment", [{"API_KEY": "\n"}, {"HEADRACE_API_KEY": "a\n\nb"}])
def test_nor_is_an_empty_line_among_keys(environment: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="--api-key: must not be empty"):
        loaded(**environment)


def test_one_key_or_several() -> None:
    assert loaded().api_key == ()
    assert loaded(API_KEY="a,b").api_key == ("a,b",)
    assert loaded(HEADRACE_API_KEY="a\nb\n").api_key == ("a", "b")
    several = loaded("--api-key=a", "--api-key", "b")
    assert to_environment(several) == {"HEADRACE_API_KEY": "a\nb"} and to_argv(several) == []


@pytest.mark.parametrize("word", ["0", "false"])
def test_prefix_caching_is_on_until_it_is_turned_off(word: str) -> None:
    assert loaded().prefix_caching and loaded(PREFIX_CACHING="1").prefix_caching
    assert loaded(PREFIX_CACHING="true").prefix_caching and loaded("--prefix-caching").prefix_caching
    assert not loaded(PREFIX_CACHING=word).prefix_caching
    assert not loaded("--no-prefix-caching").prefix_caching


def test_a_step_is_slowed_by_a_factor_of_at_least_one_or_without_bound() -> None:
    assert loaded().max_step_slowdown == 3
    assert loaded("--max-step-slowdown=1").max_step_slowdown == 1
    assert loaded("--max-step-slowdown=0").max_step_slowdown == 0
    with pytest.raises(SettingsError, match=r"^--max-step-slowdown: must be at least 1, or 0 .* got 0\.5: "):
        loaded("--max-step-slowdown=0.5")


@pytest.mark.parametrize("flag", ["--max-queued-requests", "--max-queued-tokens", "--request-timeout"])
def test_a_limit_of_nothing_is_refused(flag: str) -> None:
    with pytest.raises(SettingsError, match=f"^{flag}: must be at least "):
        loaded(f"{flag}=0")
