"""Settings: one field of a frozen dataclass is the flag, the environment variable and the line in the docs.

A process declares its settings as a frozen dataclass whose fields are made by `setting(...)`. `load`
fills it from the command line, then the environment (`HEADRACE_<NAME>`, then the bare name that Text
Generation Inference reads, where it has one), then the default. `to_argv` and `to_environment` spell
the same values for a child process; secrets travel in the environment, never on a command line.
Knows nothing of any particular process.
"""

import argparse
import dataclasses
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from typing import Any, NoReturn, TypeVar

from headrace_proto import __version__

T = TypeVar("T")

TRUE_WORDS = ("1", "true", "yes")
FALSE_WORDS = ("0", "false", "no")

MAX_NUMBER = 2**31 - 1
"""Of every number that has no smaller limit: what messages between processes, timers and counts can hold."""

_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
"""What Kubernetes puts into HEADRACE_PORT of every pod beside a Service called `headrace`."""


class SettingsError(Exception):
    """A setting is unknown, malformed or out of range. The message is one line that names the flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """What a field says beside its type and default."""

    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Further flags, e.g. `--max-input-length`; each is also a bare environment name."""
    short: str | None = None
    is_tgi: bool = False
    """Whether the bare environment name (`PORT`, `MODEL_ID`, ...) is read too."""
    is_secret: bool = False
    """Given to children by environment only and never shown."""
    is_list: bool = False
    """Repeatable on the command line, comma-separated in the environment; numbers with commas in both. Of
    secrets, which may hold commas, one a line in both."""


def setting(
    default: Any = MISSING,
    *,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    short: str | None = None,
    tgi: bool = False,
    secret: bool = False,
) -> Any:
    """A field of a settings dataclass."""
    meta = Meta(
        help=help,
        minimum=minimum,
        maximum=maximum,
        choices=choices,
        aliases=aliases,
        short=short,
        is_tgi=tgi,
        is_secret=secret,
        is_list=isinstance(default, tuple),
    )
    return dataclasses.field(default=default, metadata={"setting": meta})


def fields_of(settings: type[Any]) -> list[tuple[Field[Any], Meta]]:
    """The settings of a class in the order of their declaration."""
    return [(field, field.metadata["setting"]) for field in dataclasses.fields(settings)]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def negated_flag_of(field: Field[Any]) -> str | None:
    """`--no-name`, which a switch has that is on by default."""
    return flag_of(f"no_{field.name}") if field.default is True else None


def environment_names(name: str, meta: Meta) -> list[str]:
    """The variables that are read for a field, the first that is set wins."""
    names = [f"HEADRACE_{name.upper()}"]
    if meta.is_tgi:
        names.append(name.upper())
        names += [alias.removeprefix("--").replace("-", "_").upper() for alias in meta.aliases]
    return names


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


class _Once(argparse.Action):
    """A value that may not be given twice with different meanings, under whichever of its names."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, values)
        if before != values:
            raise SettingsError(f"{flag}: given twice, as {before!r} and {values!r}")
        setattr(namespace, self.dest, values)


class _Off(_Once):
    """`--no-name`: the switch `name`, given as false."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        super().__call__(parser, namespace, "false", flag)


def _value_type(annotation: Any) -> type[Any]:
    """`int` for `int`, `int | None` and `tuple[int, ...]`."""
    if isinstance(annotation, types.UnionType):
        (annotation,) = [part for part in typing.get_args(annotation) if part is not type(None)]
    if typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    assert isinstance(annotation, type), annotation
    return annotation


def _parse(text: str, kind: type[Any], meta: Meta, where: str) -> Any:
    if kind is bool:
        word = text.strip().lower()
        if word not in TRUE_WORDS + FALSE_WORDS:
            raise SettingsError(f"{where}: expected true or false, got {text!r}")
        return word in TRUE_WORDS
    try:
        value = kind(text)
    except ValueError:
        noun = {"int": "a whole number", "float": "a number"}.get(kind.__name__, kind.__name__)
        raise SettingsError(f"{where}: expected {noun}, got {text!r}") from None
    if meta.choices and value not in meta.choices:
        value = text.strip().lower()
    if meta.choices and value not in meta.choices:
        raise SettingsError(f"{where}: expected one of {', '.join(meta.choices)}, got {text!r}")
    if kind in (int, float):
        if meta.minimum is not None and not value >= meta.minimum:
            raise SettingsError(f"{where}: must be at least {meta.minimum:g}, got {text}")
        # Not-a-number is neither, and fails both.
        maximum = MAX_NUMBER if meta.maximum is None else meta.maximum
        if not value <= maximum:
            raise SettingsError(f"{where}: must be at most {maximum:.10g}, got {text}")
    return value


def _variable_of(name: str, kind: type[Any], meta: Meta, environment: Mapping[str, str]) -> str | None:
    """The variable that sets a field, or None."""
    for variable in environment_names(name, meta):
        value = environment.get(variable, "")
        if value and not (kind is int and _SERVICE_LINK.fullmatch(value)):
            return variable
    return None


