"""/invocations, SageMaker's one route for everything: the body says which route is meant."""

import msgspec

from headrace_router.api import tgi
from headrace_router.api.chat import chat_completions
from headrace_router.api.completions import completions
from headrace_router.api.exchange import Exchange, Service
from headrace_router.api.openai import OPENAI
from headrace_router.schemas.decode import decode, invalid


async def invocations(service: Service, exchange: Exchange, body: bytes) -> None:
    """POST /invocations: `inputs` is /, `messages` is a chat, `prompt` a completion, each in its own face."""
    keys = decode(body, dict[str, msgspec.Raw])
    if "inputs" in keys:
        await tgi.compat_generate(service, exchange, body)
    elif "messages" in keys:
        exchange.face = OPENAI
        await chat_completions(service, exchange, body)
    elif "prompt" in keys:
        exchange.face = OPENAI
        await completions(service, exchange, body)
    else:
        raise invalid("the body has none of `inputs`, `messages` and `prompt`")
