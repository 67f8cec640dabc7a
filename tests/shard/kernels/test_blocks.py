"""All blocks of a step in one call: the same bits from any team, and from a step that is cut short."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from headrace_shard.kernels.blocks import BlockTensors, DecoderBlocks
from headrace_shard.kernels.build import BLOCK_SIZE
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.kernels.paged import cache_shape
from headrace_shard.layers.rotary import RotaryEmbedding
from torch import Tensor

from tests.shard.stepping import Paged

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
NUM_LAYERS = 5
MAX_LAYERS = 12
VOCABULARY = 500
NUM_BLOCKS = 120

AT_ONCE = 1e-9
"""Seconds after which any step has fallen behind."""
NEVER = 1e9

SetThreads = Callable[[int], None]

COMPUTED = {"a": 5, "b": 37, "c": 16, "last": 21}
STEP = {"a": 1, "b": 1, "c": 5, "last": 90}
"""Enough tokens that the threads share all of a block's parts."""


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@cache
def layers(dense: DenseKernels, dtype: torch.dtype) -> list[BlockTensors]:
    """Blocks of random weights, each with an empty cache."""

    def weight(seed: int, num_results: int, depth: int) -> Tensor:
        return random(seed, num_results, depth, dtype=dtype).div_(depth**0.5)

    empty = torch.empty(0, dtype=dtype)
    return [
        BlockTensors(
            attention_norm=1 + random(seed, HIDDEN, dtype=dtype) / 10,
            qkv=dense.pack(weight(seed + 1, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)),
            output=dense.pack(weight(seed + 2, HIDDEN, HEADS * HEAD_DIM)),
            mlp_norm=1 + random(seed + 3, HIDDEN, dtype=dtype) / 10,
            gate_up=dense.pack_gated(weight(seed + 4, INNER, HIDDEN), weight(seed + 5, INNER, HIDDEN)),
            down=dense.pack(weight(seed + 6, HIDDEN, INNER)),
            key_cache=empty,
            value_cache=empty,
        )
        for seed in range(0, 10 * MAX_LAYERS, 10)
    ]


class Network:
    """Some blocks, and the sequences of `lengths` with their keys and values; what nobody wrote is NaN."""

    def __init__(
        self,
        dense: DenseKernels,
        dtype: torch.dtype,
        lengths: dict[str, int],
        *,
        num_layers: int = NUM_LAYERS,
    ) -> None:
        self.paged = Paged(BLOCK_SIZE, NUM_BLOCKS)
        for seed, (name, length) in enumerate(lengths.items()):
            generator = torch.Generator().manual_seed(seed)
            self.paged.add(name, torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())
        shape = (num_layers, 2, *cache_shape(NUM_BLOCKS, KV_HEADS, HEAD_DIM))
        self.caches = torch.full(shape, torch.nan, dtype=dtype)
        self._embedding = random(0, VOCABULARY, HIDDEN, dtype=dtype)
        self._rotary = RotaryEmbedding(HEAD_DIM, 10000.0, None)
        blocks = [
            replace(layer, key_cache=keys, value_cache=values)
            for layer, (keys, values) in zip(layers(dense, dtype), self.caches, strict=False)
        ]
        self._blocks = DecoderBlocks(dense, blocks, head_dim=HEAD_DIM, epsilon=1e-5, scale=HEAD_DIM**-0.5)

    def run(self, step: dict[str, int], *, max_seconds: float = 0.0, min_tokens: int = 0) -> Tensor:
        """Hidden states of the step's tokens that came through; the last sequence goes on behind them."""
        inputs = replace(self.paged.inputs(step), max_seconds=max_seconds, min_tokens=min_tokens)
        rotation = self._rotary(inputs.positions)
        hidden = self._embedding[inputs.token_ids]
        through = self._blocks.run(hidden, rotation.cos, rotation.sin, inputs)
        self.paged.num_computed[list(step)[-1]] -= len(hidden) - len(through)
        return through

    def bits(self, layer: int) -> Tensor:
        """Keys and values of a block, such that NaN equals NaN."""
        return self.caches[layer].view(torch.uint8)


def begun(dense: DenseKernels, dtype: torch.dtype, *, num_layers: int = NUM_LAYERS) -> Network:
    """A network that has computed what comes before `STEP`."""
    network = Network(
        dense, dtype, {name: COMPUTED[name] + STEP[name] for name in STEP}, num_layers=num_layers
    )
    network.run(COMPUTED)
    return network


