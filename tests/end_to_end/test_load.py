"""Many requests at once: nobody's text depends on company, and short ones do not wait for long ones."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.end_to_end.server import Server, generate

TEXT = "the sun hello there a small river runs over stones and every day people walk along it to work"
WORDS = TEXT.split()


def mixed_requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Prompts of 1 to 300 words, answers of 1 to 80 tokens; every third one sampled with a seed."""
    rng = random.Random(5)
    requests: list[tuple[str, dict[str, Any]]] = []
    for index in range(count):
        prompt = " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 3, 10, 40, 120, 300))))
        parameters: dict[str, Any] = {"max_new_tokens": rng.randint(1, 80)}
        if index % 3 == 0:
            parameters |= {"do_sample": True, "seed": index, "temperature": 1.1, "top_p": 0.95, "top_k": 50}
        elif index % 3 == 1:
            parameters |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
        requests.append((prompt, parameters))
    return requests


def test_sixty_four_at_once_give_the_texts_they_give_alone(server: Server) -> None:
    requests = mixed_requests(64)
    alone = [generate(server, prompt, **parameters) for prompt, parameters in requests]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda request: generate(server, request[0], **request[1]), requests))
    for before, after in zip(alone, together, strict=True):
        assert after["generated_text"] == before["generated_text"]
        assert [t["id"] for t in after["details"]["tokens"]] == [t["id"] for t in before["details"]["tokens"]]
    server.wait_metrics({'headrace_kv_blocks{state="used"}': 0, "headrace_shard_sequences": 0})


def test_short_request_overtakes_long_ones(server: Server) -> None:
    def timed(prompt: str, num_tokens: int) -> float:
        body = {"model": "tgi", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        return time.monotonic()

    with ThreadPoolExecutor(8) as pool:
        before = server.metrics()["tgi_request_success"]
        long_ones = [pool.submit(timed, " ".join(WORDS * 20), 400) for _ in range(7)]
        server.wait_metrics({'headrace_requests{state="running"}': 7})
        short_end = timed("hello", 4)
        assert server.metrics()["tgi_request_success"] - before == 1
        assert all(short_end < future.result() for future in long_ones)
