"""The Llama network over a paged cache against transformers' own, in float32, however a prompt is divided."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from headrace_shard.attention.sdpa import SdpaBackend
from headrace_shard.checkpoint.config import load_config
from headrace_shard.kv_cache import KVCache
from headrace_shard.models import NETWORKS, CausalLM, load_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.shard.stepping import Paged
from tests.tiny import make_checkpoint

CPU = torch.device("cpu")
TOLERANCE = 1e-4
NUM_BLOCKS = 40

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "multi_head": {"num_kv_heads": 4},
    "multi_query": {"num_kv_heads": 1},
    "wide_heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear_rope": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3_rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "indexed_files": {"num_files": 3, "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", "extra_config": {"sliding_window": None}},
    "qwen2": {"model_type": "qwen2", "extra_config": {"use_sliding_window": False, "sliding_window": 8}},
}

Reference = Callable[[list[int]], Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    config, backend = load_config(folder, NETWORKS), SdpaBackend()
    model = load_model(folder, config, dtype, CPU, backend)
    model.bind_cache(KVCache(config, NUM_BLOCKS, backend, dtype, CPU))
    return model


def reference(folder: Path) -> Reference:
    """Token ids to logits [T, vocab_size], by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def logits(token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            result: Tensor = model(torch.tensor([token_ids])).logits[0]
        return result

    return logits


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 384, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Reference]:
    """One network, loaded twice."""
    folder = make_checkpoint(tmp_path_factory.mktemp("tied"))
    return load(folder), reference(folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_of_every_shape(variant: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, **VARIANTS[variant])
    model, expected = load(folder), reference(folder)
    tokens = prompt(45, seed=1)
    paged = Paged(16, NUM_BLOCKS)
    paged.add("a", tokens)
    parts = [paged.run(model, {"a": count})["a"] for count in (40, 1, 1, 3)]
    torch.testing.assert_close(torch.cat(parts), expected(tokens), rtol=0, atol=TOLERANCE)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    chunks=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 25)), max_size=12),
    seed=st.integers(0, 99),
)
def test_any_division_into_steps_gives_the_same_logits(
    pair: tuple[CausalLM, Reference], lengths: list[int], chunks: list[tuple[int, int]], seed: int
) -> None:
    """`chunks` says who computes how much; a step ends where a sequence would come a second time."""
    model, expected = pair
    paged = Paged(16, NUM_BLOCKS, seed=seed)
    for index, length in enumerate(lengths):
        paged.add(str(index), prompt(length, seed + index))
    logits: dict[str, list[Tensor]] = {name: [] for name in paged.tokens}
    step: dict[str, int] = {}

    def run() -> None:
        if step:
            for name, part in paged.run(model, step).items():
                logits[name].append(part)
            step.clear()

    def left(name: str) -> int:
        return len(paged.tokens[name]) - paged.num_computed[name]

    for index, count in chunks:
        name = str(index % len(lengths))
        if name in step:
            run()
        if left(name):
            step[name] = min(count, left(name))
    run()
    step |= {name: left(name) for name in paged.tokens if left(name)}
    run()
    for name, parts in logits.items():
        torch.testing.assert_close(torch.cat(parts), expected(paged.tokens[name]), rtol=0, atol=TOLERANCE)


def test_blocks_of_a_dropped_sequence_serve_another(pair: tuple[CausalLM, Reference]) -> None:
    model, expected = pair
    paged = Paged(16, NUM_BLOCKS)
    paged.add("old", prompt(70, seed=3))
    paged.run(model, {"old": 70})
    paged.drop("old")
    paged.free = paged.free[:5][::-1]
    paged.add("new", prompt(75, seed=4))
    logits = torch.cat([paged.run(model, {"new": count})["new"] for count in (50, 24, 1)])
    torch.testing.assert_close(logits, expected(paged.tokens["new"]), rtol=0, atol=TOLERANCE)


def test_greedy_continuation_in_a_batch(pair: tuple[CausalLM, Reference]) -> None:
    """Three sequences that join one after the other generate what each would alone."""
    model, expected = pair
    paged = Paged(16, NUM_BLOCKS)
    waiting = {"a": prompt(20, seed=5), "b": prompt(33, seed=6), "c": prompt(1, seed=7)}
    prompts = dict(waiting)
    for _ in range(12):
        step = {name: 1 for name in paged.tokens}
        if waiting:
            name, tokens = waiting.popitem()
            paged.add(name, tokens)
            step[name] = len(tokens)
        for name, logits in paged.run(model, step).items():
            paged.tokens[name].append(int(logits[-1].argmax()))
    for name, tokens in paged.tokens.items():
        assert (
            tokens[len(prompts[name]) :] == expected(tokens)[len(prompts[name]) - 1 : -1].argmax(-1).tolist()
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_half_precision_stays_near(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    tokens = prompt(40, seed=8)
    results = []
    for each in (torch.float32, dtype):
        paged = Paged(16, NUM_BLOCKS)
        paged.add("a", tokens)
        model = load(folder, each)
        results.append(torch.cat([paged.run(model, {"a": count})["a"] for count in (39, 1)]))
    exact, rounded = results
    assert rounded.dtype == dtype
    difference = (rounded.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert difference < tolerance
