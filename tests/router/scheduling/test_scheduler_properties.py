"""Scheduler under random arrivals, lengths, shared prefixes, cancels, failures and pools: all end right.

What must hold after every single move is in `Simulation.check`, what must at the end in `check_over`.
"""

from dataclasses import dataclass
from itertools import cycle

from headrace_router.scheduling.limits import Limits
from headrace_router.scheduling.policy import Policy
from headrace_router.scheduling.request import FinishReason, Request, Status
from headrace_router.scheduling.scheduler import Scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.scheduling.device import VOCAB_SIZE
from tests.router.scheduling.simulation import Simulation, counts, limits_of, request_of

NUM_BLOCKS, BLOCK_SIZE = 12, 4
MAX_TOTAL = NUM_BLOCKS * BLOCK_SIZE

STEMS = [tuple((7 * position + stem) % VOCAB_SIZE for position in range(MAX_TOTAL)) for stem in range(2)]
"""Prompts begin like one of these, so that many have a prefix in common."""

FLAT, STEEP = ((1, 1.0), (1000, 1.1)), ((1, 0.01), (101, 0.11))
"""What steps cost: so little that chunks are as long as they can be, or so much that they are bounded."""

lengths = st.integers(1, MAX_TOTAL - 1).flatmap(
    lambda num_prompt: st.tuples(st.just(num_prompt), st.integers(1, MAX_TOTAL - num_prompt))
)


@dataclass(frozen=True)
class Arrival:
    """One request, or several of one asker."""

    request: Request
    num_siblings: int
    poison: int | None
    """Tokens past which no step survives the first of them."""
    fault: int | None
    """Tokens past which the last of them fails."""


@dataclass(frozen=True)
class Hurry:
    """Whether the shard cuts steps short: never without costs, for then nobody knows how long is too long."""

    costs: tuple[tuple[int, float], ...]
    cuts: list[int]
    """Tokens that the steps leave that may be cut short, over and over."""


hurries = st.builds(
    Hurry, costs=st.sampled_from([FLAT, FLAT, STEEP, ()]), cuts=st.lists(st.integers(0, 12), max_size=5)
)


def _simulation(limits: Limits, hurry: Hurry, depth: int, policy: Policy | None = None) -> Simulation:
    simulation = Simulation(Scheduler(limits, policy or Policy(), hurry.costs), depth=depth)
    simulation.device.cuts = cycle(hurry.cuts)
    return simulation


any_lengths = st.one_of(lengths, st.tuples(st.integers(1, 12), st.integers(1, 8)))
long_lengths = st.tuples(st.integers(16, MAX_TOTAL - 8), st.integers(1, 8))


@st.composite
def requests(draw: st.DrawFn, lengths: st.SearchStrategy[tuple[int, int]]) -> Request:
    num_prompt, max_new_tokens = draw(lengths, label="lengths")
    stem, num_shared = draw(st.sampled_from(STEMS)), draw(st.integers(0, num_prompt))
    tail = draw(
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=num_prompt, max_size=num_prompt)
        if num_shared < num_prompt
        else st.just([0] * num_prompt)
    )
    return request_of(
        0,
        max_new_tokens,
        prompt_ids=(*stem[:num_shared], *tail[num_shared:]),
        has_eos=draw(st.booleans()),
        priority=draw(st.sampled_from([0, 0, 0, 1])),
        tenant=draw(st.sampled_from(["", "", "a", "b"])),
        cache_salt=draw(st.sampled_from(["", "", "", "x"])),
        prompt_logprobs=draw(st.sampled_from([False] * 7 + [True])),
    )


def arrivals(
    *, fail: bool, lengths: st.SearchStrategy[tuple[int, int]] = any_lengths
) -> st.SearchStrategy[Arrival]:
    never = st.just(None)
    point = st.one_of(never, never, never, st.integers(0, 16)) if fail else never
    return st.builds(
        Arrival,
        request=requests(lengths),
        num_siblings=st.sampled_from([1, 1, 1, 2, 4]),
        poison=point,
        fault=point,
    )


def moves(*, fail: bool) -> st.SearchStrategy[list[tuple[str, object]]]:
    nothing = st.just(0)
    kinds = {
        "add": arrivals(fail=fail),
        "go on": st.integers(0, 100),
        "cancel": st.integers(0, 100),
        "schedule": nothing,
        "answer": nothing,
        "step": st.integers(1, 4),
    }
    choices = [st.tuples(st.just(kind), values) for kind, values in kinds.items()]
    if fail:
        choices += [st.tuples(st.just(kind), nothing) for kind in ("lose", "refuse")]
    return st.lists(st.one_of(choices), max_size=40)


def _add(simulation: Simulation, arrival: Arrival) -> None:
    added = [simulation.add(arrival.request) for _ in range(arrival.num_siblings)]
    if arrival.poison is not None:
        simulation.device.poisons[added[0].id] = arrival.poison
    if arrival.fault is not None:
        simulation.device.faults[added[-1].id] = arrival.fault


