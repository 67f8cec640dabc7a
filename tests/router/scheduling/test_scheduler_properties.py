"""Scheduler under random arrivals, cancellations, lengths and pools: everybody ends, and ends right."""

from headrace_router.scheduling.request import FinishReason, Status
from headrace_router.scheduling.scheduler import Scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.scheduling.simulation import Simulation, limits_of, request_of

NUM_BLOCKS, BLOCK_SIZE = 12, 4
MAX_TOTAL = NUM_BLOCKS * BLOCK_SIZE

lengths = st.integers(1, MAX_TOTAL - 1).flatmap(
    lambda num_prompt: st.tuples(st.just(num_prompt), st.integers(1, MAX_TOTAL - num_prompt))
)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("add"), lengths),
        st.tuples(st.just("cancel"), st.integers(0, 100)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    moves=moves,
    max_step_tokens=st.integers(1, 40),
    max_step_sequences=st.integers(1, 8),
    waiting_served_ratio=st.sampled_from([0.0, 0.5, 3.0]),
    max_waiting_tokens=st.integers(0, 6),
)
def test_everybody_ends_with_the_output_it_would_have_alone(
    moves: list[tuple[str, object]],
    max_step_tokens: int,
    max_step_sequences: int,
    waiting_served_ratio: float,
    max_waiting_tokens: int,
) -> None:
    limits = limits_of(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_step_tokens=max_step_tokens,
        max_step_sequences=min(max_step_sequences, max_step_tokens),
    )
    scheduler = Scheduler(
        limits, waiting_served_ratio=waiting_served_ratio, max_waiting_tokens=max_waiting_tokens
    )
    simulation = Simulation(scheduler)
    for move, value in moves:
        match move, value:
            case "add", (int(num_prompt), int(max_new)):
                salt = len(simulation.sequences)
                simulation.add(request_of(num_prompt, max_new, salt=salt, has_eos=salt % 2 == 0))
            case "cancel", int(which) if simulation.sequences:
                sequence = simulation.sequences[which % len(simulation.sequences)]
                scheduler.finish(sequence, FinishReason.CANCELLED)
                simulation.check_blocks()
            case "step", int(count):
                for _ in range(count):
                    simulation.step()
    simulation.run()
    simulation.check_over()


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=12), st.integers(4, 64), st.data())
def test_a_cancel_between_schedule_and_update_harms_nobody(
    requests: list[tuple[int, int]], max_step_tokens: int, data: st.DataObject
) -> None:
    limits = limits_of(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_step_tokens=max_step_tokens, max_step_sequences=4
    )
    scheduler = Scheduler(limits)
    simulation = Simulation(scheduler)
    for salt, (num_prompt, max_new) in enumerate(requests):
        simulation.add(request_of(num_prompt, max_new, salt=salt))
    for _ in range(len(requests)):
        step = scheduler.schedule(0.0)
        if step is None:
            break
        victim = data.draw(st.sampled_from(simulation.sequences))
        result = simulation.execute(step)
        scheduler.finish(victim, FinishReason.CANCELLED)
        simulation.check_blocks()
        scheduler.update(result)
        simulation.check_blocks()
    simulation.run()
    simulation.check_over()


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=2, max_size=10), st.integers(4, 32))
def test_the_oldest_always_gets_on(requests: list[tuple[int, int]], max_step_tokens: int) -> None:
    """Whatever happens to others, every step brings the oldest running sequence forward."""
    limits = limits_of(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_step_tokens=max_step_tokens, max_step_sequences=4
    )
    simulation = Simulation(Scheduler(limits))
    for salt, (num_prompt, max_new) in enumerate(requests):
        simulation.add(request_of(num_prompt, max_new, salt=salt))
    while any(sequence.status is not Status.FINISHED for sequence in simulation.sequences):
        running = [s for s in simulation.sequences if s.status is Status.RUNNING]
        simulation.step()
        if running:
            oldest = running[0]
            scheduled = {part.sequence.id for part in simulation.steps[-1].scheduled}
            assert oldest.status is not Status.WAITING
            # Only a prompt may have to wait, for blocks that younger decodes took and will give back.
            assert oldest.id in scheduled or (
                simulation.scheduler.blocks.num_free == 0 and len(scheduled) > 0
            )
