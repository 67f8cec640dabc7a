"""A KV cache for a quarter of the load: some are preempted, and all end with the texts of a large cache."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.end_to_end.server import Server, generate, running
from tests.end_to_end.test_load import mixed_requests

NUM_REQUESTS = 64


def answers_at_once(server: Server, requests: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Answers to requests of which the server knows all before it computes any.

    Else, on a machine that computes faster than clients send, the first would be done before the last come.
    """
    shard = server.child("headrace_shard")
    with ThreadPoolExecutor(len(requests)) as pool:
        shard.send_signal(signal.SIGSTOP)
        try:
            futures = [pool.submit(generate, server, prompt, **given) for prompt, given in requests]
            server.wait_for(
                lambda found: (
                    sum(v for k, v in found.items() if k.startswith("headrace_requests{")) == len(requests)
                ),
                f"{len(requests)} requests waiting or running",
            )
        finally:
            shard.send_signal(signal.SIGCONT)
        return [future.result() for future in futures]


def test_sixty_four_requests_end_as_with_a_large_cache(
    server: Server, tiny_folder: Path, tmp_path: Path
) -> None:
    # Answers long enough that they do not leave before the others have grown.
    requests = [
        (prompt, {**parameters, "max_new_tokens": 60 + 2 * number})
        for number, (prompt, parameters) in enumerate(mixed_requests(NUM_REQUESTS))
    ]
    expected = answers_at_once(server, requests)
    load = sum(
        len(answer["details"]["prefill"]) + answer["details"]["generated_tokens"]
        for answer in (generate(server, p, **q, decoder_input_details=True) for p, q in requests)
    )
    small = ["--max-batch-total-tokens", str(load // 4), "--max-total-tokens", str(load // 4)]
    arguments = ["--model-id", str(tiny_folder), "--dtype", "float32", *small]
    with running(tmp_path, *arguments) as narrow:
        found = answers_at_once(narrow, requests)
        metrics = narrow.wait_metrics({'headrace_kv_blocks{state="used"}': 0, "headrace_shard_sequences": 0})
    assert [answer["generated_text"] for answer in found] == [a["generated_text"] for a in expected]
    assert metrics["headrace_preemptions"] > 0
