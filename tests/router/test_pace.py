"""Pace: when the next step may still be chosen, from what alike ones took."""

import pytest
from headrace_router.pace import LEAD_SHARE, MIN_LEAD_SECONDS, Pace
from headrace_router.scheduling.request import Request, SamplingParams, Sequence
from headrace_router.scheduling.step import Arrival, Step

SEQUENCE = Sequence(
    id=1,
    request=Request(prompt_ids=(5,), sampling=SamplingParams(), max_new_tokens=1),
    arrived_at=0.0,
)


def _decode(num_sequences: int) -> Step:
    return Step(id=0, sequences=[SEQUENCE] * num_sequences, total_tokens=num_sequences)


def _prefill(num_tokens: int) -> Step:
    arrival = Arrival(sequence=SEQUENCE, num_computed=0)
    return Step(id=0, sequences=[SEQUENCE], arrivals=[arrival], total_tokens=num_tokens)


def _learned(step: Step, seconds: list[float]) -> Pace:
    pace = Pace()
    for value in seconds:
        pace.measure(step, value)
    return pace


def test_what_is_not_known_is_not_waited_for() -> None:
    pace = _learned(_decode(8), [1.0] * 20)
    assert pace.slack_seconds(_decode(8)) > 0
    for other in (_decode(1), _decode(16), _prefill(8)):
        assert pace.slack_seconds(other) == 0
    # Of one measurement nobody knows how far others lie from it.
    assert _learned(_decode(8), [1.0]).slack_seconds(_decode(8)) == 0


def test_steady_steps_leave_the_least_lead() -> None:
    assert _learned(_decode(8), [1.0] * 40).slack_seconds(_decode(8)) == pytest.approx(1 - LEAD_SHARE)
    slack = _learned(_decode(8), [0.03] * 40).slack_seconds(_decode(8))
    assert slack == pytest.approx(0.03 - MIN_LEAD_SECONDS)
    assert _learned(_decode(8), [0.008] * 40).slack_seconds(_decode(8)) == 0


def test_unsteady_steps_leave_more() -> None:
    steady = _learned(_decode(8), [1.0] * 40)
    wavering = _learned(_decode(8), [0.9, 1.1] * 20)
    wild = _learned(_decode(8), [0.2, 1.8] * 20)
    assert steady.slack_seconds(_decode(8)) > wavering.slack_seconds(_decode(8)) > 0
    assert wild.slack_seconds(_decode(8)) == 0


def test_steps_of_almost_as_many_tokens_are_alike() -> None:
    pace = _learned(_prefill(500), [1.0] * 40)
    assert pace.slack_seconds(_prefill(511)) == pace.slack_seconds(_prefill(448)) > 0
    assert pace.slack_seconds(_prefill(512)) == pace.slack_seconds(_prefill(447)) == 0


def test_a_change_is_followed() -> None:
    pace = _learned(_decode(8), [1.0] * 40 + [0.1] * 40)
    assert pace.slack_seconds(_decode(8)) == pytest.approx(0.075, rel=0.01)
