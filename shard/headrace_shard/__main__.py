"""`headrace-shard`: read settings, load the model, serve until told to stop.

`headrace-shard convert SOURCE.gguf TARGET` writes a GGUF file as a model folder instead. Exit status 0 after
a signal, at whatever moment it comes; 1 with one line when the shard cannot start, or cannot go on since its
device is lost; 2 for a usage error. torch and gRPC are imported late, so that usage errors and `--help` come
at once.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from headrace_proto import logs
from headrace_proto.process import PARENT_VARIABLE, die_with_parent, keep_what_is_loaded
from headrace_proto.settings import SettingsError, load_or_exit

from headrace_shard.config import ShardConfig

if TYPE_CHECKING:
    from headrace_shard.address import TcpAddress, UnixAddress
    from headrace_shard.loading import LoadedModel

PROGRAM = "headrace-shard"

STOP_SECONDS = 5.0
"""For steps that run when the signal comes; the router has no more to send by then."""

LOST_SECONDS = 1.0
"""For the answers that say that the device is lost."""

logger = logging.getLogger("headrace_shard")


class StopSignal:
    """SIGTERM and SIGINT: end the process at once while it starts, ask it to stop once it serves."""

    def __init__(self) -> None:
        self._ask: Callable[[], object] | None = None
        self._is_importing = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def set_asked(self, ask: Callable[[], object]) -> None:
        """From now on a signal calls `ask`."""
        self._ask = ask

    @contextmanager
    def importing(self) -> Iterator[None]:
        """For imports of large packages, which would catch what `sys.exit` raises, and try again."""
        self._is_importing = True
        yield
        self._is_importing = False

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._ask is not None:
            self._ask()
        elif self._is_importing:
            os._exit(0)  # nothing is open yet that would have to be closed
        else:
            sys.exit(0)


def main() -> NoReturn:
    """The console script."""
    stop_signal = StopSignal()
    die_with_parent(os.environ)
    arguments = sys.argv[1:]
    if arguments[:1] == ["convert"]:
        sys.exit(_convert(arguments[1:], stop_signal))
    config = load_or_exit(
        ShardConfig,
        arguments,
        os.environ,
        program=PROGRAM,
        description="Serves one model to a headrace router. `convert SOURCE TARGET` turns a GGUF file into a "
        "model folder.",
    )
    logs.setup("shard", config.json_output, config.log_level)
    sys.exit(_serve(config, stop_signal))


def _convert(arguments: Sequence[str], stop_signal: StopSignal) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} convert", description="Writes a GGUF file as a folder of safetensors and JSON files."
    )
    parser.add_argument("source", type=Path, help="the GGUF file")
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--json-output", action="store_true", help="log lines are JSON objects")
    given = parser.parse_args(arguments)
    logs.setup("convert", given.json_output)
    with stop_signal.importing():
        from headrace_shard.checkpoint.gguf import convert
        from headrace_shard.errors import StartError

    try:
        convert(given.source, given.target)
    except StartError as error:
        return _refuse(str(error), 1)
    return 0


def _serve(config: ShardConfig, stop_signal: StopSignal) -> int:
    """Load and serve; gives the exit status."""
    started = time.perf_counter()
    _let_threads_sleep(os.environ)
    with stop_signal.importing():
        from headrace_shard import address
        from headrace_shard.errors import DeviceLost, ShardError

    try:
        place = address.parse(config.listen)
    except SettingsError as error:
        return _refuse(f"{error} (see {PROGRAM} --help)", 2)
    try:
        # Before the model is read, for that may take long.
        place.claim()
        with stop_signal.importing():
            from headrace_shard.loading import load
            from headrace_shard.machine import keep_freed_memory
        loaded = load(Path(config.model_path), config)
        # Under a launcher there is a router, whose table they are in.
        level = logging.DEBUG if PARENT_VARIABLE in os.environ else logging.INFO
        for note in loaded.notes:
            logger.log(level, "%s", note)
        keep_what_is_loaded()
        keep_freed_memory()
        asyncio.run(_answer(config, loaded, place, stop_signal, started))
    except DeviceLost as error:
        _refuse(str(error), 1)
        sys.stderr.flush()
        os._exit(1)  # a thread may wait for the device for ever, and a normal end for the thread
    except ShardError as error:
        return _refuse(str(error), 1)
    return 0


async def _answer(
    config: ShardConfig,
    loaded: "LoadedModel",
    place: "UnixAddress | TcpAddress",
    stop_signal: StopSignal,
    started: float,
) -> None:
    """Answer calls until a signal comes. Raises DeviceLost when no more can be answered."""
    with stop_signal.importing():
        from headrace_shard.engine import Engine
        from headrace_shard.errors import DeviceLost, StartError
        from headrace_shard.service import ShardService, create_server

    engine = Engine(
        loaded, kv_cache_memory=config.kv_cache_memory, cuda_memory_fraction=config.cuda_memory_fraction
    )
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[DeviceLost | None] = loop.create_future()

    def end(lost: DeviceLost | None = None) -> None:
        if not ended.done():
            ended.set_result(lost)

    service = ShardService(engine, loaded, on_lost=end)
    server = create_server(service)
    # Once more, for gRPC would take the place of a shard that has begun to listen there meanwhile.
    place.claim()
    try:
        port = server.add_insecure_port(place.target)
    except RuntimeError as error:
        raise StartError(f"--listen: cannot listen on {config.listen}: {error}") from error
    stop_signal.set_asked(lambda: loop.call_soon_threadsafe(end))
    await server.start()
    where = config.listen if not config.listen.endswith(":0") else f"port {port}"
    logger.info("listening on %s after %.1f s", where, time.perf_counter() - started)
    lost = await ended
    if lost is not None:
        await server.stop(LOST_SECONDS)
        raise lost
    logger.info("stopping")
    await server.stop(STOP_SECONDS)
    service.close()


def _let_threads_sleep(environment: MutableMapping[str, str]) -> None:
    """Settings that OpenMP's runtime reads when torch loads it.

    A thread that spins while it waits for its team keeps the router and the clients off its core: a step of a
    small model then took 39 ms in place of 2.4 ms. But one that sleeps at once has to be woken for each of
    torch's own operations. 300 looks, some microseconds, are no burden to others. Within the blocks of a
    network our kernels wait for each other in their own way (kernels/team.h).
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment.setdefault("GOMP_SPINCOUNT", "300")


def _refuse(message: str, status: int) -> int:
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
