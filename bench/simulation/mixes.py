"""Synthetic traces: who arrives when, with how much text. Knows no policy and no GPU.

Sessions arrive by a Poisson process, or in bursts; lengths are log-normal, as measured lengths of prompts
and answers roughly are. The rate is that of requests, all turns of a session counted. The same seed gives the
same trace, and another rate the same texts at other times.

chat          a system prompt for all, turns that repeat all that was said before, pauses to read and type
rag           a short instruction for all, long passages, short answers; one in five asks a document again
agents        a long system prompt with tools, many quick turns, short answers, growing context
long-arrival  chat without history, and now and then a prompt of tens of thousands of tokens among it
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from bench.simulation.traces import Arrival, Segment, Segments, Trace, ordered

_BURST_SESSIONS = 16
"""Mean number of sessions in a burst."""
_BURST_SECONDS = 1.0
"""Time over which the sessions of a burst spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Token counts with this median, of which 16 % are above `spread` times it; cut at both ends."""

    median: float
    spread: float
    least: int = 1
    most: int

    def draw(self, chance: random.Random) -> int:
        """A whole number of tokens."""
        value = self.median * math.exp(chance.gauss(0.0, math.log(self.spread)))
        return int(min(max(value, self.least), self.most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What the sessions of a kind of traffic look like."""

    mean_turns: float
    system_tokens: int
    """Of the prompt that all sessions begin with."""
    user: LogNormal
    answer: LogNormal
    max_new_tokens: int
    """What clients ask for."""
    pause: LogNormal
    """In tenths of a second."""
    max_context_tokens: int
    """A session ends before its context exceeds this."""
    num_documents: int = 0
    """Documents in front of questions; each question takes a popular one or a new one."""
    document: LogNormal | None = None
    reuse: float = 0.0
    """Share of the questions about one of the documents."""
    long_share: float = 0.0
    """Share of the sessions whose first prompt has the length `long`."""
    long: LogNormal | None = None


_NO_PAUSE = LogNormal(median=1, spread=1.0, most=1)

MIXES = {
    "chat": Mix(
        mean_turns=4,
        system_tokens=256,
        user=LogNormal(median=80, spread=3.0, least=4, most=4096),
        answer=LogNormal(median=180, spread=2.3, least=2, most=1024),
        max_new_tokens=1024,
        pause=LogNormal(median=150, spread=2.0, least=20, most=1200),
        max_context_tokens=16384,
    ),
    "rag": Mix(
        mean_turns=1,
        system_tokens=128,
        user=LogNormal(median=60, spread=2.0, least=8, most=1024),
        answer=LogNormal(median=120, spread=2.0, least=2, most=512),
        max_new_tokens=512,
        pause=_NO_PAUSE,
        max_context_tokens=32768,
        num_documents=200,
        document=LogNormal(median=4000, spread=1.7, least=512, most=24576),
        reuse=0.2,
    ),
    "agents": Mix(
        mean_turns=10,
        system_tokens=3000,
        user=LogNormal(median=300, spread=3.0, least=16, most=8192),
        answer=LogNormal(median=90, spread=2.0, least=8, most=1024),
        max_new_tokens=1024,
        pause=LogNormal(median=10, spread=2.5, least=1, most=300),
        max_context_tokens=32768,
    ),
    "long-arrival": Mix(
        mean_turns=1,
        system_tokens=256,
        user=LogNormal(median=200, spread=3.0, least=8, most=4096),
        answer=LogNormal(median=200, spread=2.2, least=2, most=1024),
        max_new_tokens=1024,
        pause=_NO_PAUSE,
        max_context_tokens=65536,
        long_share=0.02,
        long=LogNormal(median=30000, spread=1.4, least=16384, most=60000),
    ),
}


def synthesize(name: str, *, num_requests: int, rate: float, seed: int, is_bursty: bool = False) -> Trace:
    """A trace of the mix `name`: `num_requests` at `rate` requests a second on average."""
    mix = MIXES[name]
    texts, times = random.Random(f"{seed} {name} texts"), random.Random(f"{seed} {name} times")
    segments = Segments()
    system = segments.new(mix.system_tokens)
    documents = (
        [segments.new(mix.document.draw(texts)) for _ in range(mix.num_documents)] if mix.document else []
    )
    starts = _starts(times, rate / mix.mean_turns, is_bursty)
    arrivals: list[Arrival] = []
    while len(arrivals) < num_requests:
        _add_session(mix, arrivals, num_requests, starts(), texts, segments, system, documents)
    return ordered(f"{name}{' bursty' if is_bursty else ''} {rate:g}/s", arrivals)


def _starts(times: random.Random, rate: float, is_bursty: bool) -> Callable[[], float]:
    """Gives the begin of one session after the other."""
    begin = 0.0
    pending: list[float] = []

    def start() -> float:
        nonlocal begin
        if not is_bursty:
            begin += times.expovariate(rate)
            return begin
        if not pending:
            begin += times.expovariate(rate / _BURST_SESSIONS)
            # Geometric, so that single ones and crowds both occur.
            size = 1 + int(times.expovariate(1 / (_BURST_SESSIONS - 0.5)))
            pending.extend(
                sorted((begin + times.random() * _BURST_SECONDS for _ in range(size)), reverse=True)
            )
        return pending.pop()

    return start


def _add_session(
    mix: Mix,
    arrivals: list[Arrival],
    num_requests: int,
    at: float,
    texts: random.Random,
    segments: Segments,
    system: Segment,
    documents: list[Segment],
) -> None:
    num_turns = 1 + (int(texts.expovariate(1 / (mix.mean_turns - 0.5))) if mix.mean_turns > 1 else 0)
    history = [system]
    follows, pause = -1, 0.0
    for _ in range(min(num_turns, num_requests - len(arrivals))):
        if mix.document is not None:
            is_again = texts.random() < mix.reuse
            # Popular ones first: the square of a uniform draw.
            known = documents[int(texts.random() ** 2 * len(documents))]
            history.append(known if is_again else segments.new(mix.document.draw(texts)))
        user = mix.user
        if mix.long is not None and texts.random() < mix.long_share:
            user = mix.long
        history.append(segments.new(user.draw(texts)))
        answer = segments.new(mix.answer.draw(texts))
        num_context = sum(segment.num_tokens for segment in history) + mix.max_new_tokens
        if follows >= 0 and num_context > mix.max_context_tokens:
            return
        arrivals.append(
            Arrival(
                at=at,
                prompt=tuple(history),
                output=answer,
                max_new_tokens=mix.max_new_tokens,
                follows=follows,
                pause_seconds=pause,
            )
        )
        history.append(answer)
        follows = len(arrivals) - 1
        pause = mix.pause.draw(texts) / 10
        at += pause
