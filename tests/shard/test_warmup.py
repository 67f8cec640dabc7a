"""The largest step: within its limits, as large as they allow, mixed."""

import pytest
from headrace_shard.engine import Engine
from headrace_shard.errors import OutOfMemory
from headrace_shard.loading import LoadedModel
from headrace_shard.step import Step, StepResult
from headrace_shard.warmup import largest_step, longest_decode, num_blocks_for, step_costs
from hypothesis import given
from hypothesis import strategies as st

limits = st.integers(1, 300)


@given(limits, limits, st.integers(2, 100))
def test_step_is_as_large_as_the_limits_allow(
    num_tokens: int, num_sequences: int, max_positions: int
) -> None:
    step = largest_step(
        max_step_tokens=num_tokens,
        max_step_sequences=num_sequences,
        max_positions=max_positions,
        vocab_size=50,
        block_size=16,
    )
    lengths = step.num_tokens.tolist()
    assert sum(lengths) == min(num_tokens, num_sequences * max_positions)
    assert len(lengths) == min(num_tokens, num_sequences)
    assert all(1 <= length <= max_positions for length in lengths)
    assert [len(sequence.token_ids) for sequence in step.new_sequences] == lengths
    assert all(
        0 <= sequence.token_ids.min() <= sequence.token_ids.max() < 50 for sequence in step.new_sequences
    )
    # All of them sample, beside every token that can have a log-probability.
    assert all(
        sequence.num_computed_tokens == 0 and sequence.num_prompt_top is not None
        for sequence in step.new_sequences
    )
    assert sum(length > 1 for length in lengths) == -(
        -(sum(lengths) - len(lengths)) // max(1, max_positions - 1)
    )
    assert step.num_new_blocks.tolist() == [-(-length // 16) for length in lengths]
    assert step.new_blocks.tolist() == list(range(sum(step.num_new_blocks.tolist())))


@pytest.mark.parametrize(
    ("max_context_len", "num_sequences"), [(1, 32), (400, 32), (2**13, 16), (2**16, 2), (2**17 + 5, 1)]
)
def test_longest_decode_looks_back_at_what_fits_its_tokens(max_context_len: int, num_sequences: int) -> None:
    step = longest_decode(
        max_step_sequences=32, max_context_len=max_context_len, vocab_size=50, block_size=16, num_blocks=33
    )
    assert [len(sequence.token_ids) for sequence in step.new_sequences] == [max_context_len] * num_sequences
    assert all(sequence.num_computed_tokens == max_context_len - 1 for sequence in step.new_sequences)
    assert step.num_tokens.tolist() == [1] * num_sequences
    assert step.num_new_blocks.sum() == len(step.new_blocks) == num_sequences * -(-max_context_len // 16)
    assert max(step.new_blocks) < 33
    # Nobody else holds the block that is written to.
    tables = step.new_blocks.reshape(num_sequences, -1)
    assert not set(tables[:, -1]) & set(tables[:, :-1].flat)
    assert len(set(tables[:, -1])) == num_sequences


def test_longest_decode_can_be_executed(engine: Engine) -> None:
    step = longest_decode(
        max_step_sequences=32, max_context_len=512, vocab_size=384, block_size=16, num_blocks=64
    )
    result = engine.step(step)
    assert not result.errors
    assert len(result.token_ids) == 32


# ---- what smaller steps cost


class Clock:
    """Executes nothing; takes `seconds` for each token of a step, and a fixed time beside."""

    def __init__(self, seconds: float, fixed: float = 0.0) -> None:
        self.seconds, self.fixed = seconds, fixed
        self.sizes: list[int] = []
        self.spent = 0.0

    def run(self, step: Step) -> StepResult:
        num_tokens = int(step.num_tokens.sum())
        self.sizes.append(num_tokens)
        seconds = self.fixed + self.seconds * num_tokens
        self.spent += seconds
        return StepResult(
            total_seconds=seconds, forward_seconds=0.75 * seconds, sample_seconds=0.25 * seconds
        )


def costs_by(clock: Clock, max_step_tokens: int, max_positions: int = 8192) -> tuple[tuple[int, float], ...]:
    step = largest_step(
        max_step_tokens=max_step_tokens,
        max_step_sequences=128,
        max_positions=max_positions,
        vocab_size=50,
        block_size=16,
    )
    return step_costs(
        clock.run,
        max_step_tokens=max_step_tokens,
        max_positions=max_positions,
        vocab_size=50,
        block_size=16,
        largest=Clock(clock.seconds, clock.fixed).run(step),
    )


@pytest.mark.parametrize(
    ("max_step_tokens", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (16, [1, 16]),
        (17, [1, 16, 17]),
        (300, [1, 16, 32, 64, 128, 256, 300]),
        (512, [1, 16, 32, 64, 128, 256, 512]),
    ],
)
def test_sizes_double_up_to_the_largest(max_step_tokens: int, sizes: list[int]) -> None:
    clock = Clock(1e-6, 1e-3)
    costs = costs_by(clock, max_step_tokens)
    assert [size for size, _ in costs] == sizes
    assert [seconds for _, seconds in costs] == pytest.approx([1e-3 + 1e-6 * size for size in sizes])
    assert all(clock.sizes.count(size) == 4 for size in sizes if size > 1)


def test_first_run_of_a_size_does_not_count() -> None:
    clock = Clock(0.0, 0.02)

    def run(step: Step) -> StepResult:
        clock.fixed = 0.01 if clock.sizes and clock.sizes[-1] == step.num_tokens.sum() else 0.02
        return clock.run(step)

    step = largest_step(
        max_step_tokens=32, max_step_sequences=4, max_positions=64, vocab_size=50, block_size=16
    )
    costs = step_costs(
        run, max_step_tokens=32, max_positions=64, vocab_size=50, block_size=16, largest=clock.run(step)
    )
    assert costs == ((1, 0.01), (16, 0.01), (32, 0.01))


@pytest.mark.parametrize("seconds_per_token", [1e-5, 1e-3, 2e-3, 0.1])
def test_slow_steps_are_measured_less_often(seconds_per_token: float) -> None:
    clock = Clock(seconds_per_token, 30 * seconds_per_token)
    costs = costs_by(clock, 4096)
    assert [size for size, _ in costs[:2]] == [1, 16]
    assert costs[-1][0] == 4096
    # The largest step was measured before; what is made up of it is what it took, but for the sampling.
    assert costs[-1][1] == pytest.approx(seconds_per_token * 4126, rel=0.3)
    for size, seconds in costs[:-1]:
        assert seconds == pytest.approx(seconds_per_token * (size + 30))
    unavoidable = seconds_per_token * (2 * 31 + 46)
    assert clock.spent <= max(1.6, unavoidable)


def test_costs_are_measured_on_what_can_be_executed(loaded: LoadedModel) -> None:
    engine = Engine(loaded, kv_cache_memory=0.01, cuda_memory_fraction=0.9)
    # Longer than the 512 positions of the model.
    capacity = engine.warm_up(max_step_tokens=600, max_step_sequences=4, max_total_tokens=0)
    assert [size for size, _ in capacity.step_costs] == [1, 16, 32, 64, 128, 256, 512, 600]
    assert all(seconds > 0 for _, seconds in capacity.step_costs)
    capacity = engine.warm_up(max_step_tokens=600, max_step_sequences=1, max_total_tokens=0)
    assert capacity.step_costs[-1][0] == 512


# ---- how many blocks fit


def test_blocks_are_capped_by_the_tokens_that_are_wanted() -> None:
    common = {"available_bytes": 1000, "block_bytes": 10, "block_size": 16}
    assert num_blocks_for(**common, max_total_tokens=0) == 100
    assert num_blocks_for(**common, max_total_tokens=161) == 11
    assert num_blocks_for(**common, max_total_tokens=10**9) == 100


def test_no_block_is_refused() -> None:
    with pytest.raises(OutOfMemory, match=r"may take 0\.0 MiB, but one block of 16 tokens takes 2\.0 MiB"):
        num_blocks_for(available_bytes=5000, block_bytes=2 * 2**20, block_size=16, max_total_tokens=0)
