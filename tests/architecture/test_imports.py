"""Every module imports in a fresh interpreter in which what its package must not know cannot be imported.

import-linter reads the code; this runs it, so it also sees what a dependency or a late import drags in.
"""

import importlib.util
import subprocess
import sys

import pytest

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
