"""Writes the pages that are made from code: `python -m tests.architecture.documents`, or `make docs`."""

from pathlib import Path

from headrace_launcher.config import IgnoredSettings, LauncherSettings, RefusedSettings
from headrace_proto.settings import document, fields_of
from headrace_router import metrics
from headrace_router.config import RouterConfig, RouterSettings
from headrace_shard.config import ShardConfig, ShardSettings

ROOT = Path(__file__).resolve().parents[2]

FLAGS_INTRODUCTION = """\
# Flags

Made from the settings classes by `make docs`.

A flag wins over its environment variables, these over the default; of several variables the first that is set
wins. An empty one counts as unset, and so does what Kubernetes puts into `HEADRACE_PORT` for a Service of
that name (`tcp://...`). A switch needs no value (`--json-output`) and takes one (`--json-output false`;
`1/0`, `true/false`, `yes/no`). A list is a repeated flag, or a variable with commas; a flag of
numbers may have commas too (`--cuda-graphs 1,2,4`). Of several keys (`--api-key`) each is a line of its own,
in the variable too. No number is above 2147483647.
A usage error ends the program with exit status 2 and one line that names the flag.

`headrace` takes the flags of the first three tables, and those of Text Generation Inference in the last two.
"""

METRICS_INTRODUCTION = """\
# Metrics

Made from the router's metrics by `make docs`. The router serves them at `/metrics`, and on
`--prometheus-port` when that is given.

"""


def own_fields(settings: type[object], base: type[object]) -> type[object]:
    """A class with the fields that `settings` adds to `base`."""
    inherited = {field.name for field, _ in fields_of(base)}
    own = [field for field, _ in fields_of(settings) if field.name not in inherited]
    namespace = {"__dataclass_fields__": {field.name: field for field in own}}
    return type(settings.__name__, (), namespace)


def flags_page() -> str:
    """docs/flags.md."""
    sections = {
        "The launcher's own: `headrace`": document(LauncherSettings),
        "The router's: `headrace`, `headrace-router`": document(RouterSettings),
        "The shard's: `headrace`, `headrace-shard`": document(ShardSettings),
        "Only `headrace-router`": document(own_fields(RouterConfig, RouterSettings)),
        "Only `headrace-shard`": document(own_fields(ShardConfig, ShardSettings)),
        "Of Text Generation Inference, accepted with a warning": document(IgnoredSettings),
        "Of Text Generation Inference, refused": document(RefusedSettings),
    }
    return FLAGS_INTRODUCTION + "".join(f"\n## {title}\n\n{table}" for title, table in sections.items())


def metrics_page() -> str:
    """docs/metrics.md."""
    return METRICS_INTRODUCTION + metrics.document()


PAGES = {"docs/flags.md": flags_page, "docs/metrics.md": metrics_page}


def main() -> None:
    """Writes every page."""
    for path, page in PAGES.items():
        (ROOT / path).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
