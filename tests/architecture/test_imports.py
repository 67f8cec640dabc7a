"""Every module imports in a fresh interpreter in which what its package must not know cannot be imported.

import-linter reads the code; this runs it, so it also sees what a dependency or a late import drags in.
"""

import ast
import importlib.util
import subprocess
import sys

import pytest

from tests.architecture.documents import ROOT

PROGRAM = """
import importlib, pkgutil, sys

package, *forbidden = sys.argv[1:]

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in forbidden:
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Forbidden())
root = importlib.import_module(package)
names = [package] + [found.name for found in pkgutil.walk_packages(root.__path__, package + ".")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""

LOADS = """
import sys
import headrace_launcher.__main__, headrace_launcher.serve
print(*(name for name in sys.modules if name.startswith(("headrace_router", "headrace_shard"))))
"""

WEB = ("starlette", "uvicorn", "uvloop", "httptools", "msgspec")
TENSORS = ("torch", "transformers", "safetensors", "gguf")

FORBIDDEN = {
    "headrace_proto": (*WEB, *TENSORS, "huggingface_hub", "headrace_router", "headrace_shard"),
    "headrace_router": (*TENSORS, "huggingface_hub", "headrace_shard", "headrace_launcher"),
    "headrace_router.scheduling": (*TENSORS, *WEB, "grpc", "asyncio", "headrace_shard"),
    "headrace_router.text": (*TENSORS, *WEB, "grpc", "headrace_shard"),
    "headrace_shard": (*WEB, "headrace_router", "headrace_launcher"),
    # What is slow to import belongs to the children: the launcher of a model that is in place starts at once.
    "headrace_launcher": (*TENSORS, *WEB, "huggingface_hub", "grpc", "tokenizers"),
}
NEEDED = {"headrace_router": "starlette", "headrace_shard": "torch"}
"""A package whose extra is not installed cannot be imported at all."""


@pytest.mark.parametrize("package", FORBIDDEN)
def test_package_imports_without_what_it_must_not_know(package: str) -> None:
    needed = NEEDED.get(package)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    command = [sys.executable, "-c", PROGRAM, package, *FORBIDDEN[package]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0


def imported(text: str) -> set[str]:
    """Every module that a source names in an import, at its top or not; `from a import b` names a.b."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{name.name}" for name in node.names}
    return names


def test_the_launcher_takes_from_the_other_processes_their_settings_alone() -> None:
    sources = sorted((ROOT / "launcher/headrace_launcher").rglob("*.py"))
    names = set().union(*(imported(path.read_text(encoding="utf-8")) for path in sources))
    foreign = {name for name in names if name.startswith(("headrace_router", "headrace_shard"))}
    assert foreign, "nothing was looked at"
    assert [name for name in sorted(foreign) if name.split(".")[1:2] != ["config"]] == []


def test_the_launcher_loads_of_the_other_processes_their_settings_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    packages = {"headrace_router", "headrace_shard"}
    assert set(ended.stdout.split()) == packages | {f"{package}.config" for package in packages}
