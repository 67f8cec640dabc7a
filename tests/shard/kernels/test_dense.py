"""The kernels around attention against torch in float64, on every path of their sources."""

from collections.abc import Callable

import pytest
import torch
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.layers.rotary import RotaryEmbedding, rotate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rounding of the result, and of sums of a thousand products in float32.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(ours: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCES[ours.dtype]
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=max(tolerance / 4, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 6, 7, 32, 61])
@pytest.mark.parametrize(("depth", "num_results"), [(64, 64), (576, 200), (30, 5), (2, 384), (1000, 129)])
def test_product(
    any_dense: DenseKernels, dtype: torch.dtype, num_rows: int, depth: int, num_results: int
) -> None:
    x = random(num_rows, depth, dtype=dtype)
    weight = random(num_results, depth, dtype=dtype, seed=1) / depth**0.5
    bias, addend = (
        random(num_results, dtype=dtype, seed=2),
        random(num_rows, num_results, dtype=dtype, seed=3),
    )
    plain, biased = any_dense.pack(weight), any_dense.pack(weight, bias)
    product = x.double() @ weight.double().T
    assert_near(plain.multiply(x), product)
    assert_near(biased.multiply(x), product + bias)
    assert_near(plain.multiply(x, addend), product + addend)
    assert_near(biased.multiply(x, addend), product + bias + addend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 6, 40])
