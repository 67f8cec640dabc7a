"""What changes or narrows a distribution before a token is drawn, each a function of tensors.

Knows no sequence and no random number. Every function treats each row as if it were alone, bit for bit: sums
are taken over weights that are whole numbers, so that they are exact in any order.

Two kinds of rows are met here. *Logits* [R, V] are what the model gave. *Scaled* values [R, S] are logits
minus the highest of the row, divided by the temperature: the best is 0, a dropped column is -inf. S is the
vocabulary, or a part of it that holds everything that can be kept.
"""

import torch
from torch import Tensor

from headrace_shard.sampling.shortlist import can_be_asked, marked_columns

_NUM_BUCKETS = 2048
_SORTED_COLUMNS = 2048
"""Rows up to this length are sorted, longer ones put into buckets first."""
_ENTROPY_UNIT = 2.0**-45


def penalise(
    logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Logits [P, C] of tokens that are in prompt or output, penalised; counts [P, C] are those in the output.

    First the repetition penalty (Keskar et al. 2019, as transformers applies it), then OpenAI's presence and
    frequency penalties; [P, 1] each, with the neutral values 1, 0 and 0.
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return repeated - frequency * counts - presence * (counts > 0)


def scale(logits: Tensor, maxima: Tensor, temperatures: Tensor) -> Tensor:
    """Logits [R, S], the highest [R, 1], temperatures [R, 1] above 0 -> scaled values [R, S].

    The highest goes first, so that no temperature can make an infinite number of it.
    """
    return (logits - maxima).div_(temperatures)


def weights(scaled: Tensor, vocab_size: int) -> Tensor:
    """Scaled values [R, S] -> float64 [R, S], proportional to the probabilities: whole numbers, 0 for -inf.

    A sum over the vocabulary stays below 2**53, so it is exact whatever the order. For 50,000 tokens, one
    that is 2**37 times less likely than the best gets 0.
    """
    return scaled.to(torch.float64, copy=True).exp_().mul_(weight_unit(vocab_size)).floor_()


def weight_unit(vocab_size: int) -> float:
    """What `weights` gives the best token of a row."""
    return 2.0 ** (53 - vocab_size.bit_length())


def keep_top_k(scaled: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """Keeps the best top_k [R] int64 columns, all for 0; `max_top_k` is the largest, at most S."""
    best = scaled.topk(max_top_k, dim=1).values
    top_k = top_k.unsqueeze(1)
    last = best.gather(1, (top_k - 1).clamp(min=0))
    num_last = top_k - (best > last).sum(1, keepdim=True)
    return _keep(scaled, -scaled, torch.where(top_k > 0, -last, torch.inf), num_last)


def keep_top_p(scaled: Tensor, top_p: Tensor, masses: Tensor | None, vocab_size: int) -> Tensor:
    """Keeps the fewest best columns with the share top_p [R] float64 of the mass, at least one; all for 1.

    `masses` [R] float64 is the weight of the whole row where `scaled` is only a part of it. Holtzman et al.,
    "The curious case of neural text degeneration", 2020.
    """
    mass = weights(scaled, vocab_size)
    total = mass.sum(1) if masses is None else masses
    wanted = torch.where(top_p < 1, top_p * total, torch.inf)
    last, num_last = smallest_set(-scaled, mass, wanted)
    return _keep(scaled, -scaled, last, num_last)


def keep_typical(scaled: Tensor, typical_p: Tensor, vocab_size: int) -> Tensor:
    """Keeps the fewest columns with the share typical_p [R] float64 of the mass, at least one; all for 1.

    Those come first whose surprise is nearest to the entropy. `scaled` must hold the whole distribution.
    Meister et al., "Locally typical sampling", 2022.
    """
    mass = weights(scaled, vocab_size)
    total = mass.sum(1, keepdim=True)
    shares = mass / total
    surprise = (total / weight_unit(vocab_size)).log() - scaled
    terms = torch.where(mass > 0, shares * surprise, 0.0)
    entropy = (terms / _ENTROPY_UNIT).floor().sum(1, keepdim=True) * _ENTROPY_UNIT
    distance = torch.where(mass > 0, (surprise - entropy).abs(), torch.inf)
    wanted = torch.where(typical_p < 1, typical_p * total.squeeze(1), torch.inf)
    last, num_last = smallest_set(distance, mass, wanted)
    return _keep(scaled, distance, last, num_last)


def keep_min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    """Keeps columns whose probability is at least the share min_p [R] float64 of the best one's left."""
    ratios = (scaled - scaled.amax(1, keepdim=True)).to(torch.float64).exp_()
    return torch.where(ratios >= min_p.unsqueeze(1), scaled, -torch.inf)


def smallest_set(keys: Tensor, mass: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The fewest columns, lowest keys first, whose mass reaches `wanted`: the last key, and how many have it.

    keys [R, S] float, those without mass above all others; mass [R, S] whole numbers in float64; wanted [R]
    float64 -> [R, 1] each. At least one column; where the row has less, the last key is inf. On a CPU long
    rows are sorted only around the last key; a GPU would have to be asked how many columns that are, so it
    sorts all.
    """
    wanted = wanted.unsqueeze(1)
    if can_be_asked(keys.device) and keys.shape[1] > _SORTED_COLUMNS:
        last, num_last = _smallest_set_by_buckets(keys, mass, wanted)
    else:
        ordered, order = keys.sort(dim=1, stable=True)
        last, num_last = _last_needed(ordered, mass.gather(1, order), wanted)
    return torch.where(mass.sum(1, keepdim=True) < wanted, torch.inf, last), num_last


def _smallest_set_by_buckets(keys: Tensor, mass: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """As `smallest_set`, for rows whose mass reaches what is wanted; what it says of others is of no use.

    Columns with mass are put into buckets of equal width by key; only the bucket in which the wanted mass is
    reached is sorted.
    """
    has_none = mass == 0
    lowest = keys.amin(1, keepdim=True)
    highest = keys.masked_fill(has_none, -torch.inf).amax(1, keepdim=True)
    steps = (_NUM_BUCKETS - 1) / (highest - lowest).clamp(min=torch.finfo(keys.dtype).tiny * 2**20)
    places = keys.clamp(max=highest).sub_(lowest).mul_(steps).clamp_(0, _NUM_BUCKETS - 1)
    buckets = places.to(torch.int64).masked_fill_(has_none, _NUM_BUCKETS)
    sums = mass.new_zeros((mass.shape[0], _NUM_BUCKETS + 1)).scatter_add_(1, buckets, mass).cumsum(1)
    reached = torch.searchsorted(sums, wanted).clamp(max=_NUM_BUCKETS - 1)
    before = torch.where(reached > 0, sums.gather(1, (reached - 1).clamp(min=0)), 0.0)

    columns, is_real = marked_columns(buckets == reached)
    inside = keys.gather(1, columns).masked_fill_(~is_real, torch.inf)
    ordered, order = inside.sort(dim=1, stable=True)
    ordered_mass = mass.gather(1, columns.gather(1, order)).masked_fill_(ordered == torch.inf, 0.0)
    return _last_needed(ordered, ordered_mass, wanted - before)


def _last_needed(ordered: Tensor, mass: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Of rising keys and their mass, the last key that is needed to reach `wanted`, and how many have it."""
    before = mass.cumsum(1) - mass
    num_kept = (before < wanted).sum(1, keepdim=True).clamp(min=1)
    last = ordered.gather(1, num_kept - 1)
    return last, num_kept - (ordered < last).sum(1, keepdim=True)


def _keep(scaled: Tensor, keys: Tensor, last: Tensor, num_last: Tensor) -> Tensor:
    """Drops all columns with keys above `last` [R, 1], and all but the first `num_last` [R, 1] with that key.

    A `last` of inf keeps all.
    """
    is_last = keys == last
    if can_be_asked(keys.device):
        keeps_all_last = (is_last.sum(1, keepdim=True) <= num_last) | (last == torch.inf)
        if keeps_all_last.all():
            return scaled.masked_fill(keys > last, -torch.inf)
    is_kept = (keys < last) | (is_last & (is_last.cumsum(1) <= num_last))
    return scaled.masked_fill(~is_kept, -torch.inf)
