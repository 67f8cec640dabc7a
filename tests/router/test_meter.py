"""Meter: what a scheduler and a step become on the metrics page."""

from headrace_router.meter import Meter
from headrace_router.metrics import Metrics
from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.policy import Policy
from headrace_router.scheduling.request import Sequence
from headrace_router.scheduling.scheduler import Scheduler
from headrace_router.scheduling.step import SampledToken, Step, StepResult

from tests.router.batching import request_of

LIMITS = Limits(
    max_input_tokens=63,
    max_total_tokens=64,
    max_step_tokens=64,
    max_step_sequences=8,
    num_blocks=4,
    block_size=16,
    vocab_size=384,
    eos_token_ids=frozenset({2}),
)


class Measured:
    """A scheduler, its meter, and the page."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.meter = Meter(self.metrics, backpressure=False)
        self.meter.ready(LIMITS)
        self.scheduler = Scheduler(LIMITS, Policy())
        self._next_id = 1

    def add(self, num_prompt: int, max_new: int, salt: int) -> None:
        sequence = Sequence(id=self._next_id, request=request_of(num_prompt, max_new, salt), arrived_at=0.0)
        self._next_id += 1
        self.scheduler.add(sequence)
        self.meter.levels(self.scheduler)

    def step(self, *, follows_pause: bool = False) -> None:
        """One step, all the way."""
        step = self.scheduler.schedule(0.0)
        assert step is not None
        self.meter.sent(step, step.admitted, self.scheduler, 0.001)
        result = _answer(step)
        self.scheduler.update(result)
        self.meter.came(
            step,
            result,
            self.scheduler,
            len(result.tokens),
            update_seconds=0.25,
            total_seconds=0.75,
            follows_pause=follows_pause,
        )

    def __getitem__(self, name: str) -> float:
        for line in self.metrics.render().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.removeprefix(f"{name} "))
        raise AssertionError(f"no sample {name}")


def _answer(step: Step) -> StepResult:
    return StepResult(
        tokens=[SampledToken(sequence_id=s.id, token_id=7, logprob=0.0) for s in step.samplers],
        prompt_logprobs=[],
        errors=[],
        forward_seconds=0.5,
        sample_seconds=0.125,
        idle_seconds=0.0625,
        num_sequences=len(step.sequences),
    )


def test_levels() -> None:
    page = Measured()
    page.add(20, 2, salt=0)
    page.add(10, 1, salt=100)
    assert (page["tgi_queue_size"], page["headrace_queue_tokens"]) == (2, 30)
    page.step()
    assert (page["tgi_queue_size"], page["headrace_queue_tokens"]) == (0, 0)
    # The shorter one has ended. Of the longer one's block and a half the whole block stays when it ends.
    assert page['headrace_requests{state="running"}'] == 1
    blocks = [page[f'headrace_kv_blocks{{state="{state}"}}'] for state in ("used", "cached", "free")]
    assert blocks == [2, 0, 2]
    assert page["tgi_batch_current_max_tokens"] == 32
    assert page["headrace_kv_unused_slots"] == 12
    assert page["headrace_kv_waste_ratio"] == 12 / 32
    page.step()
    blocks = [page[f'headrace_kv_blocks{{state="{state}"}}'] for state in ("used", "cached", "free")]
    assert blocks == [0, 1, 3]
    assert page["headrace_kv_unused_slots"] == page["headrace_kv_waste_ratio"] == 0


def test_hits_and_evictions_of_one_cache_and_the_next() -> None:
    page = Measured()
    page.add(40, 1, salt=0)
    page.step()
    page.add(40, 1, salt=0)
    page.step()
    assert page["headrace_prompt_tokens"] == 80
    assert page["headrace_prefix_cache_hit_tokens"] == 32
    assert page["headrace_prefix_cache_evicted_blocks"] == 0
    page.add(60, 1, salt=100)
    page.step()
    assert page["headrace_prefix_cache_evicted_blocks"] == 2
    # Another shard, another cache.
    page.scheduler = Scheduler(LIMITS, Policy())
    page.meter.ready(LIMITS)
    page.add(40, 1, salt=0)
    page.step()
    assert page["headrace_prefix_cache_evicted_blocks"] == 2
    page.add(60, 1, salt=100)
    page.step()
    assert page["headrace_prefix_cache_evicted_blocks"] == 4


def test_seconds_of_a_step() -> None:
    page = Measured()
    page.add(20, 1, salt=0)
    page.step()
    assert page["headrace_shard_busy_seconds_sum"] == 0.625
    assert page["headrace_shard_idle_seconds_sum"] == 0.0625
    for name, seconds in (("inference", 0.75), ("forward", 0.5), ("decode", 0.125), ("filter", 0.25)):
        assert page[f'tgi_batch_{name}_duration_sum{{method="prefill"}}'] == seconds
    assert page["headrace_generated_tokens"] == 1


def test_a_pause_in_which_nobody_wanted_anything_is_no_idle_time() -> None:
    page = Measured()
    page.add(20, 2, salt=0)
    page.step(follows_pause=True)
    assert page["headrace_shard_idle_seconds_count"] == 0
    assert page["headrace_shard_busy_seconds_count"] == 1
    page.step()
    assert page["headrace_shard_idle_seconds_sum"] == 0.0625
    assert page["headrace_shard_busy_seconds_count"] == 2


def test_every_step_ends_as_a_success_or_a_failure() -> None:
    page = Measured()
    page.add(20, 1, salt=0)
    page.step()
    page.add(20, 1, salt=100)
    step = page.scheduler.schedule(0.0)
    assert step is not None
    page.meter.sent(step, step.admitted, page.scheduler, 0.001)
    page.meter.failed(step)
    outcomes = [page[f'tgi_batch_inference_{name}{{method="prefill"}}'] for name in ("success", "failure")]
    assert outcomes == [1, 1]
    assert page['tgi_batch_inference_count{method="prefill"}'] == 2
