"""Three thousand requests, most of them left by their clients at a random moment, leave nothing behind."""

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.end_to_end.server import Server, running

NUM_REQUESTS = 3000
NUM_FIRST = 500
"""By then every pool, cache and buffer has had its load."""


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    rng = random.Random(number)
    prompt = [10 + rng.randrange(300) for _ in range(rng.choice((2, 20, 120, 400)))]
    if number % 3 == 0:
        prompt = [10 + position % 200 for position in range(160)] + prompt
    body: dict[str, Any] = {"model": "tgi", "prompt": prompt, "max_tokens": rng.randrange(1, 60)}
    if number % 4 == 0:
        body |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2}
    if number % 10 == 0:
        body |= {"n": 2, "logprobs": 2}
    if number % 20 == 0:
        body |= {"cache_salt": f"tenant {number}"}
    return "/v1/completions", body | {"stream": number % 2 == 0}


def ask_and_perhaps_leave(server: Server, number: int) -> bool:
    """Whether the whole answer was waited for."""
    path, body = body_of(number)
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        patience = random.Random(-number - 1).choice((0.0, 0.003, 0.02, 0.1, None, None))
        connection.settimeout(60 if patience is None else patience or 1e-6)
        with suppress(TimeoutError, BlockingIOError):
            while connection.recv(65536):
                pass
            return True
    return False


def memory(server: Server) -> dict[str, int]:
    """Resident bytes of each process, by its part."""
    names = {"headrace_router": "router", "headrace_shard": "shard", "headrace_launcher": "launcher"}
    found: dict[str, int] = {}
    for process in server.processes():
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline()[:4])
            name = next((name for word, name in names.items() if word in words), "other")
            found[name] = found.get(name, 0) + process.memory_info().rss
    return found


def test_memory_stays_where_it_was(tiny_folder: Path, tmp_path: Path) -> None:
    # A cache that has been filled to the brim after the first few hundred requests.
    arguments = ["--model-id", str(tiny_folder), "--max-batch-total-tokens", "16384"]
    with running(tmp_path, *arguments) as server, ThreadPoolExecutor(24) as pool:

        def ask(first: int, last: int) -> int:
            whole = sum(pool.map(lambda number: ask_and_perhaps_leave(server, number), range(first, last)))
            idle = {'headrace_requests{state="running"}': 0.0, 'headrace_requests{state="waiting"}': 0.0}
            server.wait_metrics(
                {**idle, 'headrace_kv_blocks{state="used"}': 0, "headrace_shard_sequences": 0}
            )
            return whole

        ask(0, NUM_FIRST)
        before = memory(server)
        num_whole = ask(NUM_FIRST, NUM_REQUESTS)
        after = memory(server)
        blocks = server.metrics()
    assert 0 < num_whole < NUM_REQUESTS - NUM_FIRST
    assert blocks['headrace_kv_blocks{state="free"}'] + blocks['headrace_kv_blocks{state="cached"}'] == 1024
    assert set(before) == set(after) >= {"router", "shard", "launcher"}
    for name in before:
        assert after[name] <= 1.05 * before[name], f"{name} grew from {before[name]} to {after[name]} bytes"
