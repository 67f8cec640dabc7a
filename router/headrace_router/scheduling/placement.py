"""Fills a step: who computes how many tokens in it, in which blocks. Decides nothing of what comes back.

In this order:

1. Decodes: every running sequence whose prefill is scheduled to its end gets one token, the best priority and
   the oldest first. A sequence that reaches a new block takes one; when none is available, the youngest of
   the worst priority is preempted (it gives up its blocks and waits with all it has generated), unless that
   one has given way often enough (`running.py`).
2. Prefills: what is left of the step's token budget, or what the decodes can bear (`chunking.py`), is shared
   among running prefills and those that wait and could join now (`admission.py`).

While somebody is suspected, only suspects are in a step, and everybody else makes room for them.
"""

from collections.abc import Collection, Iterable

from headrace_router.scheduling.admission import Admission
from headrace_router.scheduling.chunking import StepCosts, shares
from headrace_router.scheduling.flights import Flights
from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.memory import Memory
from headrace_router.scheduling.request import Sequence, Status
from headrace_router.scheduling.running import Running
from headrace_router.scheduling.step import Arrival, Step


class Placement:
    """Puts sequences into steps, and moves them between the queue and the running ones for it."""

    def __init__(
        self,
        limits: Limits,
        *,
        memory: Memory,
        admission: Admission,
        running: Running,
        flights: Flights,
        costs: StepCosts,
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._blocks = memory.blocks
        self._admission = admission
        self._running = running
        self._flights = flights
        self._costs = costs
        self._num_preempted = 0
        """Those of whom no step has told: one that comes out empty is never made."""

    def fill(self, step: Step, suspects: list[Sequence], now: float) -> int:
        """Fills an empty step with suspects or, if there are none, with everybody; leaves it empty when
        nobody can compute anything. Gives how many are decoded: these come first in it."""
        spared = {sequence.id for sequence in suspects}
        num_decodes = self._place(step, suspects, spared, now)
        while not step.sequences and self._running and not self._flights:
            # Only prefills could go on, and no block is left for any: one who holds some makes room.
            self._preempt(self._victim(spared) or self._running.sequences[-1])
            num_decodes = self._place(step, suspects, spared, now)
        step.is_overdue = bool(step.admitted) and not suspects and self._admission.is_overdue
        step.total_tokens = sum(step.num_tokens)
        if step.chunks and num_decodes:
            step.max_seconds = self._costs.max_seconds(num_decodes)
        if step.sequences:
            step.num_preempted, self._num_preempted = self._num_preempted, 0
        self._memory.filled(step.total_tokens)
        return num_decodes

    def _place(self, step: Step, suspects: list[Sequence], spared: Collection[int], now: float) -> int:
        running = self._running.sequences
        if suspects:
            # Of a copy, for whoever makes room for them may stand anywhere between them.
            present = (s for s in [*running] if s.id in spared and s.status is Status.RUNNING)
            prompts = self._place_decodes(step, present, spared)
        else:
            prompts = self._place_decodes(step, running, spared)
        num_decodes = len(step.sequences)
        budget = self._limits.max_step_tokens - num_decodes
        if suspects:
            candidates = self._open_suspects(suspects, spared, prompts)
        else:
            budget = self._costs.max_prompt_tokens(num_decodes, budget)
            prefilling = self._flights.prefilling()
            candidates = self._admission.candidates(step.id, running, prompts, prefilling, budget)
        for sequence, share in shares([*prompts, *candidates], budget):
            self._place_chunk(sequence, share, step, now)
        for sequence in candidates:
            if sequence.status is Status.WAITING:
                self._memory.close(sequence)
        return num_decodes

    def _place_decodes(
        self, step: Step, running: Iterable[Sequence], spared: Collection[int]
    ) -> list[Sequence]:
        """A token for everybody of `running` who decodes; gives the others, whose prefill is not done."""
        sequences, prompts = step.sequences, list[Sequence]()
        num_new_blocks: dict[int, int] = {}
        # Preemption takes from the end of those who run, or of those who are not spared: never one who is in
        # the step or among `prompts`.
        for sequence in running:
            num_computed = sequence.num_computed
            if num_computed < sequence.num_ready:
                sequence.num_computed = num_computed + 1
                sequences.append(sequence)
            elif num_computed < sequence.num_prefill:
                prompts.append(sequence)
            elif num_computed < sequence.num_final and self._make_room(sequence, spared):
                num_new_blocks[len(sequences)] = self._memory.grow(sequence, num_computed + 1)
                step.new_blocks.append(sequence.blocks[-1])
                self._make_ready(sequence)
                # At every block: nobody's turn comes again before long answers are paid for.
                self._running.charge(sequence)
                sequence.num_computed = num_computed + 1
                sequences.append(sequence)
        step.num_tokens = [1] * len(sequences)
        step.num_new_blocks = [0] * len(sequences)
        for index, num_new in num_new_blocks.items():
            step.num_new_blocks[index] = num_new
        step.samplers = sequences.copy()
        return prompts

    def _make_room(self, sequence: Sequence, spared: Collection[int]) -> bool:
        """Makes a block available; False when `sequence` itself was the one to be preempted."""
        while not self._blocks.num_available:
            victim = self._victim(spared) or self._running.sequences[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _make_ready(self, sequence: Sequence) -> None:
        """Its blocks have grown: so many tokens can be computed without a look."""
        sequence.num_ready = min(len(sequence.blocks) * self._limits.block_size, sequence.num_final)

    def _place_chunk(self, sequence: Sequence, share: int, step: Step, now: float) -> None:
        """A part of a prefill, as far as there are blocks for it; admits a sequence that waits."""
        # The decodes may have taken what had been left for a prefill; then its chunk is smaller.
        free_slots = (len(sequence.blocks) + self._blocks.num_available) * self._limits.block_size
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
                step.copies.append((sequence.copied_block, sequence.blocks[start // self._limits.block_size]))
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
        self, suspects: list[Sequence], spared: Collection[int], prompts: list[Sequence]
    ) -> list[Sequence]:
        """Suspects that wait and can join, at whatever cost to those who are none."""
        num_reserved = sum(self._memory.num_lacking(prompt) for prompt in prompts)
        opened: list[Sequence] = []
        for sequence in suspects:
            if sequence.status is not Status.WAITING:
                continue
            self._memory.open(sequence, copies=False)
            while self._memory.num_lacking(sequence) + num_reserved > self._blocks.num_available:
                if (victim := self._victim(spared)) is None:
                    self._memory.close(sequence)
                    break
                self._preempt(victim)
            else:
                num_reserved += self._memory.num_lacking(sequence)
                opened.append(sequence)
        return opened

    def _victim(self, spared: Collection[int]) -> Sequence | None:
        """Who is preempted next: the last by rank without those whose ids are in `spared`."""
        return next((other for other in reversed(self._running.sequences) if other.id not in spared), None)

    def _preempt(self, sequence: Sequence) -> None:
        self._num_preempted += 1
        self._running.requeue(sequence, self._flights.count(sequence))
        sequence.num_preemptions += 1  # after it has left its place, which depends on it
