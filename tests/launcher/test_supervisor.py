"""What the supervisor does when its children die, freeze, fail to start or are told to end."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from headrace_launcher import supervisor
from headrace_launcher.errors import ChildFailed, StartError
from headrace_launcher.process import watch_children
from headrace_launcher.supervisor import Supervised, Supervisor
from headrace_router.__main__ import CLOSING_SECONDS

from tests.launcher.fakes import Fakes, is_running


class Group:
    """A supervisor of the two fakes, and the event that ends it."""

    def __init__(self, fakes: Fakes, port: int, folder: Path, **variables: str) -> None:
        environment = fakes.environment(**variables)
        socket = folder / "shard-0"
        self.stop = asyncio.Event()
        shard_argv = [sys.executable, "-P", "-m", "headrace_shard", f"--listen=unix://{socket}"]
        router_argv = [sys.executable, "-P", "-m", "headrace_router", f"--shard=unix://{socket}"]
        router_argv += ["--hostname=127.0.0.1", f"--port={port}"]
        self.shard = Supervised("shard", shard_argv, environment, socket=socket)
        self.router = Supervised("router", router_argv, environment)
        self.supervisor = Supervisor(
            self.shard,
            self.router,
            hostname="127.0.0.1",
            port=port,
            socket=socket,
            drain_seconds=20,
            started=time.monotonic(),
        )


@contextlib.asynccontextmanager
async def running(group: Group) -> AsyncIterator[asyncio.Task[None]]:
    """The supervisor at work; told to end and awaited afterwards."""
    watch_children()
    task = asyncio.ensure_future(group.supervisor.run(group.stop))
    try:
        yield task
    finally:
        group.stop.set()
        with contextlib.suppress(StartError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def both_serve(group: Group) -> bool:
    return not group.supervisor._is_anybody_down()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SERVING_PROBE_SECONDS", 0.05)


def test_router_drains_before_the_shard_ends(
    fakes: Fakes, free_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace_launcher")

    async def work() -> None:
        group = Group(fakes, free_port, tmp_path)
        async with running(group):
            await until(lambda: both_serve(group))

    run(work())
    started = ["router serves", "router starts", "shard serves", "shard starts"]
    assert sorted(fakes.events()[:-3]) == started
    assert fakes.events()[-3:] == ["router told to end", "router drained", "shard told to end"]
    assert f"ready on http://127.0.0.1:{free_port}" in caplog.text
    assert "the weights" not in caplog.text


@pytest.mark.parametrize("name", ["shard", "router"])
def test_a_dead_child_is_started_again_beside_the_other(
    name: str, fakes: Fakes, free_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        group = Group(fakes, free_port, tmp_path)
        async with running(group):
            for times in (1, 2, 3):
                await until(lambda: both_serve(group))
                os.kill(fakes.pids(f"{name} serves")[-1], signal.SIGKILL)
                await until(lambda times=times: fakes.events().count(f"{name} serves") > times)  # type: ignore[misc]
            await until(lambda: both_serve(group))

    run(work())
    other = {"shard": "router", "router": "shard"}[name]
    assert fakes.events().count(f"{other} starts") == 1
    assert f"the {name} ended, signal SIGKILL" in caplog.text


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FAKE_SHARD": "fails"}, "the shard did not start, exit status 3: the weights are upside down"),
        (
            {"FAKE_ROUTER": "fails-router"},
            "the router did not start, exit status 1: the tokenizer is inside out",
        ),
    ],
)
def test_a_failed_first_start_ends_everything(
    variables: dict[str, str], message: str, fakes: Fakes, free_port: int, tmp_path: Path
) -> None:
    async def work() -> None:
        group = Group(fakes, free_port, tmp_path, **variables)
        async with running(group) as task:
            with pytest.raises(ChildFailed) as failure:
                await task
            assert str(failure.value) == message

    run(work())
    assert not any(is_running(pid) for name in ("shard", "router") for pid in fakes.pids(f"{name} starts"))


def test_a_child_that_cannot_start_again_ends_everything(
    fakes: Fakes, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.01)

    async def work() -> None:
        group = Group(fakes, free_port, tmp_path)
        async with running(group) as task:
            await until(lambda: both_serve(group))
            fakes.mood_path.write_text("fails")
            os.kill(fakes.pids("shard serves")[0], signal.SIGKILL)
            with pytest.raises(ChildFailed, match=r"failed to start 5 times in a row.*upside down"):
                await task

    run(work())
    assert fakes.events().count("shard starts") == 1 + supervisor.MAX_FAILED_STARTS
    assert fakes.events()[-1] == "router drained"


@pytest.mark.parametrize("name", ["shard", "router"])
def test_a_frozen_child_is_killed_and_started_again(
    name: str, fakes: Fakes, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FROZEN_SECONDS", 0.2)
    monkeypatch.setattr("headrace_launcher.network.PROBE_SECONDS", 0.5)

    async def work() -> None:
        group = Group(fakes, free_port, tmp_path)
        async with running(group):
            await until(lambda: both_serve(group))
            os.kill(fakes.pids(f"{name} serves")[0], signal.SIGSTOP)
            await until(lambda: fakes.events().count(f"{name} serves") == 2)
            await until(lambda: both_serve(group))

    run(work())
    other = {"shard": "router", "router": "shard"}[name]
    assert fakes.events().count(f"{other} starts") == 1


def test_a_shard_whose_device_does_not_compute_is_started_again(
    fakes: Fakes, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FROZEN_SECONDS", 0.2)

    async def work() -> None:
        group = Group(fakes, free_port, tmp_path)
        async with running(group):
            await until(lambda: both_serve(group))
            fakes.mood_path.write_text("numb")
            await until(lambda: fakes.events().count("shard starts") == 2)
            fakes.mood_path.write_text("")
            await until(lambda: both_serve(group))

    run(work())
    assert fakes.events().count("router starts") == 1


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_shard_that_warms_up_again_has_time(
    is_patient: bool, fakes: Fakes, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FROZEN_SECONDS", 0.1)
    monkeypatch.setattr(supervisor, "MIN_WAIT_SECONDS", 1000.0 if is_patient else 0.1)
    monkeypatch.setattr(supervisor, "WARM_UPS", 0.0)
    looks: list[int | None] = []

    async def work() -> None:
        group = Group(fakes, free_port, tmp_path)
        judge = group.supervisor._judge

        def count(status: int | None, is_alive: bool) -> None:
            looks.append(status)
            judge(status, is_alive)

        monkeypatch.setattr(group.supervisor, "_judge", count)
        async with running(group):
            await until(lambda: both_serve(group))
            looks.clear()
            fakes.mood_path.write_text("warming")
            if is_patient:
                await until(lambda: looks.count(503) >= 10)
            else:
                await until(lambda: fakes.events().count("shard starts") == 2)
            fakes.mood_path.write_text("")
            await until(lambda: both_serve(group))

    run(work())
    assert fakes.events().count("shard starts") == (1 if is_patient else 2)
    assert fakes.events().count("router starts") == 1


def test_the_first_warm_up_says_how_long_the_next_ones_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    shard = Supervised("shard", [], {})
    shard.state = supervisor.State.STARTING
    shard.answered()
    now = 3.0
    shard.answered()
    now = 50.0
    shard.served()
    assert shard._wait_seconds == supervisor.WARM_UPS * 50
    now = 60.0
    shard.answered()
    shard.served()
    assert shard._wait_seconds == supervisor.WARM_UPS * 50


def test_a_router_has_time_to_close_what_is_left() -> None:
    assert supervisor.DRAIN_MARGIN_SECONDS >= 2 * CLOSING_SECONDS


def test_stop_while_the_shard_loads(fakes: Fakes, free_port: int, tmp_path: Path) -> None:
    async def work() -> None:
        group = Group(fakes, free_port, tmp_path, FAKE_SHARD="slow")
        async with running(group):
            await until(lambda: {"shard starts", "router serves"} <= set(fakes.events()))

    run(work())
    assert not any(is_running(pid) for name in ("shard", "router") for pid in fakes.pids(f"{name} starts"))


def test_a_program_that_is_not_there_is_a_start_error(free_port: int, tmp_path: Path) -> None:
    async def work() -> None:
        missing = Supervised("shard", [str(tmp_path / "no-such-program")], {})
        with pytest.raises(StartError, match=r"the shard cannot be started: .*no-such-program"):
            await missing.run()

    run(work())


def test_pauses_double_and_shrink_again_after_a_steady_while() -> None:
    class Ended:
        how_it_ended = "exit status 1"

    child: Any = Ended()
    supervised = Supervised("shard", [], {})
    supervised._has_served = True
    supervised._pause_seconds = 8.0
    supervised._settle(child, ran_seconds=supervisor.STEADY_SECONDS - 1)
    assert supervised._pause_seconds == 8.0
    supervised._settle(child, ran_seconds=supervisor.STEADY_SECONDS)
    assert supervised._pause_seconds == supervisor.FIRST_PAUSE_SECONDS
