"""Where tables go. Knows no figures."""

import sys

from rich.console import Console

_FILE_COLUMNS = 200
"""In a file or a pipe a table gets the columns that it needs; a terminal says how many it has."""


def screen() -> Console:
    """The console of standard output."""
    return Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)
