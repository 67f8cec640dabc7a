"""The order of a step: check, drop, add, grow, prepare, forward, sample, keep. Knows no messages.

Whoever calls makes sure that one call runs at a time. The life of a sequence in a shard:

    unknown ──new in a step──► held ──dropped or cleared──► unknown
       │                        │                              ▲
       │                        └──it or its step fails──► failed ──named as dropped or new, cleared──┘
       └──new, but wrong by itself─────────────────────────► failed

A failed sequence is forgotten, but for its name and the reason: a step that was sent before the router could
read of the failure may still name it, and is told the reason again instead of being refused as a whole.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from headrace_shard.batch import Batch, IntArray
from headrace_shard.errors import DeviceLost, InvalidStep, NotWarm, OutOfMemory, ShardError
from headrace_shard.kv_cache import KVCache, block_bytes
from headrace_shard.loading import LoadedModel
from headrace_shard.machine import is_lost
from headrace_shard.prepare import prepare
from headrace_shard.results import NOT_FINITE, put_prompt_logprobs, put_tokens
from headrace_shard.runner import Runner, Stopwatch
from headrace_shard.sampling.sampler import SamplingBatch, sample
from headrace_shard.sampling.state import PenaltyTable, SequenceSampling
from headrace_shard.step import NewSequence, Step, StepResult
from headrace_shard.validation import StepLimits, check, check_holders, check_lengths
from headrace_shard.warmup import (
    CacheBudget,
    Capacity,
    largest_step,
    longest_decode,
    num_blocks_for,
    step_costs,
)

logger = logging.getLogger(__name__)

_MAX_FAILED = 4096
"""Failed sequences remembered; the router reads of a failure one or two steps later."""


class Engine:
    """Sequences, KV cache and model of one shard."""

    def __init__(
        self, loaded: LoadedModel, *, kv_cache_memory: float | None, cuda_memory_fraction: float
    ) -> None:
        """`kv_cache_memory` in GiB, None for the default of the device."""
        self._loaded = loaded
        self._kv_cache_memory = kv_cache_memory
        self._cuda_memory_fraction = cuda_memory_fraction
        self._runner = Runner(loaded.model)
        self._limits: StepLimits | None = None
        self._ended: float | None = None
        self._forget_all()

    def _forget_all(self) -> None:
        self._batch = Batch(self._loaded.device, self._loaded.backend.block_size)
        self._penalties = PenaltyTable(self._loaded.config.vocab_size, self._loaded.device)
        self._sampling_of: dict[int, SequenceSampling] = {}
        self._failed: dict[int, str] = {}
        self._sampling_batch: tuple[list[int], SamplingBatch] | None = None

    @torch.inference_mode()
    def warm_up(self, *, max_step_tokens: int, max_step_sequences: int, max_total_tokens: int) -> Capacity:
        """Drop everything, run the largest steps, give the memory that is left to the KV cache.

        `max_total_tokens` caps the cache unless it is 0. Raises InvalidStep for a limit of 0, OutOfMemory
        when a step or a single block does not fit.
        """
        loaded = self._loaded
        block_size = loaded.backend.block_size
        step = largest_step(
            max_step_tokens=max_step_tokens,
            max_step_sequences=max_step_sequences,
            max_positions=loaded.config.max_positions,
            vocab_size=loaded.config.vocab_size,
            block_size=block_size,
        )
        limits = StepLimits(
            vocab_size=loaded.config.vocab_size,
            max_positions=loaded.config.max_positions,
            num_blocks=len(step.new_blocks) + 1,
            max_step_tokens=max_step_tokens,
            max_step_sequences=max_step_sequences,
        )
        # Until the end only a temporary cache is there: if this fails, the shard is not warm.
        self._limits = None
        self._forget_all()
        self._bind_cache(1)
        self._bind_cache(limits.num_blocks)
        budget = CacheBudget(loaded.device, self._kv_cache_memory, self._cuda_memory_fraction)
        self._limits = limits
        try:
            seconds, costs = self._rehearse(step, limits, max_total_tokens)
        finally:
            self._limits = None
            self._forget_all()
        self._bind_cache(1)
        num_bytes = block_bytes(loaded.config, loaded.backend, loaded.dtype)
        available = budget.available_bytes()
        num_blocks = num_blocks_for(
            available_bytes=available,
            block_bytes=num_bytes,
            block_size=block_size,
            max_total_tokens=max_total_tokens,
        )
        self._bind_cache(num_blocks)
        self._limits = replace(limits, num_blocks=num_blocks)
        self._ended = None
        return Capacity(
            num_blocks=num_blocks,
            block_bytes=num_bytes,
            step_seconds=seconds,
            available_bytes=available,
            step_costs=costs,
        )

    def _rehearse(
        self, step: Step, limits: StepLimits, max_total_tokens: int
    ) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Execute the largest step and others; gives its seconds, and what smaller ones cost."""
        loaded = self._loaded
        result = self.step(step)
        if result.errors:
            logger.warning("warm-up: %s", result.errors[0][1])
        self.clear()
        costs = step_costs(
            self.step,
            max_step_tokens=int(step.num_tokens.sum()),
            max_positions=limits.max_positions,
            vocab_size=limits.vocab_size,
            block_size=loaded.backend.block_size,
            largest=result,
        )
        self.clear()
        if loaded.device.type == "cuda":  # the memory of a CPU is not measured, only asked for
            self.step(
                longest_decode(
                    max_step_sequences=min(limits.max_step_sequences, limits.max_step_tokens),
                    max_context_len=min(max_total_tokens or limits.max_positions, limits.max_positions),
                    vocab_size=limits.vocab_size,
                    block_size=loaded.backend.block_size,
                    num_blocks=limits.num_blocks,
                )
            )
        return result.total_seconds, costs

    @torch.inference_mode()
    def step(self, step: Step) -> StepResult:
        """Execute a step. A new sequence that cannot be taken in is one of the result's errors.

        Raises InvalidStep or NotWarm with nothing changed, but that sequences which are dropped and not
        scheduled again are forgotten. Raises OutOfMemory or ShardError when the computation fails, and
        InvalidStep when it would write to what others hold; then the step's sequences are dropped, all others
        unharmed. Raises DeviceLost when there can be no other step.
        """
        started = time.perf_counter()
        if self._limits is None:
            raise NotWarm("the shard has no KV cache; call Warmup first")
        result = StepResult(idle_seconds=started - self._ended if self._ended is not None else 0.0)
        try:
            check_lengths(step)
            if self._failed:
                step = self._report_failed(step, result)
            refused = check(step, self._batch, self._limits)
        except InvalidStep:
            # The router will not name them again.
            self.drop(set(step.dropped_ids).difference(step.ids))
            raise
        try:
            if refused:
                step = step.without(refused)
            if step.dropped_ids:
                self.drop(step.dropped_ids)
            self._fail(refused, result)
            for sequence in step.new_sequences:
                self._add(sequence)
            if len(step.copied_to):
                self._copy_blocks(step.copied_from, step.copied_to)
            if step.ids:
                self._execute(step, result)
        except InvalidStep as error:
            self._forget_failed(dict.fromkeys(step.ids, f"the step before failed: {error}"))
            raise
        except Exception as error:  # the edge of one step: whatever went wrong in it, the shard lives
            raise self._fail_step(step, error) from error
        finally:
            self._ended = time.perf_counter()
        result.total_seconds = self._ended - started
        result.num_sequences = len(self._batch)
        return result

    def drop(self, ids: Iterable[int]) -> int:
        """Forget sequences; unknown ids are no error. Gives how many are held after that."""
        ids = list(ids)
        for number in ids:
            if number in self._sampling_of:
                self._sampling_of.pop(number).close()
            self._failed.pop(number, None)
        if self._batch.drop(ids):
            self._sampling_batch = None
        return len(self._batch)

    def clear(self) -> int:
        """Forget every sequence. Gives how many there were."""
        count = len(self._batch)
        self.drop(list(self._batch.row_of))
        self._failed.clear()
        return count

    def _report_failed(self, step: Step, result: StepResult) -> Step:
        """Tell again why sequences of the step had failed; gives the step without them."""
        new = (sequence.id for sequence in step.new_sequences)
        restarted = {*step.dropped_ids, *new, *step.refused}
        named = {number for number in step.ids if number in self._failed and number not in restarted}
        if not named:
            return step
        result.errors = [(number, self._failed[number]) for number in step.ids if number in named]
        return step.without(named)

    def _add(self, sequence: NewSequence) -> None:
        self._failed.pop(sequence.id, None)
        self._sampling_batch = None
        self._batch.add(
            sequence.id,
            sequence.token_ids,
            num_prompt=sequence.num_prompt_tokens,
            num_computed=sequence.num_computed_tokens,
            num_top=sequence.num_top,
            num_prompt_top=sequence.num_prompt_top,
        )
        self._sampling_of[sequence.id] = SequenceSampling(
            sequence.sampling,
            sequence.token_ids[: sequence.num_prompt_tokens],
            sequence.token_ids[sequence.num_prompt_tokens :],
            self._penalties,
        )

    def _copy_blocks(self, sources: IntArray, targets: IntArray) -> None:
        check_holders(targets, self._batch, most=0)
        copied = torch.from_numpy(np.stack((sources, targets))).to(self._loaded.device)
        self._cache.copy_blocks(copied[0], copied[1])

    def _execute(self, step: Step, result: StepResult) -> None:
        batch, runner = self._batch, self._runner
        watch = Stopwatch(self._loaded.device)
        watch.mark()
        rows = batch.rows(step.ids)
        batch.grow_blocks(rows, step.num_new_blocks, step.new_blocks)
        prepared = prepare(batch, rows, step.num_tokens, step.max_seconds)
        check_holders(prepared.blocks, batch, most=1)
        hidden, num_computed = runner.forward(prepared.inputs)
        num_sampled = len(prepared.sampled)
        logits = runner.logits(hidden[:num_sampled]) if num_sampled else None
        watch.mark()
        ids = step.ids
        failed: list[int] = []
        sampled_rows = rows[prepared.sampled]
        if logits is not None:
            if num_sampled < len(ids):
                ids = [ids[index] for index in prepared.sampled.tolist()]
            sampling = self._sampling_for(ids)
            token_ids = sample(logits, sampling)
            batch.append(prepared.sampled_rows, prepared.sampled_columns, token_ids)
            sampling.observe(token_ids)
            failed = put_tokens(result, ids, logits, token_ids, batch.num_top[sampled_rows])
        if prepared.prompt_parts:
            put_prompt_logprobs(result, step.ids, batch, rows, prepared, runner, hidden[num_sampled:])
        watch.mark()
        result.forward_seconds, result.sample_seconds = watch.seconds()
        num_tokens = step.num_tokens
        if (num_left := len(prepared.inputs.token_ids) - num_computed) > 0:
            num_tokens = num_tokens.copy()
            num_tokens[-1] -= num_left
            result.shortened_id, result.num_left = step.ids[-1], num_left
        batch.advance(rows, num_tokens, sampled_rows)
        self._fail(dict.fromkeys(failed, NOT_FINITE), result)

    def _sampling_for(self, ids: list[int]) -> SamplingBatch:
        """What the sampler needs of the sequences `ids`, kept for as long as the same ones sample."""
        if self._sampling_batch is None or self._sampling_batch[0] != ids:
            self._sampling_batch = ids, SamplingBatch([self._sampling_of[number] for number in ids])
        return self._sampling_batch[1]

    def _fail(self, reasons: dict[int, str], result: StepResult) -> None:
        """Sequences that fail by themselves."""
        if reasons:
            self._forget_failed(reasons)
            result.errors += reasons.items()

    def _forget_failed(self, reasons: dict[int, str]) -> None:
        self.drop(reasons)
        self._failed.update(reasons)
        for number in list(self._failed)[: max(0, len(self._failed) - _MAX_FAILED)]:
            del self._failed[number]

    def _fail_step(self, step: Step, error: Exception) -> ShardError:
        """Drop the step's sequences, for nobody knows how far they are; gives the error for the router."""
        if is_lost(self._loaded.device):
            return DeviceLost.after(error)
        self._forget_failed(dict.fromkeys(step.ids, f"the step before failed: {error}"))
        num_tokens = int(step.num_tokens.sum())
        what = f"a step of {num_tokens} tokens in {len(step.ids)} sequences"
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            if self._loaded.device.type == "cuda":
                torch.cuda.empty_cache()
            logger.error("no memory for %s", what)
            return OutOfMemory(f"no memory for {what}; lower --max-batch-prefill-tokens or --kv-cache-memory")
        logger.error("%s failed", what, exc_info=error)
        return ShardError(f"{what} failed: {type(error).__name__}: {error}")

    def _bind_cache(self, num_blocks: int) -> None:
        """Give the model a new cache, then free the old one."""
        loaded = self._loaded
        self._cache = KVCache(loaded.config, num_blocks, loaded.backend, loaded.dtype, loaded.device)
        loaded.model.bind_cache(self._cache)
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()
