"""A router's loop and its clients as plain functions: drives a scheduler and looks at every step it makes."""

from collections import deque
from dataclasses import dataclass, field

from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.request import FinishReason, Request, SamplingParams, Sequence, Status
from headrace_router.scheduling.scheduler import Scheduler
from headrace_router.scheduling.step import Step, Update

from tests.router.scheduling.device import (
    VOCAB_SIZE,
    Device,
    Message,
    StepFailed,
    expected_output,
    marks_of,
    message_of,
)
from tests.router.scheduling.tree import check_tree, contents


def limits_of(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    max_step_tokens: int = 32,
    max_step_sequences: int = 16,
    max_total_tokens: int | None = None,
) -> Limits:
    longest = max_total_tokens or num_blocks * block_size
    return Limits(
        max_input_tokens=longest - 1,
        max_total_tokens=longest,
        max_step_tokens=max_step_tokens,
        max_step_sequences=min(max_step_sequences, max_step_tokens),
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({0}),
    )


def prompt_of(num_prompt: int, variant: int = 0) -> tuple[int, ...]:
    """Prompts of different variants have no first token in common."""
    return tuple((variant + position) % VOCAB_SIZE for position in range(num_prompt))


def request_of(
    num_prompt: int,
    max_new_tokens: int,
    *,
    variant: int = 0,
    has_eos: bool = False,
    prompt_ids: tuple[int, ...] = (),
    priority: int = 0,
    tenant: str = "",
    cache_salt: str = "",
    prompt_logprobs: bool = False,
) -> Request:
    return Request(
        prompt_ids=prompt_ids or prompt_of(num_prompt, variant),
        sampling=SamplingParams(temperature=0),
        max_new_tokens=max_new_tokens,
        eos_token_ids=frozenset({0}) if has_eos else frozenset(),
        priority=priority,
        tenant=tenant,
        cache_salt=cache_salt,
        prompt_logprobs=prompt_logprobs,
    )


def counts(step: Step) -> dict[int, int]:
    """Tokens by sequence id."""
    return {
        sequence.id: num_tokens for sequence, num_tokens in zip(step.sequences, step.num_tokens, strict=True)
    }


