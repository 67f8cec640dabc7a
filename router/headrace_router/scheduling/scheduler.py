"""Who computes how many tokens in the next step, and what a step's result means for each sequence.

One step, in this order:

1. Decodes: every running sequence whose prefill is scheduled to its end gets one token, the best priority and
   the oldest first. A sequence that reaches a new block takes one; when none is available, the youngest of the
   worst priority is preempted (it gives up its blocks and waits with all it has generated).
2. Prefills: what is left of the step's token budget, or what the decodes can bear (`chunking.py`), is shared
   among running prefills and those that wait and could join now (`admission.py`).

Steps overlap: up to `MAX_IN_FLIGHT` are scheduled before the oldest is answered, and a sequence is decoded
again before its last token is known. What an unanswered step computes is used by the same sequence in later
steps and by nobody else, so a failed step spoils nothing. A sequence that turns out to have ended before a step
that computes it costs one row, whose token is ignored. Freed blocks may be handed out at once, because a shard
executes steps in the order they were sent.

A preempted sequence takes the tokens that are still on their way, and comes back when it has them all. One that
was in a failed step takes none: it is suspected (`suspects.py`), and starts again from what was confirmed.

Pure: no clock, no waiting, no wire.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from headrace_router.scheduling.admission import Admission
from headrace_router.scheduling.blocks import KVBlocks
from headrace_router.scheduling.chunking import StepCosts, shares
from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.memory import Memory
from headrace_router.scheduling.policy import Policy
from headrace_router.scheduling.request import FinishReason, Sequence, Status
from headrace_router.scheduling.running import Running
from headrace_router.scheduling.step import (
    Arrival,
    PromptLogprobs,
    SampledToken,
    Step,
    StepResult,
    Update,
)
from headrace_router.scheduling.suspects import Suspects

MAX_IN_FLIGHT = 2
"""Steps that may be scheduled before the oldest of them is answered."""

MAX_REPLAYS = 1
"""Shards that may be lost under a sequence before it fails: it may be what kills them."""

_DEFAULT_POLICY = Policy()


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A step that is not answered."""

    step: Step
    num_decodes: int
    ignored_ids: set[int] = field(default_factory=set)
    """Sequences that an earlier step took with it when it failed."""


