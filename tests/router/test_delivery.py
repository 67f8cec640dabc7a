"""Delivery: who hears what, and in which order."""

from headrace_router.delivery import Delivery
from headrace_router.errors import GenerationError, Unavailable
from headrace_router.scheduling.request import FinishReason, Sequence, Status
from headrace_router.scheduling.step import SampledToken, Update

from tests.router.batching import RecordingSink, request_of


def _joined(delivery: Delivery, number: int) -> tuple[Sequence, RecordingSink]:
    sequence, sink = Sequence(id=number, request=request_of(4, 4), arrived_at=0.0), RecordingSink()
    delivery.join(sequence, sink)
    return sequence, sink


def _token(sequence: Sequence, token_id: int) -> Update:
    return Update(
        sequence=sequence, token=SampledToken(sequence_id=sequence.id, token_id=token_id, logprob=0.0)
    )


def test_what_was_kept_is_told_in_its_order_and_once() -> None:
    delivery = Delivery()
    (one, first), (other, second) = _joined(delivery, 1), _joined(delivery, 2)
    delivery.start([one, other], 0.0)
    delivery.keep([_token(one, 10), _token(other, 20)], 1.0)
    delivery.keep([_token(one, 11)], 2.0)
    assert first.tokens == []
    delivery.deliver()
    delivery.deliver()
    assert (first.tokens, second.tokens) == ([10, 11], [20])
    assert (first.num_starts, second.num_starts) == (1, 1)


def test_who_has_left_or_ended_hears_nothing_more() -> None:
    delivery = Delivery()
    (one, first), (other, second) = _joined(delivery, 1), _joined(delivery, 2)
    delivery.leave(one)
    delivery.leave(one)
    delivery.start([one], 0.0)
    other.status, other.finish_reason = Status.FINISHED, FinishReason.EOS
    delivery.keep([_token(one, 10), _token(other, 20)], 1.0)
    delivery.deliver()
    delivery.fail_all(Unavailable("gone"), 2.0)
    assert (first.num_starts, first.tokens, first.error) == (0, [], None)
    assert (second.tokens, second.reason, second.error) == ([20], FinishReason.EOS, None)


def test_failures() -> None:
    delivery = Delivery()
    (one, first), (_, second) = _joined(delivery, 1), _joined(delivery, 2)
    delivery.keep([Update(sequence=one, error="not finite")], 1.0)
    delivery.deliver()
    assert isinstance(first.error, GenerationError)
    assert first.error.message == "Request failed during generation: not finite"
    delivery.fail(one, Unavailable("gone"), 2.0)
    delivery.fail_all(Unavailable("gone"), 3.0)
    assert isinstance(first.error, GenerationError) and isinstance(second.error, Unavailable)
