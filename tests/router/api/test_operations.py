"""Probes, /info, /metrics and /v1/models."""

from pathlib import Path

import pytest
from headrace_proto import __version__

from tests.router.running import MODEL, RunningRouter


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/ready", "/live", "/startup"])
def test_a_well_router_answers_probes_with_nothing(router: RunningRouter, path: str) -> None:
    response = router.client.get(path)
    assert response.status_code == 200 and response.content == b""


def test_a_router_without_shard_is_alive_and_no_more(model_folder: Path) -> None:
    with RunningRouter(model_folder, starts_shard=False) as router:
        for path in ("/", "/health", "/ping", "/ready", "/startup"):
            response = router.client.get(path)
            assert response.status_code == 503
            assert response.json() == {"error": "unhealthy", "error_type": "healthcheck"}
            assert response.headers["retry-after"].isdecimal()
        assert router.client.get("/live").status_code == 200
        assert router.client.get("/info").status_code == 503
        assert router.client.get("/v1/models").status_code == 200
        assert router.metric("headrace_shard_up") == 0


def test_info_has_the_keys_of_tgi(router: RunningRouter) -> None:
    info = router.client.get("/info").json()
    assert info == {
        "model_id": MODEL,
        "model_sha": None,
        "model_pipeline_tag": None,
        "max_concurrent_requests": 128,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_input_tokens": 200,
        "max_total_tokens": 256,
        "validation_workers": 2,
        "max_client_batch_size": 4,
        "router": "text-generation-router",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
    assert list(info)[-4:] == ["router", "version", "sha", "docker_label"]


@pytest.mark.parametrize(("revision", "shown"), [("main", None), ("0a" * 20, "0a" * 20), ("A" * 40, None)])
def test_only_a_commit_is_shown(model_folder: Path, revision: str, shown: str | None) -> None:
    with RunningRouter(model_folder, revision=revision) as router:
        assert router.client.get("/info").json()["model_sha"] == shown


def test_metrics_are_text(router: RunningRouter) -> None:
    response = router.client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert router.metric("tgi_batch_max_total_tokens") == 64 * 16
    assert router.metric("headrace_shard_up") == 1


def test_models(router: RunningRouter) -> None:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}
    assert router.client.get("/v1/models").json() == {"object": "list", "data": [model]}
    assert router.client.get(f"/v1/models/{MODEL}").json() == model
    response = router.client.get("/v1/models/no/such")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "no/such" in response.json()["error"]["message"]


def test_a_model_id_with_slashes(model_folder: Path) -> None:
    with RunningRouter(model_folder, model_id="org/model") as router:
        for path in ("/v1/models/org/model", "/v1/models/org%2Fmodel"):
            assert router.client.get(path).json()["id"] == "org/model"
