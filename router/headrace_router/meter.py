"""What the batcher counts and measures: queue, running sequences, blocks, steps. Decides nothing."""

from headrace_router.metrics import METHODS, Metrics
from headrace_router.scheduling.limits import Limits
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
        self.blocks_free = metrics.kv_blocks.labels("free")
        self.requests_running = metrics.requests.labels("running")
        self.requests_waiting = metrics.requests.labels("waiting")
        self.prompt_tokens = metrics.prompt_tokens
        self.shard_up = metrics.shard_up
        self.shard_sequences = metrics.shard_sequences

    def ready(self, limits: Limits) -> None:
        self.shard_up.set(1)
        self.shard_sequences.set(0)
        self._metrics.batch_max_total_tokens.set(limits.num_blocks * limits.block_size)

    def lost(self) -> None:
        self.shard_up.set(0)
        self.shard_sequences.set(0)

    def levels(self, scheduler: Scheduler) -> None:
        """The gauges of queue, running sequences and blocks."""
        blocks = scheduler.blocks
        self._metrics.queue_size.set(scheduler.num_waiting)
        self.requests_waiting.set(scheduler.num_waiting)
        self._metrics.batch_current_size.set(scheduler.num_running)
        self.requests_running.set(scheduler.num_running)
        self._metrics.batch_current_max_tokens.set(blocks.num_used * blocks.block_size)
        self.blocks_used.set(blocks.num_used)
        self.blocks_free.set(blocks.num_free)

    def started(self, step: Step, scheduler: Scheduler, scheduling_seconds: float) -> None:
        """A step was scheduled and is about to be sent."""
        metrics, num_admitted = self._metrics, len(step.admitted)
        self.inference_count[METHODS[0 if step.is_prefill else 1]].inc()
        metrics.step_tokens.observe(step.num_tokens)
        metrics.preemptions.inc(step.num_preempted)
        if num_admitted:
            metrics.batch_next_size.observe(num_admitted)
            if scheduler.num_running > num_admitted:
                metrics.batch_concat.labels("wait_exceeded" if step.is_overdue else self._concat_reason).inc()
                self.concat_duration.observe(scheduling_seconds)
        self.levels(scheduler)

    def stepped(self, method: str, result: StepResult, num_generated: int) -> None:
        """A step came back."""
        self.inference_success[method].inc()
        self.forward_duration[method].observe(result.forward_seconds)
        self.decode_duration[method].observe(result.sample_seconds)
        self._metrics.shard_idle_seconds.observe(result.idle_seconds)
        self._metrics.generated_tokens.inc(num_generated)
        self.shard_sequences.set(result.num_sequences)
