"""What the Makefile's verbs promise where that is more than to call one program."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.architecture.documents import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a verb with the environment that runs this test, as it is; by itself, though `make` may run us."""
    command = ["make", "--no-print-directory", f"VENV={sys.prefix}", f"--old-file={sys.prefix}/.installed"]
    of_outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in of_outer}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_gpu_tests_without_a_gpu_fail_in_one_line() -> None:
    ended = make("test-gpu")
    assert ended.returncode != 0 and ended.stdout == ""
    message, made = ended.stderr.splitlines()
    assert message == "make test-gpu needs a CUDA device, and torch finds none on this machine"
    assert made.startswith("make: ***")


def test_who_asks_for_gpu_tests_is_not_told_that_they_were_skipped() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", "half_precision", "--maxfail=1"]
    ended = subprocess.run(
        [*command, "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert re.search(r"1 (failed|error)", ended.stdout) and "skipped" not in ended.stdout


def test_help_lists_every_verb() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    listed = re.findall(r"^  make ([a-z-]+) ", make("help").stdout, re.MULTILINE)
    assert sorted([*listed, "check-proto"]) == sorted(phony.split())
