"""The program: what it prints, writes and refuses."""

import gc
import json
import sys
from pathlib import Path

import pytest

from bench import simulate

SMALL = ("--requests", "40", "--rate", "20", "--cache-tokens", "40000")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setenv("COLUMNS", "160")
    return simulate.main()


def test_policies_stand_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file in files:
        status = run(
            monkeypatch, *SMALL, "--json", str(file), "--policy", "headrace", "--policy", "tgi:chunking=off"
        )
        assert status == 0
    printed = capsys.readouterr().out
    assert "1 x h100, llama-3-8b, KV for 40,000 tokens" in printed
    assert "TTFT p99" in printed and "chunking=off" in printed
    assert files[0].read_bytes() == files[1].read_bytes()
    told = json.loads(files[0].read_bytes())
    assert [result["policy"] for result in told["results"]] == ["headrace", "tgi:chunking=off"]
    assert all(result["num_answered"] == 40 and result["ttft"]["p99"] > 0 for result in told["results"])


def test_each_rate_is_a_comparison_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = (
        "--trace",
        "rag",
        "--requests",
        "20",
        "--rate",
        "1,5",
        "--policy",
        "headrace",
        "--json",
        str(file),
    )
    assert run(monkeypatch, *arguments) == 0
    assert [result["trace"] for result in json.loads(file.read_bytes())["results"]] == ["rag 1/s", "rag 5/s"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"picture{suffix}"
    assert run(monkeypatch, *SMALL, "--plot", str(file)) == 0
    assert file.stat().st_size > 10_000


def test_a_recorded_trace_is_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded, file = tmp_path / "recorded.csv", tmp_path / "figures.json"
    recorded.write_text("arrival,prompt_tokens,output_tokens\n0,100,5\n0.5,200,7\n", encoding="utf-8")
    assert run(monkeypatch, "--trace", str(recorded), "--json", str(file)) == 0
    results = json.loads(file.read_bytes())["results"]
    assert [(result["trace"], result["num_answered"]) for result in results] == [("recorded", 2)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "nowhere.csv"), "--trace nowhere.csv: neither a file nor one of chat, "),
        (("--model", "llama-3-70b"), "raise --tensor-parallel"),
        (("--rate", "1,2", "--plot", "x.png"), "give one --rate"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert run(monkeypatch, *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("simulate: ") and message in line


@pytest.mark.parametrize(
    "arguments", [("--policy", "none"), ("--rate", "0"), ("--requests", "-1"), ("--plot", "x.pdf")]
)
def test_what_is_no_value_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == 2
