"""The pages made from code are fresh and complete; the change log names the version."""

import re

import pytest
from headrace_launcher.config import LauncherConfig
from headrace_launcher.download import DownloadSettings
from headrace_proto import __version__
from headrace_proto.settings import environment_names, fields_of, flag_of
from headrace_router import metrics
from headrace_router.config import RouterConfig
from headrace_shard.config import ShardConfig

from tests.architecture.documents import PAGES, ROOT


@pytest.mark.parametrize("path", PAGES)
def test_page_is_fresh(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path](), "run make docs"


@pytest.mark.parametrize("settings", [LauncherConfig, RouterConfig, ShardConfig])
def test_every_setting_stands_in_the_flags_page(settings: type[object]) -> None:
    page = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
    for field, meta in fields_of(settings):
        for name in [flag_of(field.name), *meta.aliases, *environment_names(field.name, meta)]:
            assert f"`{name}`" in page, name


@pytest.mark.parametrize("settings", [LauncherConfig, RouterConfig, ShardConfig, DownloadSettings])
def test_every_setting_has_a_help_of_whole_sentences(settings: type[object]) -> None:
    for field, meta in fields_of(settings):
        assert re.fullmatch(r"[A-Z`].*\.", meta.help), f"{field.name}: {meta.help!r}"
        assert "|" not in meta.help and "\n" not in meta.help, field.name


def test_every_metric_stands_in_the_metrics_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    for attribute, spec in metrics.specs():
        assert f"`{spec.prefix}{attribute}`" in page
        assert spec.help


def test_change_log_names_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(\d[^\]]*)\]", text, re.MULTILINE)
    assert versions[0] == __version__
