"""The native face: /generate, /generate_stream and /, as Text Generation Inference."""

from collections.abc import Sequence

import msgspec

from headrace_router.api.exchange import Exchange, Face, Service, encoder
from headrace_router.api.generations import (
    Answer,
    Running,
    admitted,
    answer_headers,
    answers,
    best_of,
    stream_headers,
    submitted,
)
from headrace_router.api.sse import EventStream, frame
from headrace_router.engine import OutputToken
from headrace_router.errors import HeadraceError
from headrace_router.scheduling.request import Request
from headrace_router.schemas import tgi
from headrace_router.schemas.decode import decode


def _error_body(error: HeadraceError) -> bytes:
    return encoder.encode(tgi.ErrorResponse(error=error.message, error_type=error.error_type))


NATIVE = Face(status=lambda error: error.status, error_body=_error_body, stream_end=b"")


async def generate(service: Service, exchange: Exchange, body: bytes) -> None:
    """POST /generate: one answer; a `stream` key means nothing here."""
    answer, headers = await _answer(service, exchange, decode(body, tgi.GenerateRequest), full_text=False)
    await exchange.answer_json(answer, headers)


async def generate_stream(service: Service, exchange: Exchange, body: bytes) -> None:
    """POST /generate_stream: one event per token."""
    await _stream(service, exchange, decode(body, tgi.GenerateRequest), full_text=False)


async def compat_generate(service: Service, exchange: Exchange, body: bytes) -> None:
    """POST /: one of the above by `stream`. An answer is in an array; texts begin with the prompt unless
    `return_full_text` is false."""
    request = decode(body, tgi.CompatGenerateRequest)
    if request.stream:
        await _stream(service, exchange, request, full_text=True)
    else:
        answer, headers = await _answer(service, exchange, request, full_text=True)
        await exchange.answer_json([answer], headers)


def _full_text_prefix(parameters: tgi.GenerateParameters, prompt: str, full_text: bool) -> str:
    wanted = parameters.return_full_text
    return prompt if (full_text if wanted is None else wanted) else ""


async def _answer(
    service: Service, exchange: Exchange, body: tgi.GenerateRequest, *, full_text: bool
) -> tuple[tgi.GenerateResponse, list[tuple[bytes, bytes]]]:
    """The answer and its headers. `full_text` is the default of `return_full_text`."""
    parameters = body.parameters or tgi.GenerateParameters()
    num_copies = max(1, parameters.best_of or 1)
    with admitted(service, min(num_copies, service.config.max_best_of), "best_of"):
        job = await service.validator.generate(body, is_stream=False)
        with submitted(service, exchange, [job], num_copies) as running:
            ranked = best_of(await answers(running))
    prefix = _full_text_prefix(parameters, job.prompt, full_text)
    best = ranked[0]
    answer = tgi.GenerateResponse(generated_text=prefix + best.finish.text)
    if parameters.details or parameters.decoder_input_details:
        answer.details = _details(ranked, prefix)
    headers = answer_headers(
        service, exchange, [best], num_characters=len(job.prompt), num_generated=best.finish.num_generated
    )
    return answer, headers


async def _stream(
    service: Service, exchange: Exchange, body: tgi.GenerateRequest, *, full_text: bool
) -> None:
    parameters = body.parameters or tgi.GenerateParameters()
    with service.engine.admit():
        job = await service.validator.generate(body, is_stream=True)
        prefix = _full_text_prefix(parameters, job.prompt, full_text)
        headers = stream_headers(service, len(job.prompt))
        with submitted(service, exchange, [job]) as running:
            async with EventStream(exchange, headers, service.config.keep_alive_seconds) as stream:
                await _write_events(stream, running[0], prefix, with_details=bool(parameters.details))
    await exchange.end()


async def _write_events(stream: EventStream, running: Running, prefix: str, *, with_details: bool) -> None:
    """One event per token; those of one output go out in one piece."""
    index = 0
    async for output in running.generation:
        events: list[tgi.StreamResponse] = []
        for token in output.tokens:
            index += 1
            event = tgi.StreamResponse(index=index, token=_token(token))
            if token.top:
                event.top_tokens = _top_tokens(token)
            events.append(event)
        if output.finish:
            events[-1].generated_text = prefix + output.finish.text
            if with_details:
                events[-1].details = tgi.StreamDetails(
                    finish_reason=output.finish.reason.value,
                    generated_tokens=output.finish.num_generated,
                    seed=_seed(running.request),
                    input_length=len(running.request.prompt_ids),
                )
        if events:
            await stream.write(b"".join([frame(encoder.encode(event)) for event in events]))


def _details(ranked: Sequence[Answer], prefix: str) -> tgi.Details:
    best, *losers = ranked
    details = tgi.Details(
        finish_reason=best.finish.reason.value,
        generated_tokens=best.finish.num_generated,
        seed=_seed(best.request),
        prefill=_prefill(best),
        tokens=[_token(token) for token in best.tokens],
    )
    if losers:
        details.best_of_sequences = [
            tgi.BestOfSequence(
                generated_text=prefix + one.finish.text,
                finish_reason=one.finish.reason.value,
                generated_tokens=one.finish.num_generated,
                seed=_seed(one.request),
                prefill=_prefill(one),
                tokens=[_token(token) for token in one.tokens],
                top_tokens=_all_top_tokens(one),
            )
            for one in losers
        ]
    details.top_tokens = _all_top_tokens(best)
    return details


def _seed(request: Request) -> int | None:
    """The seed that was drawn with; none when nothing was drawn."""
    return request.sampling.seed if request.sampling.temperature > 0 else None


def _token(token: OutputToken) -> tgi.Token:
    # Special tokens are shown as they are; of the others, what joined up makes the generated text.
    text = token.raw if token.is_special else token.text
    return tgi.Token(id=token.id, text=text, logprob=token.logprob, special=token.is_special)


def _top_tokens(token: OutputToken) -> list[tgi.Token]:
    return [
        tgi.Token(id=top.id, text=top.text, logprob=top.logprob, special=top.is_special) for top in token.top
    ]


def _all_top_tokens(one: Answer) -> list[list[tgi.Token]] | msgspec.UnsetType:
    if one.request.top_n_tokens == 0:
        return msgspec.UNSET
    return [_top_tokens(token) for token in one.tokens]


def _prefill(one: Answer) -> list[tgi.PrefillToken]:
    return [tgi.PrefillToken(id=token.id, text=token.text, logprob=token.logprob) for token in one.prompt]
