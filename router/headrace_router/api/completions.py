"""/v1/completions: `n` answers to each of some prompts, in one piece or as a stream."""

from collections.abc import Iterator, Sequence

from headrace_router.api.exchange import Exchange, Service
from headrace_router.api.generations import admitted, answer_headers, answers, best_of, submitted
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
from headrace_router.engine import Output, OutputToken, Permit, PromptToken, TopToken
from headrace_router.schemas import openai
from headrace_router.schemas.decode import decode
from headrace_router.text.tokenizer import Tokenizer
from headrace_router.validation import Job


async def completions(service: Service, exchange: Exchange, body: bytes) -> None:
    """POST /v1/completions."""
    request = decode(body, openai.CompletionRequest)
    if request.stream:
        await _stream(service, exchange, request)
    else:
        await _answer(service, exchange, request)


def _admitted(service: Service, request: openai.CompletionRequest, num_copies: int) -> Permit:
    """Taken before numbers are checked."""
    is_one = isinstance(request.prompt, str) or isinstance(next(iter(request.prompt), None), int)
    num_prompts = 1 if is_one else max(1, min(len(request.prompt), service.config.max_client_batch_size))
    param = "prompt" if num_copies == 1 else "n" if num_copies == request.n else "best_of"
    return admitted(service, num_prompts * min(num_copies, service.config.max_n), param)


async def _answer(service: Service, exchange: Exchange, request: openai.CompletionRequest) -> None:
    num_choices = max(1, request.n or 1)
    num_copies = max(num_choices, request.best_of or 1)
    with _admitted(service, request, num_copies):
        jobs = await service.validator.completion(request)
        with submitted(service, exchange, jobs, num_copies) as running:
            ended = await answers(running)
    by_prompt = [ended[start : start + num_copies] for start in range(0, len(ended), num_copies)]
    choices: list[openai.CompletionChoice] = []
    for copies in by_prompt:
        for one in best_of(copies, num_choices)[:num_choices]:
            text = _Text(service.tokenizer, request, one.job)
            choices.append(
                openai.CompletionChoice(
                    index=len(choices),
                    text=text.prefix + one.finish.text,
                    logprobs=text.logprobs(one.prompt, one.tokens),
                    finish_reason=finish_reason(one.finish),
                )
            )
    num_generated = [one.finish.num_generated for one in ended]
    answer = openai.Completion(
        id=new_id("cmpl"),
        created=now(),
        model=answered_model(service, request.model),
        system_fingerprint=SYSTEM_FINGERPRINT,
        choices=choices,
        usage=usage(exchange.num_prompt_tokens, exchange.num_cached_tokens, num_generated),
    )
    headers = answer_headers(
        service,
        exchange,
        [slowest(copies) for copies in by_prompt],
        num_characters=sum(len(job.prompt) for job in jobs),
        num_generated=sum(num_generated),
    )
    await exchange.answer_json(answer, headers)


async def _stream(service: Service, exchange: Exchange, request: openai.CompletionRequest) -> None:
    num_copies = max(1, request.n or 1)
    with _admitted(service, request, num_copies):
        jobs = await service.validator.completion(request)
        event = openai.Completion(
            id=new_id("cmpl"),
            created=now(),
            model=answered_model(service, request.model),
            system_fingerprint=SYSTEM_FINGERPRINT,
            choices=[],
        )
        parts = _Parts([_Text(service.tokenizer, request, job) for job in jobs for _ in range(num_copies)])
        writer = StreamWriter(service, exchange, request, jobs, num_copies, event, parts.of)
        await writer.write()
    await writer.end()


class _Parts:
    """What the events of one stream say. For each choice: its prompt if echoed, what is new, the end."""

    def __init__(self, texts: "Sequence[_Text]") -> None:
        self._texts = texts

    def of(self, index: int, output: Output) -> Iterator[openai.CompletionChoice]:
        """What an output of choice `index` brings about."""
        own = self._texts[index]
        text = own.take_prefix() + "".join([token.text for token in output.tokens])
        logprobs = own.logprobs(output.prompt or [], output.tokens)
        if text or (logprobs and logprobs.tokens):
            yield openai.CompletionChoice(index=index, text=text, logprobs=logprobs)
        elif output.num_new and not output.finish:
            # A token whose text is held back is an event all the same: one sees that the answer gets on.
            yield openai.CompletionChoice(index=index, text="")
        if output.finish:
            yield openai.CompletionChoice(index=index, text="", finish_reason=finish_reason(output.finish))


class _Text:
    """The text of one choice: what stands before it, and how far its log-probabilities have come."""

    def __init__(self, tokenizer: Tokenizer, request: openai.CompletionRequest, job: Job) -> None:
        self._tokenizer = tokenizer
        self.prefix = job.prompt if request.echo else ""
        self._num_top = request.logprobs
        self._echo = self.prefix
        self._offset = job.num_cut_chars if self.prefix else 0

    def take_prefix(self) -> str:
        """The prefix at the first call, nothing later."""
        prefix, self.prefix = self.prefix, ""
        return prefix

    def logprobs(
        self, prompt: Sequence[PromptToken], tokens: Sequence[OutputToken]
    ) -> openai.CompletionLogprobs | None:
        """In the legacy shape, for the next tokens of the choice; None if not asked for."""
        if self._num_top is None:
            return None
        found = openai.CompletionLogprobs(
            tokens=[], token_logprobs=[], top_logprobs=[] if self._num_top else None, text_offset=[]
        )
        if self._echo:
            for place, one in enumerate(prompt):
                # A token that the text does not show (one that opens every prompt) has no width.
                at = self._echo.find(one.text, self._offset, self._offset + len(one.text) + 1)
                self._offset = self._offset if at < 0 else at
                self._add(found, one.text, one.logprob, None if place == 0 else self._top(one.top))
                self._offset += 0 if at < 0 else len(one.text)
            if prompt:
                self._offset = len(self._echo)
        for token in visible(tokens):
            self._add(found, token.text, token.logprob, self._top(token.top, token))
            self._offset += len(token.text)
        return found

    def _add(
        self,
        found: openai.CompletionLogprobs,
        text: str,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        found.tokens.append(text)
        found.token_logprobs.append(logprob)
        found.text_offset.append(self._offset)
        if found.top_logprobs is not None:
            found.top_logprobs.append(top)

    def _top(self, top: Sequence[TopToken], chosen: OutputToken | None = None) -> dict[str, float]:
        """Alternatives by text, most likely first. A part of a character is written as OpenAI does, as its
        bytes; where two tokens have one text, the second goes by its id."""
        found: dict[str, float] = {}
        for one in top:
            text = chosen.text if chosen and chosen.id == one.id else one.text
            if "\N{REPLACEMENT CHARACTER}" in text:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._tokenizer.token_bytes(one.id))
            found[f"token_id:{one.id}" if text in found else text] = one.logprob
        return found
