"""Every error of a shard, and the gRPC status each becomes. Knows no tensors and no messages.

    ShardError                   INTERNAL             what an unforeseen fault of one step becomes
    ├── InvalidStep              INVALID_ARGUMENT     a sequence, block or token that is not there
    ├── NotWarm                  FAILED_PRECONDITION  a step before Warmup
    ├── OutOfMemory              RESOURCE_EXHAUSTED   the step, the weights or the KV cache do not fit
    ├── DeviceLost               UNAVAILABLE          the device answers no more; ends the process
    └── StartError               FAILED_PRECONDITION  the shard cannot start; ends the process with one line
        ├── CheckpointError                           files missing, damaged or contradicting each other
        ├── UnsupportedModel                          sound files of a network that headrace has not
        ├── UnsupportedDevice                         the device or attention backend cannot be used here
        └── KernelUnavailable                         a native kernel cannot be built or loaded here

The service answers a `ShardError` with its status and message and goes on, but for `DeviceLost`. A
`StartError` never reaches the wire. For both of these `__main__` prints the message and exits with status 1.
"""

import grpc


class ShardError(Exception):
    """Root of the tree. `str(error)` is one line that gives the value, the limit and the cure."""

    status: grpc.StatusCode = grpc.StatusCode.INTERNAL


class InvalidStep(ShardError):
    """The step contradicts what the shard holds; nothing of it was executed."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class NotWarm(ShardError):
    """A step came before `Warmup` had allocated the KV cache."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class OutOfMemory(ShardError):
    """The device has too little memory for what was asked."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeviceLost(ShardError):
    """The device has failed in a way that only a new process gets over, for instance by an illegal access."""

    status = grpc.StatusCode.UNAVAILABLE

    @classmethod
    def after(cls, error: Exception) -> "DeviceLost":
        """What becomes of an error by which the device was lost."""
        first_line = str(error).partition("\n")[0]
        return cls(f"the device is lost, this process must be replaced: {type(error).__name__}: {first_line}")


class StartError(ShardError):
    """The shard cannot start as it is configured."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class CheckpointError(StartError):
    """A model folder or GGUF file is missing, incomplete, damaged, or its parts contradict each other."""


class UnsupportedModel(StartError):
    """The checkpoint is sound, but its architecture, scaling or quantisation is not implemented."""


class UnsupportedDevice(StartError):
    """The device or attention backend that was asked for cannot be used on this machine."""


class KernelUnavailable(StartError):
    """A native kernel cannot be built or loaded here; whoever asked may take the torch path instead."""