@pytest.mark.parametrize(("depth", "num_results"), [(64, 128), (576, 1536), (30, 5), (64, 100)])
def test_gated_product(
    any_dense: DenseKernels, dtype: torch.dtype, num_rows: int, depth: int, num_results: int
) -> None:
    x = random(num_rows, depth, dtype=dtype)
    gate, value = (random(num_results, depth, dtype=dtype, seed=seed) / depth**0.5 for seed in (1, 2))
    exact = silu(x.double() @ gate.double().T) * (x.double() @ value.double().T)
    assert_near(any_dense.pack_gated(gate, value).multiply(x), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_far_from_zero(any_dense: DenseKernels, dtype: torch.dtype) -> None:
    x = torch.tensor([[-3e4], [-200.0], [-88.0], [0.0], [88.0], [3e4], [torch.nan]]).to(dtype)
    x = torch.cat((x, torch.zeros_like(x)), dim=1)
    gate, value = torch.tensor([[1.0, 0.0]]).to(dtype), torch.tensor([[0.0, 1.0]]).to(dtype)
    x[:, 1] = 1
    ours = any_dense.pack_gated(gate, value).multiply(x)
    torch.testing.assert_close(
        ours[:, 0], silu(x[:, 0]), rtol=2 * TOLERANCES[dtype], atol=1e-6, equal_nan=True
    )


@settings(max_examples=30, deadline=None)
@given(
    num_rows=st.integers(1, 80),
    num_words=st.integers(1, 90),
    num_results=st.integers(1, 300),
    num_threads=st.integers(1, 5),
    is_gated=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_no_bit_depends_on_other_rows_or_threads(
    built_dense: Callable[[str], DenseKernels],
    num_rows: int,
    num_words: int,
    num_results: int,
    num_threads: int,
    is_gated: bool,
    dtype: torch.dtype,
) -> None:
    dense = built_dense("native")
    x = random(num_rows, 2 * num_words, dtype=dtype)
    weights = [random(num_results, 2 * num_words, dtype=dtype, seed=seed) for seed in (1, 2)]
    packed = dense.pack_gated(*weights) if is_gated else dense.pack(weights[0])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    together = packed.multiply(x)
    torch.set_num_threads(1)
    alone = [packed.multiply(row[None]) for row in x]
    torch.set_num_threads(before)
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("depth", "num_results"), [(64, 70), (40, 33), (154, 1), (74, 32)])
def test_no_bit_depends_on_how_many_rows_are_multiplied(
    any_dense: DenseKernels,
    set_threads: Callable[[int], None],
    dtype: torch.dtype,
    is_gated: bool,
    depth: int,
    num_results: int,
) -> None:
    """Around the 16 rows of a matrix register, the 32 of a group and the 512 that share what is read.

    The depths are multiples of 16, 10, 11 and 1 words, pairs of bfloat16: that much fits into a register.
    """
    x = random(1030, depth, dtype=dtype)
    weights = [random(num_results, depth, dtype=dtype, seed=seed) / depth**0.5 for seed in (1, 2)]
    packed = any_dense.pack_gated(*weights) if is_gated else any_dense.pack(weights[0])
    set_threads(1)
    alone = torch.cat([packed.multiply(row[None]) for row in x])
    first, second = (x.double() @ weight.double().T for weight in weights)
    assert_near(alone, silu(first) * second if is_gated else first)
    for num_threads in (1, 3):
        set_threads(num_threads)
        for num_rows in (2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 511, 512, 513, 528, 529, 1024, 1030):
            assert torch.equal(packed.multiply(x[:num_rows]), alone[:num_rows])
            assert torch.equal(packed.multiply(x[-num_rows:]), alone[-num_rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [64, 30])
@pytest.mark.parametrize("start", [30, 31])
@pytest.mark.parametrize("width", [200, 201])
def test_rows_may_be_a_slice(
    any_dense: DenseKernels, dtype: torch.dtype, depth: int, start: int, width: int
) -> None:
    x = random(9, width, dtype=dtype)[:, start : start + depth]
    whole = x.contiguous()
    weights = [random(70, depth, dtype=dtype, seed=seed) for seed in (1, 2)]
    for packed in (any_dense.pack(weights[0]), any_dense.pack_gated(*weights)):
        exact = packed.multiply(whole)
        assert torch.equal(packed.multiply(x), exact)
        assert torch.equal(packed.multiply(x.T.contiguous().T), exact)
        assert torch.equal(packed.multiply(x[3:4]), exact[3:4])
    ones = torch.ones(depth, dtype=dtype)
    assert torch.equal(any_dense.normalise(x, ones, 1e-5), any_dense.normalise(whole, ones, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(384, 64), (70, 30), (1, 2)])
def test_rows_of_a_packed_weight(dense: DenseKernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = random(*shape, dtype=dtype)
    indices = torch.arange(shape[0]).flip(0).repeat(2)
    assert torch.equal(dense.pack(weight).rows(indices), weight[indices])


def test_what_cannot_be_packed(dense: DenseKernels) -> None:
    assert dense.can_pack(torch.zeros(5, 8, dtype=torch.bfloat16))
    assert dense.can_pack(torch.zeros(5, 7))
    assert not dense.can_pack(torch.zeros(5, 8, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 64, 100, 7])
@pytest.mark.parametrize("num_rows", [0, 1, 200])
def test_norm(any_dense: DenseKernels, dtype: torch.dtype, size: int, num_rows: int) -> None:
    weight = random(size, dtype=dtype, seed=1)
    # Squares of these are above the largest float16.
    x = (random(num_rows, size, dtype=torch.float32) * 300).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    ours = any_dense.normalise(x, weight, 1e-5)
    torch.testing.assert_close(ours.double(), exact, rtol=1.1 * torch.finfo(dtype).eps, atol=1e-5)
    for row in range(0, num_rows, 50):
        assert torch.equal(any_dense.normalise(x[row : row + 1], weight, 1e-5)[0], ours[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 20, 2])
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_rotation_is_that_of_torch(
    any_dense: DenseKernels, dtype: torch.dtype, head_dim: int, num_tokens: int
) -> None:
    fused = random(num_tokens, 7, head_dim, dtype=dtype)
    rotation = RotaryEmbedding(head_dim, 10000.0, None)(torch.arange(num_tokens) * 13)
    expected = torch.cat((rotate(fused[:, :5], rotation), fused[:, 5:]), dim=1)
    any_dense.rotate(fused[:, :5], rotation.cos, rotation.sin)
    # The two may round the last bit differently.
    torch.testing.assert_close(fused, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_wrong_shapes_are_caught(dense: DenseKernels) -> None:
    packed, x = dense.pack(torch.zeros(70, 64)), torch.zeros(2, 64)
    for wrong, addend in ((x[:, :62], None), (x.half(), None), (x, torch.zeros(2, 64))):
        with pytest.raises(AssertionError):
            packed.multiply(wrong, addend)
