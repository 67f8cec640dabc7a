"""The web application: every URL, and what stands around all of them."""

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from headrace_router.api import operations, tgi, tokenizing
from headrace_router.api.chat import chat_completions
from headrace_router.api.completions import completions
from headrace_router.api.endpoint import Endpoint, GetHandler, PostHandler, not_found
from headrace_router.api.exchange import Service
from headrace_router.api.invocations import invocations
from headrace_router.api.middleware import Cors, RequestId
from headrace_router.api.openai import model, models


def create_app(service: Service) -> ASGIApp:
    """The application of a router. It starts and stops nothing: the engine is its caller's."""

    def inference(path: str, post: PostHandler, get: GetHandler | None = None) -> Route:
        return Route(path, Endpoint(service, get=get, post=post))

    def token_route(path: str, post: PostHandler) -> Route:
        return Route(path, Endpoint(service, post=post, is_inference=False))

    def operation(path: str, get: GetHandler) -> Route:
        return Route(path, Endpoint(service, get=get))

    routes = [
        inference("/v1/chat/completions", chat_completions),
        inference("/v1/completions", completions),
        inference("/generate", tgi.generate),
        inference("/generate_stream", tgi.generate_stream),
        inference("/", tgi.compat_generate, get=operations.health),
        inference("/invocations", invocations),
        token_route("/tokenize", tokenizing.tokenize),
        token_route("/chat_tokenize", tokenizing.chat_tokenize),
        token_route("/detokenize", tokenizing.detokenize),
        operation("/v1/models", models),
        operation("/v1/models/{id:path}", model),
        operation("/info", operations.info),
        operation("/health", operations.health),
        operation("/ping", operations.health),
        operation("/ready", operations.ready),
        operation("/live", operations.live),
        operation("/startup", operations.startup),
        operation("/metrics", operations.metrics),
    ]
    router = Router(routes, redirect_slashes=False, default=not_found)
    return RequestId(Cors(router, service.config.cors_allow_origin))


def create_metrics_app(service: Service) -> ASGIApp:
    """Nothing but /metrics, for `--prometheus-port`."""
    return Router(
        [Route("/metrics", Endpoint(service, get=operations.metrics))],
        redirect_slashes=False,
        default=not_found,
    )
