"""Builds the C++ kernels at first use, keeps the library in a cache, loads it. Knows compilers, no tensors.

The library's name in the cache is a digest of everything that shapes it: sources, flags, compiler, processor
and OpenMP runtime. A finished library is renamed into place, so any number of processes may build at once.
"""

import ctypes
import functools
import hashlib
import logging
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from headrace_shard.errors import KernelUnavailable

BLOCK_SIZE = 16
"""Tokens per KV block; the sources take it from here."""

_SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Packed words are written as numbers of one size and read as another.
    "-fno-strict-aliasing",
    f"-DHEADRACE_BLOCK_SIZE={BLOCK_SIZE}",
    # The compiler appends its own OpenMP runtime; this drops it where torch's already answers.
    "-Wl,--as-needed",
)
_BUILD_TIMEOUT_SECONDS = 300.0

_logger = logging.getLogger(__name__)


def user_cache() -> Path | None:
    """Where libraries are kept, or None for a user without a home."""
    try:
        return Path.home() / ".cache" / "headrace" / "kernels"
    except RuntimeError:
        return None


@functools.cache
def for_machine(cxx: str) -> ctypes.CDLL:
    """The library for this machine and process, loaded once; as `load` with the user's cache."""
    return load(user_cache(), cxx)


def load(cache: Path | None, cxx: str, architecture: str = "native") -> ctypes.CDLL:
    """The library for this machine, from the cache or built now (some seconds).

    `cxx` is the compiler's command as a shell reads it, `architecture` GCC's -march. Without a cache, or with
    one that cannot be written, the library is built for this process alone. Raises KernelUnavailable when
    there is no compiler, it fails, or its result cannot be loaded.
    """
    compiler = _compiler(cxx)
    runtime = openmp_runtime()
    flags = (f"-march={architecture}", *_FLAGS)
    name = f"{_digest(compiler, flags, runtime)}.so"
    if cache is not None:
        cached = cache / name
        try:
            if cached.is_file():
                return ctypes.CDLL(str(cached))
        except OSError as error:
            _logger.info("building the CPU kernels anew, for %s cannot be loaded: %s", cached, error)
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-kernels-") as folder:
            built = Path(folder) / name
            _build(compiler, flags, runtime, built)
            return ctypes.CDLL(str(_keep(built, cache)))
    except OSError as error:
        raise KernelUnavailable(f"the CPU kernels cannot be stored and loaded: {error}") from error


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded into this process.

    The kernels are linked with this very file: two runtimes in a process would each keep a pool of threads,
    and the pools would fight for the cores.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {
        Path(path) for path in re.findall(r"\s(/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*)$", maps, re.MULTILINE)
    }
    torch_folder = Path(torch.__file__).parent
    return min(paths, key=lambda path: (not path.is_relative_to(torch_folder), path), default=None)


def _compiler(cxx: str) -> list[str]:
    try:
        command = shlex.split(cxx)
    except ValueError as error:
        raise KernelUnavailable(f"--cxx: {cxx!r} cannot be read as a command: {error}") from None
    found = shutil.which(command[0]) if command else None
    if found is None:
        raise KernelUnavailable(
            f"no C++ compiler: {cxx!r} is not on the PATH; install g++ or name another with --cxx"
        )
    return [found, *command[1:]]


def _digest(compiler: list[str], flags: tuple[str, ...], runtime: Path | None) -> str:
    digest = hashlib.sha256()
    for source in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + source.read_bytes())
    parts = (*compiler, _run([*compiler, "--version"]), *flags, str(runtime), _processor())
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """What -march=native depends on: model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.startswith(names))


def _build(compiler: list[str], flags: tuple[str, ...], runtime: Path | None, target: Path) -> None:
    _logger.info("building the CPU kernels with %s: some seconds, at the first start only", compiler[0])
    started = time.monotonic()
    libraries = [str(runtime)] if runtime is not None else []
    _run([*compiler, *flags, "-o", str(target), *map(str, sorted(_SOURCES.glob("*.cpp"))), *libraries])
    _logger.info("built the CPU kernels in %.1f s", time.monotonic() - started)


def _keep(built: Path, cache: Path | None) -> Path:
    """Copies the library into the cache, there in one rename; gives the place to load it from.

    Without a cache that can be written only the next start suffers: it builds again.
    """
    if cache is None:
        return built
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, prefix=".", suffix=".so", delete=False) as file:
            file.write(built.read_bytes())
        return Path(file.name).replace(cache / built.name)
    except OSError as error:
        _logger.info("the CPU kernels are not kept for the next start: %s", error)
        return built


def _run(command: list[str]) -> str:
    """Output of a compiler's run; raises KernelUnavailable with its first complaint."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_BUILD_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"the C++ compiler {command[0]} could not be run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        complaint = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise KernelUnavailable(f"{command[0]} failed with status {done.returncode}: {complaint.strip()}")
    return done.stdout