@dataclass
class Simulation:
    """One scheduler and one device, with up to `depth` steps between them."""

    scheduler: Scheduler
    depth: int = 1
    sequences: list[Sequence] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    in_flight: deque[Message] = field(default_factory=deque)
    num_failed_steps: int = 0
    lost: set[int] = field(default_factory=set)
    """Sequences that failed with a shard."""
    num_preempted_elsewhere: int = 0
    """By another scheduler that had some of the sequences before."""

    def __post_init__(self) -> None:
        self.device = Device(self.scheduler.limits)

    def add(self, request: Request) -> Sequence:
        sequence = Sequence(id=len(self.sequences) + 1, request=request, arrived_at=0.0)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    # ---- the loop, in single moves

    def schedule(self) -> Step | None:
        """Sends a step."""
        step = self.scheduler.schedule(float(len(self.steps)))
        if step is not None:
            self._check_step(step)
            self.steps.append(step)
            self.in_flight.append(message_of(step))
        self.check()
        return step

    def answer(self) -> list[Update]:
        """The oldest step is executed, and answered or failed."""
        message = self.in_flight.popleft()
        updates: list[Update] = []
        try:
            result = self.device.execute(message)
        except StepFailed:
            self.num_failed_steps += 1
            for sequence in self.scheduler.fail_step():
                doomed = {*self.device.poisons, *self.device.refused_ids}
                assert sequence.id in doomed, "it fails for another's poison"
        else:
            updates = self.scheduler.update(result)
        self.check()
        return updates

    def lose_shard(self) -> list[Sequence]:
        self.in_flight.clear()
        self.device.lose()
        failed = self.scheduler.lose_shard()
        self.lost.update(sequence.id for sequence in failed)
        self.check()
        return failed

    def step(self) -> list[Update]:
        """One turn of the loop: steps are sent until `depth` are in flight or there is nothing to send, then
        the oldest is answered. No updates when there was nothing to do."""
        while len(self.in_flight) < self.depth and self.schedule() is not None:
            pass
        return self.answer() if self.in_flight else []

    def run(self, max_steps: int = 2000) -> None:
        """Until everybody has finished."""
        for _ in range(max_steps):
            if all(sequence.status is Status.FINISHED for sequence in self.sequences):
                break
            num_steps, num_in_flight = len(self.steps), len(self.in_flight)
            self.step()
            assert len(self.steps) > num_steps or num_in_flight, "somebody waits, but nothing was scheduled"
        else:
            raise AssertionError("somebody never finishes")
        while self.in_flight:
            self.answer()

    # ---- what must hold

    def _check_step(self, step: Step) -> None:
        limits = self.scheduler.limits
        assert 0 < step.total_tokens <= limits.max_step_tokens
        assert len(step.sequences) <= limits.max_step_sequences
        assert len({sequence.id for sequence in step.sequences}) == len(step.sequences)
        copied = dict((target, source) for source, target in step.copies)
        # Steps are executed when they are answered: the device holds what answered steps have computed.
        for arrival in step.arrivals:
            sequence = arrival.sequence
            marks = marks_of(
                [*sequence.request.prompt_ids, *sequence.output_ids], sequence.request.cache_salt
            )
            for position in range(arrival.num_computed):
                block = sequence.blocks[position // limits.block_size]
                slot = copied.get(block, block), position % limits.block_size
                assert self.device.slots.get(slot) == marks[position], "shared before it was computed"

    def check(self) -> None:
        """Every block is free, held or cached, exactly once; what is cached is computed, for its prefix."""
        blocks, block_size = self.scheduler.blocks, self.scheduler.limits.block_size
        holdings = []
        for sequence in self.sequences:
            assert (sequence.holding is not None) == (sequence.status is Status.RUNNING)
            if sequence.holding is not None:
                holdings.append(sequence.holding)
                assert len(set(sequence.blocks)) == len(sequence.blocks)
        free, held = set(blocks._free), {block for holding in holdings for block in holding.blocks}
        tree = contents(blocks._cache)
        cached = set(tree.values()) - held
        assert len(free) == len(blocks._free) == blocks.num_free
        assert (len(held), len(cached)) == (blocks.num_held, blocks.num_cached)
        assert len(free) + len(held) + len(cached) == len(free | held | cached) == blocks.num_blocks
        check_tree(blocks._cache, holdings)
        for (salt, keys), block in tree.items():
            token_ids = list(memoryview(b"".join(keys)).cast("I"))
            marks = marks_of(token_ids, salt)[-block_size:]
            assert [self.device.slots.get((block, offset)) for offset in range(block_size)] == marks
        running = [sequence for sequence in self.sequences if sequence.status is Status.RUNNING]
        assert self.scheduler.num_running == len(running)
        for sequence in running:
            assert sequence.num_confirmed <= sequence.num_computed
            assert not sequence.num_ready or sequence.num_computed >= sequence.num_prefill
        num_slots = sum(len(sequence.blocks) for sequence in running) * block_size
        assert self.scheduler.num_unused_slots == num_slots - sum(s.num_computed for s in running) >= 0
        waiting = [sequence for sequence in self.sequences if sequence.status is Status.WAITING]
        assert self.scheduler.num_waiting == len(waiting)
        assert self.scheduler.num_in_flight == len(self.in_flight)

    def check_over(self) -> None:
        """Everybody is gone, the shard has been told, no block is held, every output is what it would have
        been alone, and nobody failed but those who had to."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight) == (0, 0, 0)
        assert (blocks.num_held, scheduler.num_unused_slots) == (0, 0)
        assert blocks.num_free + blocks.num_cached == blocks.num_blocks
        assert scheduler.schedule(0.0) is None
        self.device.drop(scheduler.take_dropped())
        assert not self.device.known
        assert not scheduler._running.late
        num_told = sum(step.num_preempted for step in self.steps) + scheduler._placement._num_preempted
        num_preempted = sum(sequence.num_preemptions for sequence in self.sequences)
        assert num_told == num_preempted - self.num_preempted_elsewhere
        doomed = {*self.device.poisons, *self.device.faults, *self.device.refused_ids, *self.lost}
        for sequence in self.sequences:
            expected = expected_output(sequence.request)
            if sequence.finish_reason in (FinishReason.LENGTH, FinishReason.EOS):
                assert sequence.output_ids == expected
            else:
                assert sequence.finish_reason is FinishReason.CANCELLED or sequence.id in doomed
                assert sequence.output_ids == expected[: len(sequence.output_ids)]
