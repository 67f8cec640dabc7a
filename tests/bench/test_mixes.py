"""Synthetic traces are what their names say, and the same for the same seed."""

import statistics
from itertools import pairwise

import pytest

from bench.simulation.mixes import MIXES, synthesize
from bench.simulation.traces import Trace


def trace(
    name: str, *, rate: float = 10.0, seed: int = 1, is_bursty: bool = False, number: int = 2000
) -> Trace:
    return synthesize(name, num_requests=number, rate=rate, seed=seed, is_bursty=is_bursty)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("is_bursty", [False, True])
def test_the_same_seed_gives_the_same_trace(name: str, is_bursty: bool) -> None:
    first = trace(name, is_bursty=is_bursty, number=200)
    assert first == trace(name, is_bursty=is_bursty, number=200)
    assert first != trace(name, is_bursty=is_bursty, number=200, seed=2)
    assert len(first.arrivals) == 200


@pytest.mark.parametrize("name", MIXES)
def test_requests_come_in_order_and_at_the_rate(name: str) -> None:
    arrivals = trace(name, number=5000).arrivals
    times = [arrival.at for arrival in arrivals]
    assert times == sorted(times)
    starts = [arrival.at for arrival in arrivals if arrival.follows < 0]
    per_session = len(arrivals) / len(starts)
    assert len(starts) * per_session / starts[-1] == pytest.approx(10.0, rel=0.2)


@pytest.mark.parametrize("name", MIXES)
def test_another_rate_brings_the_same_texts(name: str) -> None:
    slow, fast = (trace(name, rate=rate, number=300).arrivals for rate in (1.0, 100.0))
    assert sorted(map(hash, (item.prompt for item in slow))) == sorted(
        map(hash, (item.prompt for item in fast))
    )


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_a_turn_repeats_all_that_was_said(name: str) -> None:
    arrivals = trace(name).arrivals
    followers = [(index, item) for index, item in enumerate(arrivals) if item.follows >= 0]
    assert len(followers) > len(arrivals) / 2
    for index, item in followers:
        before = arrivals[item.follows]
        assert item.follows < index
        assert item.prompt[: len(before.prompt) + 1] == (*before.prompt, before.output)
        assert item.at == pytest.approx(before.at + item.pause_seconds)


@pytest.mark.parametrize("name", MIXES)
def test_lengths_stay_within_the_mix(name: str) -> None:
    mix = MIXES[name]
    for arrival in trace(name).arrivals:
        assert 1 <= arrival.output.num_tokens <= mix.max_new_tokens == arrival.max_new_tokens
        assert arrival.num_prompt_tokens + arrival.max_new_tokens <= mix.max_context_tokens
        assert arrival.prompt[0].num_tokens == mix.system_tokens


def test_documents_are_asked_again() -> None:
    arrivals = trace("rag").arrivals
    distinct = {arrival.prompt[1] for arrival in arrivals}
    assert 0.7 * len(arrivals) < len(distinct) < 0.95 * len(arrivals)


def test_long_prompts_arrive_now_and_then() -> None:
    lengths = [arrival.num_prompt_tokens for arrival in trace("long-arrival").arrivals]
    assert 0.01 < statistics.mean(length > 16000 for length in lengths) < 0.04


def test_bursts_are_less_even_than_chance() -> None:
    even, bursty = (trace("rag", is_bursty=is_bursty).arrivals for is_bursty in (False, True))

    def unevenness(times: list[float]) -> float:
        gaps = [late - early for early, late in pairwise(times)]
        return statistics.pstdev(gaps) / statistics.mean(gaps)

    assert unevenness([item.at for item in bursty]) > 1.5 * unevenness([item.at for item in even])