def assert_same_bits(ours: Network, theirs: Network) -> None:
    for layer in range(len(ours.caches)):
        assert torch.equal(ours.bits(layer), theirs.bits(layer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
@pytest.mark.parametrize("num_kept", [1, 46])
def test_step_cut_short_gives_the_bits_of_a_whole_one(
    any_dense: DenseKernels,
    set_threads: SetThreads,
    dtype: torch.dtype,
    num_threads: int,
    num_before: int,
    num_kept: int,
) -> None:
    step = dict(list(STEP.items())[3 - num_before :])
    num_others = sum(step.values()) - step["last"]
    min_tokens = num_others + num_kept
    set_threads(1)
    whole, cut, few = (begun(any_dense, dtype) for _ in range(3))
    expected = whole.run(step)
    few.run(step | {"last": num_kept})
    set_threads(num_threads)
    assert torch.equal(cut.run(step, max_seconds=AT_ONCE, min_tokens=min_tokens), expected[:min_tokens])
    # What was left behind is no longer computed.
    assert torch.equal(cut.bits(NUM_LAYERS - 1), few.bits(NUM_LAYERS - 1))
    rest = cut.run({"last": step["last"] - num_kept})
    assert torch.equal(rest, expected[min_tokens:])
    assert_same_bits(cut, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_chunks_give_the_bits_of_a_whole_prompt(
    any_dense: DenseKernels, set_threads: SetThreads, dtype: torch.dtype, num_threads: int
) -> None:
    """Sizes around those of a matrix register, of a group of rows and of what shares weights once read."""
    sizes = [1, 15, 16, 17, 31, 32, 33, 514, 1]
    set_threads(1)
    whole, chunked = (Network(any_dense, dtype, {"a": sum(sizes)}) for _ in range(2))
    expected = whole.run({"a": sum(sizes)})
    set_threads(num_threads)
    assert torch.equal(torch.cat([chunked.run({"a": size}) for size in sizes]), expected)
    assert_same_bits(chunked, whole)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("num_layers", "num_whole"), [(2, 1), (4, 1), (5, 1), (6, 2), (12, 3)])
def test_first_fifth_of_the_blocks_is_not_judged(
    dense: DenseKernels, set_threads: SetThreads, num_threads: int, num_layers: int, num_whole: int
) -> None:
    whole, cut, few = (begun(dense, torch.bfloat16, num_layers=num_layers) for _ in range(3))
    expected = whole.run(STEP)
    few.run(STEP | {"last": 1})
    set_threads(num_threads)
    through = cut.run(STEP, max_seconds=AT_ONCE, min_tokens=8)
    assert torch.equal(through, expected[:8])
    for layer in range(num_layers):
        assert torch.equal(cut.bits(layer), (whole if layer < num_whole else few).bits(layer))


@pytest.mark.parametrize(
    ("num_layers", "max_seconds", "min_tokens"),
    [
        pytest.param(1, AT_ONCE, 8, id="a single block is over when it could be judged"),
        pytest.param(NUM_LAYERS, NEVER, 8, id="there is time"),
        pytest.param(NUM_LAYERS, 1e300, 8, id="there is more time than any"),
        pytest.param(NUM_LAYERS, 0.0, 8, id="there is no limit"),
        pytest.param(NUM_LAYERS, AT_ONCE, 97, id="all tokens must come through"),
    ],
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_nothing_is_cut_while(
    dense: DenseKernels,
    set_threads: SetThreads,
    num_threads: int,
    num_layers: int,
    max_seconds: float,
    min_tokens: int,
) -> None:
    whole, limited = (begun(dense, torch.float32, num_layers=num_layers) for _ in range(2))
    expected = whole.run(STEP)
    set_threads(num_threads)
    assert torch.equal(limited.run(STEP, max_seconds=max_seconds, min_tokens=min_tokens), expected)
    assert_same_bits(limited, whole)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_any_limit_gives_the_bits_of_a_whole_step(
    dense: DenseKernels, set_threads: SetThreads, num_threads: int
) -> None:
    """How many tokens come through depends on the machine, and may shrink from block to block."""
    set_threads(num_threads)
    whole = begun(dense, torch.bfloat16, num_layers=MAX_LAYERS)
    expected = whole.run(STEP)
    for max_seconds in np.geomspace(1e-5, 1e-2, 40):
        cut = begun(dense, torch.bfloat16, num_layers=MAX_LAYERS)
        through = cut.run(STEP, max_seconds=max_seconds, min_tokens=8)
        num_through = len(through)
        assert 8 <= num_through <= 97
        assert torch.equal(through, expected[:num_through])
        if num_through < 97:
            assert torch.equal(cut.run({"last": 97 - num_through}), expected[num_through:])
        assert_same_bits(cut, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [2, 5])
def test_no_team_loses_anything_in_thousands_of_meetings(
    dense: DenseKernels, set_threads: SetThreads, num_threads: int, dtype: torch.dtype
) -> None:
    """Two look out for each other; of five, who waits for one without a core sleeps and must be woken."""
    names = ("a", "b", "c")
    shapes = [(1, 1, 1), (1, 1, 20), (2, 1, 1), (1, 40, 1), (1, 1, 1), (1, 1, 3)]
    steps = [dict(zip(names, shape, strict=True)) for shape in islice(cycle(shapes), 60)]
    lengths = {name: sum(step[name] for step in steps) for name in names}
    set_threads(1)
    alone = Network(dense, dtype, lengths)
    expected = [alone.run(step) for step in steps]
    set_threads(num_threads)
    for _ in range(3):
        team = Network(dense, dtype, lengths)
        for step, hidden in zip(steps, expected, strict=True):
            # A limit that is never reached makes the team wait for one who looks at it.
            through = team.run(step, max_seconds=NEVER, min_tokens=sum(step.values()))
            assert torch.equal(through, hidden)
        assert_same_bits(team, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_a_team_of_many_more_threads_than_cores(
    dense: DenseKernels, set_threads: SetThreads, dtype: torch.dtype
) -> None:
    """What is claimed of a part counts in that part alone, in each of some hundred."""
    set_threads(1)
    alone, team = (begun(dense, dtype, num_layers=MAX_LAYERS) for _ in range(2))
    expected = alone.run(STEP)
    set_threads(64)
    assert torch.equal(team.run(STEP), expected)
    assert_same_bits(team, alone)


@pytest.mark.parametrize(("num_rows", "num_results"), [(1, 7), (1, 700), (40, 7), (40, 700)])
def test_products_of_a_team_larger_than_the_machine(
    dense: DenseKernels, set_threads: SetThreads, num_rows: int, num_results: int
) -> None:
    """Where there is less to do than there are threads, some find nothing and still wait for the others."""
    packed = dense.pack(random(1, num_results, 512, dtype=torch.bfloat16))
    x = random(2, num_rows, 512, dtype=torch.bfloat16)
    set_threads(1)
    expected = packed.multiply(x)
    set_threads(5)
    assert all(torch.equal(packed.multiply(x), expected) for _ in range(300))
