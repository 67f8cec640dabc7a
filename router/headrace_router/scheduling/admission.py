"""Who may leave the queue for the next step. Knows the queue, the policy and the blocks, not what a step is.

A waiting sequence may join when the pool has room for all its tokens beside what running prefills still
need, and for one more block for everybody (the low-water mark): so it does not preempt itself at once, and
prefills never hold all blocks between them with none of them whole. While the front of the queue lacks room,
others may pass it, `MAX_OVERTAKEN` in all.

A sequence whose next block is about to be computed by another one, its *leader*, waits until it can share it:
of many requests with one new prefix, one computes it. It does so only as long as the leader gets on, and
never for a leader of worse priority, which others of better ones may hold up. Others pass those who follow.
"""

import sys
from collections.abc import Iterable
from itertools import compress, count
from operator import ne

from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.memory import Memory
from headrace_router.scheduling.policy import Policy
from headrace_router.scheduling.queue import WaitingQueue
from headrace_router.scheduling.request import Sequence, Status

MAX_OVERTAKEN = 16
"""Sequences that may be admitted past one that waits for blocks."""

MAX_PASSED_OVER = 8
"""Waiting sequences without room behind which we still look for one with room."""

MAX_NEW_FOLLOWERS = 64
"""Waiting sequences that may be found in a step to have a leader, which is work; the next step goes on."""

MAX_NEW_KEYS = 16_384
"""Blocks that those who are found to have a leader may have together, likewise: each is compared."""

MAX_FOLLOWERS = 1024
"""Waiting sequences known to have a leader behind which we still look for one that has none."""

MAX_PAUSE = 4
"""Steps in which a leader may compute nothing before nobody waits for it any more. Now and then a step is of
decodes alone, or of shorter prompts."""

MAX_COMPARED = 16
"""Waiting sequences with room among which the shortest is sought when the step is full already."""

MAX_ESTIMATE_AGE = 8
"""Steps after which we look again how much of a sequence without room is in the cache."""


class Admission:
    """Owns the queue."""

    def __init__(self, limits: Limits, policy: Policy, memory: Memory) -> None:
        self._limits = limits
        self._policy = policy
        self._memory = memory
        self.queue = WaitingQueue()
        self.is_overdue = False
        """Whether the last candidates were looked for because `max_waiting_tokens` had passed."""
        self._num_steps_waited = 0
        """Steps since the last admission during which somebody waited."""
        self._passed_over: list[Sequence] = []
        self._num_passed_over: dict[int, int] = {}
        """How many of `_passed_over` stand before a candidate, by its id."""

    def candidates(
        self,
        step_id: int,
        running: list[Sequence],
        prompts: list[Sequence],
        prefilling: Iterable[Sequence],
        budget: int,
    ) -> list[Sequence]:
        """Waiting sequences that could join this step, in the order of the queue, with what the cache has of
        them opened: the caller admits or withdraws every one.

        `prompts` are the running ones whose prefill is not scheduled to its end, `prefilling` those of whose
        prefill a step in flight computes a part; `budget` is what the step may compute of prefills.
        """
        self.is_overdue = False
        num_places = self._limits.max_step_sequences - len(running)
        if num_places <= 0 or budget <= 0 or not self._may_admit(len(running)):
            return []
        num_reserved = len(running) + sum(self._memory.num_lacking(prompt) for prompt in prompts)
        num_pending = sum(prompt.num_pending for prompt in prompts)
        leaders = _Leaders(self._memory, step_id, prompts, prefilling)
        self._passed_over, self._num_passed_over = [], {}
        chosen: list[Sequence] = []
        num_following = num_keys = 0
        for sequence in self.queue.in_order(leaders.still_leads):
            if leaders.num_followers == MAX_FOLLOWERS:
                break
            if sequence.num_late:
                # Its last token is on its way. Nobody takes the blocks that it has just given up.
                break
            if leaders.leads(sequence):
                num_following += 1
                num_keys += len(sequence.keys)
                if num_following == MAX_NEW_FOLLOWERS or num_keys >= MAX_NEW_KEYS:
                    break
            elif self._open(sequence, num_reserved, step_id):
                # One more block than it needs, so that it can grow.
                num_reserved += self._memory.num_lacking(sequence) + 1
                num_pending += sequence.num_pending
                chosen.append(sequence)
                leaders.add(sequence)
                self._num_passed_over[sequence.id] = len(self._passed_over)
                if len(chosen) == num_places or (num_pending >= budget and len(chosen) >= MAX_COMPARED):
                    break
            elif not self._pass_over(sequence):
                break
        return chosen

    def _may_admit(self, num_running: int) -> bool:
        """Whether `waiting_served_ratio` and `max_waiting_tokens` let anybody in now."""
        if not self.queue:
            return False
        if not num_running or len(self.queue) >= self._policy.waiting_served_ratio * num_running:
            return True
        self.is_overdue = self._num_steps_waited >= self._policy.max_waiting_tokens
        # One that was let in before only waits for blocks.
        return self.is_overdue or next(iter(self.queue)).admitted_at is not None

    def _open(self, sequence: Sequence, num_reserved: int, step_id: int) -> bool:
        """Opens a sequence, if it has room beside so many blocks that others will take."""
        memory, blocks = self._memory, self._memory.blocks
        room = blocks.num_available - num_reserved
        is_known = sequence.estimated_at >= 0 and step_id - sequence.estimated_at < MAX_ESTIMATE_AGE
        if is_known and sequence.num_needed > room:
            return False
        sequence.estimated_at = step_id
        if (num_blocks := blocks.num_for(sequence.num_tokens)) > room:
            sequence.num_needed = num_blocks - memory.lookup(sequence)
            if sequence.num_needed > room:
                return False
        memory.open(sequence)
        # What it shares with those who run is paid for; what was only cached can no longer be evicted.
        if memory.num_lacking(sequence) <= blocks.num_available - num_reserved:
            return True
        sequence.num_needed = memory.num_lacking(sequence) + room - (blocks.num_available - num_reserved)
        memory.close(sequence)
        return False

    def _pass_over(self, sequence: Sequence) -> bool:
        """One that lacks room: whether others may be admitted past it."""
        self._passed_over.append(sequence)
        # One that ran already is not passed: its reader waits in the middle of a text.
        may_be_passed = sequence.admitted_at is None and sequence.num_overtaken < MAX_OVERTAKEN
        return may_be_passed and len(self._passed_over) < MAX_PASSED_OVER

    def overtake(self, sequence: Sequence) -> None:
        """A candidate joins the step: it overtakes those that lack room."""
        for other in self._passed_over[: self._num_passed_over.pop(sequence.id, 0)]:
            other.num_overtaken += 1

    def stepped(self, num_admitted: int) -> None:
        """A step was made, which so many joined."""
        self._num_steps_waited = self._num_steps_waited + 1 if self.queue and not num_admitted else 0


