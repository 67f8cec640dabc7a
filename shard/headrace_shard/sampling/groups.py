"""Rows of a batch that are chosen from in the same way, and the ways there are.

    GREEDY    the best token, the lowest id among equals
    WHOLE     a draw from the whole vocabulary
    LISTED    top-k: a draw from so many columns, found in a short list
    HOPEFUL   top-p or min-p alone, on a CPU: a short list is likely to hold what is kept; rows of which it
              does not are drawn from all columns that could be kept
    TYPICAL   typical-p without top-k: a draw from what the steps leave of the whole row
    FULL      the same for top-p and min-p alone, where a list is no gain: a short vocabulary, or a GPU, which
              would have to be asked whether the list sufficed

The way of a row follows from its own parameters alone. Rows of one way share the steps that any of them uses;
the others pass through those unchanged. Knows edited logits; no penalties, no sequences.
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
from headrace_shard.sampling.shortlist import (
    BLOCK,
    argmax,
    best_columns,
    can_be_asked,
    marked_columns,
    shortlist,
)

_NUM_HOPEFUL_BLOCKS = 128
_MAX_COLUMNS_AT_ONCE = {"cpu": 400_000, "cuda": 4_000_000}
"""Columns that are worked on together: on a CPU they stay in its caches and in memory it already has, on a
GPU they take 32 MB for each tensor of float64."""

_FLOOR_MARGIN = 1e-3
"""Far more than the rounding of what a floor is made of."""


class Way(enum.Enum):
    """How a row's token is chosen; see the table above."""

    GREEDY = "greedy"
    WHOLE = "whole"
    LISTED = "listed"
    HOPEFUL = "hopeful"
    TYPICAL = "typical"
    FULL = "full"


