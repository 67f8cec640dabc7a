"""What a log line looks like: a readable one for people, a JSON object for machines and for the launcher.

Every process calls `setup` once and then uses the standard `logging`. Lines go to standard output. The
launcher starts its children with JSON lines, gives each line they print to `relay`, and so shows them
once more in the form that it was asked for itself. Knows no process and no setting by name.
"""

import json
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
"""The words that `--log-level` and a JSON line may use."""

COLUMN_WIDTHS = (26, 16)
"""Of the columns of a table but the last, in the readable form."""

OWN_LOGGERS = ("headrace_proto", "headrace_router", "headrace_shard", "headrace_launcher", "__main__")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """A line that another process has printed in the JSON form."""

    seconds: float
    """Time of the event, since the epoch."""
    level: int
    """As in `logging`."""
    target: str
    """Name of the logger."""
    message: str
    columns: tuple[str, ...] = ()
    """Of a row of a table; the message is the row in one piece."""


def table_row(name: str, value: str, why: str) -> tuple[str, dict[str, object]]:
    """Message and `extra` of a line that belongs to a table: `log.info(message, extra=extra)`."""
    return f"{name}: {value}, {why}".removesuffix(", "), {"headrace_columns": (name, value, why)}


def _timestamp(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, tz=UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _message_of(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if record.exc_info:
        message += "\n" + logging.Formatter().formatException(record.exc_info)
    return message


class ReadableFormatter(logging.Formatter):
    """`<time> <LEVEL> <process> <message>`; the further lines of a traceback follow as they are."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        process = getattr(record, "headrace_process", self._process)
        level = record.levelname.replace("WARNING", "WARN")
        message = _message_of(record)
        if columns := getattr(record, "headrace_columns", ()):
            widths = (*COLUMN_WIDTHS, *[0] * len(columns))
            message = " ".join(
                text.ljust(width) for text, width in zip(columns, widths, strict=False)
            ).rstrip()
        return f"{_timestamp(record.created)} {level:<5} {process:<8} {message}"


class JsonFormatter(logging.Formatter):
    """One object a line: `timestamp`, `level`, `process`, `target`, `message`; for a row `columns` too."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "timestamp": _timestamp(record.created),
            "level": record.levelname.replace("WARNING", "WARN"),
            "process": getattr(record, "headrace_process", self._process),
            "target": record.name,
            "message": _message_of(record),
        }
        if columns := getattr(record, "headrace_columns", ()):
            fields["columns"] = columns
        return json.dumps(fields, ensure_ascii=False)


class _Output(logging.StreamHandler[TextIO]):
    """Where lines go, which may be lost (`headrace | head`) or full: work goes on without its lines."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, BrokenPipeError):
            # Nobody will ever read it; and what is buffered must have somewhere to go when Python ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        elif not isinstance(error, OSError):
            super().handleError(record)


def setup(process: str, json_output: bool, level: str = "info", *, is_output_taken: bool = False) -> None:
    """Sends the log lines of this process to standard output, or to standard error where the output is for
    what the program was asked for. `level` is one of `LEVELS`.

    Other packages' loggers show warnings and worse only, whatever the level.
    """
    # A line holds text of users and models; one that the terminal cannot spell must not raise.
    stream = sys.stderr if is_output_taken else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    handler = _Output(stream)
    handler.setFormatter(JsonFormatter(process) if json_output else ReadableFormatter(process))
    threshold = LEVELS[level]
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING), force=True)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(threshold)
    logging.captureWarnings(True)
    # Python shows each deprecation of a dependency to its developer; an operator can do nothing with it.
    warnings.simplefilter("ignore", DeprecationWarning)


def parse(text: str) -> LogLine | None:
    """The fields of a JSON log line, or None when the text is anything else."""
    if not text.startswith("{"):
        return None
    try:
        fields = json.loads(text)
        return LogLine(
            seconds=datetime.fromisoformat(fields["timestamp"]).timestamp(),
            level=LEVELS[fields["level"].lower()],
            target=str(fields["target"]),
            message=str(fields["message"]),
            columns=tuple(map(str, fields.get("columns", ()))),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def relay(process: str, text: str, *, level: int = logging.INFO) -> str:
    """Shows a line of another process in this process's form; returns its message.

    A line that is no JSON log line (a crash of native code, a print) is shown whole at `level`.
    """
    line = parse(text)
    if line is None:
        line = LogLine(seconds=datetime.now(tz=UTC).timestamp(), level=level, target=process, message=text)
    record = logging.LogRecord(line.target, line.level, "", 0, line.message, None, None)
    record.created = line.seconds
    record.headrace_process = process
    record.headrace_columns = line.columns
    # The process that printed it has chosen what is worth printing: no second threshold here.
    for handler in logging.getLogger().handlers:
        handler.handle(record)
    return line.message
