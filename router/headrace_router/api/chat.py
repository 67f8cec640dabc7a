"""/v1/chat/completions: `n` answers to a chat, in one piece or as a stream of deltas."""

from collections.abc import Iterable, Iterator

from headrace_router.api.exchange import Exchange, Service
from headrace_router.api.generations import admitted, answer_headers, answers, submitted
from headrace_router.api.openai import (
    SYSTEM_FINGERPRINT,
    StreamWriter,
    answered_model,
    finish_reason,
    new_id,
    now,
    slowest,
    usage,
    visible,
)
from headrace_router.engine import Output, OutputToken, TopToken
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
    with admitted(service, num_choices, "n"):
        job = await service.validator.chat(request)
        with submitted(service, exchange, [job], num_choices) as running:
            ended = await answers(running)
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
            for index, one in enumerate(ended)
        ],
        usage=usage(
            exchange.num_prompt_tokens,
            exchange.num_cached_tokens,
            [one.finish.num_generated for one in ended],
        ),
    )
    headers = answer_headers(
        service,
        exchange,
        [slowest(ended)],
        num_characters=len(job.prompt),
        num_generated=answer.usage.completion_tokens,
    )
    await exchange.answer_json(answer, headers)


async def _stream(service: Service, exchange: Exchange, request: openai.ChatRequest) -> None:
    num_choices = _num_choices(request, service)
    with admitted(service, num_choices, "n"):
        job = await service.validator.chat(request)
        chunk = openai.ChatCompletionChunk(
            id=new_id("chatcmpl"),
            created=now(),
            model=answered_model(service, request.model),
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[],
        )
        deltas = _Deltas(service.tokenizer, with_logprobs=bool(request.logprobs))
        writer = StreamWriter(service, exchange, request, [job], num_choices, chunk, deltas.of)
        await writer.write()
    await writer.end()


class _Deltas:
    """What the events of one stream say. For each choice: the role, what is new of the text, the end."""

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._begun: set[int] = set()

    def of(self, index: int, output: Output) -> Iterator[openai.ChunkChoice]:
        """What an output of choice `index` brings about."""
        if index not in self._begun:
            self._begun.add(index)
            yield openai.ChunkChoice(index=index, delta=openai.Delta(role="assistant", content=""))
        text = "".join([token.text for token in output.tokens])
        logprobs = _logprobs(self._tokenizer, output.tokens) if self._with_logprobs else None
        if text or (logprobs and logprobs.content):
            yield openai.ChunkChoice(index=index, delta=openai.Delta(content=text), logprobs=logprobs)
        elif output.num_new and not output.finish:
            # A token whose text is held back is an event all the same: one sees that the answer gets on.
            yield openai.ChunkChoice(index=index, delta=openai.Delta(content=""))
        if output.finish:
            # OpenAI's last delta is empty; TGI's users add up `content` without looking whether it is there.
            yield openai.ChunkChoice(
                index=index, delta=openai.Delta(content=""), finish_reason=finish_reason(output.finish)
            )


def _logprobs(tokenizer: Tokenizer, tokens: Iterable[OutputToken]) -> openai.ChoiceLogprobs:
    return openai.ChoiceLogprobs(
        content=[
            openai.TokenLogprob(
                token=token.text,
                logprob=token.logprob,
                bytes=_bytes(tokenizer, token.id, token.text),
                top_logprobs=[_top_logprob(tokenizer, top, token) for top in token.top],
            )
            for token in visible(tokens)
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
