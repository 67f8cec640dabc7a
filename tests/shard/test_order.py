"""Steps pass in the order of their ids, however they arrive."""

import asyncio

import pytest
from headrace_shard import order
from headrace_shard.order import StepOrder


async def pass_all(arrivals: list[tuple[int, bool]], steps: StepOrder | None = None) -> list[int]:
    """Ids in the order in which they passed, for steps that arrive in this order."""
    steps = steps or StepOrder()
    passed: list[int] = []

    async def arrive(step_id: int, needs_earlier: bool) -> None:
        await steps.turn(step_id, needs_earlier=needs_earlier)
        passed.append(step_id)

    async with asyncio.TaskGroup() as group:
        for step_id, needs_earlier in arrivals:
            group.create_task(arrive(step_id, needs_earlier))
            await asyncio.sleep(0)
    return passed


def test_steps_in_order_pass_at_once() -> None:
    assert asyncio.run(pass_all([(7, False), (8, True), (9, True)])) == [7, 8, 9]


def test_early_steps_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "PATIENCE_SECONDS", 60.0)
    assert asyncio.run(pass_all([(7, False), (10, True), (9, True), (8, True)])) == [7, 8, 9, 10]


def test_step_that_cannot_be_the_first_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "PATIENCE_SECONDS", 60.0)
    assert asyncio.run(pass_all([(1, True), (0, False)])) == [0, 1]


def test_step_whose_predecessor_never_comes_passes_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "PATIENCE_SECONDS", 0.01)
    assert asyncio.run(pass_all([(1, False), (3, True), (4, True)])) == [1, 3, 4]


def test_late_step_does_not_make_later_ones_early(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> list[int]:
        steps = StepOrder()
        monkeypatch.setattr(order, "PATIENCE_SECONDS", 0.01)
        passed = await pass_all([(1, False), (3, True)], steps)
        monkeypatch.setattr(order, "PATIENCE_SECONDS", 60.0)
        return passed + await asyncio.wait_for(pass_all([(2, True), (4, True)], steps), 30)

    assert asyncio.run(scenario()) == [1, 3, 2, 4]


def test_after_a_restart_any_id_may_come() -> None:
    async def scenario() -> list[int]:
        steps = StepOrder()
        passed = await pass_all([(100, False)], steps)
        steps.restart()
        return passed + await asyncio.wait_for(pass_all([(5000, False), (5001, True)], steps), 30)

    assert asyncio.run(scenario()) == [100, 5000, 5001]


def test_restart_releases_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "PATIENCE_SECONDS", 60.0)

    async def scenario() -> list[int]:
        steps = StepOrder()
        await steps.turn(1, needs_earlier=False)
        waiting = asyncio.create_task(pass_all([(9, True)], steps))
        await asyncio.sleep(0.01)
        steps.restart()
        return await asyncio.wait_for(waiting, 30)

    assert asyncio.run(scenario()) == [9]
