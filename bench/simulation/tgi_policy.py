"""The policy of Text Generation Inference 3.3, for comparison: worst-case reservation, first in first out.

- All blocks for the prompt and `max_new_tokens` (in slices of 1024) are reserved before the first step and
  given back at the end. The front of the queue blocks all behind it; nobody is preempted or reordered.
- One step in flight. With chunking a step that admits carries prompts beside the running decodes, and a step
  without admission follows; without, admitted prompts are a step of their own while the running ones stall.
- `waiting_served_ratio` and `max_waiting_tokens` count only without chunking.
- Prefix cache: prompts of requests that have ended. Answers are thrown away; what runs is not shared.
- An allocation that fails has evicted what could be evicted all the same.

Left out: cached prompts that were never computed (a fault, not a policy), speculation, padded models, its
block sizes (all policies here have the same). Knows no cost and no trace.
"""

from collections import deque
from dataclasses import dataclass

from headrace_router.scheduling.blocks import Holding, KVBlocks, block_keys

from bench.simulation.cost import Work
from bench.simulation.jobs import Counters, Job, Machine

SLICE_TOKENS = 1024
"""Longest answer before a request joins the queue anew with what it has as its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiKnobs:
    """Defaults are those of its launcher."""

    chunking: bool = True
    prefix_caching: bool = True
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_step_tokens: int = 0
    """`--max-batch-prefill-tokens`; 0: as the other policies have it."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A slice of a request, waiting or running."""

    job: Job
    keys: list[bytes]
    """Of the prompt's full blocks."""
    num_prompt: int
    num_new: int
    """Tokens of the slice; blocks are reserved for all."""
    holding: Holding | None = None
    num_computed: int = 0
    """Leading tokens whose KV is there, those of the step in flight included."""
    num_generated: int = 0
    chunk: int = 0
    """Prompt tokens in the next step; 0: it decodes."""


