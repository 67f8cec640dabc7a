"""`headrace serve`: from settings to a running server, and to its end.

Checks what can be checked before anything is started, finds the model, hands each child its settings (on its
command line; secrets in its environment) and leaves the rest to the supervisor.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from headrace_proto import __version__
from headrace_proto.settings import pick, to_argv, to_environment, without_settings
from headrace_router.config import RouterConfig
from headrace_shard.config import ShardConfig

from headrace_launcher import devices, network
from headrace_launcher.claims import claim, clear_away
from headrace_launcher.config import LauncherConfig
from headrace_launcher.environment_report import environment_report
from headrace_launcher.errors import StartError
from headrace_launcher.model_files import ModelFiles, resolve
from headrace_launcher.process import kill_children, watch_children
from headrace_launcher.supervisor import Supervised, Supervisor

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 100
"""The kernel allows 107."""

PRIVATE_FOLDER = re.compile(r"headrace-\d+-\w{8}")
"""Their names, with the launcher's process id; the launcher claims its own."""

SAME_SIGNAL_SECONDS = 0.5
"""timeout(1) and some shells signal a process and then its group: both are one wish."""


async def serve(config: LauncherConfig, environment: Mapping[str, str], started: float) -> None:
    """Serves until a signal comes. Raises StartError, or Stopped for a signal before the children started.

    `started`: when this process began, in seconds of `time.monotonic()`.
    """
    stop = handle_signals()
    for line in environment_report() if config.env else [f"headrace {__version__}"]:
        logger.info("%s", line)
    for warning in config.warnings():
        logger.warning("%s", warning)
    port = network.claim_port(config.hostname, config.port)
    if config.prometheus_port not in (None, port):
        network.claim_port(config.hostname, config.prometheus_port or 0, "--prometheus-port")
    with private_folder() as scratch, sole_use(config.shard_uds_path):
        # Whatever a child leaves there when it is killed goes with this run.
        environment = {**environment, "TMPDIR": str(scratch)}
        address = await shard_socket(config, scratch)
        files = await resolve(config, environment, scratch, stop)
        logger.info("files %s: %s, %s weights", files.folder, files.model_type, files.dtype)
        logger.info(
            "starting the shard on %s with %s, and the router on %s:%d",
            devices.describe(config.device, environment),
            f"dtype {files.dtype}, the checkpoint's" if config.dtype == "auto" else f"dtype {config.dtype}",
            config.hostname,
            port,
        )
        await supervisor_for(config, environment, files, address, port, started).run(stop)


def handle_signals() -> asyncio.Event:
    """An event that the first signal sets; a second one kills what still runs. Reaps children from now on."""
    stop = asyncio.Event()
    first_at = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_at
        if stop.is_set():
            if time.monotonic() - first_at < SAME_SIGNAL_SECONDS:
                return
            logger.warning("%s again: killing what still runs", number.name)
            kill_children()
            return
        logger.info("%s", number.name)
        first_at = time.monotonic()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    watch_children()
    return stop


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder of this run that only this user may enter, gone afterwards.

    Clears away those of launchers that were killed. Raises StartError when no folder can be made.
    """
    try:
        folder, claimed = _claimed_folder()
    except OSError as error:
        raise StartError(
            f"no folder for the socket can be made: {error}; name a place for one in TMPDIR"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(claimed)


def _claimed_folder() -> tuple[Path, int]:
    parent = Path(tempfile.gettempdir())
    if len(bytes(parent)) > MAX_SOCKET_PATH_BYTES - len("/headrace-4194304-12345678/shard-0"):
        parent = Path("/tmp")
    for path in parent.glob("headrace-*"):
        if PRIVATE_FOLDER.fullmatch(path.name):
            clear_away(path)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"headrace-{os.getpid()}-", dir=parent))
        claimed = claim(folder)
        if claimed is not None:  # else another launcher took it for a dead one's
            return folder, claimed


@contextlib.contextmanager
def sole_use(prefix: str | None) -> Iterator[None]:
    """No second launcher takes the same --shard-uds-path, also before the first one's shard listens there.

    Raises StartError when another one has it.
    """
    if prefix is None or sys.platform != "linux":
        yield
        return
    path = hashlib.sha256(bytes(Path(prefix).absolute())).hexdigest()
    # A name in the kernel's own space: no file is left, whatever ends this process.
    with closing(socket.socket(socket.AF_UNIX)) as held:
        try:
            held.bind(f"\0headrace-{path}")
        except OSError:
            raise StartError(
                f"--shard-uds-path {prefix}: another server uses it; choose another one"
            ) from None
        yield


async def shard_socket(config: LauncherConfig, scratch: Path) -> Path:
    """Where the shard listens. Raises StartError when that cannot be, or somebody listens there."""
    if config.shard_uds_path is None:
        return scratch / "shard-0"
    path = Path(f"{config.shard_uds_path}-0").absolute()
    where = f"--shard-uds-path {config.shard_uds_path}"
    if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise StartError(
            f"{where}: longer than the {MAX_SOCKET_PATH_BYTES} bytes that a socket's path may have"
        )
    if not path.parent.is_dir():
        raise StartError(f"{where}: no such folder: {path.parent}")
    if await network.listens(str(path)):
        raise StartError(f"{where}: another server uses it; choose another one")
    if path.exists() and not path.is_socket():
        raise StartError(f"{where}: {path} exists and is no socket")
    return path


def supervisor_for(
    config: LauncherConfig,
    environment: Mapping[str, str],
    files: ModelFiles,
    socket: Path,
    port: int,
    started: float,
) -> Supervisor:
    """Shard and router with the settings that are theirs."""
    inherited = without_settings(environment, LauncherConfig)
    address = f"unix://{socket}"
    # The launcher reads their lines, so they are JSON whatever it prints itself.
    shard = pick(ShardConfig, config, model_path=str(files.folder), listen=address, json_output=True)
    router = pick(
        RouterConfig,
        config,
        shard=address,
        tokenizer_name=str(files.folder),
        model_id=files.name,
        revision=files.revision,
        port=port,
        json_output=True,
    )
    return Supervisor(
        supervised("shard", shard, inherited, socket=socket),
        supervised("router", router, inherited),
        hostname=config.hostname,
        port=port,
        socket=socket,
        drain_seconds=config.graceful_termination_timeout,
        started=started,
    )


def supervised(
    name: str, settings: Any, inherited: Mapping[str, str], *, socket: Path | None = None
) -> Supervised:
    """A child of headrace's own, run by the Python that runs this."""
    # -P: a folder named like a module in the working directory must not be imported instead of it.
    argv = [sys.executable, "-P", "-m", f"headrace_{name}", *to_argv(settings)]
    return Supervised(name, argv, {**inherited, **to_environment(settings)}, socket=socket)
