"""One HTTP request and its answer, in ASGI's terms; and what every handler is given.

Reads and limits the body, sends an answer or an event stream, and notices when the client leaves. Knows no
route and no shape of a body; how an error looks is the business of the face it is given.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from headrace_router.config import RouterConfig
from headrace_router.engine import Engine, Generation
from headrace_router.errors import HeadraceError, PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from headrace_router.metrics import Metrics
from headrace_router.text.tokenizer import Tokenizer
from headrace_router.validation import Validator

HeaderList = list[tuple[bytes, bytes]]

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream"

MAX_BODY_SILENCE_SECONDS = 60.0
"""Between two parts of a body."""

encoder = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True)
class Service:
    """What handlers work with; one for the life of a router."""

    config: RouterConfig
    engine: Engine
    validator: Validator
    tokenizer: Tokenizer
    metrics: Metrics
    model_id: str
    """Name of the served model."""

    @property
    def compute_type(self) -> str:
        """`x-compute-type`: how many devices of which kind."""
        info = self.engine.info
        return f"1-{info.device}" if info else "unknown"


@dataclass(frozen=True, kw_only=True)
class Face:
    """One of the two APIs: how it words errors and ends a stream."""

    status: Callable[[HeadraceError], int]
    error_body: Callable[[HeadraceError], bytes]
    stream_end: bytes
    """What follows the last event."""


class ClientLeft(Exception):
    """The client closed its connection before it had its answer."""


class Exchange:
    """A request and its answer. The answer is either `answer()` or `start()`, `send()` …, `end()`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, face: Face) -> None:
        self.scope = scope
        self.face = face
        self.headers = Headers(scope=scope)
        self.id: str = scope.get("headrace.request_id", "-")
        """`x-request-id`."""
        self.arrived = time.monotonic()
        self.status: int | None = None
        """Once it has been sent."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        """Of the prompts: found in the prefix cache."""
        self.generations: list[Generation] = []
        """What it asked for: cancelled when the client leaves, and counted for the line about its end."""
        self._is_complete = False
        self._receive = receive
        self._send = send
        self._leave: Callable[[], None] | None = None

    @property
    def authorization(self) -> tuple[str, bytes]:
        """Scheme, in lower case, and credentials that the client presents; empty when it presents none."""
        scheme, _, given = self.headers.get("authorization", "").partition(" ")
        return scheme.lower(), given.strip().encode("latin-1", "replace")

    @property
    def tenant(self) -> str:
        """Whose turn it is: a digest of the bearer key, so that the key itself goes no further."""
        scheme, key = self.authorization
        return hashlib.sha256(key).hexdigest() if scheme == "bearer" and key else ""

    async def read_body(self, max_bytes: int) -> bytes:
        """The whole body, which must be declared as uncompressed JSON.

        Raises UnsupportedMediaType, PayloadTooLarge (as soon as it is known), RequestTimeout or ClientLeft.
        """
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = media_type.startswith("application/") and media_type.endswith("+json")
        if media_type != "application/json" and not is_json:
            raise UnsupportedMediaType(
                f"Expected request with `Content-Type: application/json`, got {media_type!r}"
            )
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise UnsupportedMediaType(
                f"`Content-Encoding: {encoding}` is not supported: send the body as it is"
            )
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise self._too_large(max_bytes, f"{length} bytes")
        body = bytearray()
        while True:
            message = await self._receive_part()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise self._too_large(max_bytes, "more")
            if not message.get("more_body", False):
                return bytes(body)

    async def _receive_part(self) -> Message:
        try:
            async with asyncio.timeout(MAX_BODY_SILENCE_SECONDS):
                return await self._receive()
        except TimeoutError:
            raise RequestTimeout(
                f"The request body has not come: nothing for {MAX_BODY_SILENCE_SECONDS:g} s"
            ) from None

    def _too_large(self, max_bytes: int, given: str) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"Failed to buffer the request body: length limit exceeded: at most {max_bytes} bytes are "
            f"allowed (`--payload-limit`), got {given}"
        )

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Cancels what runs inside at the moment the client leaves, and raises ClientLeft in its place.

        The generations end in that very moment: the way out of a handler takes some turns of the loop, and in
        each of them a step might be sent.
        """
        task = asyncio.current_task()
        assert task is not None
        has_left = False

        def leave() -> None:
            nonlocal has_left
            if not has_left:
                has_left = True
                task.cancel()
                for generation in self.generations:
                    generation.cancel()

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            # ASGI says `disconnect` after a whole answer too.
            if not self._is_complete:
                leave()

        self._leave = leave
        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if has_left and task.uncancel() == 0:
                raise ClientLeft from None
            raise
        finally:
            self._leave = None
            watcher.cancel()

    def give_up(self) -> None:
        """Treats the client as one that has left, because it takes nothing any more."""
        if self._leave is not None:
            self._leave()

    async def answer(
        self,
        status: int,
        body: bytes,
        headers: Iterable[tuple[bytes, bytes]] = (),
        *,
        content_type: bytes | None = JSON,
    ) -> None:
        """A whole answer."""
        own = [(b"content-length", b"%d" % len(body))]
        if content_type:
            own.append((b"content-type", content_type))
        await self.start(status, [*own, *headers])
        await self.end(body)

    async def answer_json(self, value: object, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """A whole answer of status 200."""
        await self.answer(200, encoder.encode(value), headers)

    @property
    def is_started(self) -> bool:
        """Whether the status has been sent."""
        return self.status is not None

    async def start(self, status: int, headers: HeaderList) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.status = status

    async def send(self, body: bytes) -> None:
        """A part of the body. Waits while the client is too slow to take it."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        """The last part of the body."""
        self._is_complete = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: HeadraceError, headers: HeaderList) -> None:
        """The error as an answer, or as the last event of a stream that has begun."""
        body = self.face.error_body(error)
        if not self.is_started:
            await self.answer(self.face.status(error), body, headers)
        elif not self._is_complete:
            await self.end(b"data: " + body + b"\n\n" + self.face.stream_end)
