"""Steps in the order of their ids. Knows what an id is and how long to wait; knows nothing else of a step.

gRPC may deliver a short message before a long one that was sent first, since each call has a stream of its
own. A router that sends step N + 1 before N has answered therefore depends on this.
"""

import asyncio

PATIENCE_SECONDS = 1.0
"""How long a step waits for the one before it; a router may have given that one up."""


class StepOrder:
    """Lets steps pass one by one: N + 1 after N. Belongs to one event loop."""

    def __init__(self) -> None:
        self._next_id: int | None = None
        """None when any step may come next."""
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def restart(self) -> None:
        """The next step may have any id, as after a warm-up."""
        self._next_id = None
        self._wake(list(self._waiting))

    async def turn(self, step_id: int, *, needs_earlier: bool) -> None:
        """Returns when it is this step's turn; the caller hands it on before it next awaits.

        `needs_earlier` says that the step names sequences it does not bring: it cannot be the first one.
        """
        if self._is_early(step_id, needs_earlier):
            arrived = asyncio.get_running_loop().create_future()
            self._waiting[step_id] = arrived
            try:
                await asyncio.wait((arrived,), timeout=PATIENCE_SECONDS)
            finally:
                self._waiting.pop(step_id, None)
        # A step that was waited for in vain may still come; it must not make the later ones early again.
        self._next_id = max(self._next_id or 0, step_id + 1)
        self._wake([self._next_id])

    def _is_early(self, step_id: int, needs_earlier: bool) -> bool:
        return needs_earlier if self._next_id is None else step_id > self._next_id

    def _wake(self, step_ids: list[int]) -> None:
        for step_id in step_ids:
            waiting = self._waiting.get(step_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