class TgiPolicy:
    """See the module. Raises `ValueError` for a budget below 1."""

    max_in_flight = 1
    slack_seconds = 0.0

    def __init__(self, name: str, machine: Machine, knobs: TgiKnobs, longest_prompt: int) -> None:
        self.name = name
        self.counters = Counters()
        self._knobs = knobs
        self._max_total_tokens = machine.max_total_tokens
        self._max_batch_size = machine.max_running
        self._max_prefill = knobs.max_step_tokens or machine.max_step_tokens
        if not knobs.chunking:
            # Its router does not start when a prompt may be longer than the budget.
            self._max_prefill = max(self._max_prefill, longest_prompt)
        # Block 0 is reserved.
        self._blocks = KVBlocks(
            machine.num_blocks - 1, machine.block_size, prefix_caching=knobs.prefix_caching
        )
        self._queue: deque[_Entry] = deque()
        self._running: list[_Entry] = []
        self._in_step: list[_Entry] = []
        self._is_blocked = False
        """Whether the front of the queue found no room, and nothing was given back since."""
        self._must_decode = False
        """Whether the last step admitted somebody beside running ones: a step without admission follows."""
        self._waiting_tokens = 0
        self._num_reserved_slots = 0
        self._num_filled_slots = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_held_slots(self) -> int:
        return self._blocks.num_held * self._blocks.block_size

    @property
    def num_unused_slots(self) -> int:
        return self._num_reserved_slots - self._num_filled_slots

    @property
    def num_cached_slots(self) -> int:
        return self._blocks.num_cached * self._blocks.block_size

    def add(self, job: Job, now: float) -> bool:
        prompt = job.arrival.prompt_ids()
        num_new = min(job.arrival.max_new_tokens, SLICE_TOKENS)
        num_blocks = self._blocks.num_for(len(prompt) + num_new - 1)
        if len(prompt) + num_new > self._max_total_tokens or num_blocks > self._blocks.num_blocks:
            return False
        self._queue.append(self._entry(job, prompt))
        return True

    def _entry(self, job: Job, prompt: tuple[int, ...]) -> _Entry:
        num_new = min(job.arrival.max_new_tokens, SLICE_TOKENS)
        return _Entry(job, block_keys(prompt, self._blocks.block_size), len(prompt), num_new)

    # ---- a step

    def schedule(self, now: float) -> Work | None:
        if not self._running:
            new = self._next_batch(now, 0, self._max_batch_size, self._max_prefill)
            if not new:
                return None
            self._must_decode = False
            self._waiting_tokens = 1
            return self._step(new, new)
        new = [] if self._must_decode else self._admit_beside_running(now)
        if new:
            self._must_decode = True
            self._waiting_tokens = 1
            return self._step(self._running + new if self._knobs.chunking else new, new)
        self._must_decode = False
        self._waiting_tokens += 1
        return self._step(self._running, [])

    def _admit_beside_running(self, now: float) -> list[_Entry]:
        if not self._queue:
            return []
        num_running = len(self._running)
        if self._knobs.chunking:
            num_current = sum(entry.chunk or 1 for entry in self._running)
            return self._next_batch(now, 0, None, max(self._max_prefill - num_current, 0))
        min_size = 0
        if self._waiting_tokens < self._knobs.max_waiting_tokens:
            min_size = int(num_running * self._knobs.waiting_served_ratio)
        return self._next_batch(now, min_size, max(self._max_batch_size - num_running, 0), self._max_prefill)

    def _next_batch(
        self, now: float, min_size: int, max_size: int | None, prefill_budget: int
    ) -> list[_Entry]:
        """Those that join, with their blocks."""
        block_size = self._blocks.block_size
        is_full = self._num_reserved_slots >= (self._blocks.num_blocks + 1) * block_size
        if not prefill_budget or is_full or len(self._queue) < min_size or max_size == 0 or self._is_blocked:
            return []
        prefill_budget = -(-prefill_budget // block_size) * block_size
        new: list[_Entry] = []
        while self._queue and prefill_budget and len(new) != max_size:
            entry = self._queue[0]
            holding = self._reserve(entry)
            if holding is None:
                self._is_blocked = True
                break
            num_cached = min(holding.num_shared * block_size, entry.num_prompt - 1)
            num_postfix = entry.num_prompt - num_cached
            if num_postfix > prefill_budget and not self._knobs.chunking:
                self._blocks.close(holding)
                break
            entry.holding = holding
            entry.num_computed = num_cached
            entry.chunk = min(num_postfix, prefill_budget)
            prefill_budget -= entry.chunk
            new.append(self._queue.popleft())
        if len(new) < min_size:
            for entry in reversed(new):
                assert entry.holding is not None
                self._blocks.close(entry.holding)
                entry.holding = None
                self._queue.appendleft(entry)
            return []
        for entry in new:
            self._start(entry, now)
        return new

    def _reserve(self, entry: _Entry) -> Holding | None:
        """All blocks the slice can come to need; None when there are too few."""
        blocks = self._blocks
        holding = blocks.open("", entry.keys, len(entry.keys))
        num_missing = blocks.num_for(entry.num_prompt + entry.num_new - 1) - len(holding.blocks)
        if num_missing <= blocks.num_available:
            blocks.grow(holding, num_missing)
            return holding
        # What could be evicted has been, before the shortage showed.
        blocks.grow(holding, blocks.num_available)
        blocks.close(holding)
        return None

    def _start(self, entry: _Entry, now: float) -> None:
        assert entry.holding is not None
        job = entry.job
        if job.started_at < 0:
            job.started_at = now
            job.num_cached = entry.num_computed
        self._num_reserved_slots += len(entry.holding.blocks) * self._blocks.block_size
        self._num_filled_slots += entry.num_computed

    def _step(self, entries: list[_Entry], new: list[_Entry]) -> Work:
        work = Work(num_rows=len(entries), num_tokens=len(entries))
        for entry in entries:
            if entry.chunk > 1:
                work.add_chunk(entry.num_computed, entry.chunk)
                work.num_tokens += entry.chunk - 1
                entry.num_computed += entry.chunk
            else:
                entry.num_computed += 1
                work.decode_context += entry.num_computed
            work.num_samples += entry.num_computed >= entry.num_prompt
        self._num_filled_slots += work.num_tokens
        self.counters.num_computed_tokens += work.num_tokens
        self._in_step = list(entries)
        self._running = self._running + new
        return work

    # ---- its answer

    def answer(self, seconds: float) -> list[Job]:
        gained: list[Job] = []
        entries, self._in_step = self._in_step, []
        if any(entry.chunk for entry in entries):
            self._size_chunks(entries)
        has_ended = False
        for entry in entries:
            if entry.num_computed < entry.num_prompt:
                continue
            job = entry.job
            job.num_left -= 1
            entry.num_generated += 1
            gained.append(job)
            if job.num_left == 0 or entry.num_generated == entry.num_new:
                self._end(entry)
                has_ended = True
        if has_ended:
            self._running = [entry for entry in self._running if entry.holding is not None]
        return gained

    def _size_chunks(self, entries: list[_Entry]) -> None:
        """What each computes next: its shard shares the budget from the last request to the first."""
        budget = self._max_prefill - (len(entries) - 1)
        for entry in reversed(entries):
            num_pending = entry.num_prompt - entry.num_computed
            entry.chunk = max(min(num_pending, budget), 1) if num_pending > 0 else 0
            budget -= entry.chunk

    def _end(self, entry: _Entry) -> None:
        assert entry.holding is not None
        job, blocks = entry.job, self._blocks
        self._num_reserved_slots -= len(entry.holding.blocks) * blocks.block_size
        self._num_filled_slots -= entry.num_computed
        blocks.commit(entry.holding, entry.keys, len(entry.keys))
        blocks.close(entry.holding)
        entry.holding = None
        self._is_blocked = False
        if job.num_left:
            known = job.arrival.prompt_ids() + job.output[: -job.num_left]
            if len(known) + entry.num_new <= self._max_total_tokens:
                self._queue.append(self._entry(job, known))
            else:
                # No room for another slice: the answer ends short.
                job.num_left = 0
