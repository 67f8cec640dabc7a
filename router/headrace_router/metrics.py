"""Every metric: name, help, labels, buckets; and the page that shows them.

A metric is declared once, as a class attribute of `Metrics`; its exposed name is `tgi_` or `headrace_` and
the attribute's name. Names that start with `tgi_` are those of Text Generation Inference, letter by letter:
counters carry no `_total`, durations are seconds without a suffix. Knows nothing of who counts what; a help
text says what is counted.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from headrace_proto import __version__
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NUM_DURATION_BUCKETS = 35


def _duration_buckets() -> tuple[float, ...]:
    """TGI's: 0.0001 * 1.5^k seconds for k = 1 … 35, by repeated multiplication, so that labels are equal."""
    value, buckets = 0.0001, []
    for _ in range(NUM_DURATION_BUCKETS):
        value *= 1.5
        buckets.append(value)
    return tuple(buckets)


DURATION_BUCKETS = _duration_buckets()
# Powers of two, whatever the limits of a replica are: series of replicas can be added up.
LENGTH_BUCKETS = tuple(float(2**k) for k in range(21))
SIZE_BUCKETS = tuple(float(2**k) for k in range(11))
SKIPPED_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)

METHODS = ("prefill", "decode")

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a metric is declared as."""

    kind: Kind
    prefix: str
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()
    """Of the label; all are shown from the start, so that a rate has a beginning."""
    buckets: tuple[float, ...] = ()

    def build(self, attribute: str, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
        name, labels = self.prefix + attribute, [self.label] if self.label else []
        metric: Counter | Gauge | Histogram
        if self.kind == "histogram":
            metric = Histogram(name, self.help, labels, registry=registry, buckets=self.buckets)
        else:
            metric = (Counter if self.kind == "counter" else Gauge)(
                name, self.help, labels, registry=registry
            )
        for value in self.values:
            metric.labels(value)
        return metric


# The functions below return a `Spec` under the type of what `Metrics()` puts in its place.


def _counter(
    help: str, *, label: str | None = None, values: tuple[str, ...] = (), prefix: str = "tgi_"
) -> Counter:
    return cast(Counter, Spec(kind="counter", prefix=prefix, help=help, label=label, values=values))


def _gauge(
    help: str, *, label: str | None = None, values: tuple[str, ...] = (), prefix: str = "tgi_"
) -> Gauge:
    return cast(Gauge, Spec(kind="gauge", prefix=prefix, help=help, label=label, values=values))


def _histogram(
    help: str,
    buckets: tuple[float, ...] = DURATION_BUCKETS,
    *,
    label: str | None = None,
    values: tuple[str, ...] = (),
    prefix: str = "tgi_",
) -> Histogram:
    spec = Spec(kind="histogram", prefix=prefix, help=help, label=label, values=values, buckets=buckets)
    return cast(Histogram, spec)


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A second name under which a metric is shown, because tutorials and dashboards teach it."""

    name: str
    of: str
    help: str
    scale: float = 1.0
    """Of bucket bounds and sums: 1000 for a histogram in milliseconds."""


ALIASES = (
    Alias(name="tgi_request_queue_size", of="tgi_queue_size", help="Same as tgi_queue_size."),
    Alias(name="tgi_batch_size", of="tgi_batch_current_size", help="Same as tgi_batch_current_size."),
    Alias(name="tgi_batch_next_tokens", of="headrace_step_tokens", help="Same as headrace_step_tokens."),
    Alias(
        name="tgi_request_duration_seconds", of="tgi_request_duration", help="Same as tgi_request_duration."
    ),
    Alias(
        name="tgi_request_duration_ms",
        of="tgi_request_duration",
        help="tgi_request_duration in milliseconds.",
        scale=1000.0,
    ),
    Alias(
        name="tgi_request_inference_duration_ms",
        of="tgi_request_inference_duration",
        help="tgi_request_inference_duration in milliseconds.",
        scale=1000.0,
    ),
    Alias(
        name="tgi_batch_inference_duration_seconds",
        of="tgi_batch_inference_duration",
        help="Same as tgi_batch_inference_duration.",
    ),
)


