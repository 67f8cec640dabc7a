"""WaitingQueue: priorities, fair turns between tenants, first in first out, and nobody starves."""

import itertools
from unittest.mock import patch

import pytest
from headrace_router.scheduling.queue import MAX_ABSENT_TENANTS, MAX_PASSED, NUM_SINGLE, WaitingQueue
from headrace_router.scheduling.request import Request, SamplingParams, Sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.scheduling.rules import Rules


def sequence_of(number: int, tenant: str = "", *, priority: int = 0, num_tokens: int = 1) -> Sequence:
    request = Request(
        prompt_ids=(1,) * num_tokens,
        sampling=SamplingParams(),
        max_new_tokens=1,
        priority=priority,
        tenant=tenant,
    )
    return Sequence(id=number, request=request, arrived_at=0.0)


class Arrivals:
    """A queue, and sequences numbered as they come."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.numbers = itertools.count()

    def push(self, tenant: str = "", *, priority: int = 0, num_tokens: int = 1) -> Sequence:
        sequence = sequence_of(next(self.numbers), tenant, priority=priority, num_tokens=num_tokens)
        self.queue.push(sequence)
        return sequence

    def admit(self) -> Sequence:
        """Admits whoever comes first, and charges its prompt."""
        sequence = next(iter(self.queue))
        self.queue.admit(sequence, sequence.num_tokens)
        return sequence

    @property
    def order(self) -> list[int]:
        return [sequence.id for sequence in self.queue]

    @property
    def tenants(self) -> str:
        return "".join(sequence.request.tenant for sequence in self.queue)


# ---- one tenant


def test_first_in_first_out_and_anybody_may_leave() -> None:
    arrivals = Arrivals()
    sequences = [arrivals.push(num_tokens=number) for number in (5, 6, 7)]
    assert (arrivals.order, len(arrivals.queue), arrivals.queue.num_tokens) == ([0, 1, 2], 3, 18)
    arrivals.queue.remove(sequences[1])
    assert (arrivals.order, len(arrivals.queue), arrivals.queue.num_tokens) == ([0, 2], 2, 12)
    for leave in (arrivals.queue.remove, lambda sequence: arrivals.queue.admit(sequence, 1)):
        with pytest.raises(KeyError):
            leave(sequences[1])
    assert arrivals.admit() is sequences[0]
    assert arrivals.admit() is sequences[2]
    assert (arrivals.order, len(arrivals.queue), arrivals.queue.num_tokens) == ([], 0, 0)


def test_the_preempted_stand_before_all_of_their_priority_the_oldest_first() -> None:
    arrivals = Arrivals()
    old = [arrivals.push() for _ in range(3)]
    for _ in old:
        arrivals.admit()
    arrivals.push()
    urgent = arrivals.push(priority=-1)
    for sequence in (old[1], old[2], old[0]):
        arrivals.queue.push_front(sequence)
    assert arrivals.order == [urgent.id, 0, 1, 2, 3]
    arrivals.queue.remove(old[1])
    arrivals.queue.admit(old[0], 0)
    assert arrivals.order == [urgent.id, 2, 3]


# ---- priorities


def test_a_better_priority_comes_first() -> None:
    arrivals = Arrivals()
    for priority in (3, 0, 3, -2, 0):
        arrivals.push(priority=priority)
    assert arrivals.order == [3, 1, 4, 0, 2]


def test_one_that_was_passed_by_many_who_came_later_goes_first() -> None:
    arrivals = Arrivals()
    early = [arrivals.push() for _ in range(3)]
    patient = arrivals.push(priority=5)
    for _ in early:
        arrivals.admit()
    for _ in range(MAX_PASSED):
        assert arrivals.push() is arrivals.admit()
    latest = arrivals.push(priority=5)
    urgent = arrivals.push(priority=-7)
    # Those who came before it do not count, and who came after it has been passed by nobody.
    assert arrivals.order == [patient.id, urgent.id, latest.id]
    assert arrivals.admit() is patient
    assert arrivals.order == [urgent.id, latest.id]


def test_one_that_leaves_without_being_admitted_passes_nobody() -> None:
    arrivals = Arrivals()
    patient = arrivals.push(priority=5)
    for _ in range(2 * MAX_PASSED):
        arrivals.queue.remove(arrivals.push())
    assert arrivals.order == [patient.id]
    urgent = arrivals.push()
    assert arrivals.order == [urgent.id, patient.id]


def test_the_patience_of_the_preempted_begins_when_they_wait_again() -> None:
    arrivals = Arrivals()
    slow, other = arrivals.push(priority=5), arrivals.push(priority=5)
    arrivals.admit()
    for number in range(2):
        for _ in range(MAX_PASSED // 2):
            arrivals.push()
            arrivals.admit()
        if number == 0:
            arrivals.queue.push_front(slow)
    urgent = arrivals.push()
    assert arrivals.order == [other.id, urgent.id, slow.id]


def test_priorities_that_are_counted_together_keep_their_order_and_nobody_starves() -> None:
    arrivals = Arrivals()
    patient, other = arrivals.push(priority=501), arrivals.push(priority=500)
    for _ in range(MAX_PASSED):
        urgent = arrivals.push(priority=499)
        assert arrivals.order == [urgent.id, other.id, patient.id]
        arrivals.admit()
    arrivals.push(priority=-500)
    assert [arrivals.admit(), arrivals.admit()] == [patient, other]


def test_however_many_priorities_wait_they_are_counted_in_few_groups() -> None:
    arrivals = Arrivals()
    for priority in range(-1000, 1001):
        arrivals.push(priority=-priority)
    assert len(arrivals.queue._groups) == 2 * (NUM_SINGLE + 10) + 1
    order = [sequence.request.priority for sequence in arrivals.queue]
    assert order == list(range(-1000, 1001))
    while arrivals.queue:
        arrivals.admit()
    assert not arrivals.queue._groups


# ---- tenants


def test_tenants_take_turns_by_the_tokens_they_are_served() -> None:
    arrivals = Arrivals()
    for _ in range(3):
        arrivals.push("a", num_tokens=100)
    for _ in range(6):
        arrivals.push("b", num_tokens=50)
    # Of equal counts, whoever began to wait first.
    assert arrivals.tenants == "abbabbabb"
    assert "".join(arrivals.admit().request.tenant for _ in range(9)) == "abbabbabb"


def test_generated_tokens_count_too() -> None:
    arrivals = Arrivals()
    for tenant in "aaabbb":
        arrivals.push(tenant, num_tokens=10)
    arrivals.queue.served("a", 15)
    assert arrivals.tenants == "bbabaa"


def test_what_was_served_at_one_priority_counts_at_all() -> None:
    arrivals = Arrivals()
    for tenant in "ab":
        arrivals.push(tenant, priority=1)
    arrivals.push("a", num_tokens=500)
    arrivals.admit()
    assert arrivals.tenants == "ba"


def test_who_comes_back_has_saved_up_no_turns() -> None:
    arrivals = Arrivals()
    for _ in range(20):
        arrivals.push("a", num_tokens=10)
    for _ in range(10):
        arrivals.admit()
    for _ in range(5):
        arrivals.push("b", num_tokens=10)
    assert arrivals.tenants == "abababababaaaaa"


def test_who_leaves_and_comes_back_is_not_forgiven() -> None:
    arrivals = Arrivals()
    arrivals.push("b", num_tokens=10)
    arrivals.push("a", num_tokens=10)
    arrivals.queue.admit(next(s for s in arrivals.queue if s.request.tenant == "a"), 1000)
    arrivals.push("a")
    arrivals.push("b")
    assert arrivals.tenants == "bba"


def test_after_a_pause_all_begin_where_the_last_one_was() -> None:
    arrivals = Arrivals()
    arrivals.push("a", num_tokens=1000)
    arrivals.admit()
    for tenant in "ba":
        arrivals.push(tenant, num_tokens=10)
        arrivals.push(tenant, num_tokens=10)
    assert arrivals.tenants == "baba"


def test_a_tenant_that_was_served_much_is_not_held_up_for_ever() -> None:
    arrivals = Arrivals()
    arrivals.push("poor")
    arrivals.push("rich")
    arrivals.queue.served("rich", 10**9)
    passed = 0
    # Every new tenant begins with as little as the one that waits.
    while arrivals.push(f"poor {passed}") and arrivals.admit().request.tenant != "rich":
        passed += 1
    assert passed == 3 * MAX_PASSED


def test_being_left_out_is_amended_by_one_turn() -> None:
    arrivals = Arrivals()
    for tenant in "prr":
        arrivals.push(tenant)
    arrivals.queue.served("r", 10**9)
    for _ in range(2 * MAX_PASSED):
        assert arrivals.tenants == "prr"
        arrivals.push("p")
        arrivals.admit()
    arrivals.push("p")
    assert arrivals.tenants == "rppr"
    for _ in range(MAX_PASSED):
        arrivals.admit()
        assert arrivals.tenants == "ppr"
        arrivals.push("p")


def test_counts_of_absent_tenants_are_not_kept_without_end() -> None:
    arrivals = Arrivals()
    arrivals.push("here")
    for number in range(3 * MAX_ABSENT_TENANTS):
        arrivals.queue.served(f"tenant {number}", 5 + number % 2)
        arrivals.queue.remove(arrivals.push(f"fleeting {number}"))
    arrivals.queue.served("greedy", 10**6)
    for number in range(3 * MAX_ABSENT_TENANTS):
        arrivals.queue.served(f"other {number}", 5)
    assert len(arrivals.queue._counts) <= MAX_ABSENT_TENANTS + 1
    assert len(arrivals.queue._least_counts) <= MAX_ABSENT_TENANTS
    # Who was served most is remembered best.
    for tenant in ("greedy", "new"):
        arrivals.push(tenant)
    assert [sequence.request.tenant for sequence in arrivals.queue] == ["here", "new", "greedy"]


def test_a_tenant_loses_no_turn_for_those_who_are_skipped() -> None:
    arrivals = Arrivals()
    for tenant in "abaabb":
        arrivals.push(tenant, num_tokens=10)
    skipped = {0, 2, 4}
    order = [sequence.id for sequence in arrivals.queue.in_order(lambda other: other.id in skipped)]
    assert order == [3, 1, 5]
    assert arrivals.order == [0, 1, 2, 4, 3, 5]


@pytest.mark.parametrize("is_skipped", [False, True])
def test_the_patient_and_the_preempted_are_skipped_too(is_skipped: bool) -> None:
    arrivals = Arrivals()
    preempted, patient = arrivals.push(), arrivals.push(priority=5)
    arrivals.admit()
    for _ in range(MAX_PASSED):
        arrivals.push()
        arrivals.admit()
    arrivals.queue.push_front(preempted)
    last = arrivals.push()
    order = list(arrivals.queue.in_order(lambda other: is_skipped and other is not last))
    assert order == ([last] if is_skipped else [patient, preempted, last])


# ---- anything, in any order

moves = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abc"), st.sampled_from([-11, 0, 1]), st.integers(1, 4)),
        st.tuples(st.sampled_from(["admit", "remove", "again"]), st.integers(0, 99)),
        st.tuples(st.just("push"), st.sampled_from("ab"), st.just(0), st.sampled_from([1, 50])),
        st.tuples(st.just("admit"), st.just(0)),
        st.tuples(st.just("served"), st.sampled_from("abc"), st.integers(0, 5)),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(moves, st.sampled_from([1, 3, 256]))
def test_the_order_is_that_of_the_rules(moves: list[tuple[object, ...]], max_charges: int) -> None:
    with patch.multiple("headrace_router.scheduling.queue", MAX_PASSED=2, MAX_CHARGES=max_charges):
        arrivals, rules, admitted = Arrivals(), Rules(max_passed=2), list[Sequence]()
        for move in moves:
            match move:
                case "push", str(tenant), int(priority), int(num_tokens):
                    rules.push(arrivals.push(tenant, priority=priority, num_tokens=num_tokens))
                case "served", str(tenant), int(num_tokens):
                    arrivals.queue.served(tenant, num_tokens)
                    rules.served(tenant, num_tokens)
                    # Who stands where is looked at after several moves only, as by a scheduler.
                    continue
                case "again", int(which) if admitted:
                    sequence = admitted.pop(which % len(admitted))
                    arrivals.queue.push_front(sequence)
                    rules.push(sequence, is_preempted=True)
                case ("admit" | "remove") as leave, int(which) if rules.waiting:
                    sequence = list(arrivals.queue)[which % len(arrivals.queue)]
                    if leave == "admit":
                        arrivals.queue.admit(sequence, sequence.num_tokens)
                        rules.admit(sequence)
                        admitted.append(sequence)
                    else:
                        arrivals.queue.remove(sequence)
                        rules.leave(sequence)
            assert arrivals.order == [sequence.id for sequence in rules.order()]
            assert len(arrivals.queue) == len(rules.waiting)
            assert arrivals.queue.num_tokens == sum(sequence.num_tokens for sequence in rules.waiting)
        while rules.waiting:
            rules.admit(arrivals.admit())
            assert arrivals.order == [sequence.id for sequence in rules.order()]
        assert not arrivals.queue._classes


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), min_size=1, max_size=30), st.data())
def test_nobody_starves(others: list[tuple[str, int]], data: st.DataObject) -> None:
    arrivals = Arrivals()
    for tenant, priority in others:
        arrivals.push(tenant, priority=priority)
    one = arrivals.push(data.draw(st.sampled_from("abcd")), priority=3)
    arrivals.queue.served(one.request.tenant, 10**6)
    # However many come and however urgent they are.
    most = len(others) + (MAX_PASSED + 1) * 8 * len(others)
    for number in range(most):
        arrivals.push("abcde"[number % 5], priority=number % 4)
        if arrivals.admit() is one:
            return
    raise AssertionError(f"passed by {most}")
