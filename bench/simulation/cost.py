"""What a step costs on a GPU, and how many tokens of KV fit beside the weights. Knows no policy and no trace.

A roofline: each part of a step takes as long as the slower of its arithmetic and its memory traffic.

- Linear layers: 2 FLOP per weight and token, against reading every weight once.
- Attention of prompt chunks: 4 FLOP per layer, query head, head dimension and (query, key) pair.
- Attention of decodes: reading the keys and values of the whole context of every row.
- The output head: for the rows that sample.
- Tensor parallelism: every part is split evenly; two all-reduces a layer.

Kernels are launched while earlier ones run, so launching costs only where it is slower than computing; steps
of decodes alone are taken to be CUDA graphs. Peaks are what NVIDIA's data sheets publish, dense, for the SXM
boards: https://www.nvidia.com/en-us/data-center/h100/ and https://www.nvidia.com/en-us/data-center/h200/.

Shares of the peaks are assumptions, of the size that published measurements have: 0.6 for large matrix
products; 0.4 for prompt attention (FlashAttention-2 reaches about 35 % and FlashAttention-3 up to 75 % on an
H100: Shah et al. 2024, arXiv 2407.08608; causal masks and chunks cost); 0.8 of the memory bandwidth, about
what a plain copy reaches; half of NVLink's bandwidth in an all-reduce.
"""

from dataclasses import dataclass

from bench.simulation.failure import Refused

BLOCK_SIZE = 16
"""Tokens in a block, for every policy."""

_BYTES_PER_NUMBER = 2
"""bfloat16: weights, activations and KV."""

_KERNELS_PER_LAYER = 12
"""Norms, projections, rotation, KV write, attention, activation; roughly, and unfused."""

_LINEAR_SHARE, _ATTENTION_SHARE, _BANDWIDTH_SHARE, _LINK_SHARE = 0.6, 0.4, 0.8, 0.5

_RESERVED_BYTES = 4 * 2**30
"""Of a GPU, for activations, CUDA graphs and the libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU: published peaks, per board."""

    name: str
    flops_per_second: float
    """bfloat16, dense."""
    bytes_per_second: float
    memory_bytes: float
    link_bytes_per_second: float
    """NVLink, one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The shape of a decoder with grouped-query attention and a gated feed-forward layer."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int

    @property
    def linear_params(self) -> int:
        """Weights of all layers, which every token passes; without embedding and output head."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_params(self) -> int:
        """Weights of the output head; the embedding has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """All weights; the norms' are left out."""
        return (self.linear_params + 2 * self.head_params) * _BYTES_PER_NUMBER

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of a token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _BYTES_PER_NUMBER


DEVICES = {
    device.name: device
    for device in (
        Device(
            name="h100",
            flops_per_second=989e12,
            bytes_per_second=3.35e12,
            memory_bytes=80e9,
            link_bytes_per_second=450e9,
        ),
        Device(
            name="h200",
            flops_per_second=989e12,
            bytes_per_second=4.8e12,
            memory_bytes=141e9,
            link_bytes_per_second=450e9,
        ),
    )
}

MODELS = {
    model.name: model
    for model in (
        # Shapes: Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3; contexts are those of 3.1.
        Model(
            name="llama-3-8b",
            num_layers=32,
            hidden_size=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=14336,
            vocab_size=128256,
            max_positions=131072,
        ),
        Model(
            name="llama-3-70b",
            num_layers=80,
            hidden_size=8192,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=28672,
            vocab_size=128256,
            max_positions=131072,
        ),
    )
}


@dataclass(slots=True, kw_only=True)
class Work:
    """What a step computes. Counts only: whose tokens they are does not matter to a GPU."""

    num_rows: int = 0
    """Sequences."""
    num_tokens: int = 0
    num_samples: int = 0
    """Rows that a token is sampled for."""
    decode_context: int = 0
    """Sum over rows of one token: keys each attends to."""
    prefill_context: int = 0
    """The same over rows of more tokens."""
    prefill_pairs: int = 0
    """(query, key) pairs of rows of more than one token."""

    def add_chunk(self, start: int, num_tokens: int) -> None:
        """A row of `num_tokens` prompt tokens after `start` computed ones."""
        self.prefill_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
        self.prefill_context += start + num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What a step costs beside the GPU's work, in seconds. Assumptions, the same for every policy."""

    launch_seconds: float = 4e-6
    """Of one kernel, in steps that are no CUDA graph."""
    step_seconds: float = 0.3e-3
    """On the device, every step: preparing inputs, starting a graph, sampling."""
    reduce_seconds: float = 10e-6
    """Latency of an all-reduce."""
    wire_seconds: float = 0.3e-3
    """From the router's call to the shard's, and the same back: encoding, a socket, decoding."""
    router_seconds: float = 0.2e-3
    """To digest an answer and make the next step, and for each of its rows:"""
    router_row_seconds: float = 2e-6


