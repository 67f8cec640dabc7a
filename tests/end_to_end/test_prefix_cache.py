"""What was computed once is not computed again: later turns, bursts, siblings; not for strangers."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.end_to_end.server import Server, generate, running

BLOCK_SIZE = 16


def num_computed(server: Server) -> float:
    """Tokens that steps have computed since the start."""
    return server.metrics()["headrace_step_tokens_sum"]


def settled(server: Server, ask: Callable[[], list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], float]:
    """Answers, and the tokens that were computed for them."""
    before = num_computed(server)
    answers = ask()
    server.wait_metrics({'headrace_requests{state="running"}': 0, "headrace_shard_sequences": 0})
    return answers, num_computed(server) - before


def complete(server: Server, prompt: list[int], num_tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": "tgi", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.client.post("/v1/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt_of(length: int, salt: int) -> list[int]:
    return [10 + (salt * 31 + position * position * 7 + position) % 300 for position in range(length)]


def test_a_second_turn_computes_only_its_new_tokens(server: Server) -> None:
    turns = [{"role": "user", "content": "a wheel and a stone " * 40}]

    def chat() -> list[dict[str, Any]]:
        body = {"model": "tgi", "messages": turns, "max_tokens": 64, "temperature": 0, "logprobs": True}
        answer = server.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return [dict(answer.json())]

    (first,), cost_of_first = settled(server, chat)
    num_first = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    assert cost_of_first >= num_first
    turns += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "and on?"},
    ]
    (second,), cost_of_second = settled(server, chat)
    # Whole blocks of the first turn, its answer included as far as it reads back as the same tokens.
    assert cached(second) >= num_first // BLOCK_SIZE * BLOCK_SIZE
    num_new = second["usage"]["prompt_tokens"] - cached(second)
    assert cost_of_second <= num_new + second["usage"]["completion_tokens"] + 1


def test_generated_tokens_are_kept_too(server: Server) -> None:
    first = generate(server, "the wheel turns the stone " * 8, max_new_tokens=80, decoder_input_details=True)
    details = first["details"]
    ids = [token["id"] for part in ("prefill", "tokens") for token in details[part]]
    second = complete(server, [*ids, 20, 21, 22], 4)
    # The last generated token has not been computed; all before it has.
    assert cached(second) == (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_four_at_once_compute_their_new_prefix_once(server: Server) -> None:
    prefix = prompt_of(1600, salt=2)
    tails = [prompt_of(30, salt=3 + number) for number in range(4)]

    def ask() -> list[dict[str, Any]]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda tail: complete(server, prefix + tail, 1), tails))

    answers, cost = settled(server, ask)
    assert sorted(cached(answer) for answer in answers) == [0, 1600, 1600, 1600]
    assert cost == 1600 + 4 * 30


def test_siblings_compute_their_prompt_once(server: Server) -> None:
    prompt = prompt_of(201, salt=8)

    def ask() -> list[dict[str, Any]]:
        return [complete(server, prompt, 20, n=4, temperature=1, seed=1)]

    (answer,), cost = settled(server, ask)
    assert len(answer["choices"]) == 4
    # One computes all of it, the others copy the block that the prompt ends in and compute its last token.
    assert cost == 201 + 3 + 4 * 19


def test_siblings_sample_as_they_do_alone(server: Server) -> None:
    prompt = prompt_of(75, salt=9)
    together = complete(server, prompt, 40, n=3, temperature=1, seed=7)["choices"]
    for number, choice in enumerate(together):
        alone = complete(server, prompt, 40, temperature=1, seed=7 + number, cache_salt=f"alone {number}")
        assert choice["text"] == alone["choices"][0]["text"]


def test_a_salt_keeps_strangers_apart(server: Server) -> None:
    prompt = prompt_of(160, salt=10)
    assert [cached(complete(server, prompt, 2, cache_salt=salt)) for salt in "abba"] == [0, 0, 144, 144]
    assert cached(complete(server, prompt, 2)) == 0


def test_without_prefix_caching_nothing_is_shared(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ["--model-id", str(tiny_folder), "--dtype", "float32", "--no-prefix-caching"]
    with running(tmp_path, *arguments) as server:
        prompt = prompt_of(160, salt=11)
        first, second = (complete(server, prompt, 20) for _ in range(2))
        found = server.wait_metrics({'headrace_kv_blocks{state="used"}': 0})
    assert (cached(first), cached(second)) == (0, 0)
    assert first["choices"] == second["choices"]
    assert found['headrace_kv_blocks{state="cached"}'] == 0


def test_what_is_allocated_is_used(server: Server) -> None:
    """Of the slots of 32 mixed requests that run, less than 4 % are empty."""
    rng = random.Random(4)
    prompts = [prompt_of(rng.choice((100, 200, 400, 800)), salt=20 + number) for number in range(32)]
    shares: list[float] = []
    with ThreadPoolExecutor(32) as pool:
        running_ones = [pool.submit(complete, server, prompt, 300) for prompt in prompts]
        while not all(future.done() for future in running_ones):
            found = server.metrics()
            if found['headrace_requests{state="running"}'] == 32:
                shares.append(found["headrace_kv_waste_ratio"])
        assert all(future.result() for future in running_ones)
    assert shares, "the requests never ran all at once"
    assert max(shares) < 0.04
