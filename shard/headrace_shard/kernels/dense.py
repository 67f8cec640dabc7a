"""Calls the kernels around attention on tensors. Knows the C interface of dense.cpp; knows no models."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from headrace_shard.kernels.rows import FORMATS, with_rows_of_words, with_whole_rows
from headrace_shard.machine import LargePages

_pointer, _int64, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
# fmt: off
_MULTIPLY: list[Any] = [
    _int, _pointer, _int64, _pointer, _pointer, _pointer, _pointer,
    # format; x, its stride; weight, bias, addend, y
    _int64, _int64, _int64, _int, _int,  # rows, depth, results, is_gated, threads
]
_NORMALISE: list[Any] = [
    _int, _pointer, _int64, _pointer, _pointer,  # format, x, stride, weight, y
    _int64, _int64, ctypes.c_float, _int,  # rows, size, epsilon, threads
]
_ROTATE: list[Any] = [
    _int, _pointer, _int64, _int64, _int, _int,  # format, heads, stride, tokens, heads per token, head_dim
    _pointer, _pointer, _int,  # cosines, sines, threads
]
# fmt: on


class PackedWeight:
    """A weight [N, K] in the kernels' own order, or two that make a gated product, and what is added to it.

    Made by `DenseKernels`. Everything but the rows is settled once, for a step of one token spends more time
    on calls than some of them take.
    """

    def __init__(
        self, multiply: Any, panels: Tensor, num_results: int, *, bias: Tensor | None, is_gated: bool
    ) -> None:
        self.panels = panels
        """[P, K / (words * word), matrices, words, columns, word], see dense.h: all of the weight's memory,
        zeros behind the last column."""
        self.num_results = num_results
        self._kernel = multiply
        self.bias = bias
        self.is_gated = is_gated
        self._format = FORMATS[panels.dtype]
        self._numbers_per_word = panels.shape[5]
        self.depth = panels.shape[1] * panels.shape[3] * panels.shape[5]

    def multiply(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """Rows x [M, K] times the weight transposed, plus the bias and `addend` [M, N]; gives [M, N].

        Gated (Shazeer 2020, SwiGLU): silu(x gate^T) * (x value^T) in its place.
        """
        x = with_rows_of_words(x, self._numbers_per_word)
        num_rows, depth = x.shape
        assert x.dtype == self.panels.dtype and depth == self.depth
        y = torch.empty((num_rows, self.num_results), dtype=x.dtype)
        if addend is not None:
            addend = addend.contiguous()
            assert addend.dtype == x.dtype and addend.shape == y.shape
        self._kernel(
            self._format,
            x.data_ptr(),
            x.stride(0),
            self.panels.data_ptr(),
            self.bias.data_ptr() if self.bias is not None else None,
            addend.data_ptr() if addend is not None else None,
            y.data_ptr(),
            num_rows,
            depth,
            self.num_results,
            self.is_gated,
            torch.get_num_threads(),
        )
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` [T] of the weight as it was before it was packed, [T, K]."""
        _, _, num_matrices, _, num_columns, _ = self.panels.shape
        vectors = indices // num_columns
        return self.panels[
            vectors // num_matrices, :, vectors % num_matrices, :, indices % num_columns
        ].flatten(1)


