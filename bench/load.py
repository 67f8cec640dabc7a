"""Prompts of a given length, closed loops of clients, and the figures of a level. Prints nothing."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from bench.client import Failed, Reply, Target, ask, send

# Common words, one token each in most vocabularies; what they really cost is measured before the load.
_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind head
house service friend father power hour game line end member law car city name team minute idea body back
parent face others level office door health person art war history party result change reason
"""


class Prompts:
    """Texts of `num_tokens` tokens that share no beginning, so that no prefix cache helps the server."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        self._num_tokens = num_tokens
        self._random = random.Random(seed)
        self._words = _WORDS.split()
        self._num_words = num_tokens

    def next(self) -> str:
        """A prompt that no earlier one resembles."""
        return " ".join(self._random.choices(self._words, k=self._num_words))

    async def calibrate(self, target: Target) -> None:
        """Learn from the server how many tokens a word is, and how many come with any prompt."""
        few, many = 16, 80
        counts = []
        for num_words in (few, many):
            self._num_words = num_words
            counts.append(await _count_tokens(target, self.next()))
        per_word = (counts[1] - counts[0]) / (many - few)
        if per_word <= 0:
            raise Failed(f"the server counts {counts} tokens for {few} and {many} words; is the model right?")
        fixed = counts[0] - few * per_word
        self._num_words = max(1, round((self._num_tokens - fixed) / per_word))


async def _count_tokens(target: Target, text: str) -> int:
    if target.face == "tgi":
        return len(await ask(target, "POST", "/tokenize", {"inputs": text}))
    reply = await send(target, "POST", *target.generation(text, 1))
    if reply.error:
        raise Failed(f"the first request failed: {reply.error}")
    if not reply.num_prompt_tokens:
        raise Failed("the server sends no `usage`, so prompts of a given length cannot be made for it")
    return reply.num_prompt_tokens


@dataclass(frozen=True, kw_only=True)
class Level:
    """The figures of one concurrency. A figure without data is None."""

    concurrency: int
    num_requests: int
    num_errors: int
    first_errors: tuple[str, ...]
    elapsed_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    output_tokens_per_second: float
    tokens_per_event: float | None
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    gap_p50_seconds: float | None
    gap_p99_seconds: float | None
    gap_max_seconds: float | None


async def run_level(
    target: Target,
    prompts: Prompts,
    *,
    concurrency: int,
    num_requests: int,
    num_output_tokens: int,
    on_reply: Callable[[Reply], None],
) -> Level:
    """`num_requests` by `concurrency` clients, each sending its next one when its last one has ended."""
    requests = [target.generation(prompts.next(), num_output_tokens) for _ in range(num_requests)]
    waiting = iter(requests)
    replies: list[Reply] = []

    async def client() -> None:
        for path, body in waiting:
            reply = await send(target, "POST", path, body)
            if not reply.error and not reply.token_times:
                reply.error = "the stream carried no token"
            replies.append(reply)
            on_reply(reply)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return summarise(replies, concurrency, time.perf_counter() - started)


def summarise(replies: list[Reply], concurrency: int, elapsed_seconds: float) -> Level:
    """Failed requests count as errors and in nothing else."""
    good = [reply for reply in replies if not reply.error]
    errors = [reply.error for reply in replies if reply.error]
    num_output_tokens = sum(reply.num_output_tokens or len(reply.token_times) for reply in good)
    num_events = sum(len(reply.token_times) for reply in good)
    waits = [reply.token_times[0] - reply.sent for reply in good]
    gaps = [later - earlier for reply in good for earlier, later in pairwise(reply.token_times)]
    return Level(
        concurrency=concurrency,
        num_requests=len(replies),
        num_errors=len(errors),
        first_errors=tuple(dict.fromkeys(errors))[:3],
        elapsed_seconds=elapsed_seconds,
        num_prompt_tokens=sum(reply.num_prompt_tokens for reply in good),
        num_output_tokens=num_output_tokens,
        output_tokens_per_second=num_output_tokens / elapsed_seconds,
        tokens_per_event=num_output_tokens / num_events if num_events else None,
        ttft_p50_seconds=_quantile(waits, 0.5),
        ttft_p99_seconds=_quantile(waits, 0.99),
        gap_p50_seconds=_quantile(gaps, 0.5),
        gap_p99_seconds=_quantile(gaps, 0.99),
        gap_max_seconds=max(gaps, default=None),
    )


def _quantile(values: list[float], share: float) -> float | None:
    """The smallest value that `share` of all do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
