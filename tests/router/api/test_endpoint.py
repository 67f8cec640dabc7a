"""Keys, methods, unknown paths, failures nobody foresaw, and the counting of requests."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from headrace_router.engine import Generation
from headrace_router.scheduling.request import Request
from headrace_router.text.output import OutputOptions

from tests.router.running import CHAT, RunningRouter, raw_request

KEYED = (
    "/",
    "/generate",
    "/generate_stream",
    "/invocations",
    "/tokenize",
    "/chat_tokenize",
    "/detokenize",
    "/v1/chat/completions",
    "/v1/completions",
)
OPEN = ("/", "/health", "/ping", "/ready", "/live", "/startup", "/info", "/metrics", "/v1/models")


@pytest.fixture(scope="module")
def keyed(model_folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, api_key=("sécret", "a,b"), max_concurrent_requests=2) as router:
        yield router


def assert_envelope(response: httpx.Response, path: str) -> None:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    if path.startswith("/v1"):
        assert list(body["error"]) == ["message", "type", "param", "code"]
        assert body["error"]["message"]
    else:
        assert list(body) == ["error", "error_type"] and body["error"]


@pytest.mark.parametrize("path", KEYED)
@pytest.mark.parametrize(
    "key",
    [
        None,
        "",
        "sécret",
        "Bearer",
        "Bearer secret",
        "Bearer SÉCRET",
        "Bearer sécre",
        "Basic sécret",
        "Bearer a",
    ],
)
def test_what_is_posted_needs_a_key(keyed: RunningRouter, path: str, key: str | None) -> None:
    headers = {} if key is None else {b"authorization": key.encode()}
    response = keyed.client.post(path, json={}, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert_envelope(response, path)
    assert "sécret" not in response.text


def test_what_has_no_key_is_not_counted(keyed: RunningRouter) -> None:
    before = keyed.metric("tgi_request_count")
    keyed.post("/generate", {"inputs": "a"})
    keyed.client.get("/generate")
    assert keyed.metric("tgi_request_count") == before


def test_the_scheme_is_in_any_case(keyed: RunningRouter) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        headers = {b"authorization": f"{scheme} sécret".encode()}
        response = keyed.client.post("/tokenize", json={"inputs": "a"}, headers=headers)
        assert response.status_code == 200


def test_each_of_several_keys_is_one(keyed: RunningRouter) -> None:
    for key in ("sécret", "a,b"):
        headers = {b"authorization": f"Bearer {key}".encode()}
        assert keyed.client.post("/tokenize", json={"inputs": "a"}, headers=headers).status_code == 200


def test_each_key_is_a_tenant_and_goes_no_further(
    keyed: RunningRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "headrace_router")
    tenants: list[str] = []
    submit = keyed.service.engine.submit

    def noted(request: Request, options: OutputOptions, **others: Any) -> Generation:
        tenants.append(request.tenant)
        return submit(request, options, **others)

    monkeypatch.setattr(keyed.service.engine, "submit", noted)
    for authorization in ("Bearer a,b", "bearer  a,b", "Bearer sécret"):
        for path, body in (("/generate", {"inputs": "a"}), ("/v1/completions", {"prompt": "a", "n": 2})):
            headers = {b"authorization": authorization.encode()}
            assert keyed.client.post(path, json=body, headers=headers).status_code == 200
    first, second = tenants[0], tenants[-1]
    assert tenants == [first] * 6 + [second] * 3 and first != second
    for key in ("a,b", "sécret"):
        assert key not in first + second + caplog.text
    assert first not in caplog.text and second not in caplog.text


def test_whoever_presents_no_key_is_one_tenant_with_all_others(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str] = []
    submit = router.service.engine.submit

    def noted(request: Request, options: OutputOptions, **others: Any) -> Generation:
        tenants.append(request.tenant)
        return submit(request, options, **others)

    monkeypatch.setattr(router.service.engine, "submit", noted)
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Basic a"}, {"authorization": ""}):
        router.post("/generate", body, headers=headers)
    # Also where no key is asked for, one that is presented tells clients apart.
    router.post("/generate", body, headers={"authorization": "Bearer a"})
    assert tenants[:4] == [""] * 4 and tenants[4]


@pytest.mark.parametrize("path", OPEN)
def test_what_is_read_is_open(keyed: RunningRouter, path: str) -> None:
    assert keyed.client.get(path).status_code == 200
    head = keyed.client.head(path)
    assert head.status_code == 200 and head.content == b""


def test_the_key_comes_before_the_method(keyed: RunningRouter) -> None:
    assert keyed.client.get("/generate").status_code == 401
    assert keyed.client.post("/info", json={}).status_code == 405
    assert keyed.client.get("/nope").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/generate", "POST"),
        ("HEAD", "/generate", "POST"),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("POST", "/info", "GET, HEAD"),
        ("PUT", "/", "GET, HEAD, POST"),
        ("POST", "/v1/models", "GET, HEAD"),
    ],
)
def test_other_methods(router: RunningRouter, method: str, path: str, allowed: str) -> None:
    response = router.client.request(method, path)
    assert response.status_code == 405 and response.headers["allow"] == allowed
    if method != "HEAD":
        assert_envelope(response, path)


@pytest.mark.parametrize("path", ["/nope", "/generate/", "/v1", "/v1/", "/v1/nope", "/v1/chat/completions/"])
def test_unknown_paths(router: RunningRouter, path: str) -> None:
    for method in ("GET", "POST"):
        response = router.client.request(method, path, json={})
        assert response.status_code == 404
        assert_envelope(response, path)
        assert path in response.text


def test_one_too_many(keyed: RunningRouter) -> None:
    keyed.do(keyed.shard.gate.clear)
    headers = {b"authorization": "Bearer sécret".encode()}
    before = keyed.metric('tgi_request_failure{err="overloaded"}')
    permit = keyed.do(keyed.service.engine.admit)
    response = keyed.client.post("/v1/chat/completions", json=CHAT | {"n": 2}, headers=headers)
    keyed.do(permit.release)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"
    body = {"inputs": "a", "parameters": {"best_of": 1000}}
    assert keyed.client.post("/generate", json=body, headers=headers).status_code == 422
    assert keyed.metric('tgi_request_failure{err="overloaded"}') == before + 1
    keyed.do(keyed.shard.gate.set)


def test_a_fault_nobody_foresaw(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def burst(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(router.service.engine, "submit", burst)
    with caplog.at_level(logging.ERROR):
        native = router.post("/generate", {"inputs": "a"}, headers={"x-request-id": "the-id"})
        openai = router.post("/v1/completions", {"prompt": "a", "stream": True})
    assert native.status_code == openai.status_code == 500
    assert_envelope(native, "/generate")
    assert_envelope(openai, "/v1/completions")
    assert "secret detail" not in native.text + openai.text
    assert "secret detail" in caplog.text and "request the-id" in caplog.text
    assert "the-id" in native.text


def test_each_request_is_counted_once(router: RunningRouter) -> None:
    def counts() -> list[float]:
        names = ("count", "success", "duration_count", "validation_duration_count")
        return [router.metric(f"tgi_request_{name}") for name in (*names, 'failure{err="validation"}')]

    before = counts()
    router.post("/v1/chat/completions", CHAT | {"n": 3, "max_tokens": 2})
    router.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True})
    router.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}})
    router.post("/generate", {"inputs": ""})
    router.post("/generate_stream", {})
    router.post("/tokenize", {"inputs": "a"})
    router.client.get("/")
    after = counts()
    assert [new - old for new, old in zip(after, before, strict=True)] == [5, 3, 3, 3, 2]


def test_no_shard_is_503_with_retry_after(model_folder: Path) -> None:
    with RunningRouter(model_folder, starts_shard=False) as router:
        for number, (path, body) in enumerate(
            (("/generate", {"inputs": "a"}), ("/v1/chat/completions", CHAT))
        ):
            response = router.post(path, body)
            assert response.status_code == 503 and response.headers["retry-after"] == "5"
            assert_envelope(response, path)
            assert router.metric('tgi_request_failure{err="unavailable"}') == number + 1
        assert router.metric("tgi_request_success") == 0


def test_draining_closes_connections(model_folder: Path) -> None:
    with RunningRouter(model_folder) as router:
        router.do(router.shard.gate.clear)
        with raw_request(
            router, "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 3}}
        ) as running:
            router.wait_for(lambda: router.service.engine.num_active == 1)
            router.do(router.service.engine.drain)
            response = router.post("/generate", {"inputs": "a"})
            assert response.status_code == 503 and response.headers["connection"] == "close"
            assert router.client.get("/ready").status_code == 503
            assert router.client.get("/health").status_code == 200
            assert router.client.get("/live").status_code == 200
            router.do(router.shard.gate.set)
            assert running.recv(65536).startswith(b"HTTP/1.1 200 OK")


def ends(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.endswith("request_log")]


def test_each_inference_request_leaves_one_line(
    router: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace_router")
    two = {"parameters": {"max_new_tokens": 2}}
    router.post("/generate", {"inputs": "the water", **two}, headers={"x-request-id": "the id"})
    router.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 2, "stream": True})
    router.post("/generate", {"inputs": ""})
    router.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 5000}})
    router.post("/tokenize", {"inputs": "a"})
    router.client.get("/")
    router.wait_for(lambda: len(ends(caplog)) == 4)
    first, several, *invalid = ends(caplog)
    assert re.fullmatch(
        r"POST /generate 200 finish=length prompt_tokens=\d+ cached_tokens=0 generated_tokens=2 "
        r"first_token_ms=\d+ total_ms=\d+ request_id=the id",
        first,
    )
    assert several.startswith(
        "POST /v1/completions 200 finish=length prompt_tokens=2 cached_tokens=0 generated_tokens=8 "
    )
    for line in invalid:
        assert line.startswith(
            "POST /generate 422 finish=validation prompt_tokens=0 cached_tokens=0 generated_tokens=0 "
            "first_token_ms=- "
        )
    assert "water" not in caplog.text


def test_a_client_that_leaves_is_told_of(router: RunningRouter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace_router")
    router.do(router.shard.gate.clear)
    with raw_request(router, "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 3}}):
        router.wait_for(lambda: router.service.engine.num_active == 1)
    router.wait_for(lambda: len(ends(caplog)) == 1)
    router.do(router.shard.gate.set)
    assert ends(caplog)[0].startswith(
        "POST /generate - finish=dropped prompt_tokens=1 cached_tokens=0 generated_tokens=0 "
    )


def test_a_wrong_key_is_told_of_and_not_shown(keyed: RunningRouter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace_router")
    keyed.post("/generate", {"inputs": "a"}, headers={"authorization": "Bearer wrong"})
    keyed.wait_for(lambda: len(ends(caplog)) == 1)
    assert ends(caplog)[0].startswith("POST /generate 401 finish=unauthorized ")
    assert "wrong" not in caplog.text
