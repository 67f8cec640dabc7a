"""What stands between a URL and its handler: method, key, body, failures, and the counting of requests.

Each request of an inference route leaves one line in the log when it ends.

The order is that of the contract: key (401), method (405), content type (415), size (413), then the handler.
This is the edge of a request: whatever goes wrong in it becomes an answer in the envelope of its face.
"""

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from starlette.types import Receive, Scope, Send

from headrace_router.api.exchange import ClientLeft, Exchange, Face, HeaderList, Service
from headrace_router.api.openai import OPENAI
from headrace_router.api.request_log import log_end
from headrace_router.api.tgi import NATIVE
from headrace_router.errors import (
    HeadraceError,
    MethodNotAllowed,
    NotFound,
    RequestTimeout,
    TimedOut,
    Unauthorized,
    Unavailable,
)

log = logging.getLogger(__name__)

GetHandler = Callable[[Service, Exchange], Awaitable[None]]
PostHandler = Callable[[Service, Exchange, bytes], Awaitable[None]]


def face_of(path: str) -> Face:
    """Paths under /v1 speak OpenAI's language, all others TGI's."""
    return OPENAI if path == "/v1" or path.startswith("/v1/") else NATIVE


class Endpoint:
    """One path. What is read with GET is open, what is posted needs the key (when there is one)."""

    def __init__(
        self,
        service: Service,
        *,
        get: GetHandler | None = None,
        post: PostHandler | None = None,
        is_inference: bool = True,
    ) -> None:
        self._service = service
        self._get = get
        self._post = post
        self._is_inference = is_inference
        self._allowed = ", ".join([*(["GET", "HEAD"] if get else []), *(["POST"] if post else [])])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, face_of(scope["path"]))
        failure: str | None = "cancelled"
        try:
            await self._dispatch(exchange, scope["method"])
            failure = None
        except ClientLeft:
            failure = "dropped"  # Nobody is there to be told.
        except Exception as fault:
            error = as_error(fault, exchange)
            failure = error.error_type
            await exchange.fail(error, self._error_headers(error))
        finally:
            if self._post and self._is_inference and scope["method"] == "POST":
                log_end(exchange, failure)

    async def _dispatch(self, exchange: Exchange, method: str) -> None:
        if self._get and method in ("GET", "HEAD"):
            await self._get(self._service, exchange)
            return
        if self._post:
            self._check_key(exchange)
            if method == "POST":
                with self._counted(exchange) if self._is_inference else contextlib.nullcontext():
                    async with self._in_time(exchange):
                        body = await exchange.read_body(self._service.config.payload_limit)
                        async with exchange.watched():
                            await self._post(self._service, exchange, body)
                return
        raise MethodNotAllowed(f"{method} is not allowed on {exchange.scope['path']}, only {self._allowed}")

    @contextlib.contextmanager
    def _counted(self, exchange: Exchange) -> Iterator[None]:
        metrics = self._service.metrics
        metrics.request_count.inc()
        try:
            yield
        except ClientLeft:
            metrics.request_failure.labels("dropped").inc()
            raise
        except Exception as fault:
            error = as_error(fault, exchange)
            metrics.request_failure.labels(error.cause).inc()
            raise error from fault
        metrics.request_success.inc()

    @contextlib.asynccontextmanager
    async def _in_time(self, exchange: Exchange) -> AsyncIterator[None]:
        """Cancels what runs inside once `--request-timeout` has passed, and raises TimedOut in its place.

        Whatever it holds, a place in the queue or in the shard, it gives up on the way out.
        """
        limit_seconds = self._service.config.request_timeout
        if limit_seconds is None:
            yield
            return
        try:
            async with asyncio.timeout(exchange.arrived + limit_seconds - time.monotonic()) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise TimedOut(
                f"Request timed out: its answer was not complete after {limit_seconds:g} s, as long as this "
                "server lets one take (`--request-timeout`); ask for fewer tokens, or later"
            ) from None

    def _check_key(self, exchange: Exchange) -> None:
        keys = self._service.config.api_key
        if not keys:
            return
        scheme, given = exchange.authorization
        # As bytes: compare_digest takes no other than ASCII strings. With all of them, so that the time does
        # not tell which is the first that is equal.
        is_key = sum(hmac.compare_digest(given, key.encode()) for key in keys) > 0
        if scheme != "bearer" or not is_key:
            raise Unauthorized(
                "Incorrect API key: send the key as `Authorization: Bearer KEY`"
                if given
                else "Missing API key: send it as `Authorization: Bearer KEY`"
            )

    def _error_headers(self, error: HeadraceError) -> HeaderList:
        headers: HeaderList = []
        if error.retry_after_seconds is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_seconds))
        if isinstance(error, Unauthorized):
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, MethodNotAllowed):
            headers.append((b"allow", self._allowed.encode()))
        is_draining = isinstance(error, Unavailable) and self._service.engine.is_draining
        if is_draining or isinstance(error, RequestTimeout):
            headers.append((b"connection", b"close"))
        return headers


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers every path that is on no route."""
    exchange = Exchange(scope, receive, send, face_of(scope["path"]))
    await exchange.fail(NotFound(f"No such path: {scope['path']}"), [])


def as_error(fault: Exception, exchange: Exchange) -> HeadraceError:
    """The fault itself when it is one that a caller may meet; any other is logged and hidden."""
    if isinstance(fault, HeadraceError):
        return fault
    scope = exchange.scope
    log.error("request %s: %s %s failed", exchange.id, scope["method"], scope["path"], exc_info=fault)
    return HeadraceError(f"Internal error in request {exchange.id}: the server's log says more")
