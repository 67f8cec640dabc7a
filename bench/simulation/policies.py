"""The policies by name: `headrace`, `tgi`, with knobs as in `headrace:max_step_slowdown=2,in_flight=1`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace_router.scheduling.policy import Policy as HeadraceKnobs

from bench.simulation.failure import Refused
from bench.simulation.headrace_policy import HeadracePolicy
from bench.simulation.jobs import Machine, Policy
from bench.simulation.tgi_policy import TgiKnobs, TgiPolicy
from bench.simulation.traces import Trace

_IN_FLIGHT = "in_flight"
_KNOBS: Mapping[str, type[HeadraceKnobs] | type[TgiKnobs]] = {"headrace": HeadraceKnobs, "tgi": TgiKnobs}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy that can be made for any machine and trace, again and again."""

    text: str
    """As the user wrote it; names it in every report."""
    name: str
    knobs: Mapping[str, object]
    max_in_flight: int = 2

    def make(self, machine: Machine, trace: Trace) -> Policy:
        """A fresh one, with nothing cached."""
        knobs: dict[str, Any] = dict(self.knobs)
        if self.name == "headrace":
            return HeadracePolicy(self.text, machine, HeadraceKnobs(**knobs), self.max_in_flight)
        longest = max((arrival.num_prompt_tokens for arrival in trace.arrivals), default=1)
        return TgiPolicy(self.text, machine, TgiKnobs(**knobs), longest)


def knob_names(name: str) -> list[str]:
    """What may stand behind the colon."""
    names = [field.name for field in fields(_KNOBS[name])]
    return [*names, _IN_FLIGHT] if name == "headrace" else names


def parse(text: str) -> PolicySpec:
    """Raises `Refused` for an unknown policy or knob, or a value that is none."""
    name, _, listed = text.partition(":")
    if name not in _KNOBS:
        raise Refused(f"--policy {text}: there are {' and '.join(_KNOBS)}")
    kinds = {field.name: type(field.default) for field in fields(_KNOBS[name])}
    knobs: dict[str, object] = {}
    max_in_flight = 2
    for part in filter(None, listed.split(",")):
        knob, _, value = part.partition("=")
        if knob == _IN_FLIGHT and name == "headrace":
            if value not in ("1", "2"):
                raise Refused(f"--policy {text}: {_IN_FLIGHT} is 1 or 2, not {value!r}")
            max_in_flight = int(value)
        elif knob in kinds:
            knobs[knob] = _value(text, knob, value, kinds[knob])
        else:
            raise Refused(f"--policy {text}: no knob {knob!r}; {name} has {', '.join(knob_names(name))}")
    return PolicySpec(text=text, name=name, knobs=knobs, max_in_flight=max_in_flight)


def _value(text: str, knob: str, value: str, kind: type) -> object:
    if kind is bool:
        if value not in ("on", "off"):
            raise Refused(f"--policy {text}: {knob} is on or off, not {value!r}")
        return value == "on"
    try:
        number = kind(value)
    except ValueError as error:
        raise Refused(f"--policy {text}: {knob} is a number, not {value!r}") from error
    if not 0 <= number < float("inf"):
        raise Refused(f"--policy {text}: {knob} is at least 0, not {value}")
    return number
