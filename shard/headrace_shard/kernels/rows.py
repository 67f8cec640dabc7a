"""What every kernel asks of a tensor: a number format that it knows, and rows it can read.

Knows the words of products, and no kernel.
"""

import torch
from torch import Tensor

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""How the kernels number the formats that they know; `Format` in formats.h."""


def with_whole_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its last dimension is not contiguous: kernels take any other stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def with_rows_of_words(tensor: Tensor, numbers_per_word: int) -> Tensor:
    """`with_whole_rows` of [M, K] for a kernel that reads words of 1 or 2 numbers: each row begins where a
    word does, or in a copy."""
    tensor = with_whole_rows(tensor)
    word_bytes = numbers_per_word * tensor.element_size()
    is_cut = tensor.stride(0) % numbers_per_word or tensor.data_ptr() % word_bytes
    return tensor.clone(memory_format=torch.contiguous_format) if is_cut else tensor
