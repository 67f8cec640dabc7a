"""A request under way, and what the replay asks of a policy. Knows no particular policy."""

from dataclasses import dataclass
from typing import Protocol

from bench.simulation.cost import Work
from bench.simulation.traces import Arrival


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """An arrival that has come. Times in seconds of the replay; those below zero have not been yet."""

    index: int
    arrival: Arrival
    arrived_at: float
    output: tuple[int, ...]
    """Token ids that it will be answered with."""
    num_left: int
    """Tokens still to come; 0: it has ended."""
    started_at: float = -1.0
    """When a step with it was first made."""
    last_token_at: float = -1.0
    num_cached: int = 0
    """Prompt tokens found in the cache at the first start."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """What a policy counts over a replay."""

    num_computed_tokens: int = 0
    """In all steps."""
    num_wasted_rows: int = 0
    """Of these, rows of requests that had ended: their end was not known yet when the step was made."""
    num_preemptions: int = 0


class Policy(Protocol):
    """Decides what runs. The replay calls `schedule` and `answer`, at most `max_in_flight` steps apart."""

    name: str
    max_in_flight: int
    counters: Counters

    def add(self, job: Job, now: float) -> bool:
        """Takes a request in. False when it could never run."""

    def schedule(self, now: float) -> Work | None:
        """Makes the next step; None when nobody can compute before an answer or an arrival."""

    def answer(self, seconds: float) -> list[Job]:
        """The oldest step in flight came back, after so many seconds on the device. Gives those that got
        their next token; their `num_left` counts it already."""

    @property
    def slack_seconds(self) -> float:
        """How long after the newest step in flight has begun the next one should be made, if another answer
        may still be out then."""

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""

    @property
    def num_held_slots(self) -> int:
        """Tokens for which blocks are held by those that run, shared blocks once."""

    @property
    def num_unused_slots(self) -> int:
        """Of these, not filled."""

    @property
    def num_cached_slots(self) -> int:
        """Tokens in blocks that only the prefix cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What every policy gets to work with."""

    num_blocks: int
    block_size: int
    max_total_tokens: int
    """Prompt and answer together."""
    max_step_tokens: int
    max_running: int
    """Sequences in a step."""
    vocab_size: int
    eos_token_id: int
    step_costs: tuple[tuple[int, float], ...]
    """(tokens, seconds), as a shard's warm-up measures them."""
