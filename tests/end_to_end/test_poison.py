"""A request whose handling breaks every step it is in fails alone; its neighbours' texts do not change."""

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.poisoned_shard import POISON_IDS
from tests.end_to_end.server import Server, running

NEIGHBOURS = 12


@pytest.fixture(scope="module")
def poisoned(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A router before a shard with the fault."""
    folder = tmp_path_factory.mktemp("poisoned")
    address = f"unix://{folder}/shard"
    log = folder / "shard.log"
    command = [sys.executable, "-m", "tests.end_to_end.poisoned_shard"]
    arguments = ["--model-path", str(tiny_folder), "--listen", address, "--dtype", "float32"]
    with log.open("wb") as output:
        shard = subprocess.Popen([*command, *arguments], stdout=output, stderr=output, env=dict(os.environ))
    try:
        router = ["--shard", address, "--tokenizer-name", str(tiny_folder)]
        with running(folder, *router, module="headrace_router") as server:
            yield server
    finally:
        shard.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            shard.wait(20)
        shard.kill()


def completion(server: Server, prompt: list[int], num_tokens: int) -> httpx.Response:
    body = {"model": "tgi", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    # No answer may hold the poison.
    bias = {"logit_bias": {str(POISON_IDS[0]): -100}}
    return server.client.post("/v1/completions", json=body | bias)


def test_a_poisoned_request_fails_alone(poisoned: Server) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(10, 250) for _ in range(rng.choice((3, 20, 70)))] for _ in range(NEIGHBOURS)]
    alone = [completion(poisoned, prompt, 60).json()["choices"][0]["text"] for prompt in prompts]
    poison = [*prompts[0], *POISON_IDS, *prompts[1]]
    with ThreadPoolExecutor(NEIGHBOURS + 2) as pool:
        together = [pool.submit(completion, poisoned, prompt, 60) for prompt in prompts]
        poisoned.wait_for(lambda found: found['headrace_requests{state="running"}'] > 3, "running neighbours")
        failures = [pool.submit(completion, poisoned, poison, 60) for _ in range(2)]
        answers = [future.result() for future in together]
        failed = [future.result() for future in failures]
    assert [answer.status_code for answer in failed] == [500, 500]
    assert "the injected fault" in failed[0].json()["error"]["message"]
    assert [answer.status_code for answer in answers] == [200] * NEIGHBOURS
    assert [answer.json()["choices"][0]["text"] for answer in answers] == alone
    poisoned.wait_metrics({'headrace_kv_blocks{state="used"}': 0, "headrace_shard_sequences": 0})


def test_the_server_goes_on_afterwards(poisoned: Server) -> None:
    assert completion(poisoned, [*POISON_IDS, 20], 4).status_code == 500
    assert completion(poisoned, [20, 21], 4).status_code == 200
