"""What operators and their machines ask: is it alive, is it ready, what is it, how is it doing."""

import re

from headrace_proto import __version__

from headrace_router.api.exchange import Exchange, Service
from headrace_router.errors import Unavailable
from headrace_router.metrics import CONTENT_TYPE
from headrace_router.schemas import tgi

ROUTER_NAME = "text-generation-router"
"""What TGI calls itself in `/info`; clients compare it."""

COMMIT = re.compile(r"[0-9a-f]{40}")
"""A revision that says which model it is; a branch or a tag may mean another one tomorrow."""

PROBE_AGAIN_SECONDS = 5

UNHEALTHY = b'{"error":"unhealthy","error_type":"healthcheck"}'
"""TGI's words, which probes may look for."""


async def _answer_probe(exchange: Exchange, is_well: bool) -> None:
    if is_well:
        await exchange.answer(200, b"", content_type=None)  # With an empty body, as in TGI.
    else:
        await exchange.answer(503, UNHEALTHY, [(b"retry-after", b"%d" % PROBE_AGAIN_SECONDS)])


async def health(service: Service, exchange: Exchange) -> None:
    """200 while the shard is well; also while requests are no longer taken, because the server is draining.

    Who asks here replaces a server that says no, and one that drains is to end by itself: whether to send it
    requests is what /ready says.
    """
    # Without a line for each probe: the batcher says when the shard is lost and when it is back.
    try:
        await service.engine.check_health()
    except Unavailable:
        await _answer_probe(exchange, False)
    else:
        await _answer_probe(exchange, True)


async def ready(service: Service, exchange: Exchange) -> None:
    """200 while requests are taken: the shard is warm, nothing is being shut down."""
    await _answer_probe(exchange, service.engine.is_ready)


async def live(service: Service, exchange: Exchange) -> None:
    """200 while this process answers at all."""
    await _answer_probe(exchange, True)


async def startup(service: Service, exchange: Exchange) -> None:
    """200 once the shard has been warm for the first time."""
    await _answer_probe(exchange, service.engine.limits is not None)


async def metrics(service: Service, exchange: Exchange) -> None:
    await exchange.answer(200, service.metrics.render(), content_type=CONTENT_TYPE.encode())


async def info(service: Service, exchange: Exchange) -> None:
    """What is served, and the limits that requests are held to."""
    config, limits = service.config, service.engine.limits
    if limits is None:
        raise Unavailable("The limits are not known yet: the model is loading")
    await exchange.answer_json(
        tgi.Info(
            model_id=service.model_id,
            model_sha=config.revision if COMMIT.fullmatch(config.revision or "") else None,
            model_pipeline_tag=None,
            max_concurrent_requests=config.max_concurrent_requests,
            max_best_of=config.max_best_of,
            max_stop_sequences=config.max_stop_sequences,
            max_input_tokens=limits.max_input_tokens,
            max_total_tokens=limits.max_total_tokens,
            validation_workers=config.validation_workers,
            max_client_batch_size=config.max_client_batch_size,
            router=ROUTER_NAME,
            version=__version__,
            sha=None,
            docker_label=None,
        )
    )
