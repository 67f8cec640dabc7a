"""A step as the engine takes it, and what it answers. Plain values and numpy arrays, no messages."""

from collections.abc import Container
from dataclasses import dataclass, field, replace

import numpy as np

from headrace_shard.batch import IntArray
from headrace_shard.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence the shard has not seen, or has dropped, for instance when it was preempted."""

    id: int
    token_ids: IntArray
    """[n]: prompt, then what it has generated so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose keys and values are in its blocks already."""
    sampling: SamplingParams
    num_top: int
    """Alternatives wanted with each generated token."""
    num_prompt_top: int | None
    """Alternatives wanted with each prompt token; None when no prompt log-probabilities are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """{sequence: number of tokens}. `ids`, `num_tokens` and `num_new_blocks` are of one length S."""

    is_decode: bool
    """Promised to hold one token each of known sequences."""
    dropped_ids: list[int]
    new_sequences: list[NewSequence]
    refused: dict[int, str]
    """Further new sequences, which cannot be expressed as values, and why; scheduled like the others."""
    ids: list[int]
    num_tokens: IntArray
    """[S]."""
    num_new_blocks: IntArray
    """[S]: how many of `new_blocks` each sequence gains, in the order of `ids`."""
    new_blocks: IntArray
    """[B]."""
    copied_from: IntArray
    """[C]: blocks that are copied before anything is computed."""
    copied_to: IntArray
    """[C]: where each of them is copied to."""
    max_seconds: float = 0.0
    """How long the forward pass should take; 0: as long as it takes. For its sake the last tokens of the last
    sequence may be left, if that one does not sample."""

    def without(self, ids: Container[int]) -> "Step":
        """The same step, with these sequences neither brought nor scheduled."""
        kept = np.array([number not in ids for number in self.ids], dtype=bool)
        return replace(
            self,
            new_sequences=[sequence for sequence in self.new_sequences if sequence.id not in ids],
            refused={number: reason for number, reason in self.refused.items() if number not in ids},
            ids=[number for number in self.ids if number not in ids],
            num_tokens=self.num_tokens[kept],
            num_new_blocks=self.num_new_blocks[kept],
            new_blocks=self.new_blocks[np.repeat(kept, self.num_new_blocks)],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens from position `start` on, given those before them."""

    id: int
    start: int
    logprobs: list[float]
    num_top: int
    top_token_ids: list[int]
    """`num_top` for each token, most likely first, end to end."""
    top_logprobs: list[float]


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a step has given. `ids`, `token_ids`, `logprobs` and `top_counts` are of one length."""

    ids: list[int] = field(default_factory=list)
    """Sequences that sampled a token, in the order of the step."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Natural log of the raw model distribution."""
    top_counts: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    """`top_counts[i]` belong to `ids[i]`, most likely first, end to end."""
    top_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)
    """Sequences that failed by themselves and were dropped, and why."""
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    total_seconds: float = 0.0
    """The whole step, as the host saw it; the other two are times of the device."""
    idle_seconds: float = 0.0
    num_sequences: int = 0
    shortened_id: int = 0
    """The sequence of which `num_left` tokens were left for the sake of `max_seconds`."""
    num_left: int = 0
