"""A shard and its clients as plain functions, to drive a scheduler and look at every step it makes."""

import zlib
from dataclasses import dataclass, field

from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.request import FinishReason, Request, SamplingParams, Sequence, Status
from headrace_router.scheduling.scheduler import Scheduler
from headrace_router.scheduling.step import SampledToken, ScheduledSequence, Step, StepResult, Update

VOCAB_SIZE = 50


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


def request_of(num_prompt: int, max_new_tokens: int, *, salt: int = 0, has_eos: bool = False) -> Request:
    return Request(
        prompt_ids=tuple((salt + position) % VOCAB_SIZE for position in range(num_prompt)),
        sampling=SamplingParams(temperature=0),
        max_new_tokens=max_new_tokens,
        eos_token_ids=frozenset({0}) if has_eos else frozenset(),
    )


def next_token(token_ids: list[int]) -> int:
    """Depends on every token before it."""
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


def expected_output(request: Request) -> list[int]:
    """What the request gets when it is alone."""
    token_ids = list(request.prompt_ids)
    while len(token_ids) < len(request.prompt_ids) + request.max_new_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in request.eos_token_ids:
            break
    return token_ids[len(request.prompt_ids) :]


@dataclass
class Known:
    """What the simulated shard keeps of a sequence."""

    token_ids: list[int]
    num_computed: int
    blocks: list[int]


@dataclass
class Simulation:
    """Executes steps like a shard, and asserts that each of them could be executed."""

    scheduler: Scheduler
    known: dict[int, Known] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def add(self, request: Request) -> Sequence:
        sequence = Sequence(id=len(self.sequences) + 1, request=request, arrived_at=0.0)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Update]:
        """Schedules, executes and updates; no updates when there was nothing to do."""
        step = self.scheduler.schedule(float(len(self.steps)))
        self.check_blocks()
        if step is None:
            return []
        updates = self.scheduler.update(self.execute(step))
        self.check_blocks()
        return updates

    def run(self, max_steps: int = 2000) -> None:
        """Until everybody has finished."""
        for _ in range(max_steps):
            if all(sequence.status is Status.FINISHED for sequence in self.sequences):
                return
            num_steps = len(self.steps)
            self.step()
            assert len(self.steps) > num_steps, "somebody waits, but nothing was scheduled"
        raise AssertionError("somebody never finishes")

    def execute(self, step: Step) -> StepResult:
        limits = self.scheduler.limits
        self.steps.append(step)
        assert 0 < step.num_tokens <= limits.max_step_tokens
        assert len(step.scheduled) <= limits.max_step_sequences
        assert step.is_prefill == any(part.is_new or part.num_tokens > 1 for part in step.scheduled)
        for number in step.dropped_ids:
            self.known.pop(number, None)
        tokens = [token for part in step.scheduled if (token := self._compute(part)) is not None]
        held = [block for known in self.known.values() for block in known.blocks]
        assert len(held) == len(set(held)), "two sequences write into one block"
        return StepResult(
            tokens=tokens,
            prompt_logprobs=[],
            errors=[],
            forward_seconds=0.0,
            sample_seconds=0.0,
            idle_seconds=0.0,
            num_sequences=len(self.known),
        )

    def _compute(self, part: ScheduledSequence) -> SampledToken | None:
        sequence = part.sequence
        if part.is_new:
            assert sequence.id not in self.known
            token_ids = [*sequence.request.prompt_ids, *sequence.output_ids]
            self.known[sequence.id] = Known(token_ids, part.num_computed, [])
        known = self.known[sequence.id]
        assert known.num_computed == part.num_computed
        assert part.num_tokens >= 1
        known.blocks += part.new_blocks
        known.num_computed += part.num_tokens
        assert known.num_computed <= len(known.token_ids)
        assert known.num_computed <= len(known.blocks) * self.scheduler.limits.block_size
        assert part.samples == (known.num_computed == len(known.token_ids))
        if not part.samples:
            return None
        token_id = next_token(known.token_ids)
        known.token_ids.append(token_id)
        return SampledToken(sequence_id=sequence.id, token_id=token_id, logprob=-1.0)

    def check_blocks(self) -> None:
        """No block is owned twice, none is lost, finished and waiting sequences own none."""
        pool = self.scheduler.blocks
        held: list[int] = []
        for sequence in self.sequences:
            assert sequence.status is Status.RUNNING or not sequence.blocks
            held += sequence.blocks
        assert len(held) == len(set(held)) == pool.num_used
        assert pool.num_free + len(held) == pool.num_blocks

    def check_over(self) -> None:
        """Everybody is gone, the shard has been told, every output is what it would have been alone."""
        scheduler = self.scheduler
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.blocks.num_used) == (0, 0, 0)
        assert scheduler.schedule(0.0) is None
        for number in scheduler.take_dropped():
            self.known.pop(number)
        assert not self.known
        for sequence in self.sequences:
            expected = expected_output(sequence.request)
            if sequence.finish_reason in (FinishReason.LENGTH, FinishReason.EOS):
                assert sequence.output_ids == expected
            else:
                assert sequence.output_ids == expected[: len(sequence.output_ids)]
