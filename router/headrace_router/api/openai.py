"""What the routes of the OpenAI face share: errors, ids, names, log-probabilities; and /v1/models."""

import time
import uuid
from collections.abc import Iterable, Sequence

from headrace_proto import __version__

from headrace_router.api.exchange import Exchange, Face, Service, encoder
from headrace_router.api.generations import Whole
from headrace_router.engine import Finish, OutputToken
from headrace_router.errors import HeadraceError, ModelNotFound
from headrace_router.scheduling.request import FinishReason
from headrace_router.schemas import openai
from headrace_router.schemas.openai import BASE_MODEL_NAMES

SYSTEM_FINGERPRINT = f"{__version__}-native"

STREAM_END = b"data: [DONE]\n\n"


def _status(error: HeadraceError) -> int:
    return error.openai_status or error.status


def _error_body(error: HeadraceError) -> bytes:
    return encoder.encode(
        openai.ErrorResponse(
            error=openai.Error(
                message=error.openai_message, type=error.openai_type, param=error.param, code=error.code
            )
        )
    )


OPENAI = Face(status=_status, error_body=_error_body, stream_end=STREAM_END)


async def models(service: Service, exchange: Exchange) -> None:
    """GET /v1/models."""
    await exchange.answer_json(openai.ModelList(data=[_model(service)]))


async def model(service: Service, exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    name: str = exchange.scope["path_params"]["id"]
    if name != service.model_id and name not in BASE_MODEL_NAMES:
        raise ModelNotFound(
            f"The model `{name}` does not exist: `{service.model_id}` is served", param="model"
        )
    await exchange.answer_json(_model(service))


def _model(service: Service) -> openai.Model:
    # TGI's `created` is 0 too: when a model was made is not in its files.
    return openai.Model(id=service.model_id, created=0, owned_by=service.model_id)


def answered_model(service: Service, asked: str | None) -> str:
    """The name in a response: what was asked for, when that is the name of a model."""
    return service.model_id if asked is None or asked in BASE_MODEL_NAMES else asked


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """`created`: seconds since 1970."""
    return int(time.time())


def finish_reason(finish: Finish) -> str:
    """OpenAI knows one word for every end that is no cut."""
    return "length" if finish.reason is FinishReason.LENGTH else "stop"


def usage(num_prompt_tokens: int, finishes: Iterable[Finish]) -> openai.Usage:
    num_completion_tokens = sum(finish.num_generated for finish in finishes)
    return openai.Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
    )


def slowest(wholes: Sequence[Whole]) -> Whole:
    """The one that ended last."""
    return max(wholes, key=lambda one: one.timings.ended or 0.0)


def shown(tokens: Iterable[OutputToken]) -> list[OutputToken]:
    """The tokens that the text is made of: no special ones, none behind a stop string.

    A token that ends inside a character has neither raw nor visible text, and is part of it.
    """
    return [token for token in tokens if not token.is_special and (token.text or not token.raw)]


def includes_usage(options: openai.StreamOptions | None) -> bool:
    return options is not None and bool(options.include_usage)
