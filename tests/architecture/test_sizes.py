"""Small, and said once: files under 400 lines, functions under 60, a docstring in every module."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.documents import ROOT

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FOLDERS = ("proto", "router", "shard", "launcher", "tests", "bench")


def sources() -> Iterator[tuple[str, str]]:
    """Path and text of every Python file but generated ones."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_there_is_something_to_look_at() -> None:
    assert {Path(path).parts[0] for path, _ in sources()} == set(FOLDERS)


def test_files_are_short() -> None:
    lengths = {path: text.count("\n") for path, text in sources()}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = {}
    for path, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{path}:{node.lineno} {node.name}"] = lines
    assert long == {}


def test_every_module_says_what_it_is() -> None:
    assert [path for path, text in sources() if not ast.get_docstring(ast.parse(text))] == []
