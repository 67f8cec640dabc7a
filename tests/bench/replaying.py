"""A small machine, short arrivals and a replay of them, for the tests of policies."""

from collections.abc import Sequence

from bench.simulation.cost import DEVICES, MODELS, Gpu
from bench.simulation.jobs import Machine, Policy
from bench.simulation.record import Record
from bench.simulation.replay import Replay
from bench.simulation.traces import EOS_ID, VOCAB_SIZE, Arrival, Segment, Trace, ordered

GPU = Gpu(DEVICES["h100"], MODELS["llama-3-8b"])


def machine(*, num_blocks: int = 64, max_step_tokens: int = 512, max_running: int = 16) -> Machine:
    return Machine(
        num_blocks=num_blocks,
        block_size=16,
        max_total_tokens=num_blocks * 16,
        max_step_tokens=max_step_tokens,
        max_running=max_running,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS_ID,
        step_costs=GPU.step_costs(max_step_tokens),
    )


def arrival(
    key: int,
    num_prompt: int,
    num_output: int,
    *,
    at: float = 0.0,
    max_new_tokens: int = 64,
    prefix: Sequence[Segment] = (),
    follows: int = -1,
    pause_seconds: float = 0.0,
) -> Arrival:
    """A prompt of the prefix and `num_prompt` tokens that only `key` has."""
    return Arrival(
        at=at,
        prompt=(*prefix, Segment(2 * key, num_prompt)),
        output=Segment(2 * key + 1, num_output),
        max_new_tokens=max_new_tokens,
        follows=follows,
        pause_seconds=pause_seconds,
    )


def replayed(
    policy: Policy,
    arrivals: Sequence[Arrival] | Trace,
    *,
    num_blocks: int = 64,
    max_concurrent: int | None = None,
) -> Record:
    trace = arrivals if isinstance(arrivals, Trace) else ordered("", arrivals)
    return Replay(policy, trace, GPU, num_slots=num_blocks * 16, max_concurrent=max_concurrent).run()
