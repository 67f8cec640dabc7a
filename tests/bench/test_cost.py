"""The model of a GPU agrees with published sizes and with arithmetic done by hand."""

import pytest

from bench.simulation.cost import DEVICES, MODELS, Gpu, Model, Overheads, Work
from bench.simulation.failure import Refused

NOTHING = Overheads(
    launch_seconds=0,
    step_seconds=0,
    reduce_seconds=0,
    wire_seconds=0,
    router_seconds=0,
    router_row_seconds=0,
)


@pytest.mark.parametrize(("name", "billions"), [("llama-3-8b", 8.03), ("llama-3-70b", 70.6)])
def test_weights_are_as_many_as_published(name: str, billions: float) -> None:
    assert MODELS[name].weight_bytes / 2 / 1e9 == pytest.approx(billions, rel=0.001)


@pytest.mark.parametrize(("name", "kibibytes"), [("llama-3-8b", 128), ("llama-3-70b", 320)])
def test_kv_of_a_token_follows_from_the_shape(name: str, kibibytes: int) -> None:
    assert MODELS[name].kv_bytes_per_token == kibibytes * 1024


def test_the_pool_is_what_memory_leaves() -> None:
    one, two = (Gpu(DEVICES["h200"], MODELS["llama-3-8b"], number) for number in (1, 2))
    per_block = MODELS["llama-3-8b"].kv_bytes_per_token * 16
    left = one.num_blocks * per_block + MODELS["llama-3-8b"].weight_bytes + 4 * 2**30
    assert 0 <= DEVICES["h200"].memory_bytes - left < per_block
    assert two.num_blocks > 2 * one.num_blocks, "the weights are there once"


def test_weights_that_do_not_fit_are_refused_with_a_cure() -> None:
    with pytest.raises(Refused, match=r"llama-3-70b has 141 GB .* 1 x h100 .* raise --tensor-parallel"):
        Gpu(DEVICES["h100"], MODELS["llama-3-70b"])


def test_a_decode_takes_as_long_as_reading_weights_and_kv() -> None:
    model, device = MODELS["llama-3-8b"], DEVICES["h100"]
    gpu = Gpu(device, model, overheads=NOTHING)
    work = Work(num_rows=8, num_tokens=8, num_samples=8, decode_context=8 * 1000)
    num_bytes = 2 * (model.linear_params + model.head_params) + 8000 * model.kv_bytes_per_token
    assert gpu.seconds(work) == pytest.approx(num_bytes / (0.8 * device.bytes_per_second))


def test_a_prompt_takes_as_long_as_its_arithmetic() -> None:
    model, device = MODELS["llama-3-8b"], DEVICES["h100"]
    gpu = Gpu(device, model, overheads=NOTHING)
    work = Work(num_rows=1, num_tokens=4096)
    work.add_chunk(0, 4096)
    linear = 2 * model.linear_params * 4096 / (0.6 * device.flops_per_second)
    attention = 4 * 32 * 32 * 128 * (4096 * 4097 / 2) / (0.4 * device.flops_per_second)
    assert gpu.seconds(work) == pytest.approx(linear + attention)
    assert gpu.flops(work) == 2 * model.linear_params * 4096 + 4 * 32 * 32 * 128 * 4096 * 4097 // 2


def test_chunks_have_as_many_pairs_as_the_whole() -> None:
    whole, parts = Work(), Work()
    whole.add_chunk(0, 1000)
    for start, num_tokens in ((0, 300), (300, 1), (301, 699)):
        parts.add_chunk(start, num_tokens)
    assert parts.prefill_pairs == whole.prefill_pairs


def test_more_devices_are_faster_though_they_talk() -> None:
    model: Model = MODELS["llama-3-70b"]
    work = Work(num_rows=1, num_tokens=2048, num_samples=1)
    work.add_chunk(0, 2048)
    four, eight = (Gpu(DEVICES["h100"], model, number).seconds(work) for number in (4, 8))
    assert four / 2 < eight < four


def test_step_costs_rise_from_one_decode_to_the_largest_step() -> None:
    costs = Gpu(DEVICES["h100"], MODELS["llama-3-8b"]).step_costs(3000)
    assert costs[0][0] == 1 and costs[-1][0] == 3000
    assert list(costs) == sorted(costs)
    assert [seconds for _, seconds in costs] == sorted(seconds for _, seconds in costs)


def test_a_step_of_one_token_is_all_that_can_be_measured() -> None:
    costs = Gpu(DEVICES["h100"], MODELS["llama-3-8b"]).step_costs(1)
    assert [num_tokens for num_tokens, _ in costs] == [1]