class _Leaders:
    """Those whose prefill is being computed, by how it begins."""

    def __init__(
        self, memory: Memory, step_id: int, prompts: list[Sequence], prefilling: Iterable[Sequence]
    ) -> None:
        self._memory = memory
        self._step_id = step_id
        self._by_beginning: dict[tuple[str, bytes], list[Sequence]] = {}
        self._sources = prompts, prefilling
        self._is_filled = False
        self.num_followers = 0
        """Those that `still_leads` has found to follow somebody."""
        self._num_done: dict[Sequence, int] = {}
        """Leading blocks that a leader was found to have confirmed; more than any if it leads no more."""

    def still_leads(self, sequence: Sequence) -> bool:
        """Whether the leader of a waiting sequence, if it has one, is one still; forgets it if not. Never
        when it was so for `MAX_FOLLOWERS`."""
        leader = sequence.leader
        if leader is None or self.num_followers == MAX_FOLLOWERS:
            return False
        num_done = self._num_done.get(leader)
        if num_done is None:
            is_over = not self._gets_on(leader)
            num_done = sys.maxsize if is_over else leader.num_confirmed // self._memory.block_size
            self._num_done[leader] = num_done
        if num_done < sequence.num_common:
            self.num_followers += 1
            return True
        sequence.leader = None
        sequence.estimated_at = -1
        return False

    def leads(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence finds a leader that it should wait for."""
        max_blocks = self._memory.reusable_blocks(sequence)
        if not max_blocks:
            return False
        keys = self._memory.keys_of(sequence)
        self._fill()
        others = self._by_beginning.get((sequence.request.cache_salt, keys[0]))
        if not others:
            return False
        num_found = self._memory.lookup(sequence)
        if num_found < max_blocks:
            for leader in others:
                if leader.request.priority > sequence.request.priority:
                    continue
                if leader.keys[num_found : num_found + 1] == keys[num_found : num_found + 1]:
                    num_common = _num_common(leader.keys, keys, max_blocks)
                    if num_common > num_found and self._gets_on(leader):
                        sequence.leader, sequence.num_common = leader, num_common
                        return True
        return False

    def add(self, sequence: Sequence) -> None:
        keys = self._memory.keys_of(sequence)
        if keys:
            beginning = sequence.request.cache_salt, keys[0]
            self._by_beginning.setdefault(beginning, []).append(sequence)

    def _fill(self) -> None:
        if not self._is_filled:
            self._is_filled = True
            for sequences in self._sources:
                for sequence in sequences:
                    self.add(sequence)

    def _gets_on(self, leader: Sequence) -> bool:
        """Whether it was in one of the last steps, or may join this one."""
        if leader.status is Status.RUNNING:
            return self._step_id - leader.last_step_id <= MAX_PAUSE
        return leader.status is Status.WAITING and leader.holding is not None


def _num_common(left: list[bytes], right: list[bytes], most: int) -> int:
    """Leading keys that are equal."""
    most = min(most, len(left), len(right))
    return min(next(compress(count(), map(ne, left, right)), most), most)
