"""What changes or narrows a distribution before a token is drawn, each a function of tensors.

Knows no sequence and no random number. Every function treats each row as if it were alone, bit for bit: sums
are taken over weights that are whole numbers, so that they are exact in any order.

Two kinds of rows are met here. *Logits* [R, V] are what the model gave. *Scaled* values [R, S] are logits
minus the highest of the row, divided by the temperature: the best is 0, a dropped column is -inf. S is the
vocabulary, or a part of it that holds everything that can be kept.
"""

import torch
from torch import Tensor

from headrace_shard.sampling.shortlist import can_be_asked

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
    last = best.gather(1, (top_k - 1).clamp(min=0).unsqueeze(1))
    last = torch.where(top_k.unsqueeze(1) > 0, last, -torch.inf)
    return _keep(scaled, -scaled, -last, top_k.unsqueeze(1))


def keep_top_p(scaled: Tensor, top_p: Tensor, masses: Tensor | None, vocab_size: int) -> Tensor:
    """Keeps the fewest best columns with the share top_p [R] float64 of the mass, at least one; all for 1.

    `masses` [R] float64 is the weight of the whole row where `scaled` is only a part of it. Holtzman et al.,
    "The curious case of neural text degeneration", 2020.
    """
    mass = weights(scaled, vocab_size)
    total = mass.sum(1) if masses is None else masses
    wanted = torch.where(top_p < 1, top_p * total, torch.inf)
    last, num_kept = smallest_set(-scaled, mass, wanted)
    return _keep(scaled, -scaled, last, num_kept)


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
    last, num_kept = smallest_set(distance, mass, wanted)
    return _keep(scaled, distance, last, num_kept)


def keep_min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    """Keeps columns whose probability is at least the share min_p [R] float64 of the best one's left."""
    ratios = (scaled - scaled.amax(1, keepdim=True)).to(torch.float64).exp_()
    return torch.where(ratios >= min_p.unsqueeze(1), scaled, -torch.inf)


def smallest_set(keys: Tensor, mass: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The fewest columns, lowest keys first, whose mass reaches `wanted`: the last key and the number.

    keys [R, S] float; mass [R, S] whole numbers in float64; wanted [R] float64 -> [R, 1] each. At least one
    column; all of them where the row has less. On a CPU long rows are sorted only around the last key; how
    many columns those are a GPU would have to be asked, so it sorts all.
    """
    wanted = wanted.unsqueeze(1)
    if can_be_asked(keys.device) and keys.shape[1] > _SORTED_COLUMNS:
        last, num_kept = _smallest_set_by_buckets(keys, mass, wanted)
    else:
        ordered, order = keys.sort(dim=1, stable=True)
        ordered_mass = mass.gather(1, order)
        before = ordered_mass.cumsum(1) - ordered_mass
        num_kept = (before < wanted).sum(1, keepdim=True).clamp(min=1)
        last = ordered.gather(1, num_kept - 1)
    is_short = mass.sum(1, keepdim=True) < wanted
    return torch.where(is_short, torch.inf, last), torch.where(is_short, keys.shape[1], num_kept)


def _smallest_set_by_buckets(keys: Tensor, mass: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """As `smallest_set`, for rows whose mass reaches what is wanted; what it says of others is of no use.

    Columns with mass are put into buckets of equal width by key; only the bucket in which the wanted mass is
    reached is sorted.
    """
    has_mass = mass > 0
    lowest = torch.where(has_mass, keys, torch.inf).amin(1, keepdim=True)
    highest = torch.where(has_mass, keys, -torch.inf).amax(1, keepdim=True)
    steps = (_NUM_BUCKETS - 1) / (highest - lowest).clamp(min=torch.finfo(keys.dtype).tiny * 2**20)
    buckets = ((keys.clamp(max=highest) - lowest) * steps).clamp(0, _NUM_BUCKETS - 1).to(torch.int64)
    buckets = torch.where(has_mass, buckets, _NUM_BUCKETS)
    sums = mass.new_zeros((mass.shape[0], _NUM_BUCKETS + 1)).scatter_add_(1, buckets, mass).cumsum(1)
    reached = torch.searchsorted(sums, wanted).clamp(max=_NUM_BUCKETS - 1)
    before = torch.where(reached > 0, sums.gather(1, (reached - 1).clamp(min=0)), 0.0)

    is_inside = buckets == reached
    num_inside = max(1, int(is_inside.sum(1).max()))
    inside = torch.where(is_inside, keys, torch.inf)
    columns = inside.topk(num_inside, dim=1, largest=False, sorted=False).indices.sort(1).values
    ordered, order = inside.gather(1, columns).sort(dim=1, stable=True)
    columns = columns.gather(1, order)
    ordered_mass = torch.where(is_inside.gather(1, columns), mass.gather(1, columns), 0.0)
    ahead = before + ordered_mass.cumsum(1) - ordered_mass
    num_kept = (ahead < wanted).sum(1, keepdim=True).clamp(min=1, max=num_inside)
    last = ordered.gather(1, num_kept - 1)
    return last, (buckets < reached).sum(1, keepdim=True) + num_kept


def _keep(scaled: Tensor, keys: Tensor, last: Tensor, num_kept: Tensor) -> Tensor:
    """Drops all but `num_kept` [R, 1] columns with the lowest keys, of which `last` [R, 1] is the highest.

    Of columns with that very key the first ones are kept. A `last` of inf keeps all.
    """
    is_below = keys < last
    is_last = keys == last
    num_last = num_kept - is_below.sum(1, keepdim=True)
    is_kept = is_below | (is_last & (is_last.cumsum(1) <= num_last))
    return torch.where(is_kept, scaled, -torch.inf)
