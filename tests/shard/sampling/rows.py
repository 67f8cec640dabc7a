"""Makes logits and parameters for the tests of sampling."""

from collections.abc import Sequence
from functools import cache

import torch
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.sampling.sampler import SamplingBatch, sample
from headrace_shard.sampling.state import PenaltyTable, SequenceSampling
from hypothesis import strategies as st
from torch import Tensor

CPU = torch.device("cpu")

MANY_KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_p=0.9),
    SamplingParams(seed=3, top_k=50),
    SamplingParams(seed=4, top_k=1000),
    SamplingParams(seed=5, typical_p=0.9),
    SamplingParams(seed=6, min_p=0.1, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(
        seed=7,
        temperature=0.7,
        top_k=20,
        typical_p=0.9,
        top_p=0.9,
        min_p=0.01,
        logit_bias=((3, 5.0), (5, -2.5)),
        min_new_tokens=4,
        suppressed_token_ids=(0, 1),
        repetition_penalty=1.2,
    ),
]
"""Every way of choosing and every processor."""


def random_logits(
    num_rows: int, vocab_size: int, *, seed: int = 0, spread: float = 3.0, is_coarse: bool = False
) -> Tensor:
    """[R, V] float32; coarse ones come from bfloat16, with many equal values."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return logits.to(torch.bfloat16).to(torch.float32) if is_coarse else logits


def model_like_logits(num_rows: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    """[R, V] float32: a few hundred likely tokens in random places, as language models have them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 2
    num_likely = min(300, vocab_size)
    logits[:, :num_likely] += 14 - 1.2 * torch.arange(1, num_likely + 1).log()
    return logits[:, torch.randperm(vocab_size, generator=generator)].contiguous()


@cache
def table(vocab_size: int) -> PenaltyTable:
    """The table of a test's sequences."""
    return PenaltyTable(vocab_size, CPU)


def sequence(
    params: SamplingParams, vocab_size: int, prompt: Sequence[int] = (0,), output: Sequence[int] = ()
) -> SequenceSampling:
    """A sequence on the CPU; all of a test with one vocabulary are in one table."""
    return SequenceSampling(params, prompt, output, table(vocab_size))


def generate(sequences: Sequence[SequenceSampling], steps: Sequence[Tensor]) -> list[list[int]]:
    """Token ids of each sequence over steps of logits [R, V]."""
    batch = SamplingBatch(sequences)
    chosen = []
    for logits in steps:
        token_ids = sample(logits, batch)
        batch.observe(token_ids)
        chosen.append(token_ids)
    return torch.stack(chosen, dim=1).tolist()


def _params(
    temperature: float,
    top_k: int,
    shares: tuple[float, float, float],
    penalties: tuple[float, float, float],
    seed: int,
    biased: list[int],
    min_new_tokens: int,
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=shares[0],
        min_p=shares[1],
        typical_p=shares[2],
        repetition_penalty=penalties[0],
        presence_penalty=penalties[1],
        frequency_penalty=penalties[2],
        seed=seed,
        logit_bias=tuple((token_id, 2.5) for token_id in biased),
        min_new_tokens=min_new_tokens,
        suppressed_token_ids=(0,),
    )


def any_params(vocab_size: int) -> st.SearchStrategy[SamplingParams]:
    """Parameters of every kind, extreme ones among them."""
    return st.builds(
        _params,
        st.sampled_from([0.0, 1e-6, 0.5, 1.0, 1.7, 100.0]),
        st.sampled_from([0, 0, 1, 3, 40, 300, 10**6]),
        st.tuples(
            st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.3, 0.0]),
            st.sampled_from([0.0, 0.0, 0.02, 1.0]),
            st.sampled_from([1.0, 1.0, 0.9, 0.2, 0.0]),
        ),
        st.tuples(
            st.sampled_from([1.0, 1.0, 1.3, 0.7]),
            st.sampled_from([0.0, 0.0, 0.6]),
            st.sampled_from([0.0, 0.0, -0.4]),
        ),
        st.integers(0, 2**64 - 1),
        st.lists(st.integers(0, vocab_size - 1), max_size=3, unique=True),
        st.integers(0, 3),
    )
