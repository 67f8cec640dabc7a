"""Steps over a paged cache with known content, and attention over them written out in float64."""

from dataclasses import dataclass

import torch
from headrace_shard.kernels.build import BLOCK_SIZE
from headrace_shard.kernels.paged import PagedKernels
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, kw_only=True)
class Step:
    """What `PagedKernels.attend` takes, and each sequence's keys and values [context, KV, D] in one piece.

    The caches are token by token, [num_blocks, KV, block_size, D].
    """

    queries: Tensor
    key_cache: Tensor
    value_cache: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    scale: float

    def attend(self, kernels: PagedKernels) -> Tensor:
        return kernels.attend(
            self.queries,
            *laid_out(kernels, self.key_cache, self.value_cache),
            self.query_starts,
            self.context_lens,
            self.block_tables,
            self.scale,
        )

    def dense(self) -> Tensor:
        """Attention by its definition, [T, H, D] float64."""
        outputs = []
        num_heads = self.queries.shape[1]
        starts = self.query_starts.tolist()
        for sequence, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            queries = self.queries[starts[sequence] : starts[sequence + 1]].double().transpose(0, 1)
            group = num_heads // keys.shape[1]
            wide_keys = keys.double().repeat_interleave(group, dim=1).permute(1, 2, 0)
            wide_values = values.double().repeat_interleave(group, dim=1).transpose(0, 1)
            num_tokens, num_context = queries.shape[1], len(keys)
            is_seen = torch.ones(num_tokens, num_context, dtype=torch.bool).tril(num_context - num_tokens)
            scores = (queries @ wide_keys * self.scale).masked_fill(~is_seen, -torch.inf)
            outputs.append((scores.softmax(-1) @ wide_values).transpose(0, 1))
        return torch.cat(outputs)


def laid_out(kernels: PagedKernels, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Caches [num_blocks, KV, block_size, D] in the order in which the kernels multiply."""
    head_dim = keys.shape[3]
    word = 2 if kernels.instructions.endswith("-BF16") and keys.dtype == torch.bfloat16 else 1
    # The rest of a word counts, as zero; what is behind it may be anything.
    keys = pad(pad(keys, (0, -head_dim % word)), (0, -(-(-head_dim // word) * word) % 16), value=torch.nan)
    values = pad(values, (0, -head_dim % 16), value=torch.nan)
    shape = num_blocks, num_heads, size, row = keys.shape
    words_of_keys = keys.view(num_blocks, num_heads, size, row // word, word)
    words_of_values = values.view(num_blocks, num_heads, size // word, word, row)
    return (
        words_of_keys.transpose(2, 3).contiguous().view(shape),
        words_of_values.transpose(3, 4).contiguous().view(shape),
    )


def make_step(
    steps: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    num_kv_heads: int = 1,
    group: int = 1,
    head_dim: int = 64,
    seed: int = 0,
) -> Step:
    """Sequences of (tokens before, tokens in the step), in shuffled blocks; what nobody wrote is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    context_lens = [before + count for before, count in steps]
    num_blocks = [-(-length // BLOCK_SIZE) for length in context_lens]
    shuffled = torch.randperm(sum(num_blocks), generator=generator).to(torch.int32)
    block_tables = torch.full((len(steps), max(num_blocks) + 1), 2**30, dtype=torch.int32)
    shape = (sum(num_blocks), num_kv_heads, BLOCK_SIZE, head_dim)
    key_cache, value_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    keys = [random(length, num_kv_heads, head_dim) for length in context_lens]
    values = [random(length, num_kv_heads, head_dim) for length in context_lens]
    for sequence, count in enumerate(num_blocks):
        blocks, shuffled = shuffled[:count], shuffled[count:]
        block_tables[sequence, : len(blocks)] = blocks
        for index, block in enumerate(blocks.tolist()):
            rows = slice(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
            key, value = keys[sequence][rows], values[sequence][rows]
            key_cache[block, :, : len(key)] = key.transpose(0, 1)
            value_cache[block, :, : len(value)] = value.transpose(0, 1)
    counts = [count for _, count in steps]
    return Step(
        queries=random(sum(counts), num_kv_heads * group, head_dim),
        key_cache=key_cache,
        value_cache=value_cache,
        query_starts=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=block_tables,
        keys=keys,
        values=values,
        scale=head_dim**-0.5,
    )
