"""Limits: what is derived from settings, model and memory, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from headrace_router.errors import LimitsError
from headrace_router.scheduling.limits import Capacity, Limits, Row, ShardInfo, Wanted, derive, plan
from headrace_router.scheduling.policy import Policy

INFO = ShardInfo(
    model_type="llama",
    dtype="bfloat16",
    device="cpu",
    block_size=16,
    vocab_size=1000,
    max_positions=2048,
    eos_token_ids=frozenset({2, 7}),
    weight_bytes=270_000_000,
    version="0",
    instance="a",
    notes=("device: cpu, no GPU is there", "threads: 2, the cores, all of them"),
)
CAPACITY = Capacity(num_blocks=1000, block_bytes=4096, step_seconds=0.25, available_bytes=8_000_000)
WANTED = Wanted(model_id="org/name", max_concurrent_requests=128)


def test_defaults_come_from_model_and_device() -> None:
    limits, rows = derive(WANTED, INFO, CAPACITY)
    assert limits == Limits(
        max_input_tokens=2047,
        max_total_tokens=2048,
        max_step_tokens=512,
        max_step_sequences=128,
        num_blocks=1000,
        block_size=16,
        vocab_size=1000,
        eos_token_ids=frozenset({2, 7}),
    )
    table = {row.name: (row.value, row.why) for row in rows}
    assert table["longest prompt and answer"] == ("2048 tokens", "the model's context")
    assert table["model"] == ("llama", "org/name")
    assert table["KV cache"] == (
        "16000 tokens",
        "1000 blocks of 16 tokens x 4.0 KiB = 3.9 MiB; --kv-cache-memory or its default allows 7.6 MiB",
    )
    assert table["memory"] == (
        "261.4 MiB",
        "257.5 MiB of weights + 3.9 MiB of KV cache; the cache leaves 3.7 MiB of what it may take",
    )
    assert table["prefix cache"] == ("on", "what was computed stays until its blocks are needed")
    assert table["device"] == ("cpu", "no GPU is there")
    assert table["threads"] == ("2", "the cores, all of them")
    assert table["step"] == ("512 tokens", "the default on cpu; takes 0.250 s")
    assert table["step with a prompt in it"] == (
        "at most 3 x",
        "what a step of the running answers alone takes; --max-step-slowdown",
    )
    assert table["running at once"] == ("128 sequences", "--max-concurrent-requests")
    assert table["waiting at once"] == (
        "128 sequences",
        "--max-concurrent-requests, which counts running ones too",
    )
    assert table["request timeout"] == ("none", "--request-timeout")
    assert plan(WANTED, replace(INFO, device="cuda")).max_step_tokens == 4096


def test_a_small_cache_limits_the_context() -> None:
    limits, rows = derive(WANTED, INFO, replace(CAPACITY, num_blocks=10))
    assert (limits.max_total_tokens, limits.max_input_tokens) == (160, 159)
    assert any(row.why == "what the KV cache holds; the model's context is 2048" for row in rows)


def test_settings_hold() -> None:
    wanted = Wanted(
        model_id="org/name",
        max_input_tokens=100,
        max_total_tokens=200,
        max_step_tokens=64,
        max_cache_tokens=16000,
        max_batch_size=8,
        max_concurrent_requests=32,
    )
    planned = plan(wanted, INFO)
    assert (planned.max_step_tokens, planned.max_step_sequences, planned.max_cache_tokens) == (64, 8, 16000)
    limits, rows = derive(wanted, INFO, CAPACITY)
    assert (limits.max_input_tokens, limits.max_total_tokens) == (100, 200)
    whys = {row.name: row.why for row in rows}
    assert whys["running at once"] == "--max-batch-size"
    assert whys["longest prompt"] == "--max-input-tokens"
    assert "--max-batch-total-tokens 16000" in whys["KV cache"]


def table_of(capacity: Capacity = CAPACITY, **wanted: Any) -> dict[str, Row]:
    _, rows = derive(replace(WANTED, **wanted), INFO, capacity)
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def test_the_rows_of_policy_and_queue_say_what_was_set() -> None:
    costs = ((1, 0.0061), (16, 0.012))
    table = table_of(
        replace(CAPACITY, step_costs=costs),
        policy=Policy(prefix_caching=False, max_step_slowdown=2.5),
        max_queued_requests=8,
        max_queued_tokens=4000,
        request_timeout=30.0,
    )
    assert (table["prefix cache"].value, table["prefix cache"].why) == ("off", "--no-prefix-caching")
    assert table["step with a prompt in it"].value == "at most 2.5 x"
    assert "alone takes, 0.0061 s for one; " in table["step with a prompt in it"].why
    assert (table["waiting at once"].value, table["waiting at once"].why) == (
        "8 sequences",
        "--max-queued-requests; their prompts at most 4000 tokens, --max-queued-tokens",
    )
    assert table["request timeout"].value == "30 s"


def test_a_bound_that_is_none_is_said_to_be_none() -> None:
    row = table_of(replace(CAPACITY, step_costs=((1, 0.0061),)), policy=Policy(max_step_slowdown=0.0))
    assert row["step with a prompt in it"].value == "no bound"
    assert row["step with a prompt in it"].why == "--max-step-slowdown 0"


def test_a_cap_of_the_queue_that_is_never_reached_is_not_said_to_be_one() -> None:
    assert table_of(max_queued_requests=500)["waiting at once"].value == "128 sequences"


def test_no_more_run_than_there_are_blocks() -> None:
    row = table_of(replace(CAPACITY, num_blocks=5))["running at once"]
    assert (row.value, row.why) == ("5 sequences", "the KV cache has no more blocks")


def test_one_is_not_many() -> None:
    _, rows = derive(replace(WANTED, max_concurrent_requests=1), INFO, CAPACITY)
    assert {row.name: row.value for row in rows}["running at once"] == "1 sequence"


def test_a_step_has_a_token_for_everybody() -> None:
    limits, rows = derive(replace(WANTED, max_step_tokens=32), INFO, CAPACITY)
    assert limits.max_step_sequences == 32
    assert {row.name: row.why for row in rows}["running at once"] == "one token of a step for each"


@pytest.mark.parametrize(
    ("wanted", "num_blocks", "message"),
    [
        ({"max_total_tokens": 4096}, 1000, "--max-total-tokens is 4096, but the model's context is 2048"),
        ({"max_total_tokens": 2000}, 100, "--max-total-tokens is 2000, but the KV cache holds 1600 tokens"),
        (
            {"max_total_tokens": 2000, "max_cache_tokens": 1600},
            100,
            r"holds 1600 tokens \(100 blocks of 16, limited by --max-batch-total-tokens 1600\)",
        ),
        ({"max_input_tokens": 2048}, 1000, "--max-input-tokens is 2048, .* at most 2047"),
        ({"max_batch_size": 600}, 1000, "--max-batch-size is 600, but a step carries 512 tokens"),
        ({}, 0, "the KV cache holds 0 tokens"),
    ],
)
def test_contradictions_are_one_line_with_numbers(
    wanted: dict[str, Any], num_blocks: int, message: str
) -> None:
    with pytest.raises(LimitsError, match=message) as caught:
        derive(
            Wanted(model_id="org/name", max_concurrent_requests=1000, **wanted),
            INFO,
            replace(CAPACITY, num_blocks=num_blocks),
        )
    assert "\n" not in str(caught.value)


def test_limits_refuse_what_a_scheduler_could_not_keep() -> None:
    limits, _ = derive(WANTED, INFO, CAPACITY)
    with pytest.raises(ValueError, match="600 sequences in a step of 512"):
        replace(limits, max_step_sequences=600)
    with pytest.raises(ValueError, match="20000 tokens in 1000 blocks"):
        replace(limits, max_total_tokens=20000)


def test_a_context_without_room_for_an_answer_is_refused() -> None:
    with pytest.raises(LimitsError, match="context is 1 token: no room"):
        derive(WANTED, replace(INFO, max_positions=1), CAPACITY)
