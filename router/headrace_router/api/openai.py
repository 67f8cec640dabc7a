"""What the routes of the OpenAI face share: errors, ids, names, how a stream is written; and /v1/models."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from headrace_proto import __version__
from msgspec import UNSET, UnsetType

from headrace_router.api.exchange import Exchange, Face, Service, encoder
from headrace_router.api.generations import Answer, Running, merged, num_cached, stream_headers, submitted
from headrace_router.api.sse import EventStream, frame
from headrace_router.engine import Finish, Output, OutputToken
from headrace_router.errors import HeadraceError, ModelNotFound
from headrace_router.scheduling.request import FinishReason
from headrace_router.schemas import openai
from headrace_router.schemas.openai import base_model_names
from headrace_router.validation import Job

C = TypeVar("C")
"""A choice in an event: `ChunkChoice` or `CompletionChoice`."""

SYSTEM_FINGERPRINT = f"{__version__}-native"

STREAM_END = b"data: [DONE]\n\n"


def _status(error: HeadraceError) -> int:
    return error.openai_status or error.status


def _error_body(error: HeadraceError) -> bytes:
    return encoder.encode(
        openai.ErrorResponse(
            error=openai.Error(
                message=error.openai_message, type=error.openai_type, param=error.param, code=error.code
            )
        )
    )


OPENAI = Face(status=_status, error_body=_error_body, stream_end=STREAM_END)


async def models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models."""
    await exchange.answer_json(openai.ModelList(data=[_model(service)]))


async def model(service: Service, exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    name: str = exchange.scope["path_params"]["id"]
    if name != service.model_id and name not in base_model_names(service.model_id):
        raise ModelNotFound(
            f"The model `{name}` does not exist: `{service.model_id}` is served", param="model"
        )
    await exchange.answer_json(_model(service))


def _model(service: Service) -> openai.Model:
    # TGI's `created` is 0 too: when a model was made is not in its files.
    return openai.Model(id=service.model_id, created=0, owned_by=service.model_id)


def answered_model(service: Service, asked: str | None) -> str:
    """The name in a response: what was asked for, unless that is a short name of the model."""
    if asked is None or asked in base_model_names(service.model_id):
        return service.model_id
    return asked


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """`created`: seconds since 1970."""
    return int(time.time())


def finish_reason(finish: Finish) -> str:
    """OpenAI knows one word for every end that is no cut."""
    return "length" if finish.reason is FinishReason.LENGTH else "stop"


def usage(num_prompt_tokens: int, num_cached_tokens: int, num_generated: Iterable[int]) -> openai.Usage:
    num_completion_tokens = sum(num_generated)
    return openai.Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=openai.PromptTokensDetails(cached_tokens=num_cached_tokens),
    )


def slowest(answers: Sequence[Answer]) -> Answer:
    """The one that ended last."""
    return max(answers, key=lambda one: one.timings.ended or 0.0)


def visible(tokens: Iterable[OutputToken]) -> list[OutputToken]:
    """The tokens that the text is made of: no special ones, none behind a stop string.

    A token that ends inside a character has neither raw nor visible text, and is part of it.
    """
    return [token for token in tokens if not token.is_special and (token.text or not token.raw)]


class Event(Protocol[C]):
    """One struct for all events of a stream: `id` and `created` never change, these do."""

    choices: list[C]
    usage: openai.Usage | UnsetType | None


class StreamWriter(Generic[C]):
    """Writes `num_copies` answers to each job as one stream, each choice in an event of its own.

    `choices_of` shapes what an output of choice `index` adds to the answer.
    """

    def __init__(
        self,
        service: Service,
        exchange: Exchange,
        request: openai.SamplingRequest,
        jobs: Sequence[Job],
        num_copies: int,
        event: Event[C],
        choices_of: Callable[[int, Output], Iterable[C]],
    ) -> None:
        options = request.stream_options or openai.StreamOptions()
        self._service = service
        self._exchange = exchange
        self._jobs = jobs
        self._num_copies = num_copies
        self._event = event
        self._choices_of = choices_of
        self._ends_with_usage = bool(options.include_usage)
        self._tells_usage = bool(options.continuous_usage_stats)
        self._running: Sequence[Running] = ()
        self._num_generated = [0] * (len(jobs) * num_copies)
        """Of each choice, so far."""
        event.usage = None if self._ends_with_usage else UNSET

    async def write(self) -> None:
        """All events of all choices; to be called under a permit."""
        service = self._service
        headers = stream_headers(service, sum(len(job.prompt) for job in self._jobs))
        with submitted(service, self._exchange, self._jobs, self._num_copies) as running:
            self._running = running
            async with (
                EventStream(self._exchange, headers, service.config.keep_alive_seconds) as stream,
                contextlib.aclosing(merged(running)) as batches,
            ):
                async for batch in batches:
                    frames = [data for index, output in batch for data in self._frames(index, output)]
                    if frames:
                        await stream.write(b"".join(frames))

    async def end(self) -> None:
        """The event with the usage, if it was asked for, and the end of the stream."""
        last = b""
        if self._ends_with_usage:
            last = self._frame([], self._usage())
        await self._exchange.end(last + self._exchange.face.stream_end)

    def _frames(self, index: int, output: Output) -> list[bytes]:
        self._num_generated[index] += len(output.tokens)
        if output.finish:
            # Tokens behind a stop string were computed, and are never shown.
            self._num_generated[index] = output.finish.num_generated
        told = self._usage() if self._tells_usage else self._event.usage
        return [self._frame([choice], told) for choice in self._choices_of(index, output)]

    def _usage(self) -> openai.Usage:
        """So far: what was cached is known of each prompt from its first token on."""
        return usage(
            self._exchange.num_prompt_tokens,
            num_cached(self._running, self._num_copies),
            self._num_generated,
        )

    def _frame(self, choices: list[C], told: openai.Usage | UnsetType | None) -> bytes:
        self._event.choices, self._event.usage = choices, told
        return frame(encoder.encode(self._event))
