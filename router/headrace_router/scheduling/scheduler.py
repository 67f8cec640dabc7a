"""Who computes how many tokens in the next step, and what a step's result means for each sequence.

One step, in this order:

1. Decodes: every running sequence that lacks one token gets it, oldest first. A sequence that reaches a new
   block takes one; when the pool is dry the youngest running sequence is preempted (it gives up its blocks
   and waits at the front of the queue with all it has generated).
2. Prompts: what is left of the step's token budget is shared among running prompts and those that wait and
   could join now. The oldest is sure of half of it, so nobody starves; the rest goes to whoever has least
   left to compute, so a short prompt never stands behind a long one (shortest remaining processing time).

A waiting sequence may join when the pool has room for all its tokens beside what running prompts still
need, and for one more block for everybody (the low-water mark): so it does not preempt itself at once, and
prompts never hold all blocks between them with none of them whole. While the front of the queue lacks room,
shorter ones may pass it, `MAX_OVERTAKEN` in all.

`num_computed` counts the tokens of steps already handed out, so `schedule` may be called again before
`update`: a sequence whose next token is not known yet has nothing pending and is passed over. Freed blocks
may be handed out at once, because a shard executes steps in the order they were sent.

Pure: no clock, no waiting, no wire.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from headrace_router.scheduling.blocks import BlockPool
from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.queue import WaitingQueue
from headrace_router.scheduling.request import FinishReason, Sequence, Status
from headrace_router.scheduling.step import (
    PromptLogprobs,
    SampledToken,
    ScheduledSequence,
    Step,
    StepResult,
    Update,
)

MAX_OVERTAKEN = 16
"""Younger sequences that may be admitted before one that waits for blocks."""

MAX_PASSED_OVER = 8
"""Waiting sequences without room behind which we still look for one with room."""

MAX_REPLAYS = 1
"""Shards that may be lost under a sequence before it fails: it may be what kills them."""

_by_age = attrgetter("id")


class Scheduler:
    """Holds every sequence that is not finished: waiting ones in the queue, running ones by age.

    Age is the order of ids: the lowest is the oldest.
    """

    def __init__(
        self, limits: Limits, *, waiting_served_ratio: float = 0.0, max_waiting_tokens: int = 20
    ) -> None:
        self.limits = limits
        self.blocks = BlockPool(limits.num_blocks, limits.block_size)
        self._waiting_served_ratio = waiting_served_ratio
        self._max_waiting_steps = max_waiting_tokens
        self._queue = WaitingQueue()
        self._running: list[Sequence] = []
        self._dropped_ids: list[int] = []
        self._next_step_id = 0
        self._num_steps_waited = 0
        """Steps since the last admission during which somebody waited."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> list[Sequence]:
        """From the front of the queue."""
        return list(self._queue)

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether it can ever run here."""
        request = sequence.request
        return len(request.prompt_ids) + request.max_new_tokens <= self.limits.max_total_tokens

    def add(self, sequence: Sequence) -> None:
        """Joins the queue. Raises `ValueError` for one that could never run: see `can_hold`."""
        if not self.can_hold(sequence):
            raise ValueError(f"sequence {sequence.id} is longer than {self.limits.max_total_tokens} tokens")
        self._queue.push(sequence)

    # ---- what to run

    def schedule(self, now: float) -> Step | None:
        """The next step, or None when nobody has anything to compute."""
        if not self._running and not self._queue:
            return None
        step = Step(
            id=self._next_step_id,
            scheduled=[],
            dropped_ids=[],
            admitted=[],
            num_preempted=0,
            is_prefill=False,
            is_overdue=False,
        )
        self._schedule_decodes(step)
        self._schedule_prompts(step, now)
        self._num_steps_waited = self._num_steps_waited + 1 if self._queue and not step.admitted else 0
        if not step.scheduled:
            return None
        self._next_step_id += 1
        step.dropped_ids = self.take_dropped()
        return step

    def take_dropped(self) -> list[int]:
        """Sequences the shard holds and has not been told to forget; the caller tells it now."""
        dropped, self._dropped_ids = self._dropped_ids, []
        return dropped

    def _schedule_decodes(self, step: Step) -> None:
        running, block_size = self._running, self.limits.block_size
        index = 0
        # Preemption shortens the list from its end, never before `index`.
        while index < len(running):
            sequence = running[index]
            index += 1
            num_computed = sequence.num_computed
            if len(sequence.request.prompt_ids) + len(sequence.output_ids) - num_computed != 1:
                continue
            new_blocks: list[int] = []
            if num_computed == len(sequence.blocks) * block_size:
                while not self.blocks.num_free and sequence.status is Status.RUNNING:
                    self._preempt(running[-1], step)
                if sequence.status is not Status.RUNNING:
                    break
                new_blocks = self.blocks.take(1)
            self._place(sequence, 1, new_blocks, step)

    def _schedule_prompts(self, step: Step, now: float) -> None:
        budget = self.limits.max_step_tokens - len(step.scheduled)
        prompts = [sequence for sequence in self._running if sequence.num_pending > 1]
        passed_over: list[Sequence] = []
        prompts += self._admissible(prompts, passed_over, step)
        for sequence, share in _shares(prompts, budget):
            # The decodes may have taken what had been left for a prompt; then its chunk is smaller.
            free_slots = (len(sequence.blocks) + self.blocks.num_free) * self.limits.block_size
            num_tokens = min(share, free_slots - sequence.num_computed)
            if num_tokens == 0:
                continue
            if sequence.status is Status.WAITING:
                self._admit(sequence, passed_over, step, now)
            num_missing = self.blocks.num_for(sequence.num_computed + num_tokens) - len(sequence.blocks)
            self._place(sequence, num_tokens, self.blocks.take(max(num_missing, 0)), step)

    def _admissible(self, prompts: list[Sequence], passed_over: list[Sequence], step: Step) -> list[Sequence]:
        """Waiting sequences that could join this step, in the order of the queue; `passed_over` gains those
        that stand before one of them and lack room."""
        num_places = self.limits.max_step_sequences - len(self._running)
        if num_places <= 0 or not self._may_admit(step):
            return []
        num_for = self.blocks.num_for
        room = self.blocks.num_free - len(self._running)
        room -= sum(num_for(sequence.num_tokens) - len(sequence.blocks) for sequence in prompts)
        admissible: list[Sequence] = []
        for sequence in self._queue:
            num_blocks = num_for(sequence.num_tokens)
            if num_blocks <= room:
                admissible.append(sequence)
                # One more block than it needs, so that it can grow.
                room -= num_blocks + 1
                if len(admissible) == num_places:
                    break
            else:
                passed_over.append(sequence)
                # One that ran already is not passed: its reader waits in the middle of a text.
                may_be_passed = not sequence.num_preemptions and sequence.num_overtaken < MAX_OVERTAKEN
                if not may_be_passed or len(passed_over) == MAX_PASSED_OVER:
                    break
        return admissible

    def _may_admit(self, step: Step) -> bool:
        """Whether `waiting_served_ratio` and `max_waiting_tokens` let anybody in now."""
        if not self._queue:
            return False
        if not self._running or len(self._queue) >= self._waiting_served_ratio * len(self._running):
            return True
        step.is_overdue = self._num_steps_waited >= self._max_waiting_steps
        # A preempted sequence has been let in before; it only waits for blocks.
        return step.is_overdue or next(iter(self._queue)).num_preemptions > 0

    def _admit(self, sequence: Sequence, passed_over: list[Sequence], step: Step, now: float) -> None:
        for older in passed_over:
            if older.id < sequence.id:
                older.num_overtaken += 1
        self._queue.remove(sequence)
        sequence.status = Status.RUNNING
        if sequence.admitted_at is None:
            sequence.admitted_at = now
        insort(self._running, sequence, key=_by_age)
        step.admitted.append(sequence)

    def _place(self, sequence: Sequence, num_tokens: int, new_blocks: list[int], step: Step) -> None:
        num_computed, is_new = sequence.num_computed, not sequence.is_known
        sequence.num_computed = num_computed + num_tokens
        sequence.blocks += new_blocks
        sequence.is_known = True
        step.is_prefill |= is_new or num_tokens > 1
        step.scheduled.append(
            ScheduledSequence(
                sequence=sequence,
                num_tokens=num_tokens,
                new_blocks=new_blocks,
                num_computed=num_computed,
                is_new=is_new,
                samples=sequence.num_computed == sequence.num_tokens,
            )
        )

    # ---- what came back

    def update(self, result: StepResult) -> list[Update]:
        """What the result of a step changed, one entry for each sequence concerned.

        Sequences that were finished while the step ran are passed over.
        """
        running = {sequence.id: sequence for sequence in self._running}
        prompt_logprobs = {part.sequence_id: part for part in result.prompt_logprobs}
        updates: list[Update] = []
        for token in result.tokens:
            sequence = running.get(token.sequence_id)
            if sequence is not None:
                part = prompt_logprobs.pop(token.sequence_id, None) if prompt_logprobs else None
                updates.append(self._accept(sequence, token, part))
        for sequence_id, part in prompt_logprobs.items():
            if (sequence := running.get(sequence_id)) is not None:
                updates.append(Update(sequence=sequence, prompt_logprobs=part))
        for sequence_id, message in result.errors:
            if (sequence := running.get(sequence_id)) is not None:
                # The shard has dropped it already.
                sequence.is_known = False
                self._release(sequence, FinishReason.FAILED)
                updates.append(Update(sequence=sequence, error=message))
        self._forget_finished()
        return updates

    def _accept(
        self, sequence: Sequence, token: SampledToken, prompt_logprobs: PromptLogprobs | None
    ) -> Update:
        request = sequence.request
        if request.max_new_tokens == 0:
            self._release(sequence, FinishReason.LENGTH)
            return Update(sequence=sequence, prompt_logprobs=prompt_logprobs)
        sequence.output_ids.append(token.token_id)
        num_generated = len(sequence.output_ids)
        # Length comes first, as in Text Generation Inference: an end-of-sequence token in the last place
        # counts as "length".
        if num_generated >= request.max_new_tokens:
            self._release(sequence, FinishReason.LENGTH)
        elif num_generated > request.min_new_tokens:
            if token.token_id in request.eos_token_ids:
                self._release(sequence, FinishReason.EOS)
            elif token.token_id in request.stop_token_ids:
                self._release(sequence, FinishReason.STOP)
        return Update(sequence=sequence, token=token, prompt_logprobs=prompt_logprobs)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """Ends a sequence wherever it is: cancelled, or stopped by its text. False when it has ended."""
        if sequence.status is Status.FINISHED:
            return False
        if sequence.status is Status.WAITING:
            self._queue.remove(sequence)
        else:
            self._leave(sequence)
        self._release(sequence, reason)
        return True

    def fail_step(self, step: Step) -> list[Sequence]:
        """The shard could not execute the step and will be cleared: those in it fail and are returned, the
        other running ones go back to the queue."""
        concerned = {part.sequence.id for part in step.scheduled}
        return self._evacuate({s.id for s in self._running if s.id not in concerned})

    def lose_shard(self) -> list[Sequence]:
        """The shard is gone and all it held: running sequences fail and are returned, except those without
        a token yet, which go back to the queue, once."""
        replayed = [s for s in self._running if not s.output_ids and s.num_replays < MAX_REPLAYS]
        for sequence in replayed:
            sequence.num_replays += 1
        return self._evacuate({sequence.id for sequence in replayed})

    # ---- moves of the state machine

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        self._leave(sequence)
        if sequence.is_known:
            self._dropped_ids.append(sequence.id)
        sequence.num_preemptions += 1
        step.num_preempted += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self.blocks.give(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.is_known = False
        sequence.status = Status.WAITING
        self._queue.push_front(sequence)

    def _release(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.is_known:
            self._dropped_ids.append(sequence.id)
            sequence.is_known = False
        self.blocks.give(sequence.blocks)
        sequence.blocks = []
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def _leave(self, sequence: Sequence) -> None:
        del self._running[bisect_left(self._running, sequence.id, key=_by_age)]

    def _forget_finished(self) -> None:
        self._running = [sequence for sequence in self._running if sequence.status is Status.RUNNING]

    def _evacuate(self, keeps: set[int]) -> list[Sequence]:
        """The shard holds nothing any more: running sequences whose ids are in `keeps` go back to the queue,
        the others fail and are returned."""
        failed: list[Sequence] = []
        # The youngest first, so that the oldest comes to stand in front.
        for sequence in reversed(self._running):
            if sequence.id in keeps:
                self._requeue(sequence)
            else:
                self._release(sequence, FinishReason.FAILED)
                failed.append(sequence)
        self._running = []
        self._dropped_ids = []
        return failed


def _shares(prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Who computes how many prompt tokens, at least one each, in the order in which blocks are given out."""
    if not prompts or budget <= 0:
        return []
    oldest = min(prompts, key=_by_age)
    oldest_share = min(oldest.num_pending, (budget + 1) // 2)
    budget -= oldest_share
    others: list[tuple[Sequence, int]] = []
    for sequence in sorted(prompts, key=lambda prompt: (prompt.num_pending, prompt.id)):
        if budget == 0:
            break
        if sequence is not oldest:
            share = min(sequence.num_pending, budget)
            budget -= share
            others.append((sequence, share))
    return [(oldest, min(oldest_share + budget, oldest.num_pending)), *others]
