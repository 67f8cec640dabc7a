"""One field is the flag, the variable and the line in the docs: what is spelled is what is read."""

import dataclasses
import re
from dataclasses import dataclass

import pytest
from headrace_proto import __version__
from headrace_proto.settings import (
    MAX_NUMBER,
    SettingsError,
    document,
    fields_of,
    load,
    load_or_exit,
    pick,
    setting,
    to_argv,
    to_environment,
    without_settings,
)
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One field of each kind."""

    port: int = setting(3000, help="A port.", minimum=0, maximum=65535, short="-p", tgi=True)
    max_input_tokens: int | None = setting(
        None, help="Tokens.", minimum=1, aliases=("--max-input-length",), tgi=True
    )
    wait: float = setting(1.0, help="Seconds.", minimum=0)
    ratio: float = setting(0.5, help="A share.", minimum=0.0, maximum=1.0)
    name: str | None = setting(None, help="Any text.", tgi=True)
    json_output: bool = setting(False, help="A switch.", tgi=True)
    sharded: bool | None = setting(None, help="A switch that may be open.")
    dtype: str = setting("auto", help="A choice.", choices=("auto", "float32"), tgi=True)
    origins: tuple[str, ...] = setting((), help="A list.", tgi=True)
    sizes: tuple[int, ...] = setting((), help="A list of numbers.")
    key: str | None = setting(None, help="A secret.", tgi=True, secret=True)
    keys: tuple[str, ...] = setting((), help="Secrets.", tgi=True, secret=True)
    caching: bool = setting(True, help="A switch that is on.", tgi=True)


@dataclass(frozen=True, kw_only=True)
class Child:
    """Some of them, and one that must be given."""

    port: int = setting(3000, help="A port.")
    key: str | None = setting(None, help="A secret.", secret=True)
    folder: str = setting(help="Must be given.")


def loaded(*argv: str, **environment: str) -> Settings:
    return load(Settings, argv, environment, program="program")


def refused(*argv: str, **environment: str) -> str:
    with pytest.raises(SettingsError) as failure:
        loaded(*argv, **environment)
    assert "\n" not in str(failure.value)
    return str(failure.value)


# An item of a list in the environment is not empty and holds no comma; argv carries any text but NUL.
text = st.text(st.characters(exclude_characters="\0", codec="utf-8"))
items = st.text(st.characters(exclude_characters="\0,", codec="utf-8"), min_size=1)
# A secret is one line of text.
secrets = st.text(st.characters(exclude_characters="\0\n", codec="utf-8"), min_size=1)
any_settings = st.builds(
    Settings,
    port=st.integers(0, 65535),
    max_input_tokens=st.none() | st.integers(1, MAX_NUMBER),
    ratio=st.floats(0, 1),
    name=st.none() | text,
    json_output=st.booleans(),
    sharded=st.none() | st.booleans(),
    dtype=st.sampled_from(["auto", "float32"]),
    origins=st.lists(items).map(tuple),
    sizes=st.lists(st.integers(max_value=MAX_NUMBER)).map(tuple),
    key=st.none() | text.filter(bool),
    keys=st.lists(secrets).map(tuple),
    caching=st.booleans(),
)


@given(any_settings)
def test_a_child_reads_what_its_parent_spelled(settings: Settings) -> None:
    argv, environment = to_argv(settings), to_environment(settings)
    assert load(Settings, argv, environment, program="program") == settings
    secret = {"HEADRACE_KEY": settings.key or "", "HEADRACE_KEYS": "\n".join(settings.keys)}
    assert environment == {name: value for name, value in secret.items() if value}
    assert not any(arg.startswith("--key") for arg in argv)


@given(any_settings, any_settings)
def test_a_child_does_not_read_what_its_parent_inherited(settings: Settings, other: Settings) -> None:
    inherited = {"PATH": "/bin"}
    for field, _ in fields_of(Settings):
        value = getattr(other, field.name)
        if value not in (None, ()):
            comma = "\n" if field.name == "keys" else ","
            spelled = comma.join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
            inherited |= {f"HEADRACE_{field.name.upper()}": spelled, field.name.upper(): spelled}
    environment = without_settings(inherited, Settings)
    assert environment["PATH"] == "/bin"
    environment |= to_environment(settings)
    assert load(Settings, to_argv(settings), environment, program="program") == settings


@given(st.text(), st.sampled_from(["--port", "--ratio", "--max-input-tokens", "--json-output", "--dtype"]))
def test_any_value_is_taken_or_refused_by_the_flags_name(value: str, flag: str) -> None:
    try:
        settings = loaded(f"{flag}={value}")
    except SettingsError as error:
        assert str(error).startswith(f"{flag}: ")
    else:
        assert 0 <= settings.port <= 65535 and 0 <= settings.ratio <= 1
        assert settings.max_input_tokens is None or settings.max_input_tokens >= 1
        assert settings.dtype in ("auto", "float32")


def test_the_command_line_wins_then_the_own_name_then_the_bare_one() -> None:
    names = {"PORT": "1", "HEADRACE_PORT": "2"}
    assert loaded(**names, RATIO="1").port == 2
    assert loaded("--port", "3", **names).port == 3
    assert loaded("-p", "3", **names).port == 3
    assert loaded(PORT="1").port == 1
    assert loaded(RATIO="1").ratio == 0.5  # has no bare name
    assert loaded(MAX_INPUT_LENGTH="5").max_input_tokens == 5
    assert loaded("--max-input-length=6").max_input_tokens == 6


def test_an_empty_variable_counts_as_unset() -> None:
    assert loaded(HEADRACE_PORT="", PORT="7", NAME="", JSON_OUTPUT="").port == 7


def test_what_kubernetes_says_of_a_service_counts_as_unset() -> None:
    link = "tcp://10.96.0.12:3000"
    assert loaded(HEADRACE_PORT=link, PORT="7", HEADRACE_NAME=link) == Settings(port=7, name=link)
    assert "HEADRACE_PORT: expected a whole number" in refused(HEADRACE_PORT="tcp://")


@pytest.mark.parametrize("value", ["inf", "1e300", str(MAX_NUMBER + 1), str(10**30)])
def test_no_number_is_larger_than_what_processes_can_tell_each_other(value: str) -> None:
    flags = ("--wait",) if "e" in value or value == "inf" else ("--wait", "--max-input-tokens")
    for flag in flags:
        assert refused(f"{flag}={value}") == f"{flag}: must be at most 2147483647, got {value}"
    assert "must be at least 0, got nan" in refused("--wait=nan")
    assert loaded(NAME="").name is None


@pytest.mark.parametrize("word", ["1", "true", "yes", "TRUE", " Yes "])
@pytest.mark.parametrize("is_set", [True, False])
def test_switches(word: str, is_set: bool) -> None:
    if not is_set:
        word = {"1": "0", "true": "false", "yes": "no"}[word.strip().lower()]
    assert loaded(JSON_OUTPUT=word).json_output is is_set
    assert loaded(f"--json-output={word}").json_output is is_set
    assert loaded("--json-output", word).json_output is is_set
    assert loaded("--json-output", "--port", "1").json_output is True


def test_a_switch_that_is_on_has_a_flag_that_turns_it_off() -> None:
    assert loaded().caching is loaded("--caching").caching is True
    assert loaded("--no-caching").caching is loaded("--caching=false").caching is loaded(CACHING="0").caching
    assert loaded("--no-caching").caching is False
    assert loaded("--no-caching", CACHING="1").caching is False
    assert refused("--caching", "--no-caching") == "--no-caching: given twice, as 'true' and 'false'"
    assert refused("--no-caching=true").startswith("argument --no-caching: ")
    # One that is off has none.
    assert refused("--no-json-output") == "unrecognized arguments: --no-json-output"
    assert to_argv(loaded("--no-caching")) == ["--caching=false"]


def test_lists_repeat_on_the_command_line_and_have_commas_in_the_environment() -> None:
    assert loaded("--origins", "a", "--origins", "b,c").origins == ("a", "b,c")
    assert loaded(ORIGINS="a,,b").origins == ("a", "b")
    assert loaded(HEADRACE_SIZES="1,2").sizes == (1, 2)


def test_numbers_have_commas_on_the_command_line_too() -> None:
    assert loaded("--sizes", "1,2,4", "--sizes=8").sizes == (1, 2, 4, 8)
    assert refused("--sizes=1,,2") == "--sizes: expected a whole number, got ''"
    assert refused("--sizes=1,two") == "--sizes: expected a whole number, got 'two'"


def test_a_secret_is_one_line_and_may_hold_commas() -> None:
    assert loaded(KEYS="a,b").keys == ("a,b",)
    assert loaded(KEYS="a\nb, c\n").keys == loaded("--keys=a", "--keys", "b, c").keys == ("a", "b, c")
    assert loaded("--keys=a\nb").keys == ("a", "b")
    # Whether an empty one means anything, its owner decides; it is not passed over.
    assert loaded(KEYS="\n").keys == loaded("--keys=").keys == ("",)
    assert loaded(KEYS="a\n\nb").keys == ("a", "", "b")
    # A single one reaches the child whole, whatever it holds.
    assert loaded("--key=a,b\nc") == load(
        Settings, [], to_environment(Settings(key="a,b\nc")), program="program"
    )


def test_choices_are_found_in_any_case() -> None:
    assert loaded(DTYPE="Float32").dtype == "float32"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "70000"], "--port: must be at most 65535, got 70000"),
        (["--port", "-1"], "--port: must be at least 0, got -1"),
        (["--port", "1.5"], "--port: expected a whole number, got '1.5'"),
        (["--ratio", "nan"], "--ratio: must be at least 0, got nan"),
        (["--ratio", "half"], "--ratio: expected a number, got 'half'"),
        (["--json-output", "maybe"], "--json-output: expected true or false, got 'maybe'"),
        (["--dtype", "int3"], "--dtype: expected one of auto, float32, got 'int3'"),
        (["--port"], "argument --port/-p: expected one argument"),
        (["--por", "1"], "unrecognized arguments: --por 1"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--port", "1", "-p", "2"], "-p: given twice, as '1' and '2'"),
    ],
)
def test_usage_errors(argv: list[str], message: str) -> None:
    assert refused(*argv) == message


def test_the_same_value_twice_is_no_contradiction() -> None:
    assert loaded("--port=5", "-p", "5").port == 5


def test_a_bad_variable_is_named() -> None:
    assert refused(PORT="http") == "environment variable PORT: expected a whole number, got 'http'"
    assert refused(HEADRACE_PORT="-1").startswith("environment variable HEADRACE_PORT: must be at least 0")


def test_a_required_setting() -> None:
    with pytest.raises(SettingsError, match=r"^--folder is required$"):
        load(Child, [], {}, program="program")
    assert load(Child, ["--folder", "x"], {}, program="program").folder == "x"


def test_a_usage_error_ends_the_program_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_or_exit(Settings, ["--nope"], {}, program="program")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "program: error: unrecognized arguments: --nope (see program --help)\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        loaded("--version")
    assert not ended.value.code
    assert capsys.readouterr().out == f"program {__version__}\n"


def test_pick_takes_what_both_have_and_the_overrides() -> None:
    child = pick(Child, loaded("--port=9", KEY="k"), folder="here")
    assert child == Child(port=9, key="k", folder="here")


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded().port = 1  # type: ignore[misc]


def test_the_table_has_a_row_for_each() -> None:
    rows = document(Settings).splitlines()[2:]
    assert len(rows) == len(dataclasses.fields(Settings))
    assert rows[0] == (
        "| `--port`, `-p` | `HEADRACE_PORT`, `PORT` | `3000` | A port. (at least 0, at most 65535) |"
    )
    assert rows[-1].startswith("| `--caching`, `--no-caching` | `HEADRACE_CACHING`, `CACHING` | `true` |")
    assert "`--max-input-length`" in rows[1] and "`MAX_INPUT_LENGTH`" in rows[1]
    assert all(re.fullmatch(r"\|[^|]+\|[^|]+\|[^|]+\|[^|]+\|", row) for row in rows)
