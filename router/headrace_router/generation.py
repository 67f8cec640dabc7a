"""One running request as its reader sees it: ids to text in the reader's own task, timings, the end.

The batcher only appends to a generation and wakes its reader; the reader turns ids into text when it asks for
the next output and so gets all that has come since, at once. A slow reader therefore holds back nobody, and
holds at most its own `max_new_tokens` tokens. Knows no permits and no web.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace_router.batcher import Batcher
from headrace_router.errors import HeadraceError
from headrace_router.metrics import Metrics
from headrace_router.scheduling.request import FinishReason, Request, Sequence
from headrace_router.scheduling.step import PromptLogprobs, SampledToken, Update
from headrace_router.text.output import OutputOptions, OutputText, TokenText
from headrace_router.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class TopToken:
    """An alternative to a token."""

    id: int
    text: str
    """Of the id decoded alone."""
    logprob: float
    is_special: bool


@dataclass(slots=True, kw_only=True)
class OutputToken:
    """A generated token; `raw` and `text` as in `TokenText`."""

    id: int
    raw: str
    text: str
    logprob: float
    is_special: bool
    top: list[TopToken]


@dataclass(slots=True, kw_only=True)
class PromptToken:
    """A prompt token; the first has no log-probability and no alternatives."""

    id: int
    text: str
    """Of the id decoded alone."""
    logprob: float | None
    top: list[TopToken]


@dataclass(slots=True, kw_only=True)
class Finish:
    """How a generation ended."""

    reason: FinishReason
    text: str
    """The whole visible output."""
    num_generated: int


@dataclass(slots=True, kw_only=True)
class Output:
    """What has come since the last one."""

    tokens: list[OutputToken]
    """Those that are shown now."""
    num_new: int
    """Tokens that have come, shown or held back: within a character, or within what may be a stop string."""
    prompt: list[PromptToken] | None
    """Once, before or with the first token, when its log-probabilities were asked for."""
    finish: Finish | None
    """Set in the last output."""


@dataclass(slots=True, kw_only=True)
class Timings:
    """Moments in seconds of `time.monotonic()`."""

    arrived: float
    queued: float
    started: float | None = None
    """First admitted to a step."""
    first_token: float | None = None
    ended: float | None = None


class Generation:
    """One running request: an async iterator of `Output` for one reader.

    Raises `GenerationError` or `Unavailable` after all that had come before. After `cancel` it just ends.
    """

    def __init__(
        self,
        batcher: Batcher,
        tokenizer: Tokenizer,
        metrics: Metrics,
        request: Request,
        options: OutputOptions,
        timings: Timings,
    ) -> None:
        self.timings = timings
        self._batcher = batcher
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._request = request
        self._options = options
        self._output = OutputText(tokenizer, options)
        self._prompt = _PromptRecord(tokenizer, request) if request.prompt_logprobs else None
        self._sequence: Sequence | None = None
        # What the batcher brings; the reader takes it all.
        self._tokens: list[SampledToken] = []
        self._times: list[float] = []
        self._reason: FinishReason | None = None
        self._error: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None
        # What the reader has made of it.
        self._unshown: list[SampledToken] = []
        """Tokens whose text is held back, for want of bytes or because a stop string may begin there."""
        self._num_generated = 0
        self._last_token_at = 0.0
        self._is_over = False
        self._finish_reason: FinishReason | None = None

    def begin(self, num_companions: int) -> None:
        """Joins the queue; called once, by the engine. Raises as `Batcher.submit`."""
        self._sequence = self._batcher.submit(
            self._request, self, self.timings.queued, num_companions=num_companions
        )

    def cancel(self) -> None:
        """Idempotent, and at once: the sequence leaves queue or shard before the next step."""
        self._end(FinishReason.CANCELLED)

    @property
    def num_generated(self) -> int:
        """Tokens that the reader has taken so far."""
        return self._num_generated

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were in the prefix cache when it was first admitted; 0 until then."""
        return self._sequence.num_cached if self._sequence is not None else 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, once its reader has taken the end."""
        return self._finish_reason

    # ---- the batcher's side

    def start(self, now: float) -> None:
        self.timings.started = now

    def deliver(self, update: Update, now: float) -> None:
        if update.prompt_logprobs is not None and self._prompt is not None:
            self._prompt.add(update.prompt_logprobs)
        if update.token is not None:
            self._tokens.append(update.token)
            self._times.append(now)
        self._reason = update.sequence.finish_reason
        if self._reason is not None:
            self.timings.ended = now
        if update.token is not None or self._reason is not None:
            self._wake()

    def fail(self, error: HeadraceError, now: float) -> None:
        self._error = error
        self.timings.ended = now
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the reader's side

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while not self._is_over:
            if self._tokens or self._reason is not None:
                output = self._take()
                if output.num_new or output.prompt is not None or output.finish is not None:
                    return output
            elif self._error is not None:
                self._is_over = True
                raise self._error
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
        raise StopAsyncIteration

    def _take(self) -> Output:
        """All that has come, as text. A stop string ends the sequence here and now."""
        tokens, times = self._tokens, self._times
        self._tokens, self._times = [], []
        shown: list[TokenText] = []
        reason = self._reason
        for token, came in zip(tokens, times, strict=True):
            self._observe_token(came)
            self._unshown.append(token)
            shown += self._output.add(token.token_id)
            if self._output.is_stopped:
                # Tokens that came behind the match are not part of the text.
                reason = self._stopped()
                self.timings.ended = came
                break
        else:
            if reason is not None:
                shown += self._output.flush()
        self._is_over = reason is not None
        output = Output(
            tokens=self._shown(shown), num_new=len(tokens), prompt=self._take_prompt(), finish=None
        )
        if reason is not None:
            self._finish_reason = reason
            output.finish = Finish(reason=reason, text=self._output.text, num_generated=self._num_generated)
            self._observe_end()
        return output

    def _stopped(self) -> FinishReason:
        self._end(FinishReason.STOP)
        # On the native face length comes first, as in Text Generation Inference.
        is_last = self._num_generated >= self._request.max_new_tokens
        return FinishReason.LENGTH if is_last and self._options.keeps_stop else FinishReason.STOP

    def _shown(self, texts: list[TokenText]) -> list[OutputToken]:
        shown: list[OutputToken] = []
        first = self._num_generated - len(self._unshown)
        for text in texts:
            token = self._unshown[text.index - first]
            shown.append(
                OutputToken(
                    id=token.token_id,
                    raw=text.raw,
                    text=text.text,
                    logprob=token.logprob,
                    is_special=text.is_special,
                    top=_top_tokens(self._tokenizer, token.top) if token.top else [],
                )
            )
        del self._unshown[: len(texts)]
        return shown

    def _take_prompt(self) -> list[PromptToken] | None:
        record, self._prompt = self._prompt, None
        return record.tokens() if record is not None else None

    def _end(self, reason: FinishReason) -> None:
        self._is_over = True
        if self._sequence is not None:
            self._batcher.finish(self._sequence, reason)
        if self.timings.ended is None:
            self.timings.ended = time.monotonic()
        self._wake()

    def _observe_token(self, came: float) -> None:
        if self._num_generated:
            self._metrics.inter_token_latency_seconds.observe(came - self._last_token_at)
        else:
            self.timings.first_token = came
            self._metrics.time_to_first_token_seconds.observe(came - self.timings.arrived)
        self._last_token_at = came
        self._num_generated += 1

    def _observe_end(self) -> None:
        metrics, timings = self._metrics, self.timings
        assert timings.started is not None and timings.ended is not None
        inference_seconds = timings.ended - timings.started
        metrics.request_queue_duration.observe(timings.started - timings.queued)
        metrics.request_inference_duration.observe(inference_seconds)
        metrics.request_mean_time_per_token_duration.observe(inference_seconds / max(self._num_generated, 1))
        metrics.request_generated_tokens.observe(self._num_generated)
        # Without speculation a sequence gains one token a step, never more.
        metrics.request_skipped_tokens.observe(0)


class _PromptRecord:
    """Log-probabilities of a prompt, which come in parts, and again when the prompt is computed again."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._tokenizer = tokenizer
        self._ids = request.prompt_ids
        self._logprobs: list[float | None] = [None] * len(self._ids)
        self._top: list[list[tuple[int, float]]] = [[]] * len(self._ids)

    def add(self, part: PromptLogprobs) -> None:
        end = part.start + len(part.logprobs)
        self._logprobs[part.start : end] = part.logprobs
        self._top[part.start : end] = part.top

    def tokens(self) -> list[PromptToken]:
        return [
            PromptToken(
                id=token_id,
                text=self._tokenizer.token_text(token_id),
                logprob=logprob,
                top=_top_tokens(self._tokenizer, top),
            )
            for token_id, logprob, top in zip(self._ids, self._logprobs, self._top, strict=True)
        ]


def _top_tokens(tokenizer: Tokenizer, top: list[tuple[int, float]]) -> list[TopToken]:
    return [
        TopToken(
            id=token_id,
            text=tokenizer.token_text(token_id),
            logprob=logprob,
            is_special=tokenizer.is_special(token_id),
        )
        for token_id, logprob in top
    ]
