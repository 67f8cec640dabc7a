"""Tables in files lose nothing."""

import subprocess
import sys

PROGRAM = """
from rich.table import Table
from bench.screen import screen

table = Table()
for number in range(12):
    table.add_column(f"figure-{number}", no_wrap=True)
table.add_row(*12 * ["12,345.67"])
screen().print(table)
"""


def test_table_in_a_pipe_has_all_its_figures() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.count("12,345.67") == 12
