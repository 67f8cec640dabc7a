"""A CUDA device gives what the CPU gives: steps of a tiny model, sampling, and a whole server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from headrace_shard.config import ShardSettings
from headrace_shard.engine import Engine
from headrace_shard.loading import load
from headrace_shard.sampling.params import SamplingParams
from headrace_shard.sampling.sampler import SamplingBatch, sample
from headrace_shard.sampling.state import PenaltyTable, SequenceSampling

from tests.end_to_end.server import generate, running
from tests.shard.small_router import GREEDY, LONG, SHORT, VARIED, SmallRouter, execute_on
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cuda") / "tiny")


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """float32 products in float32, so that both devices agree."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def router_on(device: str, folder: Path, dtype: str = "float32") -> SmallRouter:
    settings = ShardSettings(dtype=dtype, device=device, attention="sdpa", num_threads=1)
    engine = Engine(load(folder, settings), kv_cache_memory=0.25, cuda_memory_fraction=0.5)
    engine.warm_up(max_step_tokens=128, max_step_sequences=32, max_total_tokens=64 * 16)
    return SmallRouter(execute_on(engine))


@pytest.mark.parametrize("chunk", [7, 128])
def test_steps_give_what_the_cpu_gives(tiny: Path, chunk: int) -> None:
    outputs = []
    for device in ("cpu", "cuda"):
        router = router_on(device, tiny)
        router.add(1, LONG, GREEDY)
        router.add(2, SHORT, VARIED)
        outputs.append(router.run(16, chunk=chunk))
    assert outputs[0] == outputs[1]


def test_shared_and_copied_blocks_give_what_the_cpu_gives(tiny: Path) -> None:
    outputs = []
    for device in ("cpu", "cuda"):
        router = router_on(device, tiny)
        router.add(1, LONG, GREEDY)
        router.run(1)
        for number, parameters in ((2, GREEDY), (3, VARIED)):
            router.add(number, LONG, parameters)
            router.share(number, of=1, num_computed=len(LONG) - 1)
        outputs.append(router.run(16))
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == outputs[0][2]


def test_cost_of_steps_rises_with_their_size(tiny: Path) -> None:
    settings = ShardSettings(dtype="float32", device="cuda", attention="sdpa", num_threads=1)
    engine = Engine(load(tiny, settings), kv_cache_memory=None, cuda_memory_fraction=0.5)
    capacity = engine.warm_up(max_step_tokens=300, max_step_sequences=64, max_total_tokens=0)
    assert [size for size, _ in capacity.step_costs] == [1, 16, 32, 64, 128, 256, 300]
    assert all(seconds > 0 for _, seconds in capacity.step_costs)
    assert capacity.num_blocks == capacity.available_bytes // capacity.block_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(tiny: Path, dtype: str) -> None:
    router = router_on("cuda", tiny, dtype)
    router.add(1, LONG, VARIED)
    assert len(router.run(8)[1]) == 8


def test_sampling_gives_what_the_cpu_gives() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)) * 3
    parameters = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=20, seed=1),
        SamplingParams(temperature=1.3, top_p=0.7, seed=2),
        SamplingParams(temperature=1.0, min_p=0.05, seed=3),
        SamplingParams(temperature=1.0, typical_p=0.6, seed=4),
        SamplingParams(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5, seed=5),
    ]
    drawn = []
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        table = PenaltyTable(5000, device)
        states = [SequenceSampling(params, [1, 2, 3], [4, 4], table) for params in parameters]
        batch = SamplingBatch(states)
        ids = []
        for _ in range(5):
            chosen = sample(logits.to(device), batch)
            batch.observe(chosen)
            ids.append(chosen.tolist())
        drawn.append(ids)
    assert drawn[0] == drawn[1]


def test_a_server_on_the_gpu_answers_as_one_on_the_cpu(tiny: Path, tmp_path: Path) -> None:
    texts = []
    for device in ("cpu", "cuda"):
        arguments = ["--model-id", str(tiny), "--dtype", "float32", "--device", device]
        with running(tmp_path, *arguments) as server:
            texts.append(generate(server, "hello there", max_new_tokens=40)["generated_text"])
    assert texts[0] == texts[1]
