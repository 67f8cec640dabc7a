"""Shard and router: starts them side by side, starts them again when they die, ends them in order.

    STARTING ──answers──► SERVING ──dies──► WAITING ──after a pause──► STARTING
        └──────dies, if it has served before──►┘
        └──────dies, and it never has, or 5 times in a row──► ChildFailed

The router is started together with the shard, for it waits for it by itself and answers 503 meanwhile: the
two start-ups overlap. A dead router is started again like a dead shard: the model stays loaded, so the
service is back within a second, where ending everything would cost a whole start-up. Who is frozen, not dead,
gives no answer of its own, and is killed. A shard that answers, while the router's `/health` says that nobody
is served, may be warming up for a router that has lost sight of it: it has several times as long as its first
warm-up took. Knows nothing of models or requests.
"""

import asyncio
import enum
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace_launcher.errors import ChildFailed, StartError
from headrace_launcher.network import health_status, listens, shard_is_alive
from headrace_launcher.process import Child

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 10.0
STEADY_SECONDS = 60.0
"""A child that has run for so long is started again after the first pause."""

MAX_FAILED_STARTS = 5
FROZEN_SECONDS = 20.0
"""Without an answer."""

WARM_UPS = 4.0
"""A shard that answers may keep everybody waiting for so many times what its first warm-up took."""

MIN_WAIT_SECONDS = 30.0
"""And for so long at least."""

MIN_FAILED_LOOKS = 3
"""Time alone does not count: a launcher may have been stopped itself for a while."""

STARTING_PROBE_SECONDS = 0.05
SERVING_PROBE_SECONDS = 1.0
STOP_SECONDS = 5.0
"""For a child without requests to end after SIGTERM."""

DRAIN_MARGIN_SECONDS = 15.0
"""What the router gets beyond the drain's own time limit. It needs some seconds itself, for clients to take
the last of their answers (`CLOSING_SECONDS` of its `__main__`), and is not to be killed meanwhile."""


class State(enum.Enum):
    """The life of a supervised process. `Supervised.run` moves it; to SERVING, the watch does."""

    STARTING = "starting"
    SERVING = "serving"
    WAITING = "waiting"


class Trouble:
    """Something that is wrong, look after look."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._num_looks = 0

    def end(self) -> None:
        """It was not found at this look."""
        self._began = None
        self._num_looks = 0

    def lasts(self, seconds: float) -> bool:
        """It was found again; whether that has gone on for so long."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self._num_looks += 1
        return now - self._began >= seconds and self._num_looks >= MIN_FAILED_LOOKS


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
        self._silence = Trouble()
        self._uselessness = Trouble()
        self._first_answer_at: float | None = None
        self._wait_seconds = MIN_WAIT_SECONDS

    async def run(self) -> None:
        """Starts the program again and again. Raises ChildFailed when that is hopeless."""
        while True:
            started = time.monotonic()
            self.child = self._start()
            self.state = State.STARTING
            await self.child.ended.wait()
            self._settle(self.child, time.monotonic() - started)
            self.state = State.WAITING
            self._silence.end()
            self._uselessness.end()
            self._first_answer_at = None
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

    def answered(self) -> None:
        """It is alive, as far as a look can tell."""
        self._silence.end()
        if self._first_answer_at is None:
            self._first_answer_at = time.monotonic()

    def served(self) -> None:
        """It was seen at work."""
        if self.state is State.WAITING:
            return  # it died just after the look
        if not self._has_served and self._first_answer_at is not None:
            took_seconds = time.monotonic() - self._first_answer_at
            self._wait_seconds = max(WARM_UPS * took_seconds, MIN_WAIT_SECONDS)
        self.state = State.SERVING
        self._has_served = True
        self._silence.end()
        self._uselessness.end()

    def gave_no_answer(self) -> None:
        """When that goes on for long, the process is killed and so started again."""
        if self.state is State.SERVING and self._silence.lasts(FROZEN_SECONDS):
            self._kill("has given no answer", FROZEN_SECONDS)

    def was_of_no_use(self) -> None:
        """It answers and has served, but nobody is served. When that goes on for long, it is killed."""
        if self.state is State.SERVING and self._uselessness.lasts(self._wait_seconds):
            self._kill("has answered, but been of no use,", self._wait_seconds)

    def _kill(self, what: str, seconds: float) -> None:
        if self.child is not None:
            logger.error("the %s %s for %.0f s, killing it", self.name, what, seconds)
            self._silence.end()
            self._uselessness.end()
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
        started: float,
    ) -> None:
        """`hostname`, `port`: where the router serves. `socket`: where the shard does.

        `started`: since when somebody waits for the server, in seconds of `time.monotonic()`.
        """
        self._shard = shard
        self._router = router
        self._hostname = hostname
        self._port = port
        self._socket = socket
        self._drain_seconds = drain_seconds
        self._started = started

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
        started = self._started
        is_serving = was_serving = False
        while True:
            status = await health_status(self._hostname, self._port)
            is_alive = await self._is_shard_alive()
            is_serving = status == 200 and is_alive
            self._judge(status, is_alive)
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
            await asyncio.sleep(STARTING_PROBE_SECONDS if self._is_anybody_down() else SERVING_PROBE_SECONDS)

    def _judge(self, status: int | None, is_alive: bool) -> None:
        """What a look means. `status` is that of the router's `/health`, `is_alive` the shard's own word."""
        if status is None:
            self._router.gave_no_answer()
        else:
            self._router.answered()
        if not is_alive:
            self._shard.gave_no_answer()
            return
        self._shard.answered()
        # A router may still be healthy by the word of the shard's predecessor.
        if status == 200:
            self._shard.served()
            self._router.served()
        elif status is not None and self._router.state is State.SERVING:
            self._shard.was_of_no_use()

    async def _is_shard_alive(self) -> bool:
        # While it starts it is asked often, and has nobody to be told apart from.
        ask = shard_is_alive if self._shard.state is State.SERVING else listens
        return await ask(str(self._socket))

    def _is_anybody_down(self) -> bool:
        return any(child.state is not State.SERVING for child in (self._shard, self._router))

    async def _shut_down(self) -> None:
        """The router first, with time for its running requests, then the shard that computes them."""
        is_draining = self._router.state is State.SERVING
        if is_draining:
            logger.info(
                "stopping: running requests have %g s to end; a second Ctrl-C or SIGTERM ends all at once",
                self._drain_seconds,
            )
        await self._router.stop(self._drain_seconds + DRAIN_MARGIN_SECONDS if is_draining else STOP_SECONDS)
        await self._shard.stop(STOP_SECONDS)
        logger.info("stopped")
