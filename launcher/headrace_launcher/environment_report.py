"""`--env`: what this server runs on, for a bug report. Knows no setting."""

import importlib.metadata
import os
import platform
import subprocess

from headrace_proto import __version__

PACKAGES = (
    "torch",
    "safetensors",
    "tokenizers",
    "grpcio",
    "protobuf",
    "uvicorn",
    "starlette",
)
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
NVIDIA_SMI_SECONDS = 10.0


def environment_report() -> list[str]:
    """Lines for the log: versions, processor, GPUs."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [
        f"headrace {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {memory_bytes / 2**30:.0f} GiB of memory",
    ]
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    lines.append(", ".join(versions))
    try:
        answer = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return [*lines, "no GPU: nvidia-smi does not run"]
    gpus = [f"GPU {line}" for line in answer.stdout.splitlines() if line]
    return lines + (gpus if answer.returncode == 0 and gpus else ["no GPU: nvidia-smi finds none"])