def parser_for(settings: type[Any], program: str, description: str) -> argparse.ArgumentParser:
    """A parser of the flags of a settings class. Values stay strings, absent flags stay absent."""
    hints = typing.get_type_hints(settings)
    parser = _Parser(
        prog=program, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for field, meta in fields_of(settings):
        names = [flag_of(field.name), *meta.aliases] + ([meta.short] if meta.short else [])
        options: dict[str, Any] = {"dest": field.name, "help": meta.help.replace("%", "%%")}
        if _value_type(hints[field.name]) is bool:
            # A bare flag means true, as in TGI; a value may follow it (`--sharded false`).
            options |= {"nargs": "?", "const": "true", "metavar": "BOOL"}
        else:
            options["metavar"] = "|".join(meta.choices) if meta.choices else field.name.upper()
        if meta.is_list:
            options["action"] = "append"
        else:
            options["action"] = _Once
        parser.add_argument(*names, **options)
        if (negated := negated_flag_of(field)) is not None:
            off = f"As `{flag_of(field.name)} false`."
            parser.add_argument(negated, dest=field.name, nargs=0, action=_Off, help=off)
    parser.add_argument("--version", "-V", action="version", version=f"{program} {__version__}")
    return parser


def load(
    settings: type[T],
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    program: str,
    description: str = "",
) -> T:
    """Settings from the command line, else the environment, else the defaults.

    Raises `SettingsError` with one line that names the flag or the variable.
    """
    given = vars(parser_for(settings, program, description).parse_args(list(argv)))
    hints = typing.get_type_hints(settings)
    values: dict[str, Any] = {}
    for field, meta in fields_of(settings):
        kind = _value_type(hints[field.name])
        if field.name in given:
            where, raw = flag_of(field.name), given[field.name]
        else:
            name = _variable_of(field.name, kind, meta, environment)
            if name is None:
                if field.default is MISSING:
                    raise SettingsError(f"{flag_of(field.name)} is required")
                continue
            where, raw = f"environment variable {name}", environment[name]
            if meta.is_list:
                # A file of secrets often ends with a line break. An empty line stays: its owner refuses it.
                raw = [raw.rstrip("\n")] if meta.is_secret else [part for part in raw.split(",") if part]
        if meta.is_list and meta.is_secret:
            raw = [part for item in raw for part in item.split("\n")]
        elif meta.is_list and kind is not str:
            # Of text, an item given as a flag may hold commas.
            raw = [part for item in raw for part in item.split(",")]
        if meta.is_list:
            values[field.name] = tuple(_parse(part, kind, meta, where) for part in raw)
        else:
            values[field.name] = _parse(raw, kind, meta, where)
    return settings(**values)


def load_or_exit(
    settings: type[T],
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    program: str,
    description: str = "",
) -> T:
    """As `load`, for `main`: a usage error is one line on standard error and exit status 2."""
    try:
        return load(settings, argv, environment, program=program, description=description)
    except SettingsError as error:
        print(f"{program}: error: {error} (see {program} --help)", file=sys.stderr)
        sys.exit(2)


def _spelled(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def to_argv(settings: Any) -> list[str]:
    """The command line that gives a child these values; values at their default and secrets are left out."""
    argv: list[str] = []
    for field, meta in fields_of(type(settings)):
        value = getattr(settings, field.name)
        if meta.is_secret or value is None or value == field.default:
            continue
        for part in value if meta.is_list else (value,):
            argv.append(f"{flag_of(field.name)}={_spelled(part)}")
    return argv


def to_environment(settings: Any) -> dict[str, str]:
    """The environment that gives a child the secrets among these values."""
    environment: dict[str, str] = {}
    for field, meta in fields_of(type(settings)):
        value = getattr(settings, field.name)
        if meta.is_secret and value:
            parts = value if meta.is_list else (value,)
            environment[f"HEADRACE_{field.name.upper()}"] = "\n".join(map(_spelled, parts))
    return environment


def without_settings(environment: Mapping[str, str], settings: type[Any]) -> dict[str, str]:
    """The environment less every variable that the class reads.

    A child that is told its settings by `to_argv` must not find others in what it inherits.
    """
    read = {name for field, meta in fields_of(settings) for name in environment_names(field.name, meta)}
    return {name: value for name, value in environment.items() if name not in read}


def pick(settings: type[T], source: Any, **overrides: Any) -> T:
    """Settings of a child process, taken from a larger settings object by name."""
    names = [field.name for field, _ in fields_of(settings) if field.name not in overrides]
    return settings(**{name: getattr(source, name) for name in names if hasattr(source, name)}, **overrides)


def document(settings: type[Any]) -> str:
    """A Markdown table of a settings class: flag, environment, default, meaning."""
    rows = ["| Flag | Environment | Default | Meaning |", "|---|---|---|---|"]
    for field, meta in fields_of(settings):
        further = filter(None, [negated_flag_of(field), meta.short])
        flags = ", ".join(f"`{name}`" for name in [flag_of(field.name), *meta.aliases, *further])
        names = ", ".join(f"`{name}`" for name in environment_names(field.name, meta))
        default = field.default
        if default is MISSING:
            spelled = "required"
        elif default is None or default == () or default == "":
            spelled = "-"
        else:
            spelled = f"`{_spelled(default)}`"
        choices = f" One of {', '.join(f'`{choice}`' for choice in meta.choices)}." if meta.choices else ""
        bounds = [f"at least {meta.minimum:g}"] if meta.minimum is not None else []
        bounds += [f"at most {meta.maximum:g}"] if meta.maximum is not None else []
        limits = f" ({', '.join(bounds)})" if bounds else ""
        rows.append(f"| {flags} | {names} | {spelled} | {meta.help}{choices}{limits} |")
    return "\n".join(rows) + "\n"
