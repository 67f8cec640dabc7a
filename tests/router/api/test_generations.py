"""Several generations of one request: room, copies, ends read at once, streams merged, failures."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from headrace_router.api.generations import MAX_SEED, copies
from headrace_router.scheduling.request import Request, SamplingParams

from tests.fake_shard import FakeSequence, FakeShard
from tests.router.running import CHAT, EOS, WAIT_SECONDS, RunningRouter, raw_request

SEED = 7
CHATS = CHAT | {"seed": SEED}
NATIVE = {"inputs": "the water", "parameters": {"best_of": 2, "do_sample": True, "seed": SEED}}
COMPLETIONS = {"prompt": "the water", "n": 2, "seed": SEED}


def copy_of(sequence: FakeSequence) -> int:
    """Which copy a sequence is, by its seed."""
    return int(sequence.new.sampling.seed) - SEED


def scripts(router: RunningRouter, *texts: str) -> None:
    """What each copy says, over and over."""
    ids = [router.service.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    router.shard.answer = lambda sequence: ids[copy_of(sequence)][
        sequence.num_generated % len(ids[copy_of(sequence)])
    ]


@pytest.fixture
def few(model_folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, max_concurrent_requests=2) as router:
        yield router


def test_copies_have_seeds_of_their_own() -> None:
    sampling = SamplingParams(seed=MAX_SEED - 1, temperature=0.5)
    request = Request(prompt_ids=(5,), sampling=sampling, max_new_tokens=3)
    made = copies(request, 3, "tenant")
    assert [copy.sampling.seed for copy in made] == [MAX_SEED - 1, 0, 1]
    assert {(copy.prompt_ids, copy.sampling.temperature, copy.tenant) for copy in made} == {
        ((5,), 0.5, "tenant")
    }
    # By the tuple itself the scheduler knows copies of one request.
    assert all(copy.prompt_ids is request.prompt_ids for copy in made)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", CHATS | {"n": 3}, "n"),
        ("/v1/chat/completions", CHATS | {"n": 3, "stream": True}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 3}, "n"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "stream": True}, "prompt"),
    ],
)
def test_more_than_there_will_ever_be_room_for(few: RunningRouter, path: str, body: Any, param: str) -> None:
    """429 would have clients try again for ever."""
    response = few.post(path, body)
    assert response.status_code == 400 and "retry-after" not in response.headers
    error = response.json()["error"]
    assert error["param"] == param and "at most 2" in error["message"]
    assert "--max-concurrent-requests" in error["message"]


def test_more_samples_than_there_will_ever_be_room_for(model_folder: Path) -> None:
    with RunningRouter(model_folder, max_concurrent_requests=1) as router:
        response = router.post("/generate", NATIVE)
        assert response.status_code == 422 and response.json()["error_type"] == "validation"
        assert "`best_of` asks for 2 answers at once" in response.json()["error"]


@pytest.fixture
def capped(model_folder: Path) -> Iterator[RunningRouter]:
    """One answer runs, and four more may wait."""
    with RunningRouter(model_folder, max_batch_size=1, max_queued_requests=4) as router:
        yield router


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 4}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ],
)
def test_a_request_for_which_the_queue_has_no_room_leaves_nothing_in_it(
    capped: RunningRouter, path: str, body: Any, is_stream: bool
) -> None:
    """The third of its four answers is refused; two had joined the queue."""
    engine = capped.service.engine
    capped.do(capped.shard.gate.clear)
    alone = {"inputs": "the water", "parameters": {"max_new_tokens": 2}}
    with contextlib.ExitStack() as held:
        running = held.enter_context(raw_request(capped, "/generate", alone))
        capped.wait_for(lambda: len(capped.shard.steps) > 0)
        waiting = [held.enter_context(raw_request(capped, "/generate", alone)) for _ in range(2)]
        capped.wait_for(lambda: engine.num_active == 3)
        before = capped.metric('tgi_request_failure{err="overloaded"}')
        response = capped.post(path, body | {"stream": is_stream})
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "--max-queued-requests is 4" in error["message"]
        assert capped.metric('tgi_request_failure{err="overloaded"}') == before + 1
        assert capped.do(lambda: engine.num_active) == 3
        assert capped.metric('headrace_requests{state="waiting"}') == 2
        capped.do(capped.shard.gate.set)
        for connection in (running, *waiting):
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_who_finds_nobody_waiting_is_let_in_whole(capped: RunningRouter) -> None:
    answer = capped.post("/v1/chat/completions", CHAT | {"n": 6, "max_tokens": 2}).json()
    assert len(answer["choices"]) == 6


def test_prompts_that_wait_have_so_many_tokens_together(model_folder: Path) -> None:
    with RunningRouter(model_folder, max_batch_size=1, max_queued_tokens=3) as router:
        ids = [5, 6]
        # Nobody waits.
        answer = router.post("/v1/completions", {"prompt": [ids * 4, ids * 4], "max_tokens": 2})
        assert answer.status_code == 200
        router.do(router.shard.gate.clear)
        num_steps = len(router.shard.steps)
        with contextlib.ExitStack() as held:
            running = raw_request(router, "/v1/completions", {"prompt": ids, "max_tokens": 2})
            held.enter_context(running)
            router.wait_for(lambda: len(router.shard.steps) > num_steps)
            waiting = raw_request(router, "/v1/completions", {"prompt": ids, "max_tokens": 2})
            held.enter_context(waiting)
            router.wait_for(lambda: router.service.engine.num_active == 2)
            refused = router.post("/v1/completions", {"prompt": ids, "max_tokens": 2})
            assert refused.status_code == 429 and "--max-queued-tokens is 3" in refused.text
            with raw_request(router, "/v1/completions", {"prompt": [5], "max_tokens": 2}):
                router.wait_for(lambda: router.service.engine.num_active == 3)
            router.do(router.shard.gate.set)


def test_as_many_as_there_is_room_for(few: RunningRouter) -> None:
    assert few.post("/v1/chat/completions", CHATS | {"n": 2, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHATS | {"n": 2, "stop": "stone"}),
        ("/v1/completions", COMPLETIONS | {"max_tokens": 100, "stop": "stone"}),
        ("/generate", NATIVE | {"parameters": NATIVE["parameters"] | {"stop": ["stone"], "details": True}}),  # type: ignore[operator]
    ],
)
def test_every_copy_ends_at_its_own_stop_string(router: RunningRouter, path: str, body: Any) -> None:
    """The second copy says it early and leaves the first alone, which never does."""
    scripts(router, "water", "the stone")
    router.shard.steps.clear()
    answer = router.post(path, body).json()
    early = answer["details"]["best_of_sequences"] if path == "/generate" else answer["choices"]
    reasons = {choice["finish_reason"] for choice in early}
    assert reasons & {"stop", "stop_sequence"}
    together = [step for step in router.shard.steps if len(step.ids) == 2]
    assert len(together) < 20 < len(router.shard.steps)


def fails_second(sequence: FakeSequence) -> str | None:
    return "no memory" if copy_of(sequence) == 1 and sequence.num_generated == 3 else None


@pytest.fixture
def failing(router: RunningRouter) -> Iterator[RunningRouter]:
    """A router whose shard fails the second copy after three tokens; the first would go on and on."""
    scripts(router, "water", "the stone")
    router.shard.sequence_error = fails_second
    yield router
    router.shard.sequence_error = lambda sequence: None


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", CHATS | {"n": 2}, 500),
        ("/v1/completions", COMPLETIONS | {"max_tokens": 100}, 500),
        ("/generate", NATIVE, 424),
    ],
)
def test_a_failed_copy_fails_the_answer(failing: RunningRouter, path: str, body: Any, status: int) -> None:
    before = failing.metric('tgi_request_failure{err="generation"}')
    response = failing.post(path, body)
    assert response.status_code == status and "no memory" in response.text
    assert failing.metric('tgi_request_failure{err="generation"}') == before + 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_failed_choice_ends_the_stream(failing: RunningRouter, path: str) -> None:
    """After all that it has said; the other choice is cancelled with it."""
    body = CHATS if "chat" in path else COMPLETIONS
    successes = failing.metric("tgi_request_success")
    events = failing.events(path, body | {"n": 2, "max_tokens": 100, "stream": True}, is_done=True)
    *before, last = events
    assert failing.metric("tgi_request_success") == successes
    assert list(last) == ["error"] and "no memory" in last["error"]["message"]
    choices = [choice for event in before for choice in event["choices"] if choice["index"] == 1]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    ids = failing.service.tokenizer.encode("the stone", add_special_tokens=False).ids[:3]
    assert text == failing.service.tokenizer.decode(ids, skip_special_tokens=True)
    assert all(choice["finish_reason"] is None for event in before for choice in event["choices"])


def test_a_copy_that_ends_first_waits_for_the_others(router: RunningRouter) -> None:
    ids = router.service.tokenizer.encode("the", add_special_tokens=False).ids[:1]
    router.shard.answer = lambda sequence: EOS if sequence.num_generated > copy_of(sequence) else ids[0]
    answer = router.post("/v1/chat/completions", CHATS | {"n": 3}).json()
    assert answer["usage"]["completion_tokens"] == 2 + 3 + 4
    events = router.events("/v1/chat/completions", CHATS | {"n": 3, "stream": True}, is_done=True)
    ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert ends == [0, 1, 2]


@pytest.mark.parametrize("is_stream", [False, True])
def test_of_several_answers_one_does_not_fit_the_shard_that_comes_back(
    model_folder: Path, is_stream: bool
) -> None:
    """They wait for their turn when it is lost. The first prompt would still fit, and may not stay behind."""
    body = {"prompt": [[5] * 9, [6] * 300], "n": 2, "max_tokens": 100, "stream": is_stream}
    with (
        RunningRouter(model_folder, starts_shard=False, max_batch_size=1) as router,
        ThreadPoolExecutor() as pool,
    ):
        engine = router.service.engine
        first, second = FakeShard(), FakeShard(num_blocks=8)
        for shard in (first, second):
            router.do(shard.gate.clear)
        with router.shard_at_work(first):
            router.wait_for(lambda: engine.is_ready)
            running = pool.submit(
                router.post, "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 3}}
            )
            router.wait_for(lambda: bool(first.steps))
            waiting = pool.submit(router.post, "/v1/completions", body)
            router.wait_for(lambda: engine.num_active == 5)
        with router.shard_at_work(second):
            response = waiting.result(WAIT_SECONDS)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded" and "length is 128 tokens" in error["message"]
            router.wait_for(lambda: engine.num_active == 1)
            router.do(second.gate.set)
            assert running.result(WAIT_SECONDS).status_code == 200
            router.wait_for(lambda: not second.sequences)
        assert {new.id for step in second.steps for new in step.new_sequences} == {1}
        assert second.violations == []
