"""headrace's own scheduler under the replay: the real one, with real requests, steps and results.

Knows no cost and no trace. The shard's part is played here: it samples what the arrival says. Late steps are
timed by the router's own `Pace`.
"""

from collections import deque

from headrace_router.pace import Pace
from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.policy import Policy as Knobs
from headrace_router.scheduling.request import Request, SamplingParams, Sequence, Status
from headrace_router.scheduling.scheduler import Scheduler
from headrace_router.scheduling.step import SampledToken, Step, StepResult

from bench.simulation.cost import Work
from bench.simulation.jobs import Counters, Job, Machine

_SAMPLING = SamplingParams(temperature=0.0)


class HeadracePolicy:
    """See the module."""

    def __init__(self, name: str, machine: Machine, knobs: Knobs, max_in_flight: int = 2) -> None:
        self.name = name
        self.max_in_flight = max_in_flight
        self.counters = Counters()
        self.scheduler = Scheduler(
            Limits(
                max_input_tokens=machine.max_total_tokens - 1,
                max_total_tokens=machine.max_total_tokens,
                max_step_tokens=machine.max_step_tokens,
                max_step_sequences=min(machine.max_running, machine.max_step_tokens),
                num_blocks=machine.num_blocks,
                block_size=machine.block_size,
                vocab_size=machine.vocab_size,
                eos_token_ids=frozenset({machine.eos_token_id}),
            ),
            knobs,
            machine.step_costs,
        )
        self._eos_token_ids = frozenset({machine.eos_token_id})
        self._next_id = 0
        self._jobs: dict[int, Job] = {}
        self._tokens: dict[int, SampledToken] = {}
        """One for each running sequence, used again and again: nobody keeps it beyond `update`."""
        self._in_flight: deque[Step] = deque()
        self._pace = Pace()

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_held_slots(self) -> int:
        return self.scheduler.blocks.num_held * self.scheduler.blocks.block_size

    @property
    def num_unused_slots(self) -> int:
        return self.scheduler.num_unused_slots

    @property
    def num_cached_slots(self) -> int:
        return self.scheduler.blocks.num_cached * self.scheduler.blocks.block_size

    def add(self, job: Job, now: float) -> bool:
        sequence = Sequence(
            id=self._next_id,
            request=Request(
                prompt_ids=job.arrival.prompt_ids(),
                sampling=_SAMPLING,
                max_new_tokens=job.arrival.max_new_tokens,
                eos_token_ids=self._eos_token_ids,
            ),
            arrived_at=now,
        )
        if not self.scheduler.can_hold(sequence):
            return False
        self._next_id += 1
        self._jobs[sequence.id] = job
        self._tokens[sequence.id] = SampledToken(sequence_id=sequence.id, token_id=0, logprob=0.0)
        self.scheduler.add(sequence)
        return True

    def schedule(self, now: float) -> Work | None:
        step = self.scheduler.schedule(now)
        if step is None:
            return None
        self._in_flight.append(step)
        counters = self.counters
        counters.num_computed_tokens += step.total_tokens
        counters.num_preemptions += step.num_preempted
        for sequence in step.admitted:
            job = self._jobs[sequence.id]
            if job.started_at < 0:
                job.started_at = now
                job.num_cached = sequence.num_cached
        return _work(step)

    @property
    def slack_seconds(self) -> float:
        return self._pace.slack_seconds(self._in_flight[-1])

    def answer(self, seconds: float) -> list[Job]:
        step = self._in_flight.popleft()
        self._pace.measure(step, seconds)
        gained: list[Job] = []
        sampled: list[SampledToken] = []
        ended: list[Sequence] = []
        jobs, tokens = self._jobs, self._tokens
        for sequence in step.samplers:
            job = jobs.get(sequence.id)
            if job is None:
                self.counters.num_wasted_rows += 1
                continue
            token = tokens[sequence.id]
            token.token_id = job.output[-job.num_left]
            sampled.append(token)
            job.num_left -= 1
            gained.append(job)
            if job.num_left == 0:
                ended.append(sequence)
        self.scheduler.update(
            StepResult(
                tokens=sampled,
                prompt_logprobs=[],
                errors=[],
                forward_seconds=seconds,
                sample_seconds=0.0,
                idle_seconds=0.0,
                num_sequences=self.scheduler.num_running,
            )
        )
        for sequence in ended:
            if sequence.status is not Status.FINISHED:
                raise RuntimeError(f"sequence {sequence.id} had its last token and goes on")
            del jobs[sequence.id], tokens[sequence.id]
        return gained


def _work(step: Step) -> Work:
    """What the step computes; called before anything moves on."""
    work = Work(num_rows=len(step.sequences), num_tokens=step.total_tokens, num_samples=len(step.samplers))
    if step.total_tokens == len(step.sequences):
        work.decode_context = sum([sequence.num_computed for sequence in step.sequences])
        return work
    decode_context = 0
    for sequence, num_tokens in zip(step.sequences, step.num_tokens, strict=True):
        if num_tokens == 1:
            decode_context += sequence.num_computed
        else:
            work.add_chunk(sequence.num_computed - num_tokens, num_tokens)
    work.decode_context = decode_context
    return work
