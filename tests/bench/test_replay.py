"""The clock of a replay, held against times worked out by hand for a policy that needs no thought."""

from collections import deque

import pytest

from bench.simulation.cost import Work
from bench.simulation.jobs import Counters, Job
from bench.simulation.record import MAX_SAMPLES
from bench.simulation.traces import Arrival
from tests.bench.replaying import GPU, arrival, replayed


class OneByOne:
    """Computes a prompt as one step and each token as one, of one job after the other."""

    name = "one by one"
    slack_seconds = 0.0
    num_held_slots = num_unused_slots = num_cached_slots = 0

    def __init__(self, max_in_flight: int, *, starts: bool = True) -> None:
        self.max_in_flight = max_in_flight
        self.counters = Counters()
        self.works: list[Work] = []
        self._starts = starts
        self._jobs: deque[Job] = deque()
        self._num_made = 0
        self._in_flight: deque[Job] = deque()

    @property
    def num_running(self) -> int:
        return min(len(self._jobs), 1)

    @property
    def num_waiting(self) -> int:
        return max(len(self._jobs) - 1, 0)

    def add(self, job: Job, now: float) -> bool:
        if job.arrival.num_prompt_tokens > 1000:
            return False
        self._jobs.append(job)
        return True

    def schedule(self, now: float) -> Work | None:
        if not self._jobs or not self._starts or self._num_made == len(self._jobs[0].output):
            return None
        job = self._jobs[0]
        if not self._num_made:
            job.started_at = now
        self._num_made += 1
        self._in_flight.append(job)
        self.works.append(Work(num_rows=1, num_tokens=1, num_samples=1, decode_context=10))
        return self.works[-1]

    def answer(self, seconds: float) -> list[Job]:
        assert seconds == pytest.approx(GPU.seconds(self.works[0]))
        job = self._in_flight.popleft()
        job.num_left -= 1
        if not job.num_left:
            self._jobs.popleft()
            self._num_made = 0
        return [job]


STEP = GPU.seconds(Work(num_rows=1, num_tokens=1, num_samples=1, decode_context=10))
WIRE = GPU.overheads.wire_seconds
THINKING = GPU.router_seconds(1)


def test_one_step_in_flight_shows_the_router_and_the_wire_in_every_gap() -> None:
    record = replayed(OneByOne(1), [arrival(1, 10, 4, at=5.0)])
    assert list(record.ttft) == [pytest.approx(THINKING + WIRE + STEP + WIRE)]
    assert list(record.queueing) == [0.0]
    assert list(record.gaps) == [pytest.approx(THINKING + 2 * WIRE + STEP)] * 3
    assert record.busy_seconds == pytest.approx(4 * STEP)
    assert record.begin == 5.0
    assert record.end == pytest.approx(5.0 + 4 * (THINKING + 2 * WIRE + STEP))


def test_two_steps_in_flight_hide_them() -> None:
    record = replayed(OneByOne(2), [arrival(1, 10, 4)])
    assert list(record.gaps) == [pytest.approx(STEP)] * 3
    assert record.end == pytest.approx(THINKING + 2 * WIRE + 4 * STEP)


def test_a_slack_puts_the_making_off_and_no_further_than_the_answer_asks() -> None:
    policy = OneByOne(2)
    policy.slack_seconds = STEP + 0.5
    record = replayed(policy, [arrival(1, 10, 3)])
    assert list(record.gaps) == [pytest.approx(STEP + 2 * WIRE + THINKING)] * 2


def test_who_waits_is_timed_from_the_arrival() -> None:
    record = replayed(OneByOne(1), [arrival(1, 10, 2), arrival(2, 20, 1, at=STEP / 2)])
    round_trip = THINKING + 2 * WIRE + STEP
    assert list(record.queueing) == [0.0, pytest.approx(2 * round_trip - STEP / 2)]
    assert list(record.latency) == [pytest.approx(2 * round_trip), pytest.approx(3 * round_trip - STEP / 2)]
    assert list(record.prompt_lengths) == [10, 20]


def test_a_follower_comes_after_the_answer_and_the_pause() -> None:
    arrivals = [arrival(1, 10, 2), arrival(2, 10, 1, at=0.001, follows=0, pause_seconds=3.0)]
    record = replayed(OneByOne(1), arrivals)
    assert record.end == pytest.approx(3 * (THINKING + 2 * WIRE + STEP) + 3.0)
    assert record.num_answered == 2


def test_who_is_too_long_is_refused_with_all_that_follow() -> None:
    arrivals: list[Arrival] = [
        arrival(1, 2000, 2),
        arrival(2, 10, 1, at=1.0, follows=0),
        arrival(3, 10, 1, at=2.0, follows=1),
        arrival(4, 10, 1, at=3.0),
    ]
    record = replayed(OneByOne(1), arrivals)
    assert (record.num_refused, record.num_answered, record.num_stuck) == (3, 1, 0)


def test_who_comes_while_too_many_are_under_way_is_turned_away() -> None:
    arrivals = [arrival(key, 10, 1) for key in range(5)] + [arrival(9, 10, 1, at=60.0)]
    record = replayed(OneByOne(1), arrivals, max_concurrent=2)
    assert (record.num_turned_away, record.num_answered) == (3, 3)


def test_who_is_never_started_is_counted() -> None:
    record = replayed(OneByOne(1, starts=False), [arrival(1, 10, 1), arrival(2, 10, 1)])
    assert (record.num_stuck, record.num_answered) == (2, 0)


def test_a_long_replay_keeps_an_even_sample_of_its_states() -> None:
    record = replayed(OneByOne(1), [arrival(key, 10, 500, max_new_tokens=500) for key in range(20)])
    line = record.timeline
    assert record.num_steps == 10_000
    assert MAX_SAMPLES / 2 <= len(line.at) == len(line.num_waiting) < MAX_SAMPLES
    gaps = [late - early for early, late in zip(line.at, line.at[1:], strict=False)]
    assert max(gaps) == pytest.approx(min(gaps))
    assert (line.num_waiting[0], line.num_waiting[-1]) == (19, 0)
