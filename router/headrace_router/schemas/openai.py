"""Bodies of the OpenAI face: requests, with extensions that servers of open models share, and responses.

In a response `None` is written as null and `UNSET` leaves the key out. Fields that would change the answer
and are not supported are declared here, so that they can be refused by name; fields without effect on the
answer (`user`, `metadata`, `store`, …) are unknown keys and ignored. Ranges are checked in `validation/`.
"""

from pathlib import PurePath
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from headrace_router.schemas.decode import invalid


def base_model_names(model_id: str) -> frozenset[str]:
    """What as `model` means the served one, beside its id.

    `tgi` and `dummy`, which clients that are bound to a URL send, and the last part of the id or the folder:
    `SmolLM2-360M-Instruct` of `HuggingFaceTB/SmolLM2-360M-Instruct`, `smollm2` of `/models/smollm2`.
    """
    return frozenset(("tgi", "dummy", PurePath(model_id).name or model_id))


class ContentPart(Struct, frozen=True, kw_only=True):
    """A part of a message's content. Only text can be read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ToolCallFunction(Struct, frozen=True, kw_only=True):
    """What an assistant called: `arguments` is JSON in a string, or (TGI's way) an object."""

    name: str
    arguments: Any = None


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call in an assistant's message."""

    function: ToolCallFunction
    id: str | None = None
    type: str | None = None


class Message(Struct, frozen=True, kw_only=True):
    """A message of a chat. Roles are any string: the template knows which there are."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None

    def to_template(self, path: str) -> dict[str, Any]:
        """The message as templates know it: `content` a string or None, absent fields left out.

        `path` is that of the message, for errors. Raises `ValidationError`.
        """
        if self.function_call is not None:
            raise invalid(
                f"`{path}.function_call` is not supported: use `tool_calls`", f"{path}.function_call"
            )
        message: dict[str, Any] = {"role": self.role, "content": self._text(path)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type or "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        return message

    def _text(self, path: str) -> str | None:
        if self.content is None:
            if not self.tool_calls:
                raise invalid(f"`{path}.content` is required: it may be null only beside `tool_calls`", path)
            return None
        if isinstance(self.content, str):
            return self.content
        texts: list[str] = []
        for index, part in enumerate(self.content):
            text = {"text": part.text, "refusal": part.refusal}.get(part.type)
            if part.type not in ("text", "refusal"):
                raise invalid(
                    f"`{path}.content[{index}]`: a part of type `{part.type}` is not supported, this model "
                    "reads only text",
                    f"{path}.content[{index}].type",
                )
            if text is None:
                raise invalid(
                    f"`{path}.content[{index}].{part.type}` is required", f"{path}.content[{index}]"
                )
            texts.append(text)
        return "".join(texts)


class StreamOptions(Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    """The usage in an event of its own at the end."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every event; an extension that vLLM has."""
    include_obfuscation: bool | None = None
    """Not supported: random text of random length in every event."""


class SamplingRequest(Struct, frozen=True, kw_only=True):
    """What chat and completions have in common. None is absent throughout."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    # Extensions.
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Not supported.
    response_format: Any = None
    grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None

    def unsupported(self) -> str | None:
        """The first field that is given and not supported."""
        if self.response_format is not None and self.response_format != {"type": "text"}:
            return "response_format"
        return self._first_given(
            "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"
        )

    def _first_given(self, *names: str) -> str | None:
        return next((name for name in names if getattr(self, name) is not None), None)


class ChatRequest(SamplingRequest, frozen=True, kw_only=True):
    """Body of `/v1/chat/completions` and `/chat_tokenize`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Extensions.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Not supported, but for the values that ask for nothing.
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    def unsupported(self) -> str | None:
        """The first field that is given and not supported."""
        if self.tools:
            return "tools"
        if self.tool_choice not in (None, "none", "auto"):
            return "tool_choice"
        if self.modalities not in (None, ["text"]):
            return "modalities"
        return SamplingRequest.unsupported(self) or self._first_given(
            "functions",
            "function_call",
            "audio",
            "prediction",
            "web_search_options",
            "reasoning_effort",
            "verbosity",
        )


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    """A text, texts, token ids, or lists of token ids."""
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def unsupported(self) -> str | None:
        """The first field that is given and not supported."""
        return self._first_given("suffix") or SamplingRequest.unsupported(self)

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or several. Raises `ValidationError` if they are of different kinds."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise invalid("`prompt` must not be an empty array", "prompt")
        texts = [item for item in self.prompt if isinstance(item, str)]
        ids = [item for item in self.prompt if isinstance(item, int)]
        lists = [item for item in self.prompt if isinstance(item, list)]
        if len(texts) == len(self.prompt):
            return texts
        if len(ids) == len(self.prompt):
            return [ids]
        if len(lists) == len(self.prompt):
            return lists
        raise invalid("`prompt` mixes texts, token ids and lists of token ids: give one kind", "prompt")


class PromptTokensDetails(Struct, kw_only=True):
    """What is known of the prompt tokens."""

    cached_tokens: int
    """Those whose keys and values were in the prefix cache when the request came to its turn."""


class Usage(Struct, kw_only=True):
    """Tokens of a request, over all prompts and choices; a prompt counts once, however many its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, kw_only=True):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, kw_only=True):
    """A generated token."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct, kw_only=True):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(Struct, kw_only=True):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(Struct, kw_only=True):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class ChatCompletion(Struct, kw_only=True):
    """Answer of `/v1/chat/completions` in one piece."""

    object: Literal["chat.completion"] = "chat.completion"
    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Struct, kw_only=True):
    """What a chunk adds to an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    """One answer's part in a chunk."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(Struct, kw_only=True):
    """One event of a chat stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    """None in all chunks but the last when usage was asked for, else left out."""


class CompletionLogprobs(Struct, kw_only=True):
    """`logprobs` of a completion choice: lists with one item for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """In characters of the choice's text."""


class CompletionChoice(Struct, kw_only=True):
    """One answer to one prompt, or in a stream a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(Struct, kw_only=True):
    """Answer of `/v1/completions` in one piece, and one event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    """None in all events of a stream but the last when usage was asked for, else left out."""


class Model(Struct, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(Struct, kw_only=True):
    """Answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


class Error(Struct, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, kw_only=True):
    """Every error."""

    error: Error
