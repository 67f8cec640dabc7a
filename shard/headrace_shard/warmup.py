"""The steps of a warm-up, made up, what they cost, and how many KV blocks the memory holds beside them.

`largest_step` is as mixed as steps get: one long prompt with its log-probabilities, all other sequences with
one token, every kind of sampling in each, logits for all of them. `longest_decode` looks back at the longest
contexts, for a backend may copy them. `step_costs` has plain steps of rising size executed. Nothing here
allocates, and nothing executes by itself.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch

from headrace_shard.batch import IntArray
from headrace_shard.errors import InvalidStep, OutOfMemory
from headrace_shard.machine import GIB, available_device_bytes, available_host_bytes, spelled
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.step import NewSequence, Step, StepResult

_NUM_TOP = 5

_EVERY = SamplingParams(
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

_PLAIN = SamplingParams()
_NONE: IntArray = np.zeros(0, dtype=np.int64)

_FIRST_PROMPT_TOKENS = 16
_MAX_TIMED_RUNS = 3
_SECONDS_PER_SIZE = 0.1
"""A size that has taken so long is not run again."""
_COST_SECONDS = 1.5
"""Sizes are left out once they would make it more in all."""

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
    step_costs: tuple[tuple[int, float], ...]
    """(tokens, seconds) as `step_costs` gives them."""


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
        _sequence(number, length, vocab_size, has_prompt_logprobs=True)
        for number, length in enumerate(lengths.tolist())
    ]
    return _step(sequences, lengths, num_blocks, np.arange(num_blocks.sum()))


def longest_decode(
    *, max_step_sequences: int, max_context_len: int, vocab_size: int, block_size: int, num_blocks: int
) -> Step:
    """One token each of contexts as long as can be, as many as are copied at once, at least one.

    Each writes to a block of its own and reads one that all share, for what is read does not matter; so
    `num_blocks` must be more than `max_step_sequences`.
    """
    count = max(1, min(max_step_sequences, _NUM_DECODE_TOKENS // max_context_len))
    per_sequence = -(-max_context_len // block_size)
    blocks = np.full((count, per_sequence), num_blocks - 1)
    blocks[:, -1] = np.arange(count)
    return _step(
        [
            _sequence(number, max_context_len, vocab_size, num_computed=max_context_len - 1)
            for number in range(count)
        ],
        np.ones(count, dtype=np.int64),
        np.full(count, per_sequence),
        blocks.ravel(),
    )


def step_costs(
    run: Callable[[Step], StepResult],
    *,
    max_step_tokens: int,
    max_positions: int,
    vocab_size: int,
    block_size: int,
    largest: StepResult,
) -> tuple[tuple[int, float], ...]:
    """(tokens, wall seconds) by tokens: of one decode, then of prompts of 16, 32, 64 ... and most tokens.

    `run` executes a step; `largest` is what `largest_step`, of `max_step_tokens`, gave. Each is the median of
    a few runs after one that does not count. Where that takes long there are fewer runs, then fewer sizes,
    and the cost of the largest prompt is put together from parts of other steps.
    """
    results = _run_some(run, _decodes(max_positions, vocab_size, block_size), at_least=2)
    costs = [(1, _median_seconds(results))]
    spent = _total_seconds(results)
    for num_tokens in _prompt_sizes(max_step_tokens):
        size, seconds = costs[-1]
        if size > 1 and spent + seconds * num_tokens / size > _COST_SECONDS:
            break
        results = _run_some(run, repeat(_prompt(num_tokens, max_positions, vocab_size, block_size)))
        costs.append((num_tokens, _median_seconds(results)))
        spent += _total_seconds(results)
    if costs[-1][0] < max_step_tokens:
        costs.append((max_step_tokens, largest.forward_seconds + results[-1].sample_seconds))
    return tuple(costs)


def _prompt_sizes(max_step_tokens: int) -> list[int]:
    sizes = []
    size = _FIRST_PROMPT_TOKENS
    while size < max_step_tokens:
        sizes.append(size)
        size *= 2
    return [*sizes, max_step_tokens] if max_step_tokens > 1 else []


def _run_some(
    run: Callable[[Step], StepResult], steps: Iterable[Step], at_least: int = 1
) -> list[StepResult]:
    """What a few of the steps give, the fewer the longer they take; ends with the first that fails."""
    results: list[StepResult] = []
    for step in steps:
        results.append(run(step))
        is_long = len(results) >= at_least and _total_seconds(results) > _SECONDS_PER_SIZE
        if len(results) > _MAX_TIMED_RUNS or is_long or results[-1].errors:
            break
    return results


def _median_seconds(results: list[StepResult]) -> float:
    """Without the first, if there are more."""
    return statistics.median(result.total_seconds for result in results[1:] or results)


def _total_seconds(results: list[StepResult]) -> float:
    return sum(result.total_seconds for result in results)


def _decodes(max_positions: int, vocab_size: int, block_size: int) -> Iterator[Step]:
    """A prompt of one token, and what follows it in its first block."""
    yield _prompt(1, max_positions, vocab_size, block_size)
    decode = Step(
        is_decode=True,
        dropped_ids=[],
        new_sequences=[],
        refused={},
        ids=[0],
        num_tokens=np.ones(1, dtype=np.int64),
        num_new_blocks=np.zeros(1, dtype=np.int64),
        new_blocks=_NONE,
        copied_from=_NONE,
        copied_to=_NONE,
    )
    yield from repeat(decode, min(block_size, max_positions) - 1)


def _prompt(num_tokens: int, max_positions: int, vocab_size: int, block_size: int) -> Step:
    """One prompt, or more if a context is too short, in the place of those before."""
    lengths = _lengths(num_tokens, -(-num_tokens // max_positions), max_positions)
    num_blocks = -(-lengths // block_size)
    sequences = [
        _sequence(number, length, vocab_size, sampling=_PLAIN, num_top=0)
        for number, length in enumerate(lengths.tolist())
    ]
    return _step(sequences, lengths, num_blocks, np.arange(num_blocks.sum()))


def _sequence(
    number: int,
    length: int,
    vocab_size: int,
    *,
    num_computed: int = 0,
    has_prompt_logprobs: bool = False,
    sampling: SamplingParams = _EVERY,
    num_top: int = _NUM_TOP,
) -> NewSequence:
    return NewSequence(
        id=number,
        token_ids=np.arange(number, number + length) % vocab_size,
        num_prompt_tokens=length,
        num_computed_tokens=num_computed,
        sampling=sampling,
        num_top=min(num_top, vocab_size),
        num_prompt_top=min(_NUM_TOP, vocab_size) if has_prompt_logprobs else None,
    )


def _step(
    sequences: list[NewSequence], num_tokens: IntArray, num_new_blocks: IntArray, new_blocks: IntArray
) -> Step:
    ids = [sequence.id for sequence in sequences]
    return Step(
        is_decode=False,
        dropped_ids=ids,
        new_sequences=sequences,
        refused={},
        ids=ids,
        num_tokens=num_tokens,
        num_new_blocks=num_new_blocks,
        new_blocks=new_blocks,
        copied_from=_NONE,
        copied_to=_NONE,
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
