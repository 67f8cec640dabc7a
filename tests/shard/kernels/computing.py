"""A process of its own that computes with the kernels, and whose system may refuse matrix registers.

    python -m tests.shard.kernels.computing CACHE permitted|refused

Prints the kernels' instructions, and what the system answers to a request for matrix registers: 0 or the
number of an error.
"""

import ctypes
import errno
import struct
import sys
from pathlib import Path

import torch
from headrace_shard.config import ShardSettings
from headrace_shard.kernels import build
from headrace_shard.kernels.dense import DenseKernels
from headrace_shard.kernels.paged import PagedKernels

from tests.shard.kernels.dense import make_step

ARCH_PRCTL = 158  # the system call's number on x86-64
REQUEST_PERMISSION, TILE_DATA = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_matrix_registers() -> None:
    """Lets the requests of this thread fail, and of those it starts, as a sandbox may (Linux, seccomp)."""
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD+W+ABS, BPF_JMP+JEQ+K, BPF_RET+K
    number, architecture, argument = 0, 4, 16  # offsets within seccomp_data
    x86_64, allow, fail = 0xC000003E, 0x7FFF0000, 0x00050000
    program = [  # operation, steps to skip if true, steps to skip if not, operand
        (load, 0, 0, architecture),
        (equal, 0, 5, x86_64),
        (load, 0, 0, number),
        (equal, 0, 3, ARCH_PRCTL),
        (load, 0, 0, argument),
        (equal, 0, 1, REQUEST_PERMISSION),
        (answer, 0, 0, fail | errno.EPERM),
        (answer, 0, 0, allow),
    ]
    code = _Program(len(program), b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    set_no_new_privileges, set_seccomp, filtered = 38, 22, 2
    _prctl(set_no_new_privileges, 1)
    _prctl(set_seccomp, filtered, ctypes.addressof(code))


def _prctl(*arguments: int) -> None:
    if _libc.prctl(*map(ctypes.c_ulong, (*arguments, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def answer_to_request() -> int:
    numbers = (ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return 0 if _libc.syscall(*map(ctypes.c_long, numbers)) == 0 else ctypes.get_errno()


def assert_near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=2e-2)


def main(cache: Path, *, is_refused: bool) -> None:
    if is_refused:
        refuse_matrix_registers()
    library = build.load(cache, ShardSettings.cxx)
    kernels, dense = PagedKernels(library), DenseKernels(library)
    x, weight = torch.randn(40, 100).bfloat16(), torch.randn(70, 100).bfloat16() / 10
    assert_near(dense.pack(weight).multiply(x), x.double() @ weight.double().T)
    step = make_step([(700, 1), (30, 20)], dtype=torch.bfloat16, group=3)
    assert_near(step.attend(kernels), step.dense())
    # Asked last: whoever uses matrix registers has to have asked by itself.
    print(kernels.instructions, answer_to_request())


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_refused=sys.argv[2] == "refused")
