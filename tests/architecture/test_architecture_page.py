"""ARCHITECTURE.md names every module and folder that there is, and none that there is not."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PACKAGES = [f"{process}/headrace_{process}" for process in ("proto", "router", "shard", "launcher")]


def section(package: str) -> str:
    """The lines of the tree that belong to a package."""
    _, _, rest = PAGE.partition(f"\n{package}")
    return rest.partition("\n\n")[0].partition("\n")[2]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tree_is_the_tree(package: str) -> None:
    folder = ROOT / package
    modules = {path.stem for path in folder.glob("*.py") if "_pb2" not in path.name} - {"__init__"}
    folders = {f"{path.name}/" for path in folder.iterdir() if list(path.glob("*.py"))}
    # The names of a line end where two blanks and a lower-case sentence, or the column of 27, begin.
    drawn = {word for line in section(package).splitlines() for word in re.findall(r"[\w./*]+", line[:27])}
    drawn -= {"shard.proto", "shard_pb2*"}
    assert drawn == modules | folders
