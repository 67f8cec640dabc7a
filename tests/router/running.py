"""A router on a real socket, with a scripted shard behind real gRPC, in a thread of its own."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
from headrace_router.__main__ import bind, create_server, create_service
from headrace_router.app import create_app
from headrace_router.config import RouterConfig

from tests.fake_shard import FakeShard, scripted, serving
from tests.tiny import make_tokenizer

T = TypeVar("T")

WAIT_SECONDS = 20.0
"""A bound, not an expectation."""

MODEL = "tiny"
EOS = 2

CHAT = {"model": "tgi", "messages": [{"role": "user", "content": "Say something."}]}


class RunningRouter:
    """The whole router in this process. `shard` may be turned while it runs."""

    def __init__(self, folder: Path, *, starts_shard: bool = True, **settings: Any) -> None:
        self.address = f"unix://{folder}/shard-{id(self)}"
        self.shard = FakeShard()
        self._starts_shard = starts_shard
        defaults: dict[str, Any] = {"model_id": MODEL, "keep_alive_seconds": 60.0}
        self.config = RouterConfig(shard=self.address, tokenizer_name=str(folder), **(defaults | settings))
        self.loop = asyncio.new_event_loop()
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._main)

    # ---- its thread

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self.service = create_service(self.config)
        bound = bind("127.0.0.1", 0)
        self.port: int = bound.getsockname()[1]
        server = create_server(create_app(self.service))
        async with contextlib.AsyncExitStack() as stack:
            if self._starts_shard:
                await stack.enter_async_context(serving(self.shard, self.address))
            await self.service.engine.start()
            task = asyncio.create_task(server.serve(sockets=[bound]))
            if self._starts_shard:
                await self.service.engine.settled()
            self._is_started.set()
            await self._stop.wait()
            await self.service.engine.stop()
            server.should_exit = True
            await task

    # ---- the test's thread

    def __enter__(self) -> "RunningRouter":
        self._thread.start()
        assert self._is_started.wait(WAIT_SECONDS)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_SECONDS, trust_env=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.do(self.shard.gate.set)
        self.do(self._stop.set)
        self._thread.join()

    @contextlib.contextmanager
    def shard_at_work(self, shard: FakeShard) -> Iterator[FakeShard]:
        """Serves a shard of the test's own, for a router that was made without; lost at the end."""
        server = serving(shard, self.address)
        asyncio.run_coroutine_threadsafe(server.__aenter__(), self.loop).result(WAIT_SECONDS)
        try:
            yield shard
        finally:
            end = server.__aexit__(None, None, None)
            asyncio.run_coroutine_threadsafe(end, self.loop).result(WAIT_SECONDS)

    def do(self, call: Callable[[], T]) -> T:
        """Runs a function in the router's loop."""

        async def run() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_SECONDS)

    def says(self, text: str, *, ends: bool = True) -> None:
        """From now on every answer is this text, then EOS; or this text over and over."""
        ids = self.service.tokenizer.encode(text, add_special_tokens=False).ids
        self.shard.answer = scripted([*ids, EOS] if ends else ids)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def metric(self, name: str) -> float:
        """A sample of /metrics; `name` includes its labels."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.removeprefix(f"{name} "))
        raise AssertionError(f"no sample {name}")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until the condition, evaluated in the router's loop, holds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.do(condition):
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.002)

    def stream(self, path: str, body: Any) -> list[str]:
        """The payloads of all events of a stream, `[DONE]` among them."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream"
        *blocks, rest = response.text.split("\n\n")
        assert rest == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
        return [block.removeprefix("data: ") for block in blocks]

    def events(self, path: str, body: Any, *, is_done: bool) -> list[Any]:
        """The events of a stream, decoded; `[DONE]` must come last, or not at all."""
        payloads = self.stream(path, body)
        assert ("[DONE]" in payloads) == is_done
        if is_done:
            assert payloads.pop() == "[DONE]"
        return [json.loads(payload) for payload in payloads]


@contextlib.contextmanager
def raw_request(
    router: RunningRouter, path: str, body: Any, *, num_missing_bytes: int = 0
) -> Iterator[socket.socket]:
    """A POST written to a socket of our own, which the test may close or leave unread; the last bytes of
    its body may be left out."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", router.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(head.encode() + data[: len(data) - num_missing_bytes])
        yield connection


def tokenizer_folder(folder: Path) -> Path:
    """A folder that a router can be pointed at."""
    return make_tokenizer(folder)
