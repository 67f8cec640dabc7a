"""Request ids and CORS, on every answer."""

from pathlib import Path

import pytest

from tests.router.running import RunningRouter


def test_a_request_id_is_echoed_or_made(router: RunningRouter) -> None:
    assert router.client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {router.client.get(path).headers["x-request-id"] for path in ("/health", "/nope", "/info")}
    assert len(made) == 3 and all(len(one) == 32 for one in made)
    stream = router.post(
        "/generate_stream",
        {"inputs": "a", "parameters": {"max_new_tokens": 1}},
        headers={"x-request-id": "s"},
    )
    assert stream.headers["x-request-id"] == "s"


@pytest.mark.parametrize("given", [b"", b"x" * 201, b"tab\there", "ü".encode()])
def test_an_unusable_request_id_is_replaced(router: RunningRouter, given: bytes) -> None:
    assert len(router.client.get("/health", headers={b"x-request-id": given}).headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", ["/health", "/nope", "/v1/nope", "/metrics"])
def test_every_answer_may_be_read_anywhere(router: RunningRouter, path: str) -> None:
    headers = router.client.get(path, headers={"origin": "http://example.test"}).headers
    assert headers["access-control-allow-origin"] == "*"
    assert headers["vary"] == "origin, access-control-request-method, access-control-request-headers"


def test_preflight_needs_no_key(model_folder: Path) -> None:
    with RunningRouter(model_folder, api_key=("secret",), cors_allow_origin=("http://a.test",)) as router:
        response = router.client.options("/v1/chat/completions", headers={"origin": "http://a.test"})
        assert response.status_code == 200 and response.content == b""
        assert response.headers["access-control-allow-origin"] == "http://a.test"
        assert response.headers["access-control-allow-methods"] == "GET,POST"
        assert response.headers["access-control-allow-headers"] == "content-type,authorization"
        assert "access-control-allow-credentials" not in response.headers
        assert router.client.options("/any/where").status_code == 200

        other = router.client.get("/health", headers={"origin": "http://b.test"})
        assert "access-control-allow-origin" not in other.headers
        refused = router.client.post("/generate", json={}, headers={"origin": "http://a.test"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://a.test"
