"""A shard as plain Python: executes steps in order, remembers for every slot which tokens it was computed
for, and asserts that no step uses a slot for anything else.

It fails as a shard does: a sequence by itself, or a step as a whole, which leaves rubbish in its sequences'
slots. What has failed is forgotten, and named as an error by steps that were sent before that was read.

It cuts steps short as a shard does, where it may: what is left of the last chunk holds rubbish, and the next
step for that sequence goes on from there, however far it was meant to get.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.request import Request, Sequence, Status
from headrace_router.scheduling.step import PromptLogprobs, SampledToken, Step, StepResult

VOCAB_SIZE = 50


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


class StepFailed(Exception):
    """The step as a whole."""


@dataclass
class Known:
    """What the shard keeps of a sequence."""

    token_ids: list[int]
    num_computed: int
    salt: str
    wants_prompt_logprobs: bool
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    """For each token, a number for all tokens up to it, and the salt."""


@dataclass
class Message:
    """A step as it was when it was sent: sequences go on to change."""

    step: Step
    arrivals: dict[int, Known]
    rows: list[tuple[Sequence, int, list[int]]]
    """(sequence, tokens, new blocks)"""


def message_of(step: Step) -> Message:
    """Asserts that the columns fit."""
    assert len(step.sequences) == len(step.num_tokens) == len(step.num_new_blocks) > 0
    assert sum(step.num_new_blocks) == len(step.new_blocks)
    assert sum(step.num_tokens) == step.total_tokens
    blocks = iter(step.new_blocks)
    rows = [
        (sequence, num_tokens, [next(blocks) for _ in range(num_new)])
        for sequence, num_tokens, num_new in zip(
            step.sequences, step.num_tokens, step.num_new_blocks, strict=True
        )
    ]
    arrivals = {
        arrival.sequence.id: Known(
            token_ids=[*arrival.sequence.request.prompt_ids, *arrival.sequence.output_ids],
            num_computed=arrival.num_computed,
            salt=arrival.sequence.request.cache_salt,
            wants_prompt_logprobs=arrival.sequence.wants_prompt_logprobs,
            num_prompt=len(arrival.sequence.request.prompt_ids),
        )
        for arrival in step.arrivals
    }
    assert step.is_prefill == (bool(arrivals) or any(num_tokens > 1 for num_tokens in step.num_tokens))
    return Message(step, arrivals, rows)


class Device:
    """`poisons` and `faults`: by sequence id, the tokens past which no step survives it, or it does not."""

    def __init__(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self.known: dict[int, Known] = {}
        self.failed: set[int] = set()
        self.poisons: dict[int, int] = {}
        self.faults: dict[int, int] = {}
        self.refuses = False
        """Whether the next step is refused with nothing changed, and with it the one that builds on it."""
        self.refused_ids: set[int] = set()
        """All sequences that were in such steps."""
        self.cuts: Iterator[int] = iter(())
        """Tokens that are left by those of the next steps that may be cut short, as far as they may leave so
        many."""
        self.shortened_ids: set[int] = set()
        """All sequences that were cut short."""
        self.seconds_of: Callable[[int], float] = lambda num_tokens: 0.0
        """How long it takes to compute so many tokens."""
        self.slots: dict[tuple[int, int], int] = {}
        """By block and offset: the mark of what was computed there."""

    def lose(self) -> None:
        """Another process comes in its place."""
        self.known.clear()
        self.failed.clear()
        self.slots.clear()

    def drop(self, ids: list[int]) -> None:
        for number in ids:
            self.known.pop(number, None)
            self.failed.discard(number)

    def execute(self, message: Message) -> StepResult:
        """Raises `StepFailed`."""
        step = message.step
        if self.refuses or self._builds_on_refused(message):
            self.refuses = False
            self.refused_ids.update(sequence.id for sequence in step.sequences)
            raise StepFailed
        self.drop(step.dropped_ids)
        self._copy(step.copies)
        for number, known in message.arrivals.items():
            assert number not in self.known, "it is there already"
            self.known[number] = known
            self.failed.discard(number)
            known.marks = marks_of(known.token_ids, known.salt)
        result = result_of([])
        samplers: list[int] = []
        rows: list[tuple[int, int]] = []
        for sequence, num_tokens, new_blocks in message.rows:
            if sequence.id in self.failed:
                result.errors.append((sequence.id, "it has failed"))
                continue
            known = self.known[sequence.id]
            known.blocks += new_blocks
            rows.append((sequence.id, num_tokens))
            assert num_tokens >= 1
            assert known.num_computed + num_tokens <= len(known.token_ids)
            assert known.num_computed + num_tokens <= len(known.blocks) * self._block_size
        for number, num_tokens in rows:
            if self.known[number].num_computed + num_tokens > self.poisons.get(number, 10**9):
                self._fail_all(rows)
                raise StepFailed
        self._check_ends(step)
        if num_left := self._num_left(step, rows):
            number, num_tokens = rows[-1]
            rows[-1] = number, num_tokens - num_left
            start = self.known[number].num_computed
            self._spoil(self.known[number], start + num_tokens - num_left, start + num_tokens)
            self.shortened_ids.add(number)
            result.shortened_id, result.num_left = number, num_left
        result.forward_seconds = self.seconds_of(sum(num_tokens for _, num_tokens in rows))
        for number, num_tokens in rows:
            known = self.known[number]
            self._compute(known, num_tokens)
            if known.num_computed > self.faults.get(number, 10**9):
                result.errors.append((number, "a fault"))
                del self.known[number]
                self.failed.add(number)
                continue
            if known.wants_prompt_logprobs:
                result.prompt_logprobs += self._prompt_logprobs(number, num_tokens)
            if known.num_computed == len(known.token_ids):
                samplers.append(number)
                token_id = next_token(known.token_ids)
                known.token_ids.append(token_id)
                known.marks += marks_of([token_id], known.salt, known.marks[-1])
                result.tokens.append(SampledToken(sequence_id=number, token_id=token_id, logprob=-1.0))
        self._check_samplers(step, samplers)
        result.num_sequences = len(self.known)
        return result

    def _num_left(self, step: Step, rows: list[tuple[int, int]]) -> int:
        """Tokens that are left of the last sequence: only if nobody waits for what comes of it, and never
        all."""
        if not step.max_seconds or not rows:
            return 0
        number, num_tokens = rows[-1]
        known = self.known[number]
        is_silent = known.num_computed + num_tokens < len(known.token_ids) and not known.wants_prompt_logprobs
        return min(next(self.cuts, 0), num_tokens - 1) if is_silent and num_tokens > 1 else 0

    def _is_unheard(self, sequence: Sequence) -> bool:
        """Whether the router may think that it is further than it is, for it has not asked any more."""
        was_shortened = sequence.id in self.shortened_ids and sequence.status is Status.FINISHED
        return was_shortened or sequence.id in self.refused_ids or sequence.id not in self.known

    def _check_ends(self, step: Step) -> None:
        """The router knows how far the chunks get, also those that go on where one before was cut short."""
        num_tokens = {s.id: count for s, count in zip(step.sequences, step.num_tokens, strict=True)}
        for sequence, end in step.chunks:
            if not self._is_unheard(sequence):
                assert end == self.known[sequence.id].num_computed + num_tokens[sequence.id]

    def _check_samplers(self, step: Step, samplers: list[int]) -> None:
        """The router knows who samples."""
        wanted = [sequence for sequence in step.samplers if sequence.id in self.known]
        missing = [sequence for sequence in wanted if sequence.id not in samplers]
        assert all(self._is_unheard(sequence) for sequence in missing)
        expected = [sequence.id for sequence in wanted if sequence not in missing]
        assert samplers == expected or self.refused_ids.intersection(samplers)

    def _builds_on_refused(self, message: Message) -> bool:
        """Whether it names a sequence, or counts on a block, that came with a step that was refused."""
        for sequence, num_tokens, new_blocks in message.rows:
            if sequence.id in self.refused_ids and sequence.id not in {*message.arrivals, *self.failed}:
                known = self.known.get(sequence.id)
                if known is None:
                    return True
                num_slots = (len(known.blocks) + len(new_blocks)) * self._block_size
                if known.num_computed + num_tokens > min(num_slots, len(known.token_ids)):
                    return True
        return False

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        sources, targets = {source for source, _ in copies}, {target for _, target in copies}
        assert len(targets) == len(copies)
        assert sources.isdisjoint(targets)
        for source, target in copies:
            for offset in range(self._block_size):
                if (mark := self.slots.get((source, offset))) is not None:
                    self.slots[target, offset] = mark

    def _compute(self, known: Known, num_tokens: int) -> None:
        for position in range(known.num_computed):
            slot = known.blocks[position // self._block_size], position % self._block_size
            assert self.slots.get(slot) == known.marks[position], "KV of something else"
        for position in range(known.num_computed, known.num_computed + num_tokens):
            slot = known.blocks[position // self._block_size], position % self._block_size
            self.slots[slot] = known.marks[position]
        known.num_computed += num_tokens

    def _prompt_logprobs(self, number: int, num_tokens: int) -> list[PromptLogprobs]:
        known = self.known[number]
        start = max(known.num_computed - num_tokens, 1)
        count = min(known.num_computed, known.num_prompt) - start
        if count <= 0:
            return []
        return [PromptLogprobs(sequence_id=number, start=start, logprobs=[-1.0] * count, top=[[]] * count)]

    def _fail_all(self, rows: list[tuple[int, int]]) -> None:
        for number, num_tokens in rows:
            known = self.known.pop(number)
            self.failed.add(number)
            self._spoil(known, known.num_computed, known.num_computed + num_tokens)

    def _spoil(self, known: Known, start: int, end: int) -> None:
        """Rubbish is left where tokens `start` to `end` - 1 should have been computed."""
        for position in range(start, end):
            self.slots[known.blocks[position // self._block_size], position % self._block_size] = -1


def marks_of(token_ids: list[int], salt: str, before: int | None = None) -> list[int]:
    marks: list[int] = []
    mark = before if before is not None else zlib.crc32(salt.encode())
    for token_id in token_ids:
        mark = hash((mark, token_id))
        marks.append(mark)
    return marks


def result_of(tokens: list[SampledToken]) -> StepResult:
    return StepResult(
        tokens=tokens,
        prompt_logprobs=[],
        errors=[],
        forward_seconds=0.0,
        sample_seconds=0.0,
        idle_seconds=0.0,
        num_sequences=0,
    )
