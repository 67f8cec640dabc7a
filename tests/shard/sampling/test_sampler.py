"""What a caller of sampling relies on: seeds, independence, exactness of extremes, rows that fail alone."""

import pytest
import torch
from headrace_shard.sampling import groups, processors
from headrace_shard.sampling.logprobs import chosen_and_top
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.sampling.sampler import NO_TOKEN, SamplingBatch, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.shard.sampling.rows import MANY_KINDS, any_params, generate, random_logits, sequence
from tests.shard.sampling.test_draw import chi_square


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([1, 2, 40, 700, 5003]), st.data())
def test_a_row_is_the_same_alone_and_in_any_batch(vocab_size: int, data: st.DataObject) -> None:
    params = data.draw(st.lists(any_params(vocab_size), min_size=2, max_size=6))
    num_steps = data.draw(st.integers(1, 4))
    spread = data.draw(st.sampled_from([0.0, 0.01, 3.0]))
    is_coarse = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 1000))
    steps = [
        random_logits(len(params), vocab_size, seed=seed + step, spread=spread, is_coarse=is_coarse)
        for step in range(num_steps)
    ]
    prompts = [[(row * 7 + i) % vocab_size for i in range(1 + row * 3)] for row in range(len(params))]
    together = generate(
        [sequence(p, vocab_size, prompt) for p, prompt in zip(params, prompts, strict=True)], steps
    )
    for row, (one, prompt) in enumerate(zip(params, prompts, strict=True)):
        alone = generate([sequence(one, vocab_size, prompt)], [logits[row : row + 1] for logits in steps])
        assert alone[0] == together[row]


@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_large_rows_are_the_same_with_any_number_of_threads(num_rows: int) -> None:
    steps = [random_logits(8, 50_257, seed=step) for step in range(3)]
    together = generate([sequence(p, 50_257) for p in MANY_KINDS], steps)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for row, params in enumerate(MANY_KINDS):
            repeated = [logits[row : row + 1].expand(num_rows, -1).contiguous() for logits in steps]
            again = generate([sequence(params, 50_257) for _ in range(num_rows)], repeated)
            assert again == [together[row]] * num_rows
    finally:
        torch.set_num_threads(num_threads)


@settings(max_examples=50, deadline=None)
@given(st.lists(any_params(300), min_size=1, max_size=4), st.integers(0, 1000), st.integers(1, 5))
def test_a_sequence_rebuilt_after_a_preemption_goes_on_unchanged(
    params: list[SamplingParams], seed: int, num_before: int
) -> None:
    steps = [random_logits(len(params), 300, seed=seed + step) for step in range(num_before + 4)]
    prompt = [5, 6, 7, 5]
    whole = generate([sequence(p, 300, prompt) for p in params], steps)
    rebuilt = [sequence(p, 300, prompt, tokens[:num_before]) for p, tokens in zip(params, whole, strict=True)]
    assert generate(rebuilt, steps[num_before:]) == [tokens[num_before:] for tokens in whole]


def test_rows_may_come_and_go() -> None:
    steps = [random_logits(len(MANY_KINDS), 5000, seed=step) for step in range(60)]
    whole = generate([sequence(p, 5000, [1, 2]) for p in MANY_KINDS], steps)
    sequences = [sequence(p, 5000, [1, 2]) for p in MANY_KINDS]
    changing: list[list[int]] = [[] for _ in MANY_KINDS]
    done = [0] * len(MANY_KINDS)
    orders = [list(range(8)), [3, 1, 6], [7, 6, 0, 2], [5], [6, 4, 3]]
    for turn in range(20):
        rows = orders[turn % len(orders)]
        batch = SamplingBatch([sequences[row] for row in rows])
        for _ in range(2):
            logits = torch.stack([steps[done[row]][row] for row in rows])
            token_ids = sample(logits, batch)
            batch.observe(token_ids)
            for row, token_id in zip(rows, token_ids.tolist(), strict=True):
                changing[row].append(token_id)
                done[row] += 1
    for row, tokens in enumerate(changing):
        assert tokens == whole[row][: len(tokens)]
        assert sequences[row].num_generated == len(tokens)


def test_sampling_again_before_observing_gives_the_same() -> None:
    batch = SamplingBatch([sequence(p, 5000) for p in MANY_KINDS])
    logits = random_logits(8, 5000)
    before = logits.clone()
    assert torch.equal(sample(logits, batch), sample(logits, batch))
    assert torch.equal(logits, before)


def test_seeds_matter() -> None:
    steps = [random_logits(40, 1000, spread=0.1)]
    by_seed = generate([sequence(SamplingParams(seed=seed), 1000) for seed in range(40)], [steps[0]])
    assert len({tokens[0] for tokens in by_seed}) > 30


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("vocab_size", [24, 5000])
def test_tokens_follow_the_narrowed_distribution(params: dict[str, float], vocab_size: int) -> None:
    logits = torch.full((1, vocab_size), -40.0)
    logits[0, -24:] = random_logits(1, 24, seed=3, spread=1.5)[0]
    logits[0, 7] = 2.0
    made = SamplingParams(**params)  # type: ignore[arg-type]
    num_rows = 4000
    sequences = [
        sequence(SamplingParams(seed=seed, **params), vocab_size)  # type: ignore[arg-type]
        for seed in range(num_rows)
    ]
    if vocab_size > 1000:
        sequences = sequences[:500]
    num_steps = 4000 // len(sequences)
    drawn = torch.tensor(generate(sequences, [logits.expand(len(sequences), -1)] * num_steps)).flatten()
    truncation = groups.Truncation.of([made], vocab_size, torch.device("cpu"))
    scaled = truncation.narrow(truncation.scale(logits, logits.amax(1)))
    probabilities = scaled[0].to(torch.float64).softmax(0)
    counts = torch.bincount(drawn, minlength=vocab_size)
    assert (counts[probabilities == 0] == 0).all()
    kept = int((probabilities > 1e-9).sum())
    assert chi_square(counts, probabilities) <= kept + 4 * (2 * kept) ** 0.5