class Scheduler:
    """Holds every sequence that is not finished."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy = _DEFAULT_POLICY,
        step_costs: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """`step_costs` are pairs (tokens, seconds) that a warm-up measured."""
        self.limits = limits
        self.blocks = KVBlocks(limits.num_blocks, limits.block_size, prefix_caching=policy.prefix_caching)
        self._memory = Memory(self.blocks)
        self._admission = Admission(limits, policy, self._memory)
        self._queue = self._admission.queue
        self._running = Running(self._memory, self._queue)
        self._costs = StepCosts(step_costs, policy.max_step_slowdown, limits.block_size)
        self._suspects = Suspects()
        self._flights: deque[_Flight] = deque()
        self._next_step_id = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return self._queue.num_tokens

    @property
    def num_in_flight(self) -> int:
        """Steps that are not answered."""
        return len(self._flights)

    @property
    def num_unused_slots(self) -> int:
        """Token slots in blocks that running sequences hold and no step has filled."""
        return self._memory.num_unused_slots

    @property
    def waiting(self) -> list[Sequence]:
        """In the order in which they would be admitted."""
        return list(self._queue)

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether it can ever run here."""
        request = sequence.request
        return len(request.prompt_ids) + request.max_new_tokens <= self.limits.max_total_tokens

    def add(self, sequence: Sequence) -> None:
        """Joins the queue. Raises `ValueError` for one that could never run: see `can_hold`."""
        if not self.can_hold(sequence):
            raise ValueError(f"sequence {sequence.id} is longer than {self.limits.max_total_tokens} tokens")
        # Another scheduler, with blocks of another size, may have held it.
        sequence.keys, sequence.leader, sequence.estimated_at = [], None, -1
        if sequence.admitted_at is None:
            self._queue.push(sequence)
        else:
            self._queue.push_front(sequence)

    # ---- what to run

    def schedule(self, now: float) -> Step | None:
        """The next step; None when nobody can compute anything, at all or before a step is answered."""
        if len(self._flights) == MAX_IN_FLIGHT or not (self._running or self._queue):
            return None
        suspects = self._suspects.next_group(self._memory.num_certain) if self._suspects else []
        if suspects and self._flights:
            return None
        step = Step(id=self._next_step_id)
        spared = {sequence.id for sequence in suspects}
        num_decodes = self._fill(step, suspects, spared, now)
        while not step.sequences and self._running and not self._flights:
            # Prefills alone, and no block for any of them: one makes room.
            self._preempt(self._victim(spared), step)
            num_decodes = self._fill(step, suspects, spared, now)
        if not step.sequences:
            return None
        step.is_overdue = bool(step.admitted) and self._admission.is_overdue
        step.total_tokens = sum(step.num_tokens)
        step.dropped_ids = self.take_dropped()
        self._memory.filled(step.total_tokens)
        self._admission.stepped(len(step.admitted))
        self._flights.append(_Flight(step=step, num_decodes=num_decodes))
        self._next_step_id += 1
        return step

    def take_dropped(self) -> list[int]:
        """Sequences the shard holds and has not been told to forget; the caller tells it now."""
        dropped, self._running.dropped_ids = self._running.dropped_ids, []
        return dropped

    def _fill(self, step: Step, suspects: list[Sequence], spared: Collection[int], now: float) -> int:
        """Puts suspects into a step, or everybody if there are none; gives how many are decoded."""
        if suspects:
            running = [sequence for sequence in self._running if sequence.id in spared]
        else:
            running = self._running.sequences
        prompts = self._place_decodes(step, running, spared)
        num_decodes = len(step.sequences)
        budget = self.limits.max_step_tokens - num_decodes
        if suspects:
            candidates = self._open_suspects(step, suspects, spared, prompts)
        else:
            budget = self._costs.max_prompt_tokens(num_decodes, budget)
            flying = [sequence for flight in self._flights for sequence, _ in flight.step.chunks]
            candidates = self._admission.candidates(step.id, running, prompts, flying, budget)
        for sequence, share in shares([*prompts, *candidates], budget):
            self._place_chunk(sequence, share, step, now)
        for sequence in candidates:
            if sequence.status is Status.WAITING:
                self._memory.close(sequence)
        return num_decodes

    def _place_decodes(self, step: Step, running: list[Sequence], spared: Collection[int]) -> list[Sequence]:
        """A token for everybody of `running` who decodes; gives the others, whose prefill is not done."""
        sequences, prompts = step.sequences, list[Sequence]()
        num_new_blocks: dict[int, int] = {}
        # Preemption takes from the end of `running`, never at or before the sequence that it makes room for.
        for sequence in running:
            num_computed = sequence.num_computed
            if num_computed < sequence.num_ready:
                sequence.num_computed = num_computed + 1
                sequences.append(sequence)
            elif num_computed < sequence.num_prefill:
                prompts.append(sequence)
            elif sequence.status is not Status.RUNNING:
                continue
            elif num_computed < sequence.num_final and self._make_room(sequence, step, spared):
                num_new_blocks[len(sequences)] = self._memory.grow(sequence, num_computed + 1)
                step.new_blocks.append(sequence.blocks[-1])
                self._make_ready(sequence)
                sequence.num_computed = num_computed + 1
                sequences.append(sequence)
        step.num_tokens = [1] * len(sequences)
        step.num_new_blocks = [0] * len(sequences)
        for index, num_new in num_new_blocks.items():
            step.num_new_blocks[index] = num_new
        step.samplers = sequences.copy()
        return [sequence for sequence in prompts if sequence.status is Status.RUNNING]

    def _make_room(self, sequence: Sequence, step: Step, spared: Collection[int]) -> bool:
        """Makes a block available; False when `sequence` itself was the one to be preempted."""
        while not self.blocks.num_available:
            victim = self._victim(spared)
            self._preempt(victim, step)
            if victim is sequence:
                return False
        return True

    def _make_ready(self, sequence: Sequence) -> None:
        """Its blocks have grown: so many tokens can be computed without a look."""
        sequence.num_ready = min(len(sequence.blocks) * self.limits.block_size, sequence.num_final)

    def _place_chunk(self, sequence: Sequence, share: int, step: Step, now: float) -> None:
        """A part of a prefill, as far as there are blocks for it; admits a sequence that waits."""
        # The decodes may have taken what had been left for a prefill; then its chunk is smaller.
        free_slots = (len(sequence.blocks) + self.blocks.num_available) * self.limits.block_size
        num_tokens = min(share, free_slots - sequence.num_computed)
        if num_tokens <= 0:
            return
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        num_held = 0 if sequence.status is Status.WAITING else len(sequence.blocks)
        self._memory.grow(sequence, end)
        if sequence.status is Status.WAITING:
            self._admission.overtake(sequence)
            self._running.admit(sequence, now)
            step.admitted.append(sequence)
            step.arrivals.append(Arrival(sequence=sequence, num_computed=start))
            if sequence.copied_block is not None:
                step.copies.append((sequence.copied_block, sequence.blocks[start // self.limits.block_size]))
                sequence.copied_block = None
        step.sequences.append(sequence)
        step.num_tokens.append(num_tokens)
        new_blocks = sequence.blocks[num_held:]
        step.num_new_blocks.append(len(new_blocks))
        step.new_blocks += new_blocks
        step.chunks.append((sequence, end))
        sequence.num_computed, sequence.last_step_id = end, step.id
        if end == sequence.num_prefill:
            step.samplers.append(sequence)
            self._make_ready(sequence)

    def _open_suspects(
        self, step: Step, suspects: list[Sequence], spared: Collection[int], prompts: list[Sequence]
    ) -> list[Sequence]:
        """Suspects that wait and can join, at whatever cost to those who are none."""
        num_reserved = sum(self._memory.num_lacking(prompt) for prompt in prompts)
        opened: list[Sequence] = []
        for sequence in suspects:
            if sequence.status is not Status.WAITING:
                continue
            self._memory.open(sequence, copies=False)
            while self._memory.num_lacking(sequence) + num_reserved > self.blocks.num_available:
                if (victim := self._victim(spared)).id in spared:
                    self._memory.close(sequence)
                    break
                self._preempt(victim, step)
            else:
                num_reserved += self._memory.num_lacking(sequence)
                opened.append(sequence)
        return opened

    def _victim(self, spared: Collection[int]) -> Sequence:
        """Who is preempted next: the last by rank, those with ids in `spared` after all others."""
        running = self._running.sequences
        return next((other for other in reversed(running) if other.id not in spared), running[-1])

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        sequence.num_preemptions += 1
        step.num_preempted += 1
        flights = (flight for flight in self._flights if sequence.id not in flight.ignored_ids)
        self._running.requeue(sequence, sum(sequence in flight.step.sequences for flight in flights))

    # ---- what came back

    def update(self, result: StepResult) -> list[Update]:
        """What the answer to the oldest step in flight changed, one entry for each sequence concerned.

        Sequences that have finished since the step was scheduled are passed over.
        """
        flight = self._flights.popleft()
        step, ignored_ids = flight.step, flight.ignored_ids
        updates = self._take_errors(flight, result.errors) if result.errors else []
        for sequence, num_tokens in step.chunks:
            if sequence.status is Status.RUNNING and sequence.id not in ignored_ids:
                self._memory.confirm(sequence, num_tokens)
        prompt_logprobs = {part.sequence_id: part for part in result.prompt_logprobs}
        for sequence, token in _paired(step.samplers, result.tokens):
            if sequence.status is not Status.FINISHED and sequence.id not in ignored_ids:
                part = prompt_logprobs.pop(sequence.id, None) if prompt_logprobs else None
                updates.append(self._accept(sequence, token, part))
        if prompt_logprobs:
            for sequence in step.sequences:
                part = prompt_logprobs.get(sequence.id)
                if part and sequence.status is not Status.FINISHED and sequence.id not in ignored_ids:
                    updates.append(Update(sequence=sequence, prompt_logprobs=part))
        if self._running.late:
            self._arrived(flight)
        if flight.num_decodes:
            seconds = result.forward_seconds + result.sample_seconds
            self._costs.observe(len(step.sequences), step.total_tokens, seconds)
        return updates

    def _take_errors(self, flight: _Flight, errors: list[tuple[int, str]]) -> list[Update]:
        """Sequences that failed by themselves; the shard has dropped them already."""
        updates: list[Update] = []
        sequences = {sequence.id: sequence for sequence in flight.step.sequences}
        for sequence_id, message in errors:
            sequence = sequences.get(sequence_id)
            if sequence is None or sequence.status is Status.FINISHED or sequence_id in flight.ignored_ids:
                continue
            self._running.finish(sequence, FinishReason.FAILED, is_dropped=True)
            updates.append(Update(sequence=sequence, error=message))
        return updates

    def _accept(
        self, sequence: Sequence, token: SampledToken, prompt_logprobs: PromptLogprobs | None
    ) -> Update:
        request, finish = sequence.request, self._running.finish
        if request.max_new_tokens == 0:
            finish(sequence, FinishReason.LENGTH)
            return Update(sequence=sequence, prompt_logprobs=prompt_logprobs)
        sequence.output_ids.append(token.token_id)
        num_generated = len(sequence.output_ids)
        # Length comes first, as in Text Generation Inference: an end-of-sequence token in the last place
        # counts as "length".
        if num_generated >= request.max_new_tokens:
            finish(sequence, FinishReason.LENGTH)
        elif num_generated > request.min_new_tokens:
            if token.token_id in request.eos_token_ids:
                finish(sequence, FinishReason.EOS)
            elif token.token_id in request.stop_token_ids:
                finish(sequence, FinishReason.STOP)
        return Update(sequence=sequence, token=token, prompt_logprobs=prompt_logprobs)

    def _arrived(self, flight: _Flight) -> None:
        sequences = flight.step.sequences
        for sequence in list(self._running.late.values()):
            if sequence in sequences and sequence.id not in flight.ignored_ids:
                self._running.arrived(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """Ends a sequence wherever it is: cancelled, or stopped by its text. False when it has ended."""
        if sequence.status is Status.FINISHED:
            return False
        self._running.finish(sequence, reason)
        return True

    def fail_step(self) -> list[Sequence]:
        """The oldest step in flight failed as a whole; gives those that fail for it.

        If it held one sequence, that one. Else nobody yet: all of it are suspected, wait, and are tried again.
        The shard has dropped them, or drops them with the next step.
        """
        step, ignored_ids = (flight := self._flights.popleft()).step, flight.ignored_ids
        members = [s for s in step.sequences if s.status is not Status.FINISHED and s.id not in ignored_ids]
        points = {sequence.id: sequence.num_tokens for sequence in members} | {
            sequence.id: num_tokens for sequence, num_tokens in step.chunks
        }
        for sequence in members:
            if sequence.status is Status.RUNNING:
                self._running.requeue(sequence)
            else:
                self._running.forsake(sequence)
        for later in self._flights:
            later.ignored_ids.update(sequence.id for sequence in members)
        # The shard may not have come to forgetting those that it should.
        known_ids = {sequence.id for sequence in self._running}
        self._running.dropped_ids += [number for number in step.dropped_ids if number not in known_ids]
        if len(step.sequences) > 1:
            self._suspects.accuse((sequence, points[sequence.id]) for sequence in members)
            return []
        for sequence in members:
            self._running.finish(sequence, FinishReason.FAILED)
        return members

    def lose_shard(self) -> list[Sequence]:
        """The shard is gone and all it held: running sequences fail and are returned, except those without
        a token yet, which go back to the queue, once."""
        self._flights.clear()
        self._suspects.clear()
        failed: list[Sequence] = []
        for sequence in [*self._running]:
            if sequence.output_ids or sequence.num_replays >= MAX_REPLAYS:
                self._running.finish(sequence, FinishReason.FAILED)
                failed.append(sequence)
            else:
                sequence.num_replays += 1
                self._running.requeue(sequence)
        for sequence in [*self._running.late.values()]:
            self._running.forsake(sequence)
        self._running.dropped_ids.clear()
        self.blocks.clear()
        return failed


def _paired(samplers: list[Sequence], tokens: list[SampledToken]) -> Iterable[tuple[Sequence, SampledToken]]:
    """Each token with its sequence. They come in the order of the samplers; those that failed have none."""
    if len(tokens) == len(samplers):
        return zip(samplers, tokens, strict=True)
    by_id = {token.sequence_id: token for token in tokens}
    return [(sequence, by_id[sequence.id]) for sequence in samplers if sequence.id in by_id]
