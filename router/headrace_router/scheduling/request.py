"""What was asked (`Request`) and how far it is (`Sequence`).

The life of a sequence; the scheduler alone moves it:

    WAITING ──admitted──► RUNNING ──last token──► FINISHED
       ▲                     │
       └─────preempted───────┘        cancelled, stopped or failed, from either: FINISHED

WAITING   in the queue; holds no blocks; the shard does not know it
RUNNING   holds blocks; the shard knows it; it may still be computing its prompt
FINISHED  holds nothing; `finish_reason` says why
"""

import enum
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Neutral values are the defaults."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Of the request's own generator, as an unsigned 64-bit number."""
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request: nothing in it can be the caller's fault any more."""

    prompt_ids: tuple[int, ...]
    """At least one, all below the vocabulary size."""
    sampling: SamplingParams
    max_new_tokens: int
    """0 only with `prompt_logprobs`."""
    min_new_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    """Ids that end the sequence with EOS; empty for `ignore_eos`."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the sequence with STOP."""
    top_n_tokens: int = 0
    prompt_logprobs: bool = False
    prompt_top_n_tokens: int = 0
    priority: int = 0
    """Lower comes first."""
    tenant: str = ""
    """Whose turn it is when several tenants wait: a digest of the API key; empty for all without one."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""


class Status(enum.Enum):
    """Where a sequence is in its life; see the diagram above."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    LENGTH = "length"
    EOS = "eos_token"
    STOP = "stop_sequence"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way: what it has generated, computed and holds."""

    id: int
    request: Request
    arrived_at: float
    """Seconds on the caller's clock."""
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens of prompt and output whose KV is in `blocks` (or will be, by a step already sent)."""
    blocks: list[int] = field(default_factory=list)
    is_known: bool = False
    """Whether the shard holds it."""
    admitted_at: float | None = None
    """When it was first admitted."""
    num_preemptions: int = 0
    num_overtaken: int = 0
    """Younger sequences that were admitted while this one waited for blocks."""
    num_replays: int = 0
    """Shards that were lost while they computed this one's prompt."""
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens whose values are known to the router."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that are still to be computed before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt's log-probabilities are still to come; with the first token they have."""
        return self.request.prompt_logprobs and not self.output_ids
