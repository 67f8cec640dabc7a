"""`headrace-router`: settings, tokenizer, port; serve; drain.

    starting ──shard is warm──► serving ──SIGTERM, SIGINT──► draining ──all ended, or time is up──► exit 0
        │                                                       └──────────second signal──────────► exit 0
        ├──signal──► exit 0
        └──the settings cannot be met by this shard──► one line, exit 1
    whenever the loop that serves requests fails ──► its traceback, exit 1

The port is bound before anything is loaded, so that a port in use is found at once; /health answers 503
until the shard is warm.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from headrace_proto import logs
from headrace_proto.process import die_with_parent, keep_what_is_loaded
from headrace_proto.settings import SettingsError, load_or_exit
from starlette.types import ASGIApp

from headrace_router.api.connection import HttpConnection
from headrace_router.api.exchange import Service
from headrace_router.app import create_app, create_metrics_app
from headrace_router.config import RouterConfig
from headrace_router.engine import Engine
from headrace_router.errors import LimitsError, StartupError, Unavailable, counted
from headrace_router.metrics import Metrics
from headrace_router.text.chat_template import ChatTemplate
from headrace_router.text.tokenizer import Tokenizer
from headrace_router.validation import Validator

PROGRAM = "headrace-router"

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

BACKLOG = 2048

KEEP_ALIVE_CONNECTION_SECONDS = 75
"""An idle connection is kept longer than proxies in front of us keep theirs (60 s is usual), or they would
now and then send a request into a connection that is just being closed."""

CLIENT_GONE_SECONDS = 60
"""After so long without a sign of life, or with an answer that it does not take, a client's connection ends:
it frees a request whose client has lost its network, and the memory of an answer that nobody reads."""

CLOSING_SECONDS = 5
"""For answers that are already computed and only have to be taken."""

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would close the port before the streams have ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(hostname: str, port: int) -> socket.socket:
    """A socket bound to an address, not listening yet. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_the_gone(bound)
        bound.bind(address)
        # Now, not when everything is loaded: two sockets may be bound to one port until one of them listens.
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def _notice_the_gone(listening: socket.socket) -> None:
    """Connections take these options over from the socket that accepts them. Linux knows them all."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", CLIENT_GONE_SECONDS // 2),
        ("TCP_KEEPINTVL", CLIENT_GONE_SECONDS // 6),
        ("TCP_USER_TIMEOUT", CLIENT_GONE_SECONDS * 1000),
    ):
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def create_service(config: RouterConfig) -> Service:
    """Loads the tokenizer and the chat template. Raises StartupError, SettingsError."""
    folder = Path(config.tokenizer_name)
    config_path = Path(config.tokenizer_config_path) if config.tokenizer_config_path else None
    tokenizer = Tokenizer.from_folder(folder, config_path)
    template = ChatTemplate.from_folder(
        folder, config_path, strftime_now=lambda form: datetime.now().strftime(form)
    )
    metrics = Metrics()
    engine = Engine(config, tokenizer, metrics)
    return Service(
        config=config,
        engine=engine,
        validator=Validator(config, tokenizer, template, lambda: engine.limits),
        tokenizer=tokenizer,
        metrics=metrics,
        model_id=config.model_id or config.tokenizer_name,
    )


class Process:
    """The running router, from bound sockets to its end."""

    def __init__(self, service: Service, main: socket.socket, metrics: socket.socket | None) -> None:
        self._service = service
        self._sockets = [main] + ([metrics] if metrics else [])
        apps = [create_app(service)] + ([create_metrics_app(service)] if metrics else [])
        self._servers = [create_server(app) for app in apps]
        self._is_stopping = asyncio.Event()
        self._is_hurried = asyncio.Event()
        self._failure: Exception | None = None

    async def run(self) -> Exception | None:
        """Serves until a signal; returns why serving is impossible, if it is."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        await self._service.engine.start()
        serving = [
            asyncio.create_task(server.serve(sockets=[bound]))
            for server, bound in zip(self._servers, self._sockets, strict=True)
        ]
        announcing = asyncio.create_task(self._announce())
        failing = asyncio.create_task(self._end_with_the_engine())
        stopping = asyncio.create_task(self._is_stopping.wait())
        await asyncio.wait([stopping, *serving], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        announcing.cancel()
        failing.cancel()
        if self._failure is None:
            await self._drain()
        await self._service.engine.stop()
        self._service.validator.close()
        for server in self._servers:
            server.should_exit = True
            server.force_exit = self._is_hurried.is_set()
        await asyncio.gather(*serving)
        return self._failure

    def _on_signal(self) -> None:
        (self._is_hurried if self._is_stopping.is_set() else self._is_stopping).set()

    async def _announce(self) -> None:
        """Says what the shard can do, once it is warm."""
        engine = self._service.engine
        try:
            await engine.settled()
        except LimitsError as error:
            self._failure = error
            self._is_stopping.set()
            return
        except Unavailable:
            return
        for row in engine.rows:
            message, extra = logs.table_row(row.name, row.value, row.why)
            log.info("%s", message, extra=extra)
        host, port = self._sockets[0].getsockname()[:2]
        log.info("Connected: serving %s on http://%s:%d", self._service.model_id, _in_url(host), port)

    async def _end_with_the_engine(self) -> None:
        """A router that can serve nothing any more ends, so that whoever looks after it starts another."""
        try:
            await self._service.engine.ended()
        except Exception as error:  # the edge of the process
            log.exception("the loop that serves requests has failed")
            self._failure = error
            self._is_stopping.set()

    async def _drain(self) -> None:
        """Lets running requests end, for a time or until a second signal. Then whatever is left fails."""
        engine, seconds = self._service.engine, self._service.config.graceful_termination_timeout
        engine.drain()
        if engine.num_active:
            log.info(
                "draining: %s may take %g s to end; a second signal ends all at once",
                counted(engine.num_active, "sequence"),
                seconds,
            )
            draining = asyncio.create_task(engine.drained(seconds))
            hurrying = asyncio.create_task(self._is_hurried.wait())
            await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            hurrying.cancel()
            if engine.num_active:
                log.warning("%s did not end in time", counted(engine.num_active, "sequence"))


def create_server(app: ASGIApp) -> Server:
    """uvicorn with our settings; `serve(sockets=[…])` runs it."""
    return Server(
        uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
    )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _bind_or_exit(flag: str, hostname: str, port: int) -> socket.socket:
    try:
        return bind(hostname, port)
    except OSError as error:
        reason = error.strerror or str(error)
        sys.exit(
            f"{PROGRAM}: error: {flag} {port}: cannot listen on {hostname}: {reason}; choose another port"
        )


def main() -> None:
    config = load_or_exit(
        RouterConfig,
        sys.argv[1:],
        os.environ,
        program=PROGRAM,
        description="Serves a model over HTTP: queues and schedules requests for a shard that computes them.",
    )
    die_with_parent(os.environ)
    for number in STOP_SIGNALS:
        signal.signal(number, _exit)  # Until there is something to drain.
    logs.setup("router", config.json_output, config.log_level)
    bound = _bind_or_exit("--port", config.hostname, config.port)
    metrics_port = config.prometheus_port
    metrics = None
    if metrics_port is not None and metrics_port != config.port:
        metrics = _bind_or_exit("--prometheus-port", config.hostname, metrics_port)
    try:
        service = create_service(config)
    except (StartupError, SettingsError) as error:
        sys.exit(f"{PROGRAM}: error: {error}")
    keep_what_is_loaded()
    failure = uvloop.run(_run(service, bound, metrics))
    if isinstance(failure, StartupError):
        sys.exit(f"{PROGRAM}: error: {failure}")
    elif failure is not None:
        # Its traceback is logged. The message alone may be a word, or empty.
        sys.exit(f"{PROGRAM}: error: {type(failure).__name__}: {failure}")


async def _run(service: Service, bound: socket.socket, metrics: socket.socket | None) -> Exception | None:
    return await Process(service, bound, metrics).run()


if __name__ == "__main__":
    main()
