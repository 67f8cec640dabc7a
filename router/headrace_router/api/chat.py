"""/v1/chat/completions: `n` answers to a chat, in one piece or as a stream of deltas."""

from collections.abc import Iterable, Iterator

from msgspec import UNSET

from headrace_router.api.exchange import Exchange, Service, encoder
from headrace_router.api.generations import answer_headers, merged, stream_headers, submitted, whole
from headrace_router.api.openai import (
    SYSTEM_FINGERPRINT,
    answered_model,
    finish_reason,
    includes_usage,
    new_id,
    now,
    shown,
    slowest,
    usage,
)
from headrace_router.api.sse import EventStream, frame
from headrace_router.engine import Finish, Output, OutputToken, TopToken
from headrace_router.schemas import openai
from headrace_router.schemas.decode import decode
from headrace_router.text.tokenizer import Tokenizer


async def chat_completions(service: Service, exchange: Exchange, body: bytes) -> None:
    """POST /v1/chat/completions."""
    request = decode(body, openai.ChatRequest)
    if request.stream:
        await _stream(service, exchange, request)
    else:
        await _answer(service, exchange, request)


def _num_choices(request: openai.ChatRequest, service: Service) -> int:
    """For the permit, which is taken before the range of `n` is checked."""
    return min(max(1, request.n or 1), service.config.max_n)


async def _answer(service: Service, exchange: Exchange, request: openai.ChatRequest) -> None:
    num_choices = _num_choices(request, service)
    with service.engine.admit(num_choices):
        job = await service.validator.chat(request)
        with submitted(service, exchange, [job], num_choices) as running:
            wholes = [await whole(one) for one in running]
    finishes = [one.finish for one in wholes]
    answer = openai.ChatCompletion(
        id=new_id("chatcmpl"),
        created=now(),
        model=answered_model(service, request.model),
        system_fingerprint=SYSTEM_FINGERPRINT,
        choices=[
            openai.ChatChoice(
                index=index,
                message=openai.AssistantMessage(content=one.finish.text),
                logprobs=_logprobs(service.tokenizer, one.tokens) if request.logprobs else None,
                finish_reason=finish_reason(one.finish),
            )
            for index, one in enumerate(wholes)
        ],
        usage=usage(len(job.request.prompt_ids), finishes),
    )
    headers = answer_headers(
        service,
        exchange,
        [slowest(wholes)],
        num_characters=len(job.prompt),
        num_generated=answer.usage.completion_tokens,
    )
    await exchange.answer_json(answer, headers)


async def _stream(service: Service, exchange: Exchange, request: openai.ChatRequest) -> None:
    num_choices = _num_choices(request, service)
    with service.engine.admit(num_choices):
        job = await service.validator.chat(request)
        events = _Events(service, request)
        headers = stream_headers(service, len(job.prompt))
        with submitted(service, exchange, [job], num_choices) as running:
            async with EventStream(exchange, headers, service.config.keep_alive_seconds) as stream:
                async for batch in merged(running):
                    await stream.write(
                        b"".join([event for index, output in batch for event in events.of(index, output)])
                    )
    await exchange.end(events.end(len(job.request.prompt_ids)) + exchange.face.stream_end)


class _Events:
    """The events of one chat stream. For each choice: the role, what is new of the text, the end."""

    def __init__(self, service: Service, request: openai.ChatRequest) -> None:
        self._tokenizer = service.tokenizer
        self._with_logprobs = bool(request.logprobs)
        self._with_usage = includes_usage(request.stream_options)
        self._begun: set[int] = set()
        self._finishes: list[Finish] = []
        # One struct for all events of the stream: `id` and `created` never change, `choices` does.
        self._chunk = openai.ChatCompletionChunk(
            id=new_id("chatcmpl"),
            created=now(),
            model=answered_model(service, request.model),
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[],
            usage=None if self._with_usage else UNSET,
        )

    def of(self, index: int, output: Output) -> Iterator[bytes]:
        """The events that an output of choice `index` brings about."""
        if index not in self._begun:
            self._begun.add(index)
            yield self._event(
                openai.ChunkChoice(index=index, delta=openai.Delta(role="assistant", content=""))
            )
        text = "".join([token.text for token in output.tokens])
        logprobs = _logprobs(self._tokenizer, output.tokens) if self._with_logprobs else None
        if text or (logprobs and logprobs.content):
            yield self._event(
                openai.ChunkChoice(index=index, delta=openai.Delta(content=text), logprobs=logprobs)
            )
        if output.finish:
            self._finishes.append(output.finish)
            # OpenAI's last delta is empty; TGI's users add up `content` without looking whether it is there.
            yield self._event(
                openai.ChunkChoice(
                    index=index,
                    delta=openai.Delta(content=""),
                    finish_reason=finish_reason(output.finish),
                )
            )

    def end(self, num_prompt_tokens: int) -> bytes:
        """The event with the usage, if it was asked for."""
        if not self._with_usage:
            return b""
        self._chunk.choices = []
        self._chunk.usage = usage(num_prompt_tokens, self._finishes)
        return frame(encoder.encode(self._chunk))

    def _event(self, choice: openai.ChunkChoice) -> bytes:
        self._chunk.choices = [choice]
        return frame(encoder.encode(self._chunk))


def _logprobs(tokenizer: Tokenizer, tokens: Iterable[OutputToken]) -> openai.ChoiceLogprobs:
    return openai.ChoiceLogprobs(
        content=[
            openai.TokenLogprob(
                token=token.text,
                logprob=token.logprob,
                bytes=_bytes(tokenizer, token.id, token.text),
                top_logprobs=[_top_logprob(tokenizer, top, token) for top in token.top],
            )
            for token in shown(tokens)
        ]
    )


def _top_logprob(tokenizer: Tokenizer, top: TopToken, chosen: OutputToken) -> openai.TopLogprob:
    text = chosen.text if top.id == chosen.id else top.text
    return openai.TopLogprob(token=text, logprob=top.logprob, bytes=_bytes(tokenizer, top.id, text))


def _bytes(tokenizer: Tokenizer, token_id: int, text: str) -> list[int]:
    """What the token adds to the text, as UTF-8; of a token that is part of a character, its own bytes."""
    data = tokenizer.token_bytes(token_id)
    try:
        data.decode()
    except UnicodeDecodeError:
        return list(data)
    return list(text.encode())
