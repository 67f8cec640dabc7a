"""Steps that are sent before the one before them has answered: over a real unix socket, several under way."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import torch
from headrace_proto import shard_pb2 as pb
from headrace_shard import service as service_module
from headrace_shard.inputs import ForwardInputs

from tests.shard.serving import TIMEOUT_SECONDS, Held, Serving, served, status_of
from tests.shard.small_router import GREEDY, LONG, SmallRouter, sampling, transformers_greedy


@pytest.fixture
def serving(folder: Path, tmp_path: Path) -> Iterator[Serving]:
    with served(folder, tmp_path) as serving:
        yield serving


@pytest.fixture
def router(serving: Serving) -> SmallRouter:
    serving.warm_up()
    return SmallRouter(serving.execute)


def test_steps_sent_ahead_give_what_steps_one_by_one_give(router: SmallRouter, serving: Serving) -> None:
    warm = sampling(temperature=1.1, seed=3)
    router.add(1, LONG, warm)
    router.add(2, [9, 8, 7])
    calls = []
    for _ in range(12):
        request, is_decode = router.request(router.plan(32))
        method = serving.stub.Decode if is_decode else serving.stub.Prefill
        calls.append(method.future(request, timeout=TIMEOUT_SECONDS))
    for call in calls:
        router.note(call.result())
    ahead = {number: known.output[:8] for number, known in router.sequences.items()}
    serving.stub.Clear(pb.ClearRequest())
    one_by_one = SmallRouter(serving.execute)
    one_by_one.add(1, LONG, warm)
    one_by_one.add(2, [9, 8, 7])
    assert one_by_one.run(8) == ahead


def test_short_message_does_not_overtake_a_long_one(router: SmallRouter, serving: Serving) -> None:
    # Megabytes, so that gRPC must cut the first message into pieces; the second one is a few bytes.
    router.add(1, LONG, sampling(temperature=0.0, suppressed=[1] * 3_000_000))
    first, _ = router.request(router.plan(128))
    second, _ = router.request({1: 1})
    calls = [
        serving.stub.Prefill.future(first, timeout=TIMEOUT_SECONDS),
        serving.stub.Decode.future(second, timeout=TIMEOUT_SECONDS),
    ]
    assert [list(call.result().ids) for call in calls] == [[1], [1]]


def test_step_that_arrives_first_waits_for_the_one_before(router: SmallRouter, serving: Serving) -> None:
    router.add(1, LONG)
    first, _ = router.request(router.plan(128))
    second, _ = router.request({1: 1})
    call = serving.stub.Decode.future(second, timeout=TIMEOUT_SECONDS)
    serving.stub.Health(pb.HealthRequest())
    assert list(serving.stub.Prefill(first, timeout=TIMEOUT_SECONDS).ids) == [1]
    assert list(call.result().ids) == [1]


def test_messages_are_read_and_written_beside_the_steps(
    router: SmallRouter, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[threading.Thread]] = {}

    def noted(name: str, owner: object) -> None:
        real = getattr(owner, name)

        def wrapper(*arguments: object, **named: object) -> object:
            threads.setdefault(name, set()).add(threading.current_thread())
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, wrapper)

    noted("from_step_request", service_module)
    noted("to_step_response", service_module)
    noted("step", serving.engine)
    router.add(1, LONG)
    router.run(4)
    assert threads["from_step_request"] == threads["to_step_response"]
    assert len(threads["step"]) == 1 and not threads["step"] & threads["to_step_response"]


def send_ahead(
    serving: Serving, held: Held, requests: list[tuple[pb.StepRequest, bool]]
) -> "Sequence[grpc.Future[pb.StepResponse]]":
    """Calls that are all under way before the first of them is computed."""
    calls = []
    for request, is_decode in requests:
        method = serving.stub.Decode if is_decode else serving.stub.Prefill
        calls.append(method.future(request, timeout=TIMEOUT_SECONDS))
    assert held.reached.wait(TIMEOUT_SECONDS)
    assert not any(call.done() for call in calls)
    held.released.set()
    return calls


def test_sequence_that_fails_by_itself_is_told_again_to_the_step_behind(
    router: SmallRouter, serving: Serving, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.add(1, [9, 8, 7])
    router.run(1)
    router.add(2, LONG, sampling(temperature=-1.0))
    router.add(3, LONG)
    requests = [router.request(router.plan(64)), router.request(router.plan(64))]
    first, second = send_ahead(serving, Held(serving.engine, monkeypatch), requests)
    for response, ids in ((first.result(), [1]), (second.result(), [1, 3])):
        assert list(router.note(response).ids) == ids
        (error,) = response.errors
        assert error.id == 2 and "temperature is -1" in error.message
    # The same sequence, now with parameters that are sound.
    router.preempt(2)
    router.sequences[2].num_promised, router.sequences[2].sampling = 0, GREEDY
    outputs = router.run(8)
    assert outputs[1] == transformers_greedy(folder, [9, 8, 7], 8)
    assert outputs[2] == outputs[3] == transformers_greedy(folder, LONG, 8)


def test_step_that_fails_as_a_whole_takes_its_sequences_out_of_the_step_behind(
    router: SmallRouter, serving: Serving, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {1: [9, 8, 7], 2: LONG[:20], 3: LONG, 4: [5, 6]}
    for number in (1, 2, 4):
        router.add(number, prompts[number])
    router.run(2)
    model = serving.engine._loaded.model
    real = model.forward
    num_forwards = 0

    def forward(inputs: ForwardInputs) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        hidden = real(inputs)
        if num_forwards == 1:
            raise RuntimeError("once only")
        return hidden

    monkeypatch.setattr(model, "forward", forward)
    first = router.request({1: 1, 2: 1})
    router.add(3, LONG)
    second = router.request({1: 1, 2: 1, 3: 70, 4: 1})
    calls = send_ahead(serving, Held(serving.engine, monkeypatch), [first, second])
    code, details = status_of(calls[0].result)
    assert code is grpc.StatusCode.INTERNAL
    assert "a step of 2 tokens in 2 sequences failed: RuntimeError: once only" in details
    response = router.note(calls[1].result())
    assert list(response.ids) == [3, 4]
    assert [error.id for error in response.errors] == [1, 2]
    assert all("once only" in error.message for error in response.errors)
    assert response.num_sequences == 2
    # Nothing is cleared: what failed is sent again beside what goes on.
    for number in (1, 2):
        router.preempt(number)
        router.sequences[number].num_promised = 0
    outputs = router.run(10)
    for number, prompt in prompts.items():
        assert outputs[number] == transformers_greedy(folder, prompt, 10)
