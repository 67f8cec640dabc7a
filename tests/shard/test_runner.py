"""Hidden states, logits and times of a runner on a real tiny model."""

from pathlib import Path

import pytest
import torch
from headrace_shard.kv_cache import KVCache
from headrace_shard.loading import LoadedModel
from headrace_shard.runner import Runner, Stopwatch

from tests.shard.small_router import load_tiny, transformers_logprobs
from tests.shard.stepping import Paged
from tests.tiny import make_checkpoint

PROMPT = [5, 200, 17, 33, 64, 9]


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    loaded = load_tiny(make_checkpoint(tmp_path), dtype="bfloat16")
    cache = KVCache(loaded.config, 4, loaded.backend, loaded.dtype, loaded.device)
    loaded.model.bind_cache(cache)
    return loaded


def test_only_wanted_rows_come_back_and_logits_are_float32(loaded: LoadedModel, tmp_path: Path) -> None:
    paged = Paged(block_size=16, num_blocks=4)
    paged.add("a", PROMPT)
    runner = Runner(loaded.model)
    with torch.inference_mode():
        hidden, _ = runner.forward(paged.inputs({"a": len(PROMPT)}))
        logits = runner.logits(hidden)
    assert hidden.shape == (1, loaded.config.hidden_size)
    assert logits.shape == (1, loaded.config.vocab_size)
    assert logits.dtype == torch.float32
    expected = transformers_logprobs(tmp_path, PROMPT)[-1:]
    torch.testing.assert_close(logits.log_softmax(-1), expected, atol=0.2, rtol=0.05)


def test_stopwatch_gives_one_length_between_two_marks() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(4):
        watch.mark()
    assert len(watch.seconds()) == 3
    assert all(seconds >= 0 for seconds in watch.seconds())
