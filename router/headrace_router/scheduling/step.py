"""One step: what to run, and what came back. Plain values; `shards/convert.py` puts them on the wire."""

from dataclasses import dataclass, field

from headrace_router.scheduling.request import Sequence


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A sequence the shard has to be told of in full, with its state as of this step."""

    sequence: Sequence
    num_computed: int
    """Leading tokens whose KV is in its blocks before this step: found in the prefix cache, or copied."""


@dataclass(slots=True, kw_only=True)
class Step:
    """{sequence: number of tokens}. `sequences`, `num_tokens` and `num_new_blocks` are of one length."""

    id: int
    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    """Tokens that each computes, at least 1."""
    num_new_blocks: list[int] = field(default_factory=list)
    """Blocks that each gains; for an arrival all it holds, those it shares included."""
    new_blocks: list[int] = field(default_factory=list)
    """The blocks, in the order of `sequences`."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to): blocks whose contents are copied before anything is computed."""
    arrivals: list[Arrival] = field(default_factory=list)
    """In the order of `sequences`."""
    samplers: list[Sequence] = field(default_factory=list)
    """Those that reach their last token, so that one is sampled, in the order of `sequences`."""
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    """(sequence, tokens computed after this step) of those that compute a part of a prompt."""
    dropped_ids: list[int] = field(default_factory=list)
    """Sequences the shard must forget before this step."""
    admitted: list[Sequence] = field(default_factory=list)
    """Those that left the queue for this step, also such as come back after a preemption."""
    num_preempted: int = 0
    """Sequences that gave up their blocks for this step."""
    total_tokens: int = 0
    """Sum of `num_tokens`."""
    is_overdue: bool = False
    """Whether somebody was admitted because `max_waiting_tokens` had passed."""
    max_seconds: float = 0.0
    """If it takes longer, the shard may leave the last tokens of the last chunk; 0: it may take its time."""

    @property
    def is_prefill(self) -> bool:
        """Whether somebody arrives or computes more than one token."""
        return bool(self.arrivals) or self.total_tokens > len(self.sequences)


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
    shortened_id: int = 0
    """The sequence that was cut short for `max_seconds`: `num_left` tokens are left of its chunk."""
    num_left: int = 0


@dataclass(slots=True, kw_only=True)
class Update:
    """What a result changed for one sequence; when it ended, `sequence.finish_reason` says why."""

    sequence: Sequence
    token: SampledToken | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
