"""The metrics page: TGI's names letter by letter, aliases, and the table for the docs."""

import re

import pytest
from headrace_router import metrics
from headrace_router.metrics import Metrics
from prometheus_client.parser import text_string_to_metric_families

TGI_TYPES = {
    "tgi_request_count": "counter",
    "tgi_request_success": "counter",
    "tgi_request_failure": "counter",
    "tgi_request_duration": "histogram",
    "tgi_request_validation_duration": "histogram",
    "tgi_request_queue_duration": "histogram",
    "tgi_request_inference_duration": "histogram",
    "tgi_request_mean_time_per_token_duration": "histogram",
    "tgi_request_generated_tokens": "histogram",
    "tgi_request_input_length": "histogram",
    "tgi_request_max_new_tokens": "histogram",
    "tgi_request_skipped_tokens": "histogram",
    "tgi_queue_size": "gauge",
    "tgi_batch_next_size": "histogram",
    "tgi_batch_current_size": "gauge",
    "tgi_batch_current_max_tokens": "gauge",
    "tgi_batch_max_total_tokens": "gauge",
    "tgi_batch_inference_count": "counter",
    "tgi_batch_inference_success": "counter",
    "tgi_batch_inference_failure": "counter",
    "tgi_batch_inference_duration": "histogram",
    "tgi_batch_forward_duration": "histogram",
    "tgi_batch_decode_duration": "histogram",
    "tgi_batch_filter_duration": "histogram",
    "tgi_batch_concat": "counter",
    "tgi_batch_concat_duration": "histogram",
    "tgi_request_queue_size": "gauge",
    "tgi_batch_size": "gauge",
    "tgi_batch_next_tokens": "histogram",
    "tgi_request_duration_ms": "histogram",
    "tgi_request_duration_seconds": "histogram",
    "tgi_request_inference_duration_ms": "histogram",
    "tgi_batch_inference_duration_seconds": "histogram",
}


def types_of(page: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.M))


def test_names_and_types_are_exact() -> None:
    types = types_of(Metrics().render().decode())
    assert {name: kind for name, kind in types.items() if name.startswith("tgi_")} == TGI_TYPES
    assert types["process_cpu_seconds_total"] == "counter"


def test_every_metric_has_help_and_is_documented() -> None:
    page, table = Metrics().render().decode(), metrics.document()
    for name in types_of(page):
        assert re.search(rf"^# HELP {name} \S", page, re.M), name
        assert name.startswith("process_") or f"| `{name}` |" in table, name


def test_counters_have_no_suffix_and_start_at_zero() -> None:
    own = Metrics()
    own.request_count.inc()
    own.request_failure.labels("dropped").inc(2)
    lines = own.render().decode().splitlines()
    assert "tgi_request_count 1.0" in lines
    assert 'tgi_request_failure{err="dropped"} 2.0' in lines
    assert 'tgi_request_failure{err="incomplete"} 0.0' in lines
    assert 'tgi_request_failure{err="timeout"} 0.0' in lines
    assert not [line for line in lines if "_created" in line]
    assert not [line for line in lines if "_total" in line.split("{")[0].split(" ")[0] and "tgi_" in line[:4]
                and "tgi_batch_max_total_tokens" not in line]  # fmt: skip


def test_the_page_parses_and_histograms_add_up() -> None:
    own = Metrics()
    own.request_duration.observe(0.25)
    own.batch_forward_duration.labels("decode").observe(0.001)
    families = {family.name: family for family in text_string_to_metric_families(own.render().decode())}
    buckets = [s for s in families["tgi_request_duration"].samples if s.name.endswith("_bucket")]
    assert len(buckets) == metrics.NUM_DURATION_BUCKETS + 1
    assert buckets[0].labels["le"] == "0.00015000000000000001"
    assert buckets[-1].labels["le"] == "+Inf" and buckets[-1].value == 1
    lengths = [s for s in families["tgi_request_input_length"].samples if s.name.endswith("_bucket")]
    assert [float(s.labels["le"]) for s in lengths[:4]] == [1, 2, 4, 8]


def test_aliases_follow_their_metric() -> None:
    own = Metrics()
    own.queue_size.set(3)
    own.request_duration.observe(0.25)
    own.step_tokens.observe(512)
    samples = {
        (s.name, s.labels.get("le")): s.value
        for family in text_string_to_metric_families(own.render().decode())
        for s in family.samples
    }
    assert samples["tgi_request_queue_size", None] == 3
    assert samples["tgi_request_duration_seconds_sum", None] == 0.25
    assert samples["tgi_request_duration_ms_sum", None] == pytest.approx(250)
    assert samples["tgi_request_duration_ms_count", None] == 1
    assert samples["tgi_batch_next_tokens_sum", None] == 512
    bounds = [float(le) for name, le in samples if name == "tgi_request_duration_ms_bucket" and le]
    assert bounds[0] == pytest.approx(0.15)


def test_registries_are_separate() -> None:
    one, other = Metrics(), Metrics()
    one.request_count.inc()
    assert "tgi_request_count 0.0" in other.render().decode().splitlines()