class Metrics:
    """The metrics of one router, in a registry of their own. `render()` is the page of `/metrics`."""

    # Requests
    request_count = _counter("Inference requests that arrived; one per HTTP request.")
    request_success = _counter("Inference requests answered to their end; one per HTTP request.")
    request_failure = _counter(
        "Inference requests that failed, by cause. dropped: the client went away; timeout: "
        "`--request-timeout` had passed; unavailable: no shard, or shutting down.",
        label="err",
        values=(
            "validation",
            "overloaded",
            "template",
            "generation",
            "dropped",
            "timeout",
            "incomplete",
            "unavailable",
        ),
    )
    request_duration = _histogram("Seconds from arrival to the end of a whole answer.")
    request_validation_duration = _histogram("Seconds from arrival until the request joins the queue.")
    request_queue_duration = _histogram("Seconds in the queue until the first step.")
    request_inference_duration = _histogram("Seconds from the first step to the last token.")
    request_mean_time_per_token_duration = _histogram("Inference seconds divided by generated tokens.")
    request_generated_tokens = _histogram("Generated tokens of a whole answer.", LENGTH_BUCKETS)
    request_input_length = _histogram("Prompt tokens, after truncation.", LENGTH_BUCKETS)
    request_max_new_tokens = _histogram("Most tokens that a request may generate.", LENGTH_BUCKETS)
    request_skipped_tokens = _histogram(
        "Tokens beyond the first that a sequence gained in one step (accepted drafts).", SKIPPED_BUCKETS
    )

    # Queue and steps
    queue_size = _gauge("Sequences that wait.")
    queue_tokens = _gauge("Prompt tokens of the sequences that wait.", prefix="headrace_")
    batch_next_size = _histogram("Sequences that a step admitted, when it admitted any.", SIZE_BUCKETS)
    batch_current_size = _gauge("Sequences that run.")
    batch_current_max_tokens = _gauge(
        "Tokens that the KV blocks of running sequences can hold; of a block that several share, once."
    )
    batch_max_total_tokens = _gauge("Tokens that the whole KV cache can hold.")
    batch_inference_count = _counter("Steps sent to the shard.", label="method", values=METHODS)
    batch_inference_success = _counter("Steps that the shard completed.", label="method", values=METHODS)
    batch_inference_failure = _counter("Steps that failed.", label="method", values=METHODS)
    batch_inference_duration = _histogram(
        "Seconds from sending a step, or from the answer to the one before if that came later, until its "
        "result is taken into account; its tokens are delivered while the next step runs.",
        label="method",
        values=METHODS,
    )
    batch_forward_duration = _histogram(
        "Seconds of preparing a step and of its forward pass, as told by the shard.",
        label="method",
        values=METHODS,
    )
    batch_decode_duration = _histogram(
        "Seconds of sampling in a step, as told by the shard.", label="method", values=METHODS
    )
    batch_filter_duration = _histogram(
        "Seconds of adding the tokens of a step to their sequences and taking out those that have ended.",
        label="method",
        values=METHODS,
    )
    batch_concat = _counter(
        "Steps that admitted sequences while others ran, by reason.",
        label="reason",
        values=("backpressure", "wait_exceeded", "chunking"),
    )
    batch_concat_duration = _histogram(
        "Seconds of adding sequences to those that run.", label="method", values=("decode",)
    )

    # What Text Generation Inference does not tell
    time_to_first_token_seconds = _histogram(
        "Seconds from arrival to the first generated token.", prefix="headrace_"
    )
    inter_token_latency_seconds = _histogram(
        "Seconds between two generated tokens of a sequence.", prefix="headrace_"
    )
    kv_blocks = _gauge(
        "Blocks of the KV cache, by state. used: held by running sequences; cached: computed, and kept for "
        "prompts that begin alike until room is needed; free: the rest.",
        label="state",
        values=("used", "cached", "free"),
        prefix="headrace_",
    )
    kv_unused_slots = _gauge(
        "Tokens for which running sequences hold room in the KV cache without having filled it.",
        prefix="headrace_",
    )
    kv_waste_ratio = _gauge(
        "headrace_kv_unused_slots divided by tgi_batch_current_max_tokens; 0 while nothing runs.",
        prefix="headrace_",
    )
    prefix_cache_hit_tokens = _counter(
        "Prompt tokens of admitted sequences that were found computed; a share of headrace_prompt_tokens.",
        prefix="headrace_",
    )
    prefix_cache_evicted_blocks = _counter(
        "Cached blocks that were given up because room was needed.", prefix="headrace_"
    )
    preemptions = _counter(
        "Times that a running sequence gave up its blocks and went back to the queue.", prefix="headrace_"
    )
    prompt_tokens = _counter("Prompt tokens of admitted sequences.", prefix="headrace_")
    postponed_tokens = _counter(
        "Prompt tokens that a step left to the next one, because it fell behind and others waited for it.",
        prefix="headrace_",
    )
    generated_tokens = _counter("Generated tokens.", prefix="headrace_")
    requests = _gauge(
        "Sequences in the server, by state.",
        label="state",
        values=("running", "waiting"),
        prefix="headrace_",
    )
    shard_up = _gauge("1 while the shard answers and is warm, else 0.", prefix="headrace_")
    shard_sequences = _gauge("Sequences that the shard holds, as told by its last step.", prefix="headrace_")
    shard_idle_seconds = _histogram(
        "Seconds that the shard's device waited for a step since the last one, while there was work: not "
        "those before the first step after a pause in which nobody wanted anything.",
        prefix="headrace_",
    )
    shard_busy_seconds = _histogram(
        "Seconds that the shard's device computed a step. idle / (idle + busy), of the sums, is the share in "
        "which it waited of the time in which there was work.",
        prefix="headrace_",
    )
    step_tokens = _histogram("Tokens computed in a step.", LENGTH_BUCKETS, prefix="headrace_")
    build_info = _gauge(
        "Always 1; the label is the version.", label="version", values=(__version__,), prefix="headrace_"
    )

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for attribute, spec in specs():
            setattr(self, attribute, spec.build(attribute, self.registry))
        self.build_info.labels(__version__).set(1)
        ProcessCollector(registry=self.registry)

    def render(self) -> bytes:
        """The page in Prometheus' text format, version 0.0.4."""
        families = {family.name: family for family in self.registry.collect()}
        lines: list[str] = []
        for family in families.values():
            lines += _shown(family)
        for alias in ALIASES:
            lines += _shown(_renamed(families[alias.of], alias))
        return "".join(lines).encode()