class Gpu:
    """So many devices with a model on them. Raises `Refused` when the weights leave no room for KV."""

    def __init__(
        self, device: Device, model: Model, num_devices: int = 1, overheads: Overheads | None = None
    ) -> None:
        self.device, self.model, self.num_devices = device, model, num_devices
        self.overheads = overheads or Overheads()
        self.weight_bytes = model.weight_bytes
        pool_bytes = (device.memory_bytes - _RESERVED_BYTES) * num_devices - self.weight_bytes
        self.num_blocks = int(pool_bytes / (model.kv_bytes_per_token * BLOCK_SIZE))
        if self.num_blocks < 1:
            usable_bytes = (device.memory_bytes - _RESERVED_BYTES) * num_devices
            raise Refused(
                f"{model.name} has {self.weight_bytes / 1e9:.0f} GB of weights, and {num_devices} x "
                f"{device.name} have room for {usable_bytes / 1e9:.0f} GB: raise --tensor-parallel"
            )
        self.num_slots = self.num_blocks * BLOCK_SIZE
        """Tokens of KV that fit."""
        self._linear_flops = device.flops_per_second * num_devices * _LINEAR_SHARE
        self._attention_flops = device.flops_per_second * num_devices * _ATTENTION_SHARE
        self._bandwidth = device.bytes_per_second * num_devices * _BANDWIDTH_SHARE
        self._pair_flops = 4 * model.num_layers * model.num_heads * model.head_dim
        self._linear_bytes_seconds = model.linear_params * _BYTES_PER_NUMBER / self._bandwidth
        self._head_bytes_seconds = model.head_params * _BYTES_PER_NUMBER / self._bandwidth
        self._launches_seconds = model.num_layers * _KERNELS_PER_LAYER * self.overheads.launch_seconds
        # A ring all-reduce moves 2 (n - 1) / n of the tensor over every link.
        self._reduce_bytes = 0.0
        if num_devices > 1:
            moved = 2 * (num_devices - 1) / num_devices * model.hidden_size * _BYTES_PER_NUMBER
            self._reduce_bytes = moved / (device.link_bytes_per_second * _LINK_SHARE)

    def flops(self, work: Work) -> float:
        """Arithmetic of a step that any implementation has to do, decodes' attention included."""
        model = self.model
        linear = 2.0 * (model.linear_params * work.num_tokens + model.head_params * work.num_samples)
        return linear + self._pair_flops * (work.prefill_pairs + work.decode_context)

    def seconds(self, work: Work) -> float:
        """How long the devices are busy with a step."""
        model, overheads = self.model, self.overheads
        busy = max(
            2.0 * model.linear_params * work.num_tokens / self._linear_flops, self._linear_bytes_seconds
        )
        if work.num_samples:
            busy += max(
                2.0 * model.head_params * work.num_samples / self._linear_flops, self._head_bytes_seconds
            )
        kv_bytes = model.kv_bytes_per_token
        busy += work.decode_context * kv_bytes / self._bandwidth
        if work.prefill_pairs:
            busy += max(
                self._pair_flops * work.prefill_pairs / self._attention_flops,
                work.prefill_context * kv_bytes / self._bandwidth,
            )
        if self.num_devices > 1:
            one = overheads.reduce_seconds + work.num_tokens * self._reduce_bytes
            busy += 2 * model.num_layers * one
        if work.num_tokens > work.num_rows:
            busy = max(busy, self._launches_seconds)
        return busy + overheads.step_seconds

    def router_seconds(self, num_rows: int) -> float:
        """How long the router thinks about a step of so many rows."""
        return self.overheads.router_seconds + num_rows * self.overheads.router_row_seconds

    def step_costs(self, max_step_tokens: int) -> tuple[tuple[int, float], ...]:
        """(tokens, seconds) as a shard's warm-up measures them: one decode, then ever longer prompts."""
        costs = [(1, self.seconds(Work(num_rows=1, num_tokens=1, num_samples=1, decode_context=1)))]
        num_tokens = min(64, max_step_tokens)
        while num_tokens > costs[-1][0]:
            work = Work(num_rows=1, num_tokens=num_tokens, num_samples=1)
            work.add_chunk(0, num_tokens)
            costs.append((num_tokens, self.seconds(work)))
            num_tokens = min(2 * num_tokens, max_step_tokens)
        return tuple(costs)
