"""Rows of a batch that are chosen from in the same way, and the ways there are.

    GREEDY    the best token, the lowest id among equals
    WHOLE     a draw from the whole vocabulary
    LISTED    top-k up to 256: a draw from a short list that is sure to hold what is kept
    HOPEFUL   top-p or min-p without top-k, on a CPU: a short list is likely to hold what is kept; rows of
              which it does not are done again as full ones
    FULL      everything else: larger top-k, typical-p without top-k; on a GPU also what is hopeful on a CPU,
              for it would have to be asked whether a list sufficed

The way of a row follows from its own parameters alone. Knows edited logits; no penalties, no sequences.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace_shard.sampling.draw import draw, draw_from_all
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.sampling.processors import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    scale,
    weight_unit,
)
from headrace_shard.sampling.shortlist import Shortlist, argmax, list_all, shortlist

_MAX_LISTED_TOP_K = 256
_NUM_HOPEFUL_BLOCKS = 128


class Way(enum.Enum):
    """How a row's token is chosen; see the table above."""

    GREEDY = "greedy"
    WHOLE = "whole"
    LISTED = "listed"
    HOPEFUL = "hopeful"
    FULL = "full"


def way_of(params: SamplingParams, vocab_size: int, device: torch.device) -> Way:
    """Depends on nothing but the row's own parameters, the vocabulary and the device."""
    uses_top_k = 0 < params.top_k < vocab_size
    if params.is_greedy:
        return Way.GREEDY
    if not uses_top_k and params.typical_p == 1 and params.top_p == 1 and params.min_p == 0:
        return Way.WHOLE
    if uses_top_k and params.top_k <= _MAX_LISTED_TOP_K:
        return Way.LISTED
    if not uses_top_k and params.typical_p == 1 and device.type == "cpu":
        return Way.HOPEFUL
    return Way.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Temperature and truncation of G rows. A share that no row uses is None."""

    vocab_size: int
    temperatures: Tensor
    """[G, 1] float32"""
    max_top_k: int
    top_k: Tensor
    """[G] int64; 0 is off"""
    typical_p: Tensor | None
    """[G] float64, as are the next two"""
    top_p: Tensor | None
    min_p: Tensor | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> "Truncation":
        """Of rows with these parameters."""
        top_k = [min(p.top_k, vocab_size) for p in params]
        return cls(
            vocab_size=vocab_size,
            temperatures=torch.tensor([[p.temperature] for p in params], dtype=torch.float32, device=device),
            max_top_k=max(top_k),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            typical_p=_shares([p.typical_p for p in params], 1.0, device),
            top_p=_shares([p.top_p for p in params], 1.0, device),
            min_p=_shares([p.min_p for p in params], 0.0, device),
        )

    def of_rows(self, rows: Tensor) -> "Truncation":
        """Of some of the rows, by their positions [n] int64."""
        return replace(
            self,
            temperatures=self.temperatures[rows],
            top_k=self.top_k[rows],
            typical_p=None if self.typical_p is None else self.typical_p[rows],
            top_p=None if self.top_p is None else self.top_p[rows],
            min_p=None if self.min_p is None else self.min_p[rows],
        )

    def scale(self, listed: Shortlist) -> Tensor:
        """Scaled values [G, S]; a row without a distribution becomes one of zeros."""
        scaled = scale(listed.values, listed.maxima.unsqueeze(1), self.temperatures)
        return torch.where(listed.maxima.isfinite().unsqueeze(1), scaled, 0.0)

    def narrow(self, scaled: Tensor, masses: Tensor | None = None) -> Tensor:
        """Scaled values [G, S] -> the same with -inf for what is dropped; `masses` as in `keep_top_p`."""
        if self.max_top_k:
            scaled = keep_top_k(scaled, self.top_k, self.max_top_k)
        if self.typical_p is not None:
            scaled = keep_typical(scaled, self.typical_p, self.vocab_size)
        if self.top_p is not None:
            scaled = keep_top_p(scaled, self.top_p, masses, self.vocab_size)
        if self.min_p is not None:
            scaled = keep_min_p(scaled, self.min_p)
        return scaled

    def draw_from(self, listed: Shortlist, scaled: Tensor, uniforms: Tensor) -> Tensor:
        """Token ids [G] int64."""
        return listed.columns(draw(scaled, uniforms, self.vocab_size)).squeeze(1)


def _shares(values: list[float], neutral: float, device: torch.device) -> Tensor | None:
    if all(value == neutral for value in values):
        return None
    return torch.tensor(values, dtype=torch.float64, device=device)


class RowGroup:
    """Rows of a batch, in ascending order, that share a way."""

    def __init__(
        self,
        way: Way,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.way = way
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        """[G] int64"""
        self._truncation = Truncation.of(params, vocab_size, device)

    def choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Edited logits [G, V], uniform numbers [G] float64 -> token ids [G] int64, highest logits [G].

        Where the highest logit is not finite, the id is of no use.
        """
        return _CHOOSE[self.way](logits, uniforms, self._truncation)


def _choose_greedy(logits: Tensor, uniforms: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    return argmax(logits)


def _choose_whole(logits: Tensor, uniforms: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    maxima = logits.amax(1)
    scaled = scale(logits, maxima.unsqueeze(1), truncation.temperatures)
    return draw_from_all(scaled, uniforms).squeeze(1), maxima


def _choose_listed(logits: Tensor, uniforms: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    listed = shortlist(logits, truncation.max_top_k)
    scaled = truncation.narrow(truncation.scale(listed))
    return truncation.draw_from(listed, scaled, uniforms), listed.maxima


def _choose_hopeful(logits: Tensor, uniforms: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    listed = shortlist(logits, _NUM_HOPEFUL_BLOCKS)
    masses = None
    if truncation.top_p is not None:
        # The weight of all of a row, listed or not: the best token weighs one unit.
        all_scaled = scale(logits, listed.maxima.unsqueeze(1), truncation.temperatures)
        best = torch.softmax(all_scaled, dim=1).amax(1).to(torch.float64)
        masses = weight_unit(truncation.vocab_size) / best
    scaled = truncation.narrow(truncation.scale(listed), masses)
    token_ids = truncation.draw_from(listed, scaled, uniforms)
    # A column outside the list can only be kept if one is that is not above all of those.
    lowest = torch.where(scaled > -torch.inf, listed.values, torch.inf).amin(1)
    missed = (lowest <= listed.bounds).nonzero().squeeze(1)
    if len(missed):
        again, _ = _choose_full(logits[missed], uniforms[missed], truncation.of_rows(missed))
        token_ids[missed] = again
    return token_ids, listed.maxima


def _choose_full(logits: Tensor, uniforms: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    everything = list_all(logits)
    scaled = truncation.narrow(truncation.scale(everything))
    return truncation.draw_from(everything, scaled, uniforms), everything.maxima


_CHOOSE: dict[Way, Callable[[Tensor, Tensor, Truncation], tuple[Tensor, Tensor]]] = {
    Way.GREEDY: _choose_greedy,
    Way.WHOLE: _choose_whole,
    Way.LISTED: _choose_listed,
    Way.HOPEFUL: _choose_hopeful,
    Way.FULL: _choose_full,
}
