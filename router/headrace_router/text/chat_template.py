"""Messages to prompt, by the model's own Jinja template, in a sandbox.

Templates see what transformers shows them: the same environment settings, the functions `raise_exception`
and `strftime_now`, the `tojson` filter that escapes nothing, loop controls and the `generation` tag. A
rendering is bounded in the turns its loops take and in the length of the text. Knows no request.

Where models' templates disagree about OpenAI's messages, the template decides: `arguments` of tool calls go
in as objects, or as the strings they came as if the template cannot do with objects; `content: null` stays
null for templates that ask for it and is "" for the others.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace_router.errors import StartupError, TemplateError
from headrace_router.text.tokenizer import read_json

MAX_PROMPT_CHARS = 16_000_000
MAX_LOOP_TURNS = 1_000_000
"""Turns of all loops of one rendering together: a second or so."""

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "bos_token", "eos_token", "add_generation_prompt"}
)
"""Variables of a template that `kwargs` cannot set."""

Message = dict[str, Any]
Clock = Callable[[str], str]
"""The present time in the given form, as `strftime` spells it."""

T = TypeVar("T")

# What code in a template can raise besides Jinja's own errors.
_RENDER_ERRORS = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    MemoryError,
    RecursionError,
)
_ASKS_FOR_NULL = re.compile(r"""content(['"]\s*\])?\s+is\s+(not\s+)?none""", re.IGNORECASE)
# Stands where a message is to be continued. The space shows whether the template trims its messages.
_CONTINUE_MARK = "\ue000continue\ue001 "
_COUNT_TURNS = "count turns"
_TURNS_LEFT = "turns left"
"""No template can write these names: they have a space."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, strftime_now: Clock) -> None:
        """Raises `jinja2.TemplateSyntaxError`."""
        self._template = _environment(strftime_now).from_string(source)
        self._keeps_null_content = bool(_ASKS_FOR_NULL.search(source))

    @classmethod
    def from_folder(cls, path: Path, config_path: Path | None = None, *, strftime_now: Clock) -> Self | None:
        """The template of a model's folder, None if it has none.

        Looked for in `config_path` (a tokenizer_config.json), then in the folder's chat_template.jinja,
        chat_template.json and tokenizer_config.json. Raises `StartupError` for one that is no Jinja.
        """
        for file in _sources(path, config_path):
            source = _read_source(file, is_required=file == config_path)
            if source is None:
                continue
            try:
                return cls(source, strftime_now)
            except jinja2.TemplateSyntaxError as error:
                raise StartupError(
                    f"the chat template in {file} cannot be read: line {error.lineno}: {error.message}; "
                    "give another with --tokenizer-config-path"
                ) from None
        return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt.

        `messages` are OpenAI's, at least one, with `content` a string or None; `kwargs` are further
        variables, none of `RESERVED_VARIABLES`. Raises `TemplateError`; a template that refuses says why.
        """
        variables = {
            **(kwargs or {}),
            "bos_token": bos_token or "",
            "eos_token": eos_token or "",
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        shown = [self._show(message) for message in messages]
        if continue_final_message:
            return self._render_open_ended(shown, variables)
        return self._render(shown, variables)

    def _show(self, message: Message) -> Message:
        is_null = message.get("content") is None
        return message | {"content": ""} if is_null and not self._keeps_null_content else message

    def _render_open_ended(self, messages: list[Message], variables: dict[str, Any]) -> str:
        last = messages[-1]
        if not last.get("content"):
            raise _error("the final message has no content to continue")
        marked = last | {"content": last["content"] + _CONTINUE_MARK}
        prompt = self._render([*messages[:-1], marked], variables)
        mark = _CONTINUE_MARK.rstrip()
        before, found, after = prompt.rpartition(mark)
        if not found:
            raise _error("the final message cannot be continued: the chat template changes its text")
        return before if after.startswith(" ") else before.rstrip()

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        parsed = [_with_parsed_arguments(message) for message in messages]
        for attempt in [parsed, messages] if parsed != messages else [messages]:
            try:
                return self._generate(attempt, variables)
            except jinja2.TemplateError as error:
                raise _error(error.message or type(error).__name__) from None
            except _RENDER_ERRORS as error:
                failure = f"{type(error).__name__}: {error}"
        raise _error(failure)

    def _generate(self, messages: list[Message], variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        turns_left = [MAX_LOOP_TURNS]
        for piece in self._template.generate(variables | {"messages": messages, _TURNS_LEFT: turns_left}):
            num_chars += len(piece)
            if num_chars > MAX_PROMPT_CHARS:
                raise jinja2.TemplateRuntimeError(f"the prompt exceeds {MAX_PROMPT_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)


def _error(message: str) -> TemplateError:
    return TemplateError(f"Template error: {message}", param="messages")


def _with_parsed_arguments(message: Message) -> Message:
    """The message with the `arguments` of its tool calls as objects, where they are JSON of one."""
    if "tool_calls" not in message:
        return message
    calls: list[Any] = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            parsed = arguments
        if isinstance(parsed, dict):
            call = call | {"function": call["function"] | {"arguments": parsed}}
        calls.append(call)
    return message | {"tool_calls": calls}


def _sources(path: Path, config_path: Path | None) -> list[Path]:
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return [*([config_path] if config_path else []), *(path / name for name in names)]


def _read_source(file: Path, *, is_required: bool) -> str | None:
    if file.suffix == ".jinja":
        try:
            return file.read_text(encoding="utf-8") if file.is_file() else None
        except (OSError, ValueError) as error:
            raise StartupError(f"{file} cannot be read: {error}") from None
    found = read_json(file, is_required=is_required).get("chat_template")
    if isinstance(found, list):
        # Named templates, for instance one for tools.
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is all there is."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountingGenerator(jinja2.compiler.CodeGenerator):
    """Sends what each `for` goes through by way of `_count_turns`."""

    def visit_Template(self, node: jinja2.nodes.Template, frame: jinja2.compiler.Frame | None = None) -> None:
        for loop in node.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, _COUNT_TURNS, [], [], None, None, lineno=loop.lineno)
            loop.iter.set_environment(self.environment)
        super().visit_Template(node, frame)


@jinja2.pass_context
def _count_turns(context: jinja2.runtime.Context, items: Iterable[T]) -> Iterator[T]:
    turns_left = context[_TURNS_LEFT]
    for item in items:
        turns_left[0] -= 1
        if turns_left[0] < 0:
            raise jinja2.TemplateRuntimeError(f"the chat template's loops exceed {MAX_LOOP_TURNS} turns")
        yield item


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment(strftime_now: Clock) -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.code_generator_class = _CountingGenerator
    environment.filters["tojson"] = _to_json
    environment.filters[_COUNT_TURNS] = _count_turns
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
