"""HTTP/1.1 on one connection: uvicorn's protocol, and what it leaves to a proxy that may not be there.

- A request that offers an upgrade (HTTP/2 in clear text, as some clients do with every first request) is
  answered in HTTP/1.1, its body included; uvicorn would lose the body.
- A client that sends a head which never ends, or ends it never, is cut off.
- What cannot be read as HTTP is answered in the envelope of its face.
- A client that leaves is noticed by the request that runs, also if it had sent others behind it.

Knows no route, and of a request only where its head and its body end.
"""

import asyncio
import logging

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace_router.api.endpoint import face_of
from headrace_router.errors import BadRequest, HeadraceError, HeadTooLarge

MAX_HEAD_BYTES = 65536
"""Of a request line with its headers; also of trailers and of whatever else carries no body."""

MAX_HEAD_SECONDS = 60.0
"""From the first byte of a head to its last."""

MAX_PIPELINED = 8
"""Requests that wait behind a running one before nothing more is read: up to then we see the client leave."""

STATUS_LINES = {400: b"HTTP/1.1 400 Bad Request", 431: b"HTTP/1.1 431 Request Header Fields Too Large"}

log = logging.getLogger(__name__)


class HttpConnection(HttpToolsProtocol):
    """See above. Its methods are the events of a transport and of a parser."""

    _running: RequestResponseCycle | None = None
    _declined: bytes | None = None
    """The method of a message that offered an upgrade, until it is read again without the offer."""
    _has_progressed = False
    """Whether what came last ended a head or a message or carried a body."""
    _num_bytes_without_progress = 0
    """Bytes since something did."""
    _head_timer: asyncio.TimerHandle | None = None

    # ---- the transport's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Whoever connects and says nothing is as idle as one who has had an answer.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def eof_received(self) -> None:
        # The transport closes now, and says so in a later turn of the loop.
        self._tell_running()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._stop_head_timer()
        super().connection_lost(exc)
        # uvicorn tells the request that came last, which need not be the one that runs.
        self._tell_running()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._has_progressed = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_again(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            # All that our own side of the parser looks at is method and target.
            is_ours = isinstance(error, httptools.HttpParserCallbackError)
            why = "Invalid request target" if is_ours else str(error)
            self._refuse(BadRequest(f"The request cannot be read as HTTP/1.1: {why}"))
            return
        self._num_bytes_without_progress = (
            0 if self._has_progressed else self._num_bytes_without_progress + len(data)
        )
        if self._num_bytes_without_progress > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"The request's head is too large: at most {MAX_HEAD_BYTES} bytes"))

    # ---- the parser's side

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(MAX_HEAD_SECONDS, self.timeout_keep_alive_handler)

    def on_headers_complete(self) -> None:
        self._has_progressed = True
        self._stop_head_timer()
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("CONNECT is for proxies")  # The parser makes an HttpParserError of it.
        if self.parser.should_upgrade():
            self._declined = method
            return
        super().on_headers_complete()
        if len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_progressed = True
        if self._declined is None:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    # ---- what uvicorn does otherwise

    def _tell_running(self) -> None:
        """Tells the request that runs that its client has left."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _read_again(self, rest: bytes) -> None:
        """Starts over with the message whose offer is declined; the parser has stopped behind its head."""
        method, self._declined = self._declined, None
        assert method is not None
        head = [b"%b %b HTTP/1.1" % (method, self.url)]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join([option for option in options if option.lower() != b"upgrade"])
            if name != b"upgrade":
                head.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        # As uvicorn's own: a request behind one that says `connection: close` is read, and never answered.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join([*head, b"", rest]))

    def _refuse(self, error: HeadraceError) -> None:
        """Answers what never became a whole request, and hangs up; whoever still runs is answered first."""
        log.debug("%s: %s", self.client, error.message)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body or cycle is not self._running:
                cycle.keep_alive = False
                self.flow.pause_reading()
                return
            if cycle.response_started:
                self.transport.close()
                return
        face = face_of(getattr(self, "url", b"").decode("latin-1"))
        body = face.error_body(error)
        head = [
            STATUS_LINES[face.status(error)],
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        ]
        self.transport.write(b"\r\n".join([*head, b"", body]))
        self.transport.close()
