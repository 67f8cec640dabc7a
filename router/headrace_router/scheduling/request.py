"""What was asked (`Request`) and how far it is (`Sequence`).

The life of a sequence; the scheduler alone moves it:

    WAITING ──admitted──► RUNNING ──last token──► FINISHED
       ▲                     │
       └─preempted, suspected┘        cancelled, stopped or failed, from either: FINISHED
         or replayed

WAITING   in the queue; holds no blocks, but for the moment in which it is looked at whether it can join a
          step; the shard does not know it, or is told to forget it with the next step
RUNNING   holds blocks; the shard knows it; it may still be computing its prompt
FINISHED  holds nothing; `finish_reason` says why

It is suspected when a step failed that it was in, and replayed when a shard was lost before it had a token.
One that was preempted while steps in flight computed it is *late*: it waits until they are answered, takes
their tokens (perhaps its last), and cannot be admitted before.
"""

import enum
from dataclasses import dataclass, field

from headrace_router.scheduling.blocks import Holding


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
    """A request on its way: what it has generated, computed and holds.

    Token counts are of prompt and output together. The router knows the tokens of answered steps only;
    `num_computed` runs ahead of them, by what the steps in flight compute.
    """

    id: int
    request: Request
    arrived_at: float
    """Seconds on the caller's clock."""
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    admitted_at: float | None = None
    """When it was first admitted."""
    num_cached: int = 0
    """Prompt tokens that need not be computed, because the cache had them when it was first admitted, or
    admitted again after a shard was lost with all that it had cached."""
    is_begun: bool = False
    """Whether `num_cached` is known."""
    num_preemptions: int = 0
    num_overtaken: int = 0
    """Sequences behind it that were admitted while it waited for blocks."""
    num_charged: int = 0
    """Generated tokens that its tenant was charged."""
    num_replays: int = 0
    """Shards that were lost while they computed this one's prompt."""
    finish_reason: FinishReason | None = None

    # ---- while it runs

    holding: Holding | None = None
    """Its blocks."""
    is_known: bool = False
    """Whether the shard holds it."""
    num_computed: int = 0
    """Leading tokens whose KV is in its blocks, or will be by a step already sent."""
    num_confirmed: int = 0
    """Of its prefill: leading tokens whose KV is in its blocks for certain, because the step was answered."""
    num_prefill: int = 0
    """Tokens that were known when it was admitted: its prompt and, after a preemption, its output."""
    num_ready: int = 0
    """While `num_computed` is below it, the next token can be computed without a look at blocks or limits. 0
    until the prefill is scheduled to its end."""
    last_step_id: int = -1
    """The last step that computed a part of its prefill."""

    # ---- while it waits

    num_late: int = 0
    """Steps in flight that compute it still, although it was preempted."""
    keys: list[bytes] = field(default_factory=list)
    """Of its whole blocks, as far as anybody asked."""
    num_needed: int = 0
    """Available blocks that it takes to hold all its tokens, as of step `estimated_at`."""
    estimated_at: int = -1
    leader: "Sequence | None" = None
    """A running sequence that is computing the prefix this one waits for."""
    num_common: int = 0
    """Leading blocks that it has in common with its leader."""
    copied_block: int | None = None
    """A sibling's block that its first own one begins as a copy of."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens whose values are known to the router."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Tokens of its prefill that no step computes yet."""
        return self.num_prefill - self.num_computed

    @property
    def num_final(self) -> int:
        """Tokens that are computed when it has generated all it may. The last one it generates never is."""
        return len(self.request.prompt_ids) + max(self.request.max_new_tokens, 1) - 1

    @property
    def blocks(self) -> list[int]:
        """The blocks it holds, in the order of its tokens."""
        return self.holding.blocks if self.holding is not None else []

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt's log-probabilities are still to come; with the first token they have."""
        return self.request.prompt_logprobs and not self.output_ids
