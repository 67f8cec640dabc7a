"""One streamed request over HTTP/1.1, and when its tokens came. Knows two faces; knows no statistics.

Written on an asyncio protocol with C parsers, for the client shares the cores with the server that it
measures: a general HTTP client costs several times as much per token.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import httptools
import msgspec

Face = Literal["openai", "tgi"]


class Failed(Exception):
    """The server cannot be measured; the message is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server and how to speak to it."""

    base_url: str
    face: Face
    model: str
    headers: tuple[str, ...] = ()
    timeout_seconds: float = 600.0

    def generation(self, prompt: str, num_tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body that ask for a stream of `num_tokens` greedy tokens."""
        if self.face == "tgi":
            return "/generate_stream", {"inputs": prompt, "parameters": {"max_new_tokens": num_tokens}}
        return "/v1/completions", {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(kw_only=True)
class Reply:
    """What came back. Times are `time.perf_counter()`, in seconds."""

    sent: float
    ended: float = 0.0
    status: int = 0
    error: str = ""
    """Empty when the stream came to its proper end."""
    body: bytearray = field(default_factory=bytearray)
    """Everything that was no event: the answer of a request without a stream, or an error."""
    token_times: list[float] = field(default_factory=list)
    """When each event arrived that carried text or a token."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Token(msgspec.Struct):
    id: int


class _Details(msgspec.Struct):
    generated_tokens: int = 0


class _Event(msgspec.Struct):
    """An event of either face; what the other one sends is absent."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    token: _Token | None = None
    details: _Details | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class _Exchange(asyncio.Protocol):
    """One request and its answer on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self.reply = Reply(sent=time.perf_counter())
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._is_stream = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            self.finish(f"unreadable answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish(f"connection lost: {exc}" if exc else "connection closed before the end")

    def finish(self, error: str) -> None:
        """The first call decides: an empty error is a proper end."""
        if self.done.done():
            return
        self.reply.error = error
        self.reply.ended = time.perf_counter()
        self.done.set_result(None)
        if self._transport is not None:
            self._transport.close()

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.lower().startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self.reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._is_stream:
            self.reply.body += body
            return
        now = time.perf_counter()
        *lines, self._unread = (self._unread + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), now)

    def on_message_complete(self) -> None:
        if self.reply.status != 200:
            text = bytes(self.reply.body[:300]).decode(errors="replace")
            self.finish(f"HTTP {self.reply.status}: {text}")
        else:
            self.finish("")

    def _on_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        event = _decode_event(data)
        reply = self.reply
        if event.error:
            self.finish(f"error in the stream: {event.error}")
        if event.usage is not None:
            reply.num_prompt_tokens = event.usage.prompt_tokens
            reply.num_output_tokens = event.usage.completion_tokens
        if event.details is not None:
            reply.num_output_tokens = event.details.generated_tokens
        # A last event with a finish reason and no text carries no token; one without text before it does:
        # half a character, or a special token.
        if event.token is not None or any(
            choice.text or choice.finish_reason is None for choice in event.choices
        ):
            reply.token_times.append(now)


async def send(target: Target, method: str, path: str, body: dict[str, Any] | None = None) -> Reply:
    """One request, followed to its end. What goes wrong is in the reply's `error`."""
    url = urlsplit(target.base_url)
    is_tls = url.scheme == "https"
    content = b"" if body is None else msgspec.json.encode(body)
    lines = [
        f"{method} {url.path.rstrip('/')}{path} HTTP/1.1",
        f"host: {url.netloc}",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(content)}",
        *target.headers,
    ]
    exchange = _Exchange("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
    try:
        await asyncio.get_running_loop().create_connection(
            lambda: exchange,
            url.hostname or "",
            url.port or (443 if is_tls else 80),
            ssl=ssl.create_default_context() if is_tls else None,
        )
        await asyncio.wait([exchange.done], timeout=target.timeout_seconds)
        exchange.finish(f"no end within {target.timeout_seconds:g} s")
    except OSError as error:
        exchange.finish(f"no connection: {error}")
    return exchange.reply


async def ask(target: Target, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of a request without a stream. Raises Failed."""
    reply = await send(target, method, path, body)
    if reply.error:
        raise Failed(f"{method} {target.base_url}{path}: {reply.error}")
    try:
        return msgspec.json.decode(reply.body)
    except msgspec.DecodeError as error:
        raise Failed(f"{method} {target.base_url}{path}: the answer is no JSON: {error}") from error