def _go_on(simulation: Simulation, which: int) -> None:
    """The next turn of a chat: all that was asked and answered, and a new question."""
    sequence = simulation.sequences[which % len(simulation.sequences)]
    prompt_ids = (*sequence.request.prompt_ids, *sequence.output_ids, which % VOCAB_SIZE)
    if len(prompt_ids) < MAX_TOTAL:
        simulation.add(request_of(0, min(4, MAX_TOTAL - len(prompt_ids)), prompt_ids=prompt_ids))


def _play(simulation: Simulation, played: list[tuple[str, object]]) -> None:
    for move, value in played:
        match move, value:
            case "add", Arrival() as arrival:
                _add(simulation, arrival)
            case "go on", int(which) if simulation.sequences:
                _go_on(simulation, which)
            case "cancel", int(which) if simulation.sequences:
                sequence = simulation.sequences[which % len(simulation.sequences)]
                simulation.scheduler.finish(sequence, FinishReason.CANCELLED)
                simulation.check()
            case "preempt", int(which) if simulation.scheduler.num_running:
                running = [s for s in simulation.sequences if s.status is Status.RUNNING]
                simulation.scheduler._placement._preempt(running[which % len(running)])
                simulation.check()
            case "schedule", _:
                simulation.schedule()
            case "answer", _ if simulation.in_flight:
                simulation.answer()
            case "step", int(count):
                for _ in range(count):
                    simulation.step()
            case "refuse", _:
                simulation.device.refuses = True
            case "lose", _:
                simulation.lose_shard()


def _finish(simulation: Simulation) -> None:
    """Everybody ends, in a number of steps that grows with what they have to compute alone."""
    total_tokens = sum(len(s.request.prompt_ids) + s.request.max_new_tokens for s in simulation.sequences)
    simulation.run(max_steps=50 + 3 * total_tokens)
    simulation.check_over()


@settings(max_examples=200, deadline=None)
@given(
    played=moves(fail=False),
    hurry=hurries,
    depth=st.sampled_from([1, 2]),
    num_blocks=st.sampled_from([NUM_BLOCKS, 2 * NUM_BLOCKS]),
    max_step_tokens=st.integers(1, 40),
    max_step_sequences=st.integers(1, 8),
    policy=st.builds(
        Policy,
        waiting_served_ratio=st.sampled_from([0.0, 0.5, 3.0]),
        max_waiting_tokens=st.integers(0, 6),
        prefix_caching=st.sampled_from([True, True, True, False]),
    ),
)
def test_everybody_ends_with_the_output_it_would_have_alone(
    played: list[tuple[str, object]],
    hurry: Hurry,
    depth: int,
    num_blocks: int,
    max_step_tokens: int,
    max_step_sequences: int,
    policy: Policy,
) -> None:
    limits = limits_of(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_step_tokens=max_step_tokens,
        max_step_sequences=max_step_sequences,
        max_total_tokens=MAX_TOTAL,
    )
    simulation = _simulation(limits, hurry, depth, policy)
    _play(simulation, played)
    _finish(simulation)
    if not policy.prefix_caching:
        assert not any(sequence.num_cached for sequence in simulation.sequences)


@settings(max_examples=200, deadline=None)
@given(
    played=moves(fail=True),
    hurry=hurries,
    depth=st.sampled_from([1, 2]),
    max_step_tokens=st.integers(1, 40),
    max_step_sequences=st.integers(1, 8),
)
def test_whoever_makes_steps_fail_fails_alone(
    played: list[tuple[str, object]],
    hurry: Hurry,
    depth: int,
    max_step_tokens: int,
    max_step_sequences: int,
) -> None:
    limits = limits_of(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_step_tokens=max_step_tokens,
        max_step_sequences=max_step_sequences,
    )
    simulation = _simulation(limits, hurry, depth)
    _play(simulation, played)
    _finish(simulation)


@st.composite
def long_moves(draw: st.DrawFn) -> list[tuple[str, object]]:
    """Somebody decodes, long prompts come, and others again and again after a few turns of the loop."""
    fail = draw(st.booleans())
    longs = arrivals(fail=fail, lengths=long_lengths).map(lambda arrival: ("add", arrival))
    turns = st.sampled_from([*[("schedule", 0), ("answer", 0)] * 3, ("step", 1), ("step", 4)])
    troubles = st.tuples(st.sampled_from(["cancel"] if fail else ["cancel", "preempt"]), st.integers(0, 100))
    if fail:
        troubles = st.one_of(troubles, troubles, st.sampled_from([("refuse", 0), ("lose", 0)]))
    played: list[tuple[str, object]] = []
    for move in [draw(longs), *draw(st.lists(st.one_of(longs, troubles), min_size=2, max_size=8))]:
        played += [move, *draw(st.lists(turns, min_size=1, max_size=8)), ("schedule", 0)]
    return played


