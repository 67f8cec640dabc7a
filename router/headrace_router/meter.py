"""What the batcher counts and measures: queue, running sequences, blocks, steps. Decides nothing."""

from headrace_router.metrics import METHODS, Metrics
from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.request import Sequence
from headrace_router.scheduling.scheduler import Scheduler
from headrace_router.scheduling.step import Step, StepResult


class Meter:
    """The metrics of the loop, with the labels looked up once."""

    def __init__(self, metrics: Metrics, *, backpressure: bool) -> None:
        self._metrics = metrics
        self._concat_reason = "backpressure" if backpressure else "chunking"
        self.inference_count = {m: metrics.batch_inference_count.labels(m) for m in METHODS}
        self.inference_success = {m: metrics.batch_inference_success.labels(m) for m in METHODS}
        self.inference_failure = {m: metrics.batch_inference_failure.labels(m) for m in METHODS}
        self.inference_duration = {m: metrics.batch_inference_duration.labels(m) for m in METHODS}
        self.forward_duration = {m: metrics.batch_forward_duration.labels(m) for m in METHODS}
        self.decode_duration = {m: metrics.batch_decode_duration.labels(m) for m in METHODS}
        self.filter_duration = {m: metrics.batch_filter_duration.labels(m) for m in METHODS}
        self.concat_duration = metrics.batch_concat_duration.labels("decode")
        self.blocks_used = metrics.kv_blocks.labels("used")
        self.blocks_cached = metrics.kv_blocks.labels("cached")
        self.blocks_free = metrics.kv_blocks.labels("free")
        self.requests_running = metrics.requests.labels("running")
        self.requests_waiting = metrics.requests.labels("waiting")
        self.shard_up = metrics.shard_up
        self.shard_sequences = metrics.shard_sequences
        self._num_evicted = 0
        """Blocks that the present cache has evicted, as far as they are counted."""

    def ready(self, limits: Limits) -> None:
        """A shard is warm, and its cache empty."""
        self._num_evicted = 0
        self.shard_up.set(1)
        self.shard_sequences.set(0)
        self._metrics.batch_max_total_tokens.set(limits.num_blocks * limits.block_size)

    def lost(self) -> None:
        self.shard_up.set(0)
        self.shard_sequences.set(0)

    def levels(self, scheduler: Scheduler) -> None:
        """The gauges of queue, running sequences and blocks, and what the cache has evicted."""
        metrics, blocks = self._metrics, scheduler.blocks
        metrics.queue_size.set(scheduler.num_waiting)
        metrics.queue_tokens.set(scheduler.num_waiting_tokens)
        self.requests_waiting.set(scheduler.num_waiting)
        metrics.batch_current_size.set(scheduler.num_running)
        self.requests_running.set(scheduler.num_running)
        num_slots, num_unused = blocks.num_held * blocks.block_size, scheduler.num_unused_slots
        metrics.batch_current_max_tokens.set(num_slots)
        metrics.kv_unused_slots.set(num_unused)
        metrics.kv_waste_ratio.set(num_unused / num_slots if num_slots else 0.0)
        self.blocks_used.set(blocks.num_held)
        self.blocks_cached.set(blocks.num_cached)
        self.blocks_free.set(blocks.num_free)
        metrics.prefix_cache_evicted_blocks.inc(blocks.num_evicted - self._num_evicted)
        self._num_evicted = blocks.num_evicted

    def sent(
        self, step: Step, started: list[Sequence], scheduler: Scheduler, scheduling_seconds: float
    ) -> None:
        """A step was sent; `started` have joined one for the first time."""
        metrics, num_admitted = self._metrics, len(step.admitted)
        self.inference_count[_method(step)].inc()
        metrics.step_tokens.observe(step.total_tokens)
        metrics.preemptions.inc(step.num_preempted)
        if num_admitted:
            metrics.batch_next_size.observe(num_admitted)
            metrics.prompt_tokens.inc(sum(len(sequence.request.prompt_ids) for sequence in started))
            metrics.prefix_cache_hit_tokens.inc(sum(sequence.num_cached for sequence in started))
            if scheduler.num_running > num_admitted:
                metrics.batch_concat.labels("wait_exceeded" if step.is_overdue else self._concat_reason).inc()
                self.concat_duration.observe(scheduling_seconds)
        self.levels(scheduler)

    def came(
        self,
        step: Step,
        result: StepResult,
        scheduler: Scheduler,
        num_generated: int,
        *,
        update_seconds: float,
        total_seconds: float,
        follows_pause: bool,
    ) -> None:
        """A step was answered, and its result taken into account, which took `update_seconds`.

        `follows_pause`: nobody had wanted anything before it, so the shard's device did not wait for us.
        """
        method = _method(step)
        self.inference_success[method].inc()
        self.inference_duration[method].observe(total_seconds)
        self.forward_duration[method].observe(result.forward_seconds)
        self.decode_duration[method].observe(result.sample_seconds)
        self.filter_duration[method].observe(update_seconds)
        if not follows_pause:
            self._metrics.shard_idle_seconds.observe(result.idle_seconds)
        self._metrics.shard_busy_seconds.observe(result.forward_seconds + result.sample_seconds)
        self._metrics.generated_tokens.inc(num_generated)
        self._metrics.postponed_tokens.inc(result.num_left)
        self.shard_sequences.set(result.num_sequences)
        self.levels(scheduler)

    def failed(self, step: Step) -> None:
        """A step failed, or the shard was lost while it was under way."""
        self.inference_failure[_method(step)].inc()


def _method(step: Step) -> str:
    return METHODS[0 if step.is_prefill else 1]
