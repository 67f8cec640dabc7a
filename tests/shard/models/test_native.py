"""The Llama network on native kernels: near transformers' own, and the same bits however it is run."""

from pathlib import Path

import pytest
import torch
from headrace_shard.attention.base import pick
from headrace_shard.checkpoint.config import load_config
from headrace_shard.config import ShardSettings
from headrace_shard.kernels import build
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.kv_cache import KVCache
from headrace_shard.models import NETWORKS, CausalLM, load_model
from headrace_shard.models.llama import LlamaForCausalLM
from torch import Tensor

from tests.shard.models.test_llama import CPU, NUM_BLOCKS, TOLERANCE, VARIANTS, prompt, reference
from tests.shard.stepping import Paged
from tests.tiny import make_checkpoint

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    settings = ShardSettings(attention="cpu")
    config, (backend, _) = load_config(folder, NETWORKS), pick(settings, CPU)
    kernels = DenseKernels(build.for_machine(settings.cxx))
    model = load_model(folder, config, dtype, CPU, backend, kernels)
    model.bind_cache(KVCache(config, NUM_BLOCKS, backend, dtype, CPU))
    assert isinstance(model, LlamaForCausalLM)
    return model


def run(model: CausalLM, tokens: list[int], counts: list[int]) -> Tensor:
    paged = Paged(16, NUM_BLOCKS)
    paged.add("a", tokens)
    return torch.cat([paged.run(model, {"a": count})["a"] for count in counts])


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_of_every_shape(variant: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, **VARIANTS[variant])
    tokens = prompt(45, seed=1)
    logits = run(load(folder), tokens, [40, 1, 1, 3])
    torch.testing.assert_close(logits, reference(folder)(tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["tied", "qwen2", "wide_heads", "multi_query"])
def test_blocks_in_one_call_give_the_bits_of_single_calls(
    variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = load(make_checkpoint(tmp_path, **VARIANTS[variant]), dtype)
    tokens = prompt(45, seed=2)
    assert model.model.whole is not None
    together = run(model, tokens, [40, 1, 4])
    model.model.whole = None
    assert torch.equal(run(model, tokens, [40, 1, 4]), together)


def test_blocks_that_compute_in_part_in_torch_are_called_one_by_one(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, mlp_bias=True))
    assert model.model.whole is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_chunks_or_neighbours(dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path), dtype)
    tokens = prompt(70, seed=3)
    alone = run(model, tokens, [70])
    assert torch.equal(run(model, tokens, [1, 33, 16, 20]), alone)
    paged = Paged(16, NUM_BLOCKS, seed=5)
    paged.add("other", prompt(60, seed=4))
    paged.add("a", tokens)
    parts = [paged.run(model, step)["a"] for step in ({"a": 9}, {"other": 50, "a": 60}, {"a": 1, "other": 1})]
    assert torch.equal(torch.cat(parts), alone)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_half_precision_stays_near(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    tokens = prompt(40, seed=8)
    exact, rounded = (run(load(folder, each), tokens, [39, 1]) for each in (torch.float32, dtype))
    assert rounded.dtype == dtype
    difference = (rounded.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert difference < tolerance


def test_weights_take_no_more_memory_than_they_did(tmp_path: Path) -> None:
    """A tied table is packed once, for both its uses, and nothing of the first order is kept."""
    folder = make_checkpoint(tmp_path)
    config, (backend, _) = load_config(folder, NETWORKS), pick(ShardSettings(attention="cpu"), CPU)
    plain = load_model(folder, config, torch.float32, CPU, backend)
    packed = load(folder)
    assert sum(parameter.nbytes for parameter in packed.parameters()) == sum(
        parameter.nbytes for parameter in plain.parameters()
    )
