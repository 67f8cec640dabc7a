"""Server-sent events: framing, keep-alive comments, when the stream begins.

Bytes go out as they are given: no dictionary, no copy of an event. A stream begins with its first event or
its first keep-alive comment; an error before that still has a status of its own.
"""

import asyncio
from types import TracebackType
from typing import Self

from headrace_router.api.exchange import EVENT_STREAM, Exchange, HeaderList

KEEP_ALIVE = b":\n\n"

MAX_STALL_SECONDS = 60.0
"""A client that takes nothing for so long, though there is something to take, is treated as gone."""


def frame(payload: bytes) -> bytes:
    """One event. `payload` is JSON, which has no line break in it."""
    return b"data: " + payload + b"\n\n"


class EventStream:
    """An answer made of events. Sends a comment after each `keep_alive_seconds` of silence, from its
    creation on; proxies and clients would take a longer silence for a dead connection."""

    def __init__(self, exchange: Exchange, headers: HeaderList, keep_alive_seconds: float) -> None:
        self._exchange = exchange
        self._headers = [
            (b"content-type", EVENT_STREAM),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *headers,
        ]
        self._keep_alive_seconds = keep_alive_seconds
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._lock = asyncio.Lock()
        """An event and a comment must not overtake each other while the client is slow."""
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        # Its last comment may still be on its way; whatever comes next must come after it.
        await asyncio.wait([self._keeper])

    async def write(self, events: bytes) -> None:
        """Frames of one or several events. Waits while the client is too slow to take them."""
        async with self._lock:
            if not self._exchange.is_started:
                await self._exchange.start(200, self._headers)
            await self._exchange.send(events)
            self._written_at = self._loop.time()

    async def _keep_alive(self) -> None:
        while True:
            silent_seconds = self._loop.time() - self._written_at
            if silent_seconds < self._keep_alive_seconds:
                await asyncio.sleep(self._keep_alive_seconds - silent_seconds)
            elif self._lock.locked():
                # The client is slow, not the answer.
                if silent_seconds > MAX_STALL_SECONDS:
                    self._exchange.give_up()
                    return
                await asyncio.sleep(min(self._keep_alive_seconds, MAX_STALL_SECONDS))
            else:
                try:
                    async with asyncio.timeout(MAX_STALL_SECONDS):
                        await self.write(KEEP_ALIVE)
                except TimeoutError:
                    self._exchange.give_up()
                    return