@settings(max_examples=150, deadline=None)
@given(
    num_decoders=st.integers(1, 2),
    played=long_moves(),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    depth=st.sampled_from([1, 2, 2]),
    num_blocks=st.sampled_from([NUM_BLOCKS, 2 * NUM_BLOCKS]),
    max_step_tokens=st.integers(4, 16),
)
def test_whoever_is_cut_short_ends_as_if_alone(
    num_decoders: int,
    played: list[tuple[str, object]],
    cuts: list[int],
    depth: int,
    num_blocks: int,
    max_step_tokens: int,
) -> None:
    """What befalls long prompts that do not fit into a step, beside decodes for whose sake they are cut."""
    limits = limits_of(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_step_tokens=max_step_tokens,
        max_step_sequences=4,
        max_total_tokens=MAX_TOTAL,
    )
    simulation = _simulation(limits, Hurry(FLAT, cuts), depth)
    for variant in range(num_decoders):
        simulation.add(request_of(3, 32, variant=variant))
    simulation.step()
    _play(simulation, played)
    _finish(simulation)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=12), hurries, st.integers(4, 64), st.data())
def test_a_cancel_between_schedule_and_update_harms_nobody(
    wanted: list[tuple[int, int]], hurry: Hurry, max_step_tokens: int, data: st.DataObject
) -> None:
    limits = limits_of(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_step_tokens=max_step_tokens, max_step_sequences=4
    )
    simulation = _simulation(limits, hurry, depth=2)
    for variant, (num_prompt, max_new) in enumerate(wanted):
        simulation.add(request_of(num_prompt, max_new, variant=variant))
    for _ in range(len(wanted)):
        while simulation.schedule() is not None:
            pass
        victim = data.draw(st.sampled_from(simulation.sequences))
        simulation.scheduler.finish(victim, FinishReason.CANCELLED)
        simulation.check()
        if simulation.in_flight:
            simulation.answer()
    _finish(simulation)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=2, max_size=10), hurries, st.integers(4, 32), st.sampled_from([1, 2]))
def test_the_oldest_always_gets_on(
    wanted: list[tuple[int, int]], hurry: Hurry, max_step_tokens: int, depth: int
) -> None:
    """Whatever happens to others, every step brings the oldest running sequence forward."""
    limits = limits_of(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_step_tokens=max_step_tokens, max_step_sequences=4
    )
    simulation = _simulation(limits, hurry, depth)
    for variant, (num_prompt, max_new) in enumerate(wanted):
        simulation.add(request_of(num_prompt, max_new, variant=variant))
    while any(sequence.status is not Status.FINISHED for sequence in simulation.sequences):
        running = [s for s in simulation.sequences if s.status is Status.RUNNING]
        step = simulation.schedule() if len(simulation.in_flight) < depth else None
        if step is None:
            simulation.answer()
        elif running and running[0].num_computed < running[0].num_final:
            oldest = running[0]
            assert oldest.status is not Status.WAITING
            # Only a prompt may have to wait, for blocks that younger decodes took and will give back.
            assert oldest.id in counts(step) or not simulation.scheduler.blocks.num_available


@settings(max_examples=20, deadline=None)
@given(
    victim=lengths,
    others=st.lists(lengths, min_size=1, max_size=8),
    is_worse=st.booleans(),
    depth=st.sampled_from([1, 2]),
    max_step_tokens=st.integers(2, 32),
    max_step_sequences=st.integers(1, 8),
)
def test_nobody_starves_whoever_keeps_coming(
    victim: tuple[int, int],
    others: list[tuple[int, int]],
    is_worse: bool,
    depth: int,
    max_step_tokens: int,
    max_step_sequences: int,
) -> None:
    """The others come again as soon as they have ended, and are of a better priority or of other tenants."""
    limits = limits_of(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_step_tokens=max_step_tokens,
        max_step_sequences=max_step_sequences,
    )
    simulation = Simulation(Scheduler(limits), depth=depth)

    def again(index: int) -> None:
        num_prompt, max_new = others[index]
        variant = len(simulation.sequences)
        simulation.add(request_of(num_prompt, max_new, variant=variant, tenant=str(index)))
        indices[len(simulation.sequences)] = index

    indices: dict[int, int] = {}
    for index in range(len(others)):
        again(index)
    num_prompt, max_new = victim
    sequence = simulation.add(request_of(num_prompt, max_new, variant=30, priority=int(is_worse)))
    # As long as it takes 200 of the others, one after the other, and itself.
    longest = max(-(-num_prompt // max_step_tokens) + max_new for num_prompt, max_new in [*others, victim])
    for _ in range(200 * longest):
        for update in simulation.step():
            if update.sequence.status is Status.FINISHED and update.sequence is not sequence:
                again(indices[update.sequence.id])
        if sequence.status is Status.FINISHED:
            break
    assert sequence.finish_reason is FinishReason.LENGTH
