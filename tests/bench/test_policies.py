"""What may be written after --policy."""

import pytest

from bench.simulation.failure import Refused
from bench.simulation.policies import parse


def test_knobs_are_read_in_their_own_kind() -> None:
    spec = parse("headrace:max_step_slowdown=2.5,max_waiting_tokens=7,prefix_caching=off,in_flight=1")
    assert spec.knobs == {"max_step_slowdown": 2.5, "max_waiting_tokens": 7, "prefix_caching": False}
    assert spec.name == "headrace" and spec.max_in_flight == 1
    assert parse("tgi").knobs == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm", "there are headrace and tgi"),
        ("tgi:in_flight=2", "no knob 'in_flight'; tgi has chunking, "),
        ("headrace:in_flight=3", "in_flight is 1 or 2, not '3'"),
        ("headrace:chunking=on", "no knob 'chunking'; headrace has "),
        ("headrace:max_step_slowdown=fast", "is a number, not 'fast'"),
        ("headrace:max_step_slowdown=nan", "is at least 0, not nan"),
        ("headrace:max_waiting_tokens=-1", "is at least 0, not -1"),
        ("tgi:chunking=yes", "chunking is on or off, not 'yes'"),
    ],
)
def test_what_no_policy_has_is_refused(text: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        parse(text)
