"""When to choose the next step: shortly before the one that runs is expected to end.

A step that is chosen late knows who has come and who has left meanwhile; chosen too late, it lets the shard
wait. How long a step takes is expected from alike ones: their smoothed mean and mean deviation, kept as TCP
keeps those of its round trips (Jacobson, "Congestion Avoidance and Control", 1988). Knows no clock and no
shard.
"""

from headrace_router.scheduling.step import Step

MIN_LEAD_SECONDS = 0.010
"""A step is chosen at least so long before the one that runs is expected to end: time to choose it, to send
it, and for the shard to read it."""

LEAD_SHARE = 0.25
"""… and at least such a share of the expected duration before."""

NUM_DEVIATIONS = 4
"""… and at least so many mean deviations of it."""

_GAIN = 0.25
"""Weight of a new measurement."""


class Pace:
    """Durations of the steps of one shard."""

    def __init__(self) -> None:
        self._measured: dict[tuple[bool, int, int], tuple[float, float]] = {}
        """Mean and mean deviation in seconds."""

    def measure(self, step: Step, seconds: float) -> None:
        """The step has kept the shard busy for so long."""
        likeness = _likeness(step)
        # Of one measurement nobody knows the spread: the whole of it is lead at first.
        mean, deviation = self._measured.get(likeness, (seconds, seconds / NUM_DEVIATIONS / (1 - _GAIN)))
        error = seconds - mean
        self._measured[likeness] = mean + _GAIN * error, deviation + _GAIN * (abs(error) - deviation)

    def slack_seconds(self, step: Step) -> float:
        """How long after the beginning of the step the next one may still be chosen; 0 when alike steps are
        short or unknown."""
        measured = self._measured.get(_likeness(step))
        if measured is None:
            return 0.0
        mean, deviation = measured
        return max(0.0, mean - max(MIN_LEAD_SECONDS, LEAD_SHARE * mean, NUM_DEVIATIONS * deviation))


def _likeness(step: Step) -> tuple[bool, int, int]:
    """Equal for steps of one kind whose numbers of tokens have the same leading three bits."""
    num_tokens = step.total_tokens
    shift = max(0, num_tokens.bit_length() - 3)
    return step.is_prefill, shift, num_tokens >> shift
