"""Building, caching and loading the kernels with a real compiler, and what happens without one."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from headrace_shard.attention.base import pick
from headrace_shard.config import ShardSettings
from headrace_shard.errors import KernelUnavailable
from headrace_shard.kernels import build

LOAD = """
import re, sys
from pathlib import Path
import torch
from headrace_shard.kernels import build
from headrace_shard.kernels.paged import PagedKernels
PagedKernels(build.load(Path(sys.argv[1]), sys.argv[2]))
"""


@dataclass(frozen=True)
class Compiler:
    command: str
    log: Path

    @property
    def num_builds(self) -> int:
        return self.log.read_text().count("build")


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    """A compiler that writes down every build and does not optimise."""
    log, script = tmp_path / "builds", tmp_path / "compiler"
    log.touch()
    script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo build >> {log};; esac\nexec g++ "$@" -O0\n')
    script.chmod(0o755)
    return Compiler(f"{script} -DNOTHING", log)


def test_second_load_comes_from_the_cache(tmp_path: Path, compiler: Compiler) -> None:
    cache = tmp_path / "cache"
    build.load(cache, compiler.command)
    build.load(cache, compiler.command)
    assert compiler.num_builds == 1
    assert len(list(cache.iterdir())) == 1


def test_damaged_library_is_built_anew(tmp_path: Path, compiler: Compiler) -> None:
    build.load(tmp_path / "sound", compiler.command)
    (sound,) = (tmp_path / "sound").iterdir()
    damaged = tmp_path / "damaged" / sound.name
    damaged.parent.mkdir()
    damaged.write_bytes(b"\x7fELF and then nothing")
    build.load(damaged.parent, compiler.command)
    assert compiler.num_builds == 2
    assert damaged.read_bytes() == sound.read_bytes()


def test_other_flags_are_another_library(tmp_path: Path, compiler: Compiler) -> None:
    build.load(tmp_path / "cache", compiler.command)
    build.load(tmp_path / "cache", f"{compiler.command} -DSOMETHING")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_cache_that_cannot_be_written_is_done_without(tmp_path: Path, compiler: Compiler) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file" / "cache", None):
        assert build.load(cache, compiler.command).headrace_instructions is not None


def test_two_processes_may_build_at_once(tmp_path: Path, compiler: Compiler) -> None:
    cache = tmp_path / "cache"
    processes = [
        subprocess.Popen([sys.executable, "-c", LOAD, str(cache), compiler.command]) for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    assert compiler.num_builds in (1, 2)
    (library,) = cache.iterdir()
    assert not library.name.startswith(".")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no-such-compiler", "'no-such-compiler' is not on the PATH; install g"),
        (" ", "' ' is not on the PATH"),
        ("g++ '-O3", "--cxx: .* cannot be read as a command"),
    ],
)
def test_missing_compiler(command: str, words: str) -> None:
    with pytest.raises(KernelUnavailable, match=words):
        build.load(None, command)


def test_failing_compiler_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "broken"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n(echo note; echo error: out of luck) >&2; exit 4\n'
    )
    script.chmod(0o755)
    with pytest.raises(KernelUnavailable, match="failed with status 4: error: out of luck"):
        build.load(tmp_path / "cache", str(script))
    backend, why = pick(ShardSettings(cxx=str(script)), torch.device("cpu"))
    assert backend.name == "sdpa"
    assert "out of luck" in why
    assert "\n" not in why


def test_compiler_that_makes_nonsense(tmp_path: Path) -> None:
    script = tmp_path / "nonsense"
    script.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo nonsense > "$2"; shift; done\n'
    )
    script.chmod(0o755)
    with pytest.raises(KernelUnavailable, match="cannot be stored and loaded"):
        build.load(tmp_path / "cache", str(script))


ONE_RUNTIME = (
    LOAD
    + """
def num_threads():
    return len(list(Path("/proc/self/task").iterdir()))

torch.set_num_threads(3)
matrix = torch.randn(512, 512)
for _ in range(3):
    matrix.exp().sum()
before = num_threads()
kernels = PagedKernels(build.load(Path(sys.argv[1]), sys.argv[2]))
from tests.shard.kernels.dense import make_step
make_step([(300, 4)] * 8).attend(kernels)
names = re.findall(r"/lib(?:gomp|iomp5|omp)[^/]*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
print(len(set(names)), num_threads() - before)
"""
)


@pytest.mark.skipif(build.openmp_runtime() is None, reason="torch was built without a shared OpenMP runtime")
def test_one_openmp_runtime_and_one_pool_of_threads(tmp_path: Path, compiler: Compiler) -> None:
    command = [sys.executable, "-c", ONE_RUNTIME, str(tmp_path), compiler.command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]
