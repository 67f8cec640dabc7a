"""One child: its lines, its last words, its end. Every child here is a real process."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from headrace_launcher import process
from headrace_launcher.process import MAX_LINE_BYTES, Child, watch_children

from tests.launcher.fakes import is_running, wait_until


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def with_children() -> None:
        watch_children()
        await asyncio.wait_for(work(), 60)

    asyncio.run(with_children())


def python(program: str, **options: Any) -> Child:
    return Child("child", [sys.executable, "-c", program], {}, **options)


def printed_by(program: str, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Level and message of each line that the launcher shows for a program."""

    async def work() -> None:
        await python(program).ended.wait()

    run(work)
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_lines_of_both_pipes_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    program = "import sys; print('one'); print('two', file=sys.stderr); print('no newline', end='')"
    lines = printed_by(program, caplog)
    assert sorted(lines) == [(logging.INFO, "no newline"), (logging.INFO, "one"), (logging.WARNING, "two")]
    assert lines.index((logging.INFO, "one")) < lines.index((logging.INFO, "no newline"))


def test_json_lines_keep_level_time_and_line_breaks(caplog: pytest.LogCaptureFixture) -> None:
    program = (
        "from headrace_proto import logs; import logging; logs.setup('x', True)\n"
        "logging.getLogger('headrace_shard.a').error('first\\nsecond é')"
    )
    assert printed_by(program, caplog) == [(logging.ERROR, "first\nsecond é")]
    assert caplog.records[0].name == "headrace_shard.a"


def test_a_line_comes_before_the_next_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        child = python("import time; print('now'); time.sleep(60)")
        while not caplog.records:
            await asyncio.sleep(0.01)
        assert not child.ended.is_set()
        await child.stop(10)

    run(work)
    assert [record.getMessage() for record in caplog.records] == ["now"]


def test_long_lines_are_whole_and_endless_ones_come_in_pieces(caplog: pytest.LogCaptureFixture) -> None:
    program = f"print('a' * 300_000); print('b' * {MAX_LINE_BYTES + 10}); print('c')"
    lengths = [len(text) for _, text in printed_by(program, caplog)]
    assert lengths == [300_000, MAX_LINE_BYTES, 10, 1]


def test_each_picture_of_a_progress_bar_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    program = r"import sys; sys.stdout.write('10%\r50%\r100%\r\n\n'); sys.stdout.buffer.write(b'\xff\n')"
    assert [text for _, text in printed_by(program, caplog)] == ["10%", "50%", "100%", "�"]


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("import sys; print('fine'); sys.exit('it broke')", "exit status 1: it broke"),
        ("import sys; sys.exit('headrace-shard: error: no weights')", "exit status 1: no weights"),
        (
            "from headrace_proto import logs; import logging, sys; logs.setup('x', True)\n"
            "logging.getLogger('headrace_shard').error('not why'); sys.exit('headrace-shard: error: why')",
            "exit status 1: why",
        ),
        ("raise ValueError('three is no prime')", "exit status 1: ValueError: three is no prime"),
        ("import os; print('fine', flush=True); os.kill(os.getpid(), 11)", "signal SIGSEGV"),
        ("print('no weights'); exit(4)", "exit status 4: no weights"),
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL (by somebody, or out of memory)"),
        (
            "from headrace_proto import logs; import logging; logs.setup('x', True)\n"
            "logging.getLogger('headrace_shard').error('why'); print('bye')",
            "exit status 0: why",
        ),
    ],
)
def test_last_words_tell_why(program: str, how: str) -> None:
    async def work() -> None:
        child = python(program)
        await child.ended.wait()
        assert child.how_it_ended == how

    run(work)


def test_output_can_go_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []

    async def work() -> None:
        program = "import sys; print('result'); print('progress', file=sys.stderr)"
        await python(program, on_output=lines.append, stderr_level=logging.INFO).ended.wait()

    run(work)
    assert lines == ["result"]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.INFO, "progress")
    ]


def test_stop_kills_who_does_not_listen_with_all_it_has_started() -> None:
    program = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "below = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(below.pid); time.sleep(60)"
    )
    lines: list[str] = []

    async def work() -> None:
        child = python(program, on_output=lines.append)
        while not lines:
            await asyncio.sleep(0.01)
        assert is_running(int(lines[0]))
        await child.stop(0.1)
        assert child.exit_status == -signal.SIGKILL
        child.kill_group()  # of a dead child: nothing happens

    run(work)
    wait_until(lambda: not is_running(int(lines[0])), "the end of the child's child")


def test_a_stranger_that_holds_the_pipes_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LAST_LINE_SECONDS", 0.1)
    program = (
        "import subprocess, sys\n"
        "stranger = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)\nprint(stranger.pid)"
    )
    lines: list[str] = []

    async def work() -> None:
        await python(program, on_output=lines.append).ended.wait()

    run(work)
    assert is_running(int(lines[0]))
    os.kill(int(lines[0]), signal.SIGKILL)
