"""What one server can hold: derived once from the user's settings, the shard's facts and its capacity.

    plan(wanted, info)              → Plan       what the shard is asked to warm up for
    derive(wanted, info, capacity)  → Limits     what requests are held to, and the rows that explain it

Knows no flags' parsing and no wire; messages name the flags because their readers set them.
"""

from dataclasses import dataclass, field

from headrace_router.errors import LimitsError, counted
from headrace_router.scheduling.policy import Policy

CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user set; None leaves it to us."""

    model_id: str
    """What to serve, in the user's words."""
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_step_tokens: int | None = None
    """`--max-batch-prefill-tokens`."""
    max_cache_tokens: int | None = None
    """`--max-batch-total-tokens`."""
    max_batch_size: int | None = None
    max_concurrent_requests: int
    policy: Policy = field(default_factory=Policy)
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    request_timeout: float | None = None
    """Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """What a shard says of itself."""

    model_type: str
    dtype: str
    device: str
    """`cpu` or `cuda`."""
    block_size: int
    vocab_size: int
    max_positions: int
    """The longest context the model was made for."""
    eos_token_ids: frozenset[int]
    weight_bytes: int
    version: str
    instance: str
    """Changes whenever the process does."""
    notes: tuple[str, ...]
    """What it decided at its start: `name: value, why`, for the start-up table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a shard found at warm-up."""

    num_blocks: int
    block_bytes: int
    step_seconds: float
    available_bytes: int
    step_costs: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of measured steps, by tokens: the first of one decode, the others of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a shard is asked to warm up for."""

    max_step_tokens: int
    max_step_sequences: int
    max_cache_tokens: int
    """0: as many as fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What requests and steps are held to."""

    max_input_tokens: int
    max_total_tokens: int
    """Prompt and answer together; never more than the cache holds."""
    max_step_tokens: int
    max_step_sequences: int
    """At most `max_step_tokens`, so that every running sequence can have a token in every step."""
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if not 1 <= self.max_step_sequences <= self.max_step_tokens:
            raise ValueError(
                f"{self.max_step_sequences} sequences in a step of {self.max_step_tokens} tokens"
            )
        if self.max_total_tokens > self.num_blocks * self.block_size:
            raise ValueError(f"{self.max_total_tokens} tokens in {self.num_blocks} blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the start-up table."""

    name: str
    value: str
    why: str


def plan(wanted: Wanted, info: ShardInfo) -> Plan:
    """The size of the largest step. Raises `LimitsError`."""
    max_step_tokens = wanted.max_step_tokens or (CPU_STEP_TOKENS if info.device == "cpu" else GPU_STEP_TOKENS)
    if wanted.max_batch_size is not None and wanted.max_batch_size > max_step_tokens:
        raise LimitsError(
            f"--max-batch-size is {wanted.max_batch_size}, but a step carries {max_step_tokens} tokens and "
            f"every running sequence takes one: lower it or raise --max-batch-prefill-tokens"
        )
    # No more run than are let in, so the shard need not make room for more.
    max_running = wanted.max_batch_size or wanted.max_concurrent_requests
    return Plan(
        max_step_tokens=max_step_tokens,
        max_step_sequences=min(max_running, wanted.max_concurrent_requests, max_step_tokens),
        max_cache_tokens=wanted.max_cache_tokens or 0,
    )


def derive(wanted: Wanted, info: ShardInfo, capacity: Capacity) -> tuple[Limits, tuple[Row, ...]]:
    """The limits and the rows of the start-up table. Raises `LimitsError`."""
    planned = plan(wanted, info)
    cache_tokens = capacity.num_blocks * info.block_size
    max_total_tokens = _max_total_tokens(wanted, info, capacity, cache_tokens)
    max_input_tokens = wanted.max_input_tokens or max_total_tokens - 1
    if max_input_tokens >= max_total_tokens:
        raise LimitsError(
            f"--max-input-tokens is {max_input_tokens}, but prompt and answer together may have "
            f"{max_total_tokens} tokens: set it to at most {max_total_tokens - 1}"
        )
    limits = Limits(
        max_input_tokens=max_input_tokens,
        max_total_tokens=max_total_tokens,
        max_step_tokens=planned.max_step_tokens,
        max_step_sequences=planned.max_step_sequences,
        num_blocks=capacity.num_blocks,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
    )
    return limits, _rows(wanted, info, capacity, limits)


def _max_total_tokens(wanted: Wanted, info: ShardInfo, capacity: Capacity, cache_tokens: int) -> int:
    if cache_tokens < 2:
        raise LimitsError(
            f"the KV cache holds {counted(cache_tokens, 'token')}: it may take "
            f"{_spelled(capacity.available_bytes)} beside {_spelled(info.weight_bytes)} of weights, and "
            f"{counted(info.block_size, 'token')} take {_spelled(capacity.block_bytes)}; free memory or take "
            "a smaller model"
        )
    if info.max_positions < 2:
        raise LimitsError(
            f"the model's context is {info.max_positions} token: no room for a prompt and an answer"
        )
    longest = wanted.max_total_tokens
    if longest is None:
        return min(info.max_positions, cache_tokens)
    if longest > info.max_positions:
        raise LimitsError(
            f"--max-total-tokens is {longest}, but the model's context is {info.max_positions} tokens: "
            f"set it to at most {info.max_positions}"
        )
    if longest > cache_tokens:
        cap = f", limited by --max-batch-total-tokens {wanted.max_cache_tokens}"
        raise LimitsError(
            f"--max-total-tokens is {longest}, but the KV cache holds {cache_tokens} tokens "
            f"({capacity.num_blocks} blocks of {info.block_size}{cap if wanted.max_cache_tokens else ''}): "
            f"set it to at most {cache_tokens}"
        )
    return longest


def _rows(wanted: Wanted, info: ShardInfo, capacity: Capacity, limits: Limits) -> tuple[Row, ...]:
    rows = [
        ("model", info.model_type, wanted.model_id),
        *(_noted(note) for note in info.notes),
        *_memory_rows(wanted, info, capacity, limits),
        *_length_rows(wanted, info, limits),
        *_step_rows(wanted, info, capacity, limits),
        *_queue_rows(wanted),
    ]
    return tuple(Row(name=name, value=value, why=why) for name, value, why in rows)


def _memory_rows(
    wanted: Wanted, info: ShardInfo, capacity: Capacity, limits: Limits
) -> list[tuple[str, str, str]]:
    """The sums: weights and cache together, and what the cache is."""
    cache_tokens = limits.num_blocks * limits.block_size
    cache_bytes = limits.num_blocks * capacity.block_bytes
    left_bytes = max(0, capacity.available_bytes - cache_bytes)
    cap = f"; --max-batch-total-tokens {wanted.max_cache_tokens}" if wanted.max_cache_tokens else ""
    caching = ("on", "what was computed stays until its blocks are needed")
    if not wanted.policy.prefix_caching:
        caching = ("off", "--no-prefix-caching")
    return [
        (
            "KV cache",
            counted(cache_tokens, "token"),
            f"{counted(limits.num_blocks, 'block')} of {counted(limits.block_size, 'token')} x "
            f"{_spelled(capacity.block_bytes)} = {_spelled(cache_bytes)}; --kv-cache-memory or its default "
            f"allows {_spelled(capacity.available_bytes)}{cap}",
        ),
        (
            "memory",
            _spelled(info.weight_bytes + cache_bytes),
            f"{_spelled(info.weight_bytes)} of weights + {_spelled(cache_bytes)} of KV cache; "
            f"the cache leaves {_spelled(left_bytes)} of what it may take",
        ),
        ("prefix cache", *caching),
    ]


def _length_rows(wanted: Wanted, info: ShardInfo, limits: Limits) -> list[tuple[str, str, str]]:
    if wanted.max_total_tokens is not None:
        total_why = "--max-total-tokens"
    elif info.max_positions <= limits.num_blocks * limits.block_size:
        total_why = "the model's context"
    else:
        total_why = f"what the KV cache holds; the model's context is {info.max_positions}"
    return [
        ("longest prompt and answer", counted(limits.max_total_tokens, "token"), total_why),
        (
            "longest prompt",
            counted(limits.max_input_tokens, "token"),
            "--max-input-tokens" if wanted.max_input_tokens else "one token is left for the answer",
        ),
    ]


def _step_rows(
    wanted: Wanted, info: ShardInfo, capacity: Capacity, limits: Limits
) -> list[tuple[str, str, str]]:
    most = min(limits.max_step_sequences, limits.num_blocks)
    if most < limits.max_step_sequences:
        batch_why = "the KV cache has no more blocks"
    elif limits.max_step_sequences == wanted.max_batch_size:
        batch_why = "--max-batch-size"
    elif limits.max_step_sequences == wanted.max_concurrent_requests:
        batch_why = "--max-concurrent-requests"
    else:
        batch_why = "one token of a step for each"
    slowdown = wanted.policy.max_step_slowdown
    decode = f", {capacity.step_costs[0][1]:.4f} s for one" if capacity.step_costs else ""
    return [
        (
            "step",
            counted(limits.max_step_tokens, "token"),
            ("--max-batch-prefill-tokens" if wanted.max_step_tokens else f"the default on {info.device}")
            + f"; takes {capacity.step_seconds:.3f} s",
        ),
        (
            "step with a prompt in it",
            f"at most {slowdown:g} x" if slowdown else "no bound",
            f"what a step of the running answers alone takes{decode}; --max-step-slowdown"
            if slowdown
            else "--max-step-slowdown 0",
        ),
        ("running at once", counted(most, "sequence"), batch_why),
    ]


def _queue_rows(wanted: Wanted) -> list[tuple[str, str, str]]:
    most, flag = wanted.max_concurrent_requests, "--max-concurrent-requests, which counts running ones too"
    if wanted.max_queued_requests is not None and wanted.max_queued_requests < most:
        most, flag = wanted.max_queued_requests, "--max-queued-requests"
    if wanted.max_queued_tokens is not None:
        flag += f"; their prompts at most {counted(wanted.max_queued_tokens, 'token')}, --max-queued-tokens"
    timeout = wanted.request_timeout
    return [
        ("waiting at once", counted(most, "sequence"), flag),
        ("request timeout", "none" if timeout is None else f"{timeout:g} s", "--request-timeout"),
    ]


def _noted(note: str) -> tuple[str, str, str]:
    """A shard's note, `name: value, why`, as a row."""
    name, _, rest = note.partition(": ")
    value, _, why = rest.partition(", ")
    return name, value, why


def _spelled(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