def test_extreme_temperatures() -> None:
    logits = random_logits(1, 3000)
    best = int(logits.argmax())
    cold = [sequence(SamplingParams(temperature=1e-6, seed=seed), 3000) for seed in range(20)]
    assert generate(cold, [logits.expand(20, -1)]) == [[best]] * 20
    for temperature in (1e-40, 1e-300):
        colder = SamplingParams(temperature=temperature, top_p=0.9)
        assert generate([sequence(colder, 3000)], [logits]) == [[best]]
    hot = [sequence(SamplingParams(temperature=100, seed=seed), 3000) for seed in range(50)]
    assert len({tokens[0] for tokens in generate(hot, [logits.expand(50, -1)])}) > 40


def test_only_the_top_token_of_equals_is_the_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(top_k=1, seed=9),
        SamplingParams(top_p=0, seed=9),
    ):
        assert generate([sequence(params, 4)], [logits] * 5) == [[1] * 5]


def test_a_vocabulary_of_one() -> None:
    steps = [torch.tensor([[0.5]]).expand(len(MANY_KINDS), 1).contiguous()] * 3
    params = [
        SamplingParams(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, typical_p=p.typical_p)
        for p in MANY_KINDS
    ]
    assert generate([sequence(p, 1) for p in params], steps) == [[0, 0, 0]] * len(params)


@pytest.mark.parametrize("vocab_size", [24, 6000])
def test_impossible_tokens_are_never_chosen(vocab_size: int) -> None:
    for seed in range(5):
        logits = random_logits(len(MANY_KINDS), vocab_size, seed=seed)
        logits = torch.where(logits > 1, -torch.inf, logits)
        chosen = generate([sequence(p, vocab_size) for p in MANY_KINDS], [logits] * 3)
        assert (logits.gather(1, torch.tensor(chosen)) > -torch.inf).all()


def _spoil(logits: Tensor, kind: str) -> None:
    if kind == "all nan":
        logits[:] = torch.nan
    elif kind == "one nan":
        logits[-1] = -torch.nan
    elif kind == "infinite":
        logits[2] = torch.inf
    else:
        logits[:] = -torch.inf


@pytest.mark.parametrize("kind", ["all nan", "one nan", "infinite", "all impossible"])
@pytest.mark.parametrize("vocab_size", [24, 6000])
def test_a_row_without_a_distribution_fails_alone(kind: str, vocab_size: int) -> None:
    healthy = [random_logits(8, vocab_size, seed=step) for step in range(3)]
    expected = generate([sequence(p, vocab_size) for p in MANY_KINDS], healthy)
    for row in range(len(MANY_KINDS)):
        steps = [logits.clone() for logits in healthy]
        _spoil(steps[1][row], kind)
        chosen = generate([sequence(p, vocab_size) for p in MANY_KINDS], steps)
        assert chosen[row][1] == NO_TOKEN
        assert chosen[:row] + chosen[row + 1 :] == expected[:row] + expected[row + 1 :]


@pytest.mark.parametrize("kind", ["all nan", "one nan", "infinite", "all impossible"])
def test_a_batch_of_nothing_but_failures(kind: str) -> None:
    for params in MANY_KINDS:
        logits = random_logits(1, 6000)
        _spoil(logits[0], kind)
        assert generate([sequence(params, 6000)], [logits]) == [[NO_TOKEN]]


def test_suppressing_every_token_is_a_failure() -> None:
    params = SamplingParams(min_new_tokens=1, suppressed_token_ids=(0, 1, 2))
    logits = torch.zeros(1, 3)
    chosen = generate([sequence(params, 3)], [logits, logits])
    assert chosen[0][0] == NO_TOKEN
    assert chosen[0][1] in (0, 1, 2)


def test_a_gpu_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: whatever would have to be read from a device raises."""
    monkeypatch.setattr(groups, "can_be_asked", lambda device: False)
    monkeypatch.setattr(processors, "can_be_asked", lambda device: False)
    batch = SamplingBatch([sequence(p, 50_257, [1, 2]) for p in MANY_KINDS])
    with FakeTensorMode(allow_non_fake_inputs=True):
        for _ in range(20):
            logits = torch.empty(len(MANY_KINDS), 50_257)
            token_ids = sample(logits, batch)
            batch.observe(token_ids)
            chosen_and_top(logits, token_ids, 5)
    assert batch.num_rows == len(MANY_KINDS)


def test_the_ways_of_a_gpu_choose_like_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [random_logits(8, 6000, seed=step) for step in range(5)]
    expected = generate([sequence(p, 6000) for p in MANY_KINDS], steps)
    monkeypatch.setattr(groups, "can_be_asked", lambda device: False)
    monkeypatch.setattr(processors, "can_be_asked", lambda device: False)
    assert generate([sequence(p, 6000) for p in MANY_KINDS], steps) == expected
