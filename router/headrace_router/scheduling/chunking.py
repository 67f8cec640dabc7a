"""How many prompt tokens a step computes, and whose. Knows no blocks and no queue.

`StepCosts`  how many may stand beside the running decodes, so that these do not stall
`shares`     who gets how many of them
"""

from bisect import bisect_left
from collections import deque
from operator import attrgetter, itemgetter
from statistics import median_low

from headrace_router.scheduling.request import Sequence

TARGET = 0.78
"""Share of the bound that is aimed at: what is measured scatters."""

LIMIT = 0.8
"""Share of the bound at which the shard cuts a step short: something comes after the forward pass."""

NUM_DECODES = 31
"""Steps of decodes alone whose median is what they cost: a measure that wavers makes all others waver."""

NUM_MIXED = 3
SMOOTHING = 0.3
"""Of steps with prompts: a median of fewer, and the weight of the newest. A context grows by a chunk with
every step, and its cost with it."""

MAX_MIXED = 32
"""Steps with prompts in them after which one of decodes alone is made, if none came by itself: its cost is
what the others are measured by, and grows with the contexts."""

_UNIT_COSTS = [(1, 1.0), (2, 2.0)]
"""As many as tokens, until the measured steps say more."""

_by_age = attrgetter("id")


class StepCosts:
    """What a step costs, from its tokens: piecewise linear through what warm-up measured, times a factor.

    There is a factor for steps of decodes alone and one for those with prompts beside them. Both follow what
    answered steps took: contexts grow, and warm-up had none. One step that took long for a reason of its own
    changes neither.
    """

    def __init__(self, costs: tuple[tuple[int, float], ...], max_slowdown: float, min_tokens: int) -> None:
        """`costs` are pairs (tokens, seconds) of a warm-up. A step may take `max_slowdown` times as long as
        one of its decodes alone, 0: as long as it likes; `min_tokens` of prompts it gets at least."""
        self._max_slowdown = max_slowdown
        self._min_tokens = min_tokens
        points = _rising(costs)
        self._points = points if len(points) > 1 else _UNIT_COSTS
        factor = 1.0 if len(points) > 1 else None
        self._decodes = _Factor(factor, num_last=NUM_DECODES, smoothing=1.0)
        self._mixed = _Factor(factor, num_last=NUM_MIXED, smoothing=SMOOTHING)
        self._num_mixed = 0
        """Steps with prompts in them since the last one of decodes alone."""

    def observe(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """A step of so many sequences and tokens took so long. Prompts alone tell nothing of those beside
        decodes, so call it for steps with decodes only."""
        if seconds <= 0:
            return
        factor = seconds / self._seconds(num_tokens)
        if num_tokens == num_sequences:
            self._decodes.observe(factor)
            self._num_mixed = 0
        else:
            self._num_mixed += 1
            self._mixed.observe(factor)

    def max_prompt_tokens(self, num_decodes: int, budget: int) -> int:
        """The most prompt tokens, up to `budget`, that a step may compute beside so many decodes.

        0 once in a while, so that the cost of decodes alone stays known.
        """
        # Of a kind of steps that was not seen yet, we suppose that it is like the other one.
        decode_factor = self._decodes.value or self._mixed.value
        mixed_factor = self._mixed.value or self._decodes.value
        if not num_decodes or not self._max_slowdown or not decode_factor or not mixed_factor:
            return budget
        if self._num_mixed >= MAX_MIXED:
            return 0
        bound = TARGET * self._max_slowdown * decode_factor * self._seconds(num_decodes)
        most = int(self._tokens(bound / mixed_factor)) - num_decodes
        return min(budget, max(self._min_tokens, most))

    def max_seconds(self, num_decodes: int) -> float:
        """When a step with so many decodes and a part of a prompt is to be cut short; 0: never, because there
        is no bound, or nothing yet to measure it by."""
        bound = self._max_slowdown * (self._decodes.value or 0.0) * self._seconds(num_decodes)
        return max(0.0, LIMIT * bound)

    def _seconds(self, num_tokens: int) -> float:
        points = self._points
        index = min(max(bisect_left(points, (num_tokens, 0.0)), 1), len(points) - 1)
        (left, low), (right, high) = points[index - 1], points[index]
        return low + (high - low) * (num_tokens - left) / (right - left)

    def _tokens(self, seconds: float) -> float:
        """The most tokens whose step takes at most so long; below the first point, less than it has."""
        points = self._points
        index = min(max(bisect_left(points, seconds, key=itemgetter(1)), 1), len(points) - 1)
        (left, low), (right, high) = points[index - 1], points[index]
        return left + (seconds - low) * (right - left) / (high - low)


class _Factor:
    """What steps of one kind take, as a share of what is expected: the median of the last few, smoothed."""

    def __init__(self, value: float | None, *, num_last: int, smoothing: float) -> None:
        """`value` is the factor to begin with, None if nobody knows; `smoothing` the weight of the newest."""
        self.value = value
        self._smoothing = smoothing
        self._last: deque[float] = deque([] if value is None else [value], maxlen=num_last)

    def observe(self, factor: float) -> None:
        self._last.append(factor)
        typical = median_low(self._last)
        self.value = typical if self.value is None else self.value + self._smoothing * (typical - self.value)


def _rising(costs: tuple[tuple[int, float], ...]) -> list[tuple[int, float]]:
    """By tokens, without those that are no dearer than one of fewer tokens, as measured ones may be."""
    points: list[tuple[int, float]] = []
    for num_tokens, seconds in sorted(costs):
        if seconds > (points[-1][1] if points else 0.0) and (not points or num_tokens > points[-1][0]):
            points.append((num_tokens, seconds))
    return points


def shares(prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Who computes how many prompt tokens, at least one each, in the order in which blocks are given out.

    The oldest is sure of half of them, or of an eighth beside prompts of better priority, so that nobody
    starves; the rest goes to whoever has least left to compute, among those of the best priority first
    (shortest remaining processing time), so that a short prompt never stands behind a long one.
    """
    if not prompts or budget <= 0:
        return []
    oldest = min(prompts, key=_by_age)
    is_best = oldest.request.priority == min(sequence.request.priority for sequence in prompts)
    oldest_share = min(oldest.num_pending, -(-budget // (2 if is_best else 8)))
    budget -= oldest_share
    others: list[tuple[Sequence, int]] = []
    for sequence in sorted(prompts, key=_by_remaining):
        if budget == 0:
            break
        if sequence is not oldest:
            share = min(sequence.num_pending, budget)
            budget -= share
            others.append((sequence, share))
    return [(oldest, min(oldest_share + budget, oldest.num_pending)), *others]


def _by_remaining(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.request.priority, sequence.num_pending, sequence.id
