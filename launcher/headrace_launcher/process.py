"""One child process: start it, show its lines as they come, remember its last words, end it.

A child gets a process group of its own, so that a terminal's Ctrl-C reaches the launcher alone and the
launcher decides who ends when; and it is told whose child it is (`headrace_proto.process`), so that it dies
with the launcher whatever happens. Knows nothing of what a child is for.

Everything happens in one thread: the event loop reads the pipes and reaps on SIGCHLD. That thread starts the
children too, for the kernel's parent-death signal watches the thread, not the process.
"""

import asyncio
import logging
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from headrace_proto import logs
from headrace_proto.process import environment_for_child

MAX_LINE_BYTES = 1 << 20
"""A longer line is shown in pieces, so that a child that prints no newline costs no memory."""

NUM_LAST_WORDS = 20
MAX_LAST_WORDS = 600
"""Characters of the line that is quoted when a child has died."""

_REFUSAL = re.compile(r"headrace-\w+: error: ")
"""How a program of headrace's own begins the line, on standard error, that says why it ends."""

logger = logging.getLogger(__name__)

LAST_LINE_SECONDS = 1.0
"""How long the pipes of a dead child are read on when somebody else holds their other end."""


class _Lines(asyncio.Protocol):
    """Cuts a byte stream into lines and hands each on as soon as it is whole."""

    def __init__(self, on_line: Callable[[str], None], on_end: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_end = on_end
        self._rest = bytearray()

    def data_received(self, data: bytes) -> None:
        # Only the new bytes are searched: a long line that comes in many pieces stays linear.
        start = len(self._rest)
        # A progress bar redraws its line after a carriage return; each picture of it is a line here.
        self._rest += data.replace(b"\r", b"\n")
        while (end := self._rest.find(b"\n", start)) >= 0 or len(self._rest) > MAX_LINE_BYTES:
            end = min(end, MAX_LINE_BYTES) if end >= 0 else MAX_LINE_BYTES
            self._emit(bytes(self._rest[:end]))
            del self._rest[: end + 1 if self._rest[end : end + 1] == b"\n" else end]
            start = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._emit(bytes(self._rest))
        self._on_end()

    def _emit(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            self._on_line(text)


class Child:
    """A started child process. `ended` is set once it is reaped and its last line has been shown."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stderr_level: int = logging.WARNING,
        on_output: Callable[[str], None] | None = None,
    ) -> None:
        """Starts the program. With `on_output` its standard output goes there instead of into the log.

        `stderr_level` is that of the lines on standard error that are no log lines.

        Raises OSError if the program cannot be started. Needs a running event loop.
        """
        self.name = name
        self.ended = asyncio.Event()
        self._lines: deque[tuple[int, str]] = deque(maxlen=NUM_LAST_WORDS)
        self._num_open = 2
        self._transports: list[asyncio.ReadTransport] = []
        self._on_output = on_output
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, **environment_for_child(), "PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        self._readers = [
            asyncio.ensure_future(self._read(self._popen.stdout, logging.INFO)),
            asyncio.ensure_future(self._read(self._popen.stderr, stderr_level)),
        ]
        _children[self._popen.pid] = self

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: the number of the signal that ended it."""
        return self._popen.returncode

    @property
    def how_it_ended(self) -> str:
        """For a message: the exit status or signal, and the line that is most likely the reason."""
        status = self.exit_status
        how = f"exit status {status}"
        if status is not None and status < 0:
            how = f"signal {signal.Signals(-status).name}"
            if status == -signal.SIGKILL:
                how += " (by somebody, or out of memory)"
        words = self.last_words
        return f"{how}: {words}" if words else how

    @property
    def last_words(self) -> str:
        """The line that is most likely the reason: the last error, else the last line on standard error.

        What ended by itself and complained nowhere may have said it in plain words, its last ones. Of a
        traceback it is the last line, the exception.
        """
        levels = [logging.ERROR, logging.WARNING]
        if self.exit_status is not None and self.exit_status > 0:
            levels.append(logging.NOTSET)
        for least in levels:
            for level, text in reversed(self._lines):
                if level >= least:
                    words = text.rstrip().rsplit("\n", 1)[-1]
                    return _REFUSAL.sub("", words, count=1)[:MAX_LAST_WORDS]
        return ""

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the process; one that has ended already is no error."""
        # Not Popen's method: it reaps on the side.
        if self._popen.returncode is None:
            os.kill(self._popen.pid, number)

    def kill_group(self) -> None:
        """Kills the process and whatever it has started itself."""
        # Once it is reaped, its number may belong to somebody else.
        if self._popen.returncode is None:
            os.killpg(self._popen.pid, signal.SIGKILL)

    async def stop(self, timeout_seconds: float) -> None:
        """SIGTERM, and after the time SIGKILL; returns when it has ended."""
        if not self.ended.is_set():
            self.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.ended.wait(), timeout_seconds)
            except TimeoutError:
                self.kill_group()
        await self.ended.wait()

    async def _read(self, pipe: IO[bytes] | None, level: int) -> None:
        def on_line(text: str) -> None:
            if self._on_output is not None and pipe is self._popen.stdout:
                self._on_output(text)
                return
            line = logs.parse(text)
            bare_level = logging.ERROR if _REFUSAL.match(text) else level
            self._lines.append((line.level if line else bare_level, line.message if line else text))
            # A refusal is told by whoever looks at how the child ended.
            if bare_level != logging.ERROR or logger.isEnabledFor(logging.DEBUG):
                logs.relay(self.name, text, level=bare_level)

        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: _Lines(on_line, self._pipe_ended), pipe)
        self._transports.append(transport)

    def _pipe_ended(self) -> None:
        self._num_open -= 1
        self._settle()

    def _reap(self) -> None:
        if os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        # Its own children would outlive it, and hold the pipes.
        self.kill_group()
        self._popen.poll()
        del _children[self._popen.pid]
        self._settle()
        # A grandchild in a session of its own may hold them still.
        asyncio.get_running_loop().call_later(LAST_LINE_SECONDS, self._close_pipes)

    def _close_pipes(self) -> None:
        for transport in self._transports:
            transport.close()

    def _settle(self) -> None:
        if self._popen.returncode is not None and self._num_open == 0:
            self.ended.set()


_children: dict[int, Child] = {}
"""The children that are not reaped yet, by process id."""


def watch_children() -> None:
    """Reaps children as they end. Called once, from the running event loop, before the first child."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _on_child_signal)


def kill_children() -> None:
    """Ends every child and what it has started, at once."""
    for child in _children.values():
        child.kill_group()


def _on_child_signal() -> None:
    for child in list(_children.values()):
        child._reap()
    if os.getpid() == 1:
        _reap_orphans()


def _reap_orphans() -> None:
    """As process 1 of a container: waits for processes whose parents are gone, else they stay zombies."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid in _children:
                return
            os.waitpid(found.si_pid, 0)
        except ChildProcessError:
            return
