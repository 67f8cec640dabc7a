"""From what a replay measured to the figures people compare. Prints nothing."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from bench.simulation.jobs import Counters
from bench.simulation.record import Record

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of many times, in seconds; None when there were none."""

    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one policy on one trace. Times in seconds; shares from 0 to 1."""

    num_answered: int
    num_refused: int
    num_turned_away: int
    num_stuck: int
    duration: float
    """From the first arrival to the last token."""
    num_steps: int
    busy_share: float
    """Of the duration in which the device computed."""
    flops_share: float
    """Of the peak arithmetic of the devices over the duration."""
    output_tokens_per_second: float
    useful_share: float
    """Of the computed tokens, neither recomputed nor wasted."""
    queueing: Spread
    ttft: Spread
    ttft_short: Spread
    """Of the quarter of the requests with the shortest prompts."""
    ttft_long: Spread
    """Of the twentieth with the longest."""
    gap: Spread
    latency: Spread
    held_share: float
    """Of the KV pool, held by running requests, on average over the busy time."""
    unused_share: float
    """Of what was held, not filled."""
    num_preemptions: int
    hit_share: float
    """Of the prompt tokens, found in the prefix cache."""
    num_recomputed_tokens: int
    num_wasted_rows: int
    max_running: int
    max_waiting: int


def figures(record: Record, counters: Counters) -> Figures:
    """Of a replay that has ended."""
    duration = max(record.end - record.begin, 1e-9)
    busy = max(record.busy_seconds, 1e-9)
    peak = record.gpu.device.flops_per_second * record.gpu.num_devices
    gaps, counts = np.asarray(record.gaps), np.asarray(record.gap_counts)
    ttft, lengths = np.asarray(record.ttft), np.asarray(record.prompt_lengths)
    # A request computes its prompt but for what was cached, and every token of its answer but the last.
    num_useful = record.num_prompt_tokens - record.num_cached_tokens + int(counts.sum())
    num_computed = max(counters.num_computed_tokens, 1)
    held = record.held_seconds / busy
    return Figures(
        num_answered=record.num_answered,
        num_refused=record.num_refused,
        num_turned_away=record.num_turned_away,
        num_stuck=record.num_stuck,
        duration=duration,
        num_steps=record.num_steps,
        busy_share=record.busy_seconds / duration,
        flops_share=record.flops / (duration * peak),
        output_tokens_per_second=record.num_output_tokens / duration,
        useful_share=num_useful / num_computed,
        queueing=spread(np.asarray(record.queueing)),
        ttft=spread(ttft),
        ttft_short=spread(_of_lengths(ttft, lengths, 0.0, 0.25)),
        ttft_long=spread(_of_lengths(ttft, lengths, 0.95, 1.0)),
        gap=spread(gaps, counts),
        latency=spread(np.asarray(record.latency)),
        held_share=held,
        unused_share=record.unused_seconds / busy / held if held else 0.0,
        num_preemptions=counters.num_preemptions,
        hit_share=record.num_cached_tokens / max(record.num_prompt_tokens, 1),
        num_recomputed_tokens=counters.num_computed_tokens - counters.num_wasted_rows - num_useful,
        num_wasted_rows=counters.num_wasted_rows,
        max_running=record.max_running,
        max_waiting=record.max_waiting,
    )


def spread(values: Floats, counts: NDArray[np.int64] | None = None) -> Spread:
    """Percentiles by nearest rank; `counts` says how often each value occurred."""
    if not len(values):
        return Spread(p50=None, p90=None, p99=None, max=None)
    order = np.argsort(values)
    ranks = np.cumsum(np.ones(len(values), np.int64) if counts is None else counts[order])
    p50, p90, p99 = (
        float(values[order[np.searchsorted(ranks, share * ranks[-1], side="left")]])
        for share in (0.5, 0.9, 0.99)
    )
    return Spread(p50=p50, p90=p90, p99=p99, max=float(values[order[-1]]))


def _of_lengths(ttft: Floats, lengths: NDArray[np.int64], low: float, high: float) -> Floats:
    """TTFT of the requests whose prompts stand between two shares when ordered by length."""
    order = np.argsort(lengths, kind="stable")
    return ttft[order[int(low * len(order)) : int(high * len(order))]]


def as_json(results: Sequence[tuple[str, str, Figures]]) -> list[dict[str, object]]:
    """(trace, policy, figures) as plain values."""
    return [{"trace": trace, "policy": policy, **asdict(values)} for trace, policy, values in results]
