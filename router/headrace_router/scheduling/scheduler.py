"""Which step comes next, and what the answer to one means for each sequence.

Who computes what in a step is decided in `placement.py`, and who leaves the queue for it in `admission.py`.

Steps overlap: up to `MAX_IN_FLIGHT` are scheduled before the oldest is answered, and a sequence is decoded
again before its last token is known. What an unanswered step computes is used by the same sequence in later
steps and by nobody else, so a failed step spoils nothing. A sequence that turns out to have ended before a
step that computes it costs one row, whose token is ignored. Freed blocks may be handed out at once, because a
shard executes steps in the order they were sent.

A preempted sequence takes the tokens that are still on their way, and comes back when it has them all. One
that was in a failed step takes none: it is suspected (`suspects.py`), and starts again from what answered
steps have computed.

Pure: no clock, no waiting, no wire.
"""

from collections.abc import Iterable

from headrace_router.scheduling.admission import Admission
from headrace_router.scheduling.blocks import KVBlocks
from headrace_router.scheduling.chunking import StepCosts
from headrace_router.scheduling.flights import Flight, Flights
from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.memory import Memory
from headrace_router.scheduling.placement import Placement
from headrace_router.scheduling.policy import Policy
from headrace_router.scheduling.request import FinishReason, Sequence, Status
from headrace_router.scheduling.running import Running
from headrace_router.scheduling.step import (
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

NO_TOKEN = "the shard has sampled no token"
"""Why a sequence fails for which an answer holds neither a token nor an error."""

_DEFAULT_POLICY = Policy()


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
        self._flights = Flights()
        self._placement = Placement(
            limits,
            memory=self._memory,
            admission=self._admission,
            running=self._running,
            flights=self._flights,
            costs=self._costs,
        )
        self._suspects = Suspects()
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
        num_decodes = self._placement.fill(step, suspects, now)
        if not step.sequences:
            return None
        self._next_step_id += 1
        step.dropped_ids = self.take_dropped()
        self._admission.stepped(len(step.admitted))
        self._flights.append(Flight(step=step, num_decodes=num_decodes))
        return step

    def take_dropped(self) -> list[int]:
        """Sequences the shard holds and has not been told to forget; the caller tells it now."""
        dropped, self._running.dropped_ids = self._running.dropped_ids, []
        return dropped

    # ---- what came back

    def update(self, result: StepResult) -> list[Update]:
        """What the answer to the oldest step in flight changed, one entry for each sequence concerned.

        Sequences that have finished since the step was scheduled are passed over.
        """
        flight = self._flights.pop_oldest()
        step, ignored_ids = flight.step, flight.ignored_ids
        updates = self._take_errors(flight, result.errors) if result.errors else []
        if result.num_left:
            self._shorten(flight, result.shortened_id, result.num_left)
        for sequence, num_tokens in step.chunks:
            if sequence.status is Status.RUNNING and sequence.id not in ignored_ids:
                self._memory.confirm(sequence, num_tokens)
        prompt_logprobs = {part.sequence_id: part for part in result.prompt_logprobs}
        for sequence, token in _paired(step.samplers, result.tokens):
            if sequence.status is Status.FINISHED or sequence.id in ignored_ids:
                continue
            if token is None:
                self._running.finish(sequence, FinishReason.FAILED)
                updates.append(Update(sequence=sequence, error=NO_TOKEN))
                continue
            part = prompt_logprobs.pop(sequence.id, None) if prompt_logprobs else None
            updates.append(self._accept(sequence, token, part))
        if prompt_logprobs:
            for sequence in step.sequences:
                part = prompt_logprobs.get(sequence.id)
                if part is not None and flight.concerns(sequence):
                    updates.append(Update(sequence=sequence, prompt_logprobs=part))
        if self._running.late:
            self._arrived(flight)
        if flight.num_decodes:
            seconds = result.forward_seconds + result.sample_seconds
            self._costs.observe(len(step.sequences), step.total_tokens - result.num_left, seconds)
        return updates

    def _take_errors(self, flight: Flight, errors: list[tuple[int, str]]) -> list[Update]:
        """Sequences that failed by themselves; the shard has dropped them already."""
        updates: list[Update] = []
        sequences = {sequence.id: sequence for sequence in flight.step.sequences}
        for sequence_id, message in errors:
            sequence = sequences.get(sequence_id)
            if sequence is not None and flight.concerns(sequence):
                self._running.finish(sequence, FinishReason.FAILED, is_dropped=True)
                updates.append(Update(sequence=sequence, error=message))
        return updates

    def _shorten(self, flight: Flight, sequence_id: int, num_left: int) -> None:
        """The step had no time for the last tokens of a chunk; the shard computes them with the next one."""
        for sequence, _ in flight.step.chunks:
            if sequence.id == sequence_id and flight.concerns(sequence):
                flight.shorten(sequence, num_left)
                self._flights.shorten(sequence, num_left)
                if sequence.status is Status.RUNNING:
                    self._memory.left(sequence, num_left)

    def _accept(
        self, sequence: Sequence, token: SampledToken, prompt_logprobs: PromptLogprobs | None
    ) -> Update:
        request, output_ids, token_id = sequence.request, sequence.output_ids, token.token_id
        if request.max_new_tokens == 0:
            self._running.finish(sequence, FinishReason.LENGTH)
            return Update(sequence=sequence, prompt_logprobs=prompt_logprobs)
        output_ids.append(token_id)
        num_generated = len(output_ids)
        # Length comes first, as in Text Generation Inference: an end-of-sequence token in the last place
        # counts as "length".
        if num_generated >= request.max_new_tokens:
            self._running.finish(sequence, FinishReason.LENGTH)
        elif num_generated > request.min_new_tokens:
            if token_id in request.eos_token_ids:
                self._running.finish(sequence, FinishReason.EOS)
            elif token_id in request.stop_token_ids:
                self._running.finish(sequence, FinishReason.STOP)
        return Update(sequence=sequence, token=token, prompt_logprobs=prompt_logprobs)

    def _arrived(self, flight: Flight) -> None:
        sequences = flight.step.sequences
        for sequence in list(self._running.late.values()):
            if sequence in sequences and flight.concerns(sequence):
                self._running.arrived(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """Ends a sequence wherever it is: cancelled, or stopped by its text. False when it has ended."""
        if sequence.status is Status.FINISHED:
            return False
        self._running.finish(sequence, reason)
        return True

    def fail_step(self) -> list[Sequence]:
        """The oldest step in flight failed as a whole; gives those that fail for it.

        If it held one sequence, that one. Else nobody yet: all in it are suspected, wait, and are tried
        again. The shard has dropped them, or drops them with the next step.
        """
        flight = self._flights.pop_oldest()
        step, members = flight.step, [s for s in flight.step.sequences if flight.concerns(s)]
        points = {sequence.id: sequence.num_tokens for sequence in members} | {
            sequence.id: num_tokens for sequence, num_tokens in step.chunks
        }
        for sequence in members:
            if sequence.status is Status.RUNNING:
                self._running.requeue(sequence)
            else:
                self._running.forsake(sequence)
        self._flights.ignore(members)
        # The shard may not have come to forgetting those that it should.
        settled_ids = {*self._running.dropped_ids, *(sequence.id for sequence in self._running)}
        self._running.dropped_ids += [number for number in step.dropped_ids if number not in settled_ids]
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
        for sequence in self._queue:
            if not sequence.output_ids:
                sequence.is_begun, sequence.num_cached = False, 0
        self._running.dropped_ids.clear()
        self.blocks.clear()
        return failed


def _paired(
    samplers: list[Sequence], tokens: list[SampledToken]
) -> Iterable[tuple[Sequence, SampledToken | None]]:
    """Each sampler with its token. These are in the order of the samplers; one that failed has none."""
    if len(tokens) == len(samplers):
        return zip(samplers, tokens, strict=True)
    by_id = {token.sequence_id: token for token in tokens}
    return [(sequence, by_id.get(sequence.id)) for sequence in samplers]