def specs() -> Iterator[tuple[str, Spec]]:
    """Attribute and declaration of every metric, in the order of declaration."""
    for attribute, value in vars(Metrics).items():
        declared: Any = value
        if isinstance(declared, Spec):
            yield attribute, declared


def _renamed(family: Metric, alias: Alias) -> Metric:
    renamed = Metric(alias.name, alias.help, family.type)
    for sample in family.samples:
        suffix, labels, value = sample.name.removeprefix(family.name), sample.labels, sample.value
        if alias.scale != 1.0 and suffix == "_bucket" and labels["le"] != "+Inf":
            labels = labels | {"le": _number(float(labels["le"]) * alias.scale)}
        if suffix == "_sum":
            value *= alias.scale
        renamed.add_sample(alias.name + suffix, labels, value)
    return renamed


def _shown(family: Metric) -> Iterator[str]:
    # prometheus_client ends every counter in `_total`. Ours do not, those of the process collector do.
    is_ours = family.name.startswith(("tgi_", "headrace_"))
    name = family.name if is_ours or family.type != "counter" else f"{family.name}_total"
    documentation = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {documentation}\n# TYPE {name} {family.type}\n"
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        sample_name = name if family.type == "counter" else sample.name
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels.items())
        yield f"{sample_name}{{{labels}}}" if labels else sample_name
        yield f" {_number(sample.value)}\n"


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(float(value))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def document() -> str:
    """A Markdown table of every metric: name, type, labels, meaning. `docs/metrics.md` is made of it."""
    rows = ["| Name | Type | Labels | Meaning |", "|---|---|---|---|"]
    kinds: dict[str, Kind] = {}
    for attribute, spec in specs():
        name = spec.prefix + attribute
        kinds[name] = spec.kind
        labels = "-"
        if spec.label:
            values = " ".join(f"`{value}`" for value in spec.values)
            labels = f"`{spec.label}`" if attribute == "build_info" else f"`{spec.label}`: {values}"
        rows.append(f"| `{name}` | {spec.kind} | {labels} | {spec.help} |")
    for alias in ALIASES:
        rows.append(f"| `{alias.name}` | {kinds[alias.of]} | as `{alias.of}` | {alias.help} |")
    rows.append("| `process_*` | - | - | Memory, CPU seconds, open files and start time of the router. |")
    return "\n".join(rows) + "\n"
