"""Every setting of a shard: default, range, help. `ShardSettings` are also flags of the launcher."""

from dataclasses import dataclass

from headrace_proto.logs import LEVELS
from headrace_proto.settings import setting


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """What a user may set, whether the shard is started by hand or by the launcher."""

    dtype: str = setting(
        "auto",
        help="Number format of weights and KV cache; `auto` is the checkpoint's.",
        choices=("auto", "float32", "bfloat16", "float16"),
        tgi=True,
    )
    device: str = setting(
        "auto", help="Where the model runs; `auto` is a GPU if there is one.", choices=("auto", "cpu", "cuda")
    )
    attention: str = setting(
        "auto",
        help="Attention backend; `sdpa` is plain torch, `cpu` our own kernels for the CPU, which then "
        "compute the layers around attention as well.",
        choices=("auto", "sdpa", "cpu"),
        tgi=True,
    )
    cxx: str = setting(
        "g++",
        help="C++ compiler that builds the `cpu` backend's kernels at first use; options may follow it.",
    )
    kv_cache_memory: float | None = setting(
        None,
        help="GiB for the KV cache. Default: on a CPU half of the available memory, at most 4; "
        "on a GPU what `--cuda-memory-fraction` leaves.",
        minimum=0.001,
    )
    cuda_memory_fraction: float = setting(
        0.9, help="Share of a GPU's memory that the shard may use.", minimum=0.01, maximum=1.0, tgi=True
    )
    num_threads: int | None = setting(
        None,
        help="Threads that compute on a CPU. Default: the cores this process may use.",
        minimum=1,
        maximum=1024,
    )
    json_output: bool = setting(False, help="Log lines are JSON objects.", tgi=True)
    log_level: str = setting(
        "info", help="Log lines below this level are not written.", choices=tuple(LEVELS), tgi=True
    )


@dataclass(frozen=True, kw_only=True)
class ShardConfig(ShardSettings):
    """All settings of a shard process."""

    model_path: str = setting(help="Folder with config.json and safetensors weights.")
    listen: str = setting(
        "unix:///tmp/headrace-0", help="Address to listen on: `unix:///path` or `tcp://host:port`."
    )
