"""Shard and router: starts them side by side, starts them again when they die, ends them in order.

    STARTING ──answers──► SERVING ──dies──► WAITING ──after a pause──► STARTING
        └──────dies, if it has served before──►┘
        └──────dies, and it never has, or 5 times in a row──► ChildFailed

The router is started together with the shard, for it waits for it by itself and answers 503 meanwhile: the
two start-ups overlap. A dead router is started again like a dead shard: the model stays loaded, so the
service is back within a second, where ending everything would cost a whole start-up. Who is frozen, not dead,
shows in the router's `/health`, and is killed. Knows nothing of models or requests.
"""

import asyncio
import enum
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace_launcher.errors import ChildFailed, StartError
from headrace_launcher.network import health_status, listens
from headrace_launcher.process import Child

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 10.0
STEADY_SECONDS = 60.0
"""A child that has run for so long is started again after the first pause."""

MAX_FAILED_STARTS = 5
FROZEN_SECONDS = 10.0
"""Without an answer, on top of the patience that the router has had before it says so."""

MIN_FROZEN_PROBES = 3
STARTING_PROBE_SECONDS = 0.05
SERVING_PROBE_SECONDS = 1.0
STOP_SECONDS = 5.0
"""For a child without requests to end after SIGTERM."""

DRAIN_MARGIN_SECONDS = 5.0
"""What the router gets beyond the drain's own time limit, to close what is left."""


class State(enum.Enum):
    """The life of a supervised process. `Supervised.run` moves it; to SERVING, the watch does."""

    STARTING = "starting"
    SERVING = "serving"
    WAITING = "waiting"


class Supervised:
    """A program that is to run, whatever happens to its process."""

    def __init__(
        self, name: str, argv: Sequence[str], environment: Mapping[str, str], *, socket: Path | None = None
    ) -> None:
        """`socket` is removed before each start: nobody shall reach the grave of an earlier process."""
        self.name = name
        self.state = State.WAITING
        self.child: Child | None = None
        self._argv = argv
        self._environment = environment
        self._socket = socket
        self._has_served = False
        self._num_failed_starts = 0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._failing_since: float | None = None
        self._num_failed_probes = 0

    async def run(self) -> None:
        """Starts the program again and again. Raises ChildFailed when that is hopeless."""
        while True:
            started = time.monotonic()
            self.child = self._start()
            self.state = State.STARTING
            await self.child.ended.wait()
            self._settle(self.child, time.monotonic() - started)
            self.state = State.WAITING
            self.answered()
            await asyncio.sleep(self._pause_seconds)
            self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)

    def _start(self) -> Child:
        try:
            if self._socket is not None:
                self._socket.unlink(missing_ok=True)
            return Child(self.name, self._argv, self._environment)
        except OSError as error:
            raise StartError(f"the {self.name} cannot be started: {error}") from error

    def _settle(self, child: Child, ran_seconds: float) -> None:
        """What an end means: a word in the log, or the end of everything."""
        if not self._has_served:
            raise ChildFailed(f"the {self.name} did not start, {child.how_it_ended}")
        self._num_failed_starts = 0 if self.state is State.SERVING else self._num_failed_starts + 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            raise ChildFailed(
                f"the {self.name} failed to start {MAX_FAILED_STARTS} times in a row, {child.how_it_ended}"
            )
        if ran_seconds >= STEADY_SECONDS:
            self._pause_seconds = FIRST_PAUSE_SECONDS
        logger.error(
            "the %s ended, %s; starting it again in %.1f s",
            self.name,
            child.how_it_ended,
            self._pause_seconds,
        )

    def served(self) -> None:
        """It was seen at work."""
        if self.state is State.WAITING:
            return  # it died just after the look
        self.state = State.SERVING
        self._has_served = True
        self.answered()

    def answered(self) -> None:
        """It is alive, as far as a look can tell."""
        self._failing_since = None
        self._num_failed_probes = 0

    def failed_probe(self) -> None:
        """It gave no answer; when that goes on for long, the process is killed and so started again."""
        if self.state is not State.SERVING or self.child is None:
            return
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        self._num_failed_probes += 1
        # The count is for a launcher that was itself stopped for a while.
        if now - self._failing_since >= FROZEN_SECONDS and self._num_failed_probes >= MIN_FROZEN_PROBES:
            logger.error("the %s has given no answer for %.0f s, killing it", self.name, FROZEN_SECONDS)
            self.answered()
            self.child.kill_group()

    async def stop(self, timeout_seconds: float) -> None:
        """Ends the process; `run` must have been cancelled."""
        if self.child is not None:
            await self.child.stop(timeout_seconds)


class Supervisor:
    """One shard and one router."""

    def __init__(
        self,
        shard: Supervised,
        router: Supervised,
        *,
        hostname: str,
        port: int,
        socket: Path,
        drain_seconds: float,
    ) -> None:
        """`hostname`, `port`: where the router serves. `socket`: where the shard does."""
        self._shard = shard
        self._router = router
        self._hostname = hostname
        self._port = port
        self._socket = socket
        self._drain_seconds = drain_seconds

    async def run(self, stop: asyncio.Event) -> None:
        """Returns once `stop` is set and every child has ended. Raises StartError after ending what runs."""
        tasks = [
            asyncio.ensure_future(work)
            for work in (self._shard.run(), self._router.run(), self._watch(), stop.wait())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failures = [task.exception() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._shut_down()
        if not stop.is_set():
            raise next(failure for failure in failures if failure is not None)

    async def _watch(self) -> None:
        """Looks whether the two answer: marks them as serving, and sees who is frozen."""
        started = time.monotonic()
        is_serving = was_serving = False
        while True:
            status = await health_status(self._hostname, self._port)
            is_serving = status == 200 and await self._does_shard_listen()
            if is_serving:
                self._shard.served()
                self._router.served()
            elif status is None:
                self._shard.answered()  # nobody could ask it
                self._router.failed_probe()
            else:
                self._router.answered()
                if self._router.state is State.SERVING:
                    self._shard.failed_probe()
            if is_serving and not was_serving:
                logger.info(
                    "ready on http://%s:%d after %.1f s",
                    f"[{self._hostname}]" if ":" in self._hostname else self._hostname,
                    self._port,
                    time.monotonic() - started,
                )
                was_serving = True
            elif was_serving and self._is_anybody_down():
                was_serving, started = False, time.monotonic()
            await asyncio.sleep(SERVING_PROBE_SECONDS if is_serving else STARTING_PROBE_SECONDS)

    async def _does_shard_listen(self) -> bool:
        # A router may still be healthy by the word of the shard's predecessor. One that serves is left alone.
        return self._shard.state is State.SERVING or await listens(str(self._socket))

    def _is_anybody_down(self) -> bool:
        return any(child.state is not State.SERVING for child in (self._shard, self._router))

    async def _shut_down(self) -> None:
        """The router first, with time for its running requests, then the shard that computes them."""
        is_draining = self._router.state is State.SERVING
        if is_draining:
            logger.info("stopping: running requests get up to %g s", self._drain_seconds)
        await self._router.stop(self._drain_seconds + DRAIN_MARGIN_SECONDS if is_draining else STOP_SECONDS)
        await self._shard.stop(STOP_SECONDS)
        logger.info("stopped")
