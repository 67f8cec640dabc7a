"""The line about the end of a request: what was asked, what came of it, how long it took.

Holds no text of a prompt or an answer and no header but the request id.
"""

import logging
import time

from headrace_router.api.exchange import Exchange

log = logging.getLogger(__name__)


def log_end(exchange: Exchange, failure: str | None) -> None:
    """Logs the line. `failure` is the error's type, None for a request that was answered."""
    log.info("%s", line(exchange, failure, time.monotonic()))


def line(exchange: Exchange, failure: str | None, now: float) -> str:
    """`POST PATH STATUS name=value …`; the status is - when none was sent, as is the time of no first token.

    `finish` is the failure, or the reasons why the answers ended. Times are in milliseconds since the request
    came; `now` is in seconds of `time.monotonic()`. The request id comes last, for it may hold spaces.
    """
    generations = exchange.generations
    firsts = [moment for one in generations if (moment := one.timings.first_token) is not None]
    reasons = {one.finish_reason.value for one in generations if one.finish_reason is not None}
    fields = {
        "finish": failure or ",".join(sorted(reasons)) or "-",
        "prompt_tokens": exchange.num_prompt_tokens,
        "cached_tokens": exchange.num_cached_tokens,
        "generated_tokens": sum(one.num_generated for one in generations),
        "first_token_ms": f"{(min(firsts) - exchange.arrived) * 1000:.0f}" if firsts else "-",
        "total_ms": f"{(now - exchange.arrived) * 1000:.0f}",
        "request_id": exchange.id,
    }
    head = f"{exchange.scope['method']} {exchange.scope['path']} {exchange.status or '-'}"
    return " ".join([head, *(f"{name}={value}" for name, value in fields.items())])
