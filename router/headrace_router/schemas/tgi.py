"""Bodies of the native face, TGI's: requests as they come, responses in TGI's order of keys.

In a response `None` is written as null and `UNSET` leaves the key out. Ranges are checked in `validation/`.
"""

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType


class GenerateParameters(Struct, frozen=True, kw_only=True):
    """`parameters`. None is absent throughout."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: str | list[str] | None = None
    truncate: int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: Any = None
    adapter_id: str | None = None
    # Extensions.
    priority: int | None = None
    cache_salt: str | None = None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Body of `/generate` and `/generate_stream`; a `stream` key in it is an unknown one."""

    inputs: str
    parameters: GenerateParameters | None = None
    """Absent, the answer is sampled; present, it is greedy unless sampling is asked for."""
    # Keys that nobody knows are passed over here, but whoever sends these would rely on them.
    cache_salt: Raw | UnsetType = UNSET
    priority: Raw | UnsetType = UNSET

    def __post_init__(self) -> None:
        for name in ("cache_salt", "priority"):
            if getattr(self, name) is not UNSET:
                raise ValueError(f"`{name}` has to stand in `parameters`")


class CompatGenerateRequest(GenerateRequest, frozen=True, kw_only=True):
    """Body of `/`."""

    stream: bool | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """Body of `/tokenize`: of a generate request, only the text is read."""

    inputs: str


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """Body of `/detokenize`."""

    ids: list[int]


class Token(Struct, kw_only=True):
    """A generated token, or an alternative to one."""

    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(Struct, kw_only=True):
    """A token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class BestOfSequence(Struct, kw_only=True):
    """A sample of `best_of` that was not the best."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(Struct, kw_only=True):
    """`details` of an answer in one piece."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    """None when greedy."""
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateResponse(Struct, kw_only=True):
    """Answer of `/generate`; of `/` in an array of one."""

    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct, kw_only=True):
    """`details` of the last event of a stream."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(Struct, kw_only=True):
    """One event of a stream."""

    index: int
    """From 1."""
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    """The whole text, on the last event."""
    details: StreamDetails | None = None


class SimpleToken(Struct, kw_only=True, gc=False):
    """A token of `/tokenize`."""

    id: int
    text: str
    """The slice of the input that it stands for."""
    start: int
    """In bytes of the input in UTF-8, as is `stop`."""
    stop: int


class ChatTokenizeResponse(Struct, kw_only=True):
    """Answer of `/chat_tokenize`."""

    tokenize_response: Raw
    """A list of `SimpleToken`, encoded."""
    templated_text: str


class DetokenizeResponse(Struct, kw_only=True):
    """Answer of `/detokenize`."""

    text: str


class Info(Struct, kw_only=True):
    """Answer of `/info`."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None


class ErrorResponse(Struct, kw_only=True):
    """Every error."""

    error: str
    error_type: str