class DenseKernels:
    """Products with packed weights and what stands beside them, in float32, bfloat16 or float16.

    Sums are float32 and results are rounded once. A row's result depends on that row alone: on no other row
    of the call and on no number of threads. All tensors lie on the CPU, their last dimension contiguous.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._pages = LargePages()
        self._panel_columns = {
            dtype: int(library.headrace_panel_columns(number)) for dtype, number in FORMATS.items()
        }
        self._numbers_per_word = {
            dtype: int(library.headrace_numbers_per_word(number)) for dtype, number in FORMATS.items()
        }
        self._matrix_columns = {
            dtype: int(library.headrace_matrix_columns(number)) for dtype, number in FORMATS.items()
        }
        self._matrix_words = library.headrace_matrix_words
        self._matrix_words.argtypes, self._matrix_words.restype = [_int, _int64], _int
        self._multiply = library.headrace_multiply
        self._multiply.argtypes, self._multiply.restype = _MULTIPLY, None
        self._normalise = library.headrace_normalise
        self._normalise.argtypes, self._normalise.restype = _NORMALISE, None
        self._rotate = library.headrace_rotate
        self._rotate.argtypes, self._rotate.restype = _ROTATE, None

    def can_pack(self, weight: Tensor) -> bool:
        """Whether `weight` [N, K] can be packed: K has to be whole words, of 1 or 2 numbers."""
        return weight.dtype in FORMATS and weight.shape[1] % self._numbers_per_word[weight.dtype] == 0

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """A copy of `weight` [N, K] in the kernels' order; `bias` [N] is kept as it is."""
        if bias is not None:
            assert bias.dtype == weight.dtype and bias.shape == (len(weight),) and bias.is_contiguous()
        return PackedWeight(self._multiply, self._panels(weight), len(weight), bias=bias, is_gated=False)

    def pack_gated(self, gate: Tensor, value: Tensor) -> PackedWeight:
        """Two weights [N, K] for a gated product: each panel holds some gates, then their values."""
        assert gate.shape == value.shape and gate.dtype == value.dtype
        half = self._panel_columns[gate.dtype] // 2
        parts = [_filled(part, half).view(-1, half, part.shape[1]) for part in (gate, value)]
        panels = self._panels(torch.cat(parts, dim=1).flatten(0, 1))
        return PackedWeight(self._multiply, panels, len(gate), bias=None, is_gated=True)

    def _panels(self, weight: Tensor) -> Tensor:
        num_numbers = self._numbers_per_word[weight.dtype]
        num_columns = self._matrix_columns[weight.dtype]
        num_matrices = self._panel_columns[weight.dtype] // num_columns
        depth = weight.shape[1] // num_numbers
        num_words = self._matrix_words(FORMATS[weight.dtype], depth)
        filled = _filled(weight, num_matrices * num_columns)
        panels = filled.view(-1, num_matrices, num_columns, depth // num_words, num_words, num_numbers)
        ordered = panels.permute(0, 3, 1, 4, 2, 5)
        memory = self._pages.take(weight.itemsize * ordered.numel())
        return memory.view(weight.dtype).view(ordered.shape).copy_(ordered)

    def normalise(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x / rms(x) * weight for rows x [M, N]; gives [M, N]."""
        x = with_whole_rows(x)
        num_rows, size = x.shape
        assert weight.dtype == x.dtype and weight.shape == (size,)
        y = torch.empty((num_rows, size), dtype=x.dtype)
        self._normalise(
            FORMATS[x.dtype],
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            y.data_ptr(),
            num_rows,
            size,
            epsilon,
            torch.get_num_threads(),
        )
        return y

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turn heads [T, H, D] where they lie, by cos and sin [T, 1, D] float32 of a `Rotation`."""
        num_tokens, num_heads, head_dim = heads.shape
        assert heads.stride()[1:] == (head_dim, 1) and head_dim % 2 == 0
        for table in (cos, sin):
            assert table.dtype == torch.float32 and table.is_contiguous()
            assert table.shape == (num_tokens, 1, head_dim)
        self._rotate(
            FORMATS[heads.dtype],
            heads.data_ptr(),
            heads.stride(0),
            num_tokens,
            num_heads,
            head_dim,
            cos.data_ptr(),
            sin.data_ptr(),
            torch.get_num_threads(),
        )


def _filled(weight: Tensor, multiple: int) -> Tensor:
    """[N, K] with rows of zeros behind, so that N is a multiple; a copy only where there is a need."""
    num_missing = -len(weight) % multiple
    return pad(weight, (0, 0, 0, num_missing)) if num_missing else weight
