"""The largest steps a router may send, made up, and how many KV blocks the memory holds beside them.

`largest_step` is as mixed as steps get: one long prompt with its log-probabilities, all other sequences with
one token, every kind of sampling in each. `longest_decode` looks back at the longest contexts, for a backend
may copy them. Executes nothing and allocates nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch

from headrace_shard.batch import IntArray
from headrace_shard.errors import InvalidStep, OutOfMemory
from headrace_shard.machine import GIB, available_device_bytes, available_host_bytes, spelled
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.step import NewSequence, Step

_NUM_TOP = 5

_SAMPLING = SamplingParams(
    temperature=0.9,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    seed=1,
)

_NUM_DECODE_TOKENS = 2**17
"""Contexts of a decode together; no backend copies more at once, but for a single longer context."""

_MAX_DEFAULT_CPU_BYTES = 4 * GIB
"""More than that a machine's other programs would miss before a small model on a CPU uses it."""

_CUDA_SLACK = 1.05
"""Of the measured peak: the allocator's blocks are somewhat larger than what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What `Warmup` answers."""

    num_blocks: int
    block_bytes: int
    step_seconds: float
    """Wall time of the largest step."""
    available_bytes: int
    """What the cache could have taken."""


def largest_step(
    *, max_step_tokens: int, max_step_sequences: int, max_positions: int, vocab_size: int, block_size: int
) -> Step:
    """A step of `max_step_tokens`, as far as `max_step_sequences` contexts hold them; blocks count from 0.

    Raises InvalidStep when a limit is 0.
    """
    for name, limit in (("max_step_tokens", max_step_tokens), ("max_step_sequences", max_step_sequences)):
        if limit < 1:
            raise InvalidStep(f"{name} must be at least 1, got {limit}")
    lengths = _lengths(max_step_tokens, max_step_sequences, max_positions)
    num_blocks = -(-lengths // block_size)
    sequences = [
        _sequence(number, length, vocab_size, has_prompt_logprobs=number == 0)
        for number, length in enumerate(lengths.tolist())
    ]
    return _step(sequences, lengths, num_blocks, np.arange(num_blocks.sum()))


def longest_decode(
    *, max_step_sequences: int, max_context_len: int, vocab_size: int, block_size: int, num_blocks: int
) -> Step:
    """One token each of contexts as long as can be, as many as are copied at once, at least one.

    They share the `num_blocks` there are, for what is read does not matter.
    """
    count = max(1, min(max_step_sequences, _NUM_DECODE_TOKENS // max_context_len))
    per_sequence = -(-max_context_len // block_size)
    return _step(
        [
            _sequence(number, max_context_len, vocab_size, num_computed=max_context_len - 1)
            for number in range(count)
        ],
        np.ones(count, dtype=np.int64),
        np.full(count, per_sequence),
        np.arange(count * per_sequence) % num_blocks,
    )


def _sequence(
    number: int, length: int, vocab_size: int, *, num_computed: int = 0, has_prompt_logprobs: bool = False
) -> NewSequence:
    return NewSequence(
        id=number,
        token_ids=np.arange(number, number + length) % vocab_size,
        num_prompt_tokens=length,
        num_computed_tokens=num_computed,
        sampling=_SAMPLING,
        num_top=min(_NUM_TOP, vocab_size),
        num_prompt_top=min(_NUM_TOP, vocab_size) if has_prompt_logprobs else None,
    )


def _step(
    sequences: list[NewSequence], num_tokens: IntArray, num_new_blocks: IntArray, new_blocks: IntArray
) -> Step:
    return Step(
        is_decode=False,
        dropped_ids=[],
        new_sequences=sequences,
        refused={},
        ids=[sequence.id for sequence in sequences],
        num_tokens=num_tokens,
        num_new_blocks=num_new_blocks,
        new_blocks=new_blocks,
    )


def _lengths(num_tokens: int, max_sequences: int, max_positions: int) -> IntArray:
    """One long prompt and as many single tokens as may be; more long ones if a context is too short."""
    count = min(num_tokens, max_sequences)
    lengths = np.ones(count, dtype=np.int64)
    left = num_tokens - count
    for index in range(count):
        lengths[index] += min(left, max_positions - 1)
        left -= lengths[index] - 1
        if left == 0:
            break
    return lengths


def num_blocks_for(*, available_bytes: int, block_bytes: int, block_size: int, max_total_tokens: int) -> int:
    """Blocks that fit, at most those of `max_total_tokens` if that is not 0. Raises OutOfMemory for none."""
    num_blocks = available_bytes // block_bytes
    if num_blocks < 1:
        raise OutOfMemory(
            f"the KV cache may take {spelled(available_bytes)}, but one block of {block_size} tokens takes "
            f"{spelled(block_bytes)}; free memory, raise --kv-cache-memory or --cuda-memory-fraction, "
            "or lower --max-batch-prefill-tokens"
        )
    return min(num_blocks, -(-max_total_tokens // block_size)) if max_total_tokens else num_blocks


class CacheBudget:
    """What the KV cache may take of the memory; made before the largest step runs, asked after it."""

    def __init__(
        self, device: torch.device, kv_cache_memory: float | None, cuda_memory_fraction: float
    ) -> None:
        """`kv_cache_memory` in GiB; None takes what the device's default is."""
        self._device = device
        self._kv_cache_memory = kv_cache_memory
        self._fraction = cuda_memory_fraction
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated_bytes = torch.cuda.memory_allocated(device)

    def available_bytes(self) -> int:
        """Raises OutOfMemory when less is there than `kv_cache_memory` asks for."""
        left = self._left_on_gpu() if self._device.type == "cuda" else available_host_bytes()
        if self._kv_cache_memory is None:
            return left if self._device.type == "cuda" else min(left // 2, _MAX_DEFAULT_CPU_BYTES)
        wanted = int(self._kv_cache_memory * GIB)
        if wanted > left:
            raise OutOfMemory(
                f"--kv-cache-memory asks for {spelled(wanted)}, but only {spelled(left)} are left beside the "
                "weights and the largest step; lower it"
            )
        return wanted

    def _left_on_gpu(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device) - self._allocated_bytes
        torch.cuda.empty_cache()
        return max(0, available_device_bytes(self._fraction) - int(_CUDA_SLACK * peak))
