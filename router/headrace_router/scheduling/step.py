"""One step: what to run, and what came back. Plain values; `shards/convert.py` puts them on the wire."""

from dataclasses import dataclass, field

from headrace_router.scheduling.request import Sequence


@dataclass(slots=True, kw_only=True)
class ScheduledSequence:
    """A sequence's part in a step."""

    sequence: Sequence
    num_tokens: int
    """Tokens to compute, at least 1."""
    new_blocks: list[int]
    """Blocks it gains; for a new sequence all it holds."""
    num_computed: int
    """Tokens computed before this step."""
    is_new: bool
    """Whether the shard has to be told of it in full."""
    samples: bool
    """Whether the step reaches its last token, so that one is sampled."""


@dataclass(slots=True, kw_only=True)
class Step:
    """{sequence: number of tokens}."""

    id: int
    scheduled: list[ScheduledSequence]
    dropped_ids: list[int]
    """Sequences the shard must forget before this step."""
    admitted: list[Sequence]
    """Those that left the queue for this step, also such as come back after a preemption."""
    num_preempted: int
    """Sequences that gave up their blocks for this step."""
    is_prefill: bool
    """Whether somebody arrives or computes more than one token."""
    is_overdue: bool
    """Whether they were admitted because `max_waiting_tokens` had passed."""

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.scheduled)


@dataclass(slots=True, kw_only=True)
class SampledToken:
    """A token a sequence has gained."""

    sequence_id: int
    token_id: int
    logprob: float
    """Natural log of the raw model distribution."""
    top: list[tuple[int, float]] = field(default_factory=list)
    """The request's `top_n_tokens` most likely ids, most likely first."""


@dataclass(slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens `start` onwards given those before them."""

    sequence_id: int
    start: int
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    """One list per token; empty lists when no alternatives were asked for."""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a shard answers to a step."""

    tokens: list[SampledToken]
    prompt_logprobs: list[PromptLogprobs]
    errors: list[tuple[int, str]]
    """(sequence id, message): failed by itself and dropped by the shard."""
    forward_seconds: float
    sample_seconds: float
    idle_seconds: float
    num_sequences: int
    """Sequences the shard holds now."""


@dataclass(slots=True, kw_only=True)
class Update:
    """What a result changed for one sequence; when it ended, `sequence.finish_reason` says why."""

    sequence: Sequence
    token: SampledToken | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
