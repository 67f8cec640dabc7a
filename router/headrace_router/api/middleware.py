"""What happens to every request, whatever its path: a request id, CORS."""

import uuid
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = b"x-request-id"
MAX_REQUEST_ID_CHARACTERS = 200

VARY = b"origin, access-control-request-method, access-control-request-headers"


class RequestId:
    """Every answer has an `x-request-id`: the caller's, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        # Nothing that could not stand in a header or in one line of a log.
        is_usable = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS
        request_id = given if is_usable else uuid.uuid4().hex
        scope["headrace.request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REQUEST_ID_HEADER, request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


class Cors:
    """Lets browsers of the allowed origins (all of them when none is named) read every answer.

    Answers every OPTIONS itself, without asking for a key.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Collection[str]) -> None:
        self._app = app
        self._allowed_origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = self._headers(Headers(scope=scope).get("origin"))
        if scope["method"] == "OPTIONS":
            headers += [
                (b"access-control-allow-methods", b"GET,POST"),
                (b"access-control-allow-headers", b"content-type,authorization"),
                (b"content-length", b"0"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self._app(scope, receive, send_with_cors)

    def _headers(self, origin: str | None) -> list[tuple[bytes, bytes]]:
        headers = [(b"vary", VARY)]
        if not self._allowed_origins or "*" in self._allowed_origins:
            headers.append((b"access-control-allow-origin", b"*"))
        elif origin in self._allowed_origins and origin is not None:
            headers.append((b"access-control-allow-origin", origin.encode("latin-1")))
        return headers
