"""A log line is one line for people, one object for machines, and passes a second process unharmed."""

import json
import logging
import os
import re
import subprocess
import sys
import warnings

import pytest
from headrace_proto import logs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("untouched_logging")

logger = logging.getLogger("headrace_shard.test")


def test_a_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("shard", False)
    logger.warning("%d of %s", 3, "them")
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARN  shard    3 of them\n"
    assert re.fullmatch(pattern, capsys.readouterr().out)


def test_a_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", True)
    logger.info("café\nnext")
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    fields = json.loads(out)
    assert fields.pop("timestamp").endswith("Z")
    assert fields == {
        "level": "INFO",
        "process": "router",
        "target": "headrace_shard.test",
        "message": "café\nnext",
    }


def test_a_row_of_a_table_has_columns_for_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    message, extra = logs.table_row("step", "512 tokens", "the default")
    logs.setup("router", True)
    logger.info(message, extra=extra)
    line = capsys.readouterr().out
    fields = json.loads(line)
    assert fields["message"] == "step: 512 tokens, the default"
    assert fields["columns"] == ["step", "512 tokens", "the default"]
    logs.setup("launcher", False)
    logs.relay("router", line)
    assert capsys.readouterr().out.endswith(f"router   {'step':<26} {'512 tokens':<16} the default\n")
    logs.setup("launcher", True)
    logs.relay("router", line)
    assert json.loads(capsys.readouterr().out) == fields


def test_a_traceback_stays_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", True)
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("failed")
    message = json.loads(capsys.readouterr().out)["message"]
    assert message.startswith("failed\nTraceback") and message.endswith("ValueError: why")


@pytest.mark.parametrize(
    ("level", "own", "foreign"),
    [("debug", 4, 2), ("info", 3, 2), ("warn", 2, 2), ("error", 1, 1)],
)
def test_levels(level: str, own: int, foreign: int, capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", False, level)
    for name, num_lines in (("headrace_router.x", own), ("someone.else", foreign)):
        for method in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger(name), method)("line")
        assert capsys.readouterr().out.count("\n") == num_lines


def test_warnings_are_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("router", False)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("look out", UserWarning, stacklevel=1)
    assert "look out" in capsys.readouterr().out


@given(message=st.text(st.characters(codec="utf-8")), level=st.sampled_from(["INFO", "ERROR"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_relayed_line_is_the_same_again(
    message: str, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.setup("launcher", True, "error")
    fields = {"timestamp": "2026-01-02T03:04:05.678Z", "level": level, "target": "t", "message": message}
    text = json.dumps(fields | {"process": "unknown"})
    assert logs.relay("shard", text) == message
    assert json.loads(capsys.readouterr().out) == fields | {"process": "shard"}


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "{",
        "{}",
        "[1]",
        '{"a":' * 100_000,
        '{"timestamp": 1, "level": "INFO", "target": "t", "message": "m"}',
        '{"timestamp": "2026-01-02T03:04:05Z", "level": "LOUD", "target": "t", "message": "m"}',
        '{"timestamp": "2026-01-02T03:04:05Z", "level": 3, "target": "t", "message": "m"}',
    ],
)
def test_a_line_that_is_no_log_line_is_shown_whole(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.parse(text) is None
    logs.setup("launcher", True)
    assert logs.relay("shard", text, level=logging.WARNING) == text
    fields = json.loads(capsys.readouterr().out)
    assert (fields["level"], fields["process"], fields["message"]) == ("WARN", "shard", text)


PROGRAM = """
import logging, sys
from headrace_proto import logs
logs.setup("launcher", False)
for number in range(2000):
    logging.getLogger("headrace_launcher").warning("line %d", number)
print("done", file=sys.stderr)
"""


def test_a_reader_that_has_gone_stops_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "done\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this device")
def test_a_full_disk_stops_nothing() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    # The lines that are still in the buffer at the end are lost, which Python itself mentions.
    assert done.stderr.startswith("done\n") and "Logging error" not in done.stderr