def way_of(params: SamplingParams, vocab_size: int, device: torch.device) -> Way:
    """Depends on nothing but the row's own parameters, the vocabulary and the device."""
    uses_top_k = 0 < params.top_k < vocab_size
    if params.is_greedy:
        return Way.GREEDY
    if not uses_top_k and params.typical_p == 1 and params.top_p == 1 and params.min_p == 0:
        return Way.WHOLE
    if uses_top_k:
        return Way.LISTED
    if params.typical_p < 1:
        return Way.TYPICAL
    is_long = vocab_size > _NUM_HOPEFUL_BLOCKS * BLOCK
    return Way.HOPEFUL if is_long and can_be_asked(device) else Way.FULL


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
        top_k = [p.top_k if p.top_k < vocab_size else 0 for p in params]
        # What float32 cannot hold must not become 0, by which nothing can be divided.
        temperatures = [max(p.temperature, torch.finfo(torch.float32).tiny) for p in params]
        return cls(
            vocab_size=vocab_size,
            temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device).unsqueeze(1),
            max_top_k=max(top_k),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            typical_p=_shares([p.typical_p for p in params], 1.0, device),
            top_p=_shares([p.top_p for p in params], 1.0, device),
            min_p=_shares([p.min_p for p in params], 0.0, device),
        )

    def of_rows(self, rows: Tensor | slice) -> "Truncation":
        """Of some of the rows, by their positions [n] int64."""
        return replace(
            self,
            temperatures=self.temperatures[rows],
            top_k=self.top_k[rows],
            typical_p=None if self.typical_p is None else self.typical_p[rows],
            top_p=None if self.top_p is None else self.top_p[rows],
            min_p=None if self.min_p is None else self.min_p[rows],
        )

    def scale(self, logits: Tensor, maxima: Tensor) -> Tensor:
        """Logits [G, S] and the highest of each whole row [G] -> scaled values [G, S]."""
        return scale(logits, maxima.unsqueeze(1), self.temperatures)

    def masses(self, logits: Tensor, maxima: Tensor) -> Tensor | None:
        """[G] float64: the weight of each whole row of logits [G, V], if top-p takes a share of that."""
        if self.top_p is None or self.max_top_k or self.typical_p is not None:
            return None
        num_at_once = _num_rows_at_once(logits.shape[1], logits.device)
        best = [
            torch.softmax(scale(rows, highest, temperatures), dim=1).amax(1)
            for rows, highest, temperatures in zip(
                torch.split(logits, num_at_once),
                torch.split(maxima.unsqueeze(1), num_at_once),
                torch.split(self.temperatures, num_at_once),
                strict=True,
            )
        ]
        return weight_unit(self.vocab_size) / torch.cat(best).to(torch.float64)

    def floors(self, masses: Tensor | None) -> Tensor:
        """[G, 1] float32: no scaled value below it can be kept, if top-p and min-p are all there is.

        All columns less likely than (1 - top_p) / V have less than 1 - top_p between them.
        """
        floors = torch.full_like(self.temperatures, -torch.inf).squeeze(1)
        if self.min_p is not None:
            floors = self.min_p.log().to(torch.float32)
        if self.top_p is not None and masses is not None:
            lowest = (1 - self.top_p) * masses / weight_unit(self.vocab_size) / self.vocab_size
            floors = torch.maximum(floors, lowest.log().to(torch.float32))
        return (floors - _FLOOR_MARGIN).unsqueeze(1)

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

    def draw(self, scaled: Tensor, uniforms: Tensor) -> Tensor:
        """Scaled values [G, S] and numbers [G] -> positions [G, 1] int64."""
        return draw(scaled, uniforms, self.vocab_size)


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
        truncation = Truncation.of(params, vocab_size, device)
        num_columns = min(vocab_size, BLOCK * truncation.max_top_k) if way is Way.LISTED else vocab_size
        if way is Way.TYPICAL:
            num_columns *= 2  # its distances are in float64
        is_light = way in (Way.GREEDY, Way.HOPEFUL)
        num_at_once = len(rows) if is_light else _num_rows_at_once(num_columns, device)
        starts = range(0, len(rows), num_at_once)
        parts = [slice(start, start + num_at_once) for start in starts]
        self._parts = [(part, truncation.of_rows(part)) for part in parts]

    def choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Edited logits [G, V], uniform numbers [G] float64 -> token ids [G] int64, highest logits [G].

        Where the highest logit is not finite, the id is of no use.
        """
        choose = _CHOOSE[self.way]
        if len(self._parts) == 1:
            return choose(logits, uniforms, self._parts[0][1])
        chosen = [choose(logits[part], uniforms[part], truncation) for part, truncation in self._parts]
        return torch.cat([token_ids for token_ids, _ in chosen]), torch.cat([maxima for _, maxima in chosen])


def _choose_greedy(logits: Tensor, uniforms: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    return argmax(logits)


def _choose_whole(logits: Tensor, uniforms: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    maxima = logits.amax(1)
    scaled = scale(logits, maxima.unsqueeze(1), truncation.temperatures)
    return draw_from_all(scaled, uniforms).squeeze(1), maxima


def _choose_listed(logits: Tensor, uniforms: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    num_best = truncation.max_top_k
    listed = shortlist(logits, num_best)
    positions = best_columns(listed.values, num_best)
    scaled = truncation.scale(listed.values.gather(1, positions), listed.maxima)
    drawn = truncation.draw(truncation.narrow(_sound(scaled, listed.maxima.isfinite())), uniforms)
    return listed.columns(positions.gather(1, drawn)).squeeze(1), listed.maxima


def _choose_hopeful(logits: Tensor, uniforms: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    listed = shortlist(logits, _NUM_HOPEFUL_BLOCKS)
    masses = truncation.masses(logits, listed.maxima)
    # What is above the bound is ahead of all that is not listed.
    positions, is_real = marked_columns(listed.values > listed.bounds.unsqueeze(1))
    scaled = truncation.scale(listed.values.gather(1, positions), listed.maxima)
    scaled = torch.where(is_real, scaled, -torch.inf)
    is_sound = listed.maxima.isfinite()
    narrowed = truncation.narrow(_sound(scaled, is_sound & is_real[:, 0]), masses)
    drawn = truncation.draw(narrowed, uniforms)
    token_ids = listed.columns(positions.gather(1, drawn)).squeeze(1)
    # Where nothing was dropped, something outside the list might be kept too.
    is_dropped = is_real & (narrowed == -torch.inf)
    missed = (is_sound & ~is_dropped.any(1)).nonzero().squeeze(1)
    num_at_once = _num_rows_at_once(logits.shape[1], logits.device)
    for rows in torch.split(missed, num_at_once) if len(missed) else ():
        token_ids[rows] = _draw_bounded(
            logits[rows],
            listed.maxima[rows],
            None if masses is None else masses[rows],
            uniforms[rows],
            truncation.of_rows(rows),
        )
    return token_ids, listed.maxima


def _draw_bounded(
    logits: Tensor, maxima: Tensor, masses: Tensor | None, uniforms: Tensor, truncation: Truncation
) -> Tensor:
    """Token ids [G] by top-p and min-p, from all that are likely enough to be kept. Sound rows, on a CPU."""
    scaled = truncation.scale(logits, maxima)
    columns, is_real = marked_columns(scaled >= truncation.floors(masses))
    scaled = torch.where(is_real, scaled.gather(1, columns), -torch.inf)
    drawn = truncation.draw(truncation.narrow(scaled, masses), uniforms)
    return columns.gather(1, drawn).squeeze(1)


def _choose_full(logits: Tensor, uniforms: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    maxima = logits.amax(1)
    # The same masses as for a short list, so that both keep the same.
    masses = truncation.masses(logits, maxima)
    scaled = _sound(truncation.scale(logits, maxima), maxima.isfinite())
    return truncation.draw(truncation.narrow(scaled, masses), uniforms).squeeze(1), maxima


def _num_rows_at_once(num_columns: int, device: torch.device) -> int:
    return max(1, _MAX_COLUMNS_AT_ONCE[device.type] // num_columns)


def _sound(scaled: Tensor, is_sound: Tensor) -> Tensor:
    """Scaled values, with zeros in rows that have no distribution, so that no step chokes on them."""
    return torch.where(is_sound.unsqueeze(1), scaled, 0.0)


_CHOOSE: dict[Way, Callable[[Tensor, Tensor, Truncation], tuple[Tensor, Tensor]]] = {
    Way.GREEDY: _choose_greedy,
    Way.WHOLE: _choose_whole,
    Way.LISTED: _choose_listed,
    Way.HOPEFUL: _choose_hopeful,
    Way.TYPICAL: _choose_full,
    Way.FULL: _choose_full,
}
