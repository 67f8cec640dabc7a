"""Texts of a trace share what they should share; recorded traces are read as they are written."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulation.failure import Refused
from bench.simulation.traces import EOS_ID, VOCAB_SIZE, Arrival, Segment, ordered, read

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


@given(st.integers(0, 10**9), st.integers(1, 1 << 18))
def test_a_segment_has_its_length_and_no_end_in_it(key: int, num_tokens: int) -> None:
    ids = Segment(key, num_tokens).ids()
    assert len(ids) == num_tokens
    assert all(0 <= token_id < EOS_ID for token_id in ids)
    assert ids == Segment(key, num_tokens).ids()


@given(st.lists(st.integers(0, EOS_ID**2 - 1), min_size=2, max_size=8, unique=True))
def test_segments_differ_where_they_begin(keys: list[int]) -> None:
    assert len({Segment(key, 16).ids()[:2] for key in keys}) == len(keys)


def arrival(*prompt: Segment, output: Segment, max_new_tokens: int) -> Arrival:
    return Arrival(at=0.0, prompt=prompt, output=output, max_new_tokens=max_new_tokens)


def test_prompts_share_their_leading_segments_and_no_more() -> None:
    system = Segment(1, 50)
    first = arrival(system, Segment(2, 40), output=Segment(3, 9), max_new_tokens=99).prompt_ids()
    second = arrival(system, Segment(4, 40), output=Segment(5, 9), max_new_tokens=99).prompt_ids()
    assert len(first) == len(second) == 90
    assert first[:50] == second[:50] == system.ids() and first[50:52] != second[50:52]


def test_an_answer_ends_with_eos_unless_it_is_cut() -> None:
    output = Segment(7, 10)
    ends = arrival(Segment(1, 5), output=output, max_new_tokens=11).output_ids()
    is_cut = arrival(Segment(1, 5), output=output, max_new_tokens=10).output_ids()
    assert ends == (*is_cut[:-1], EOS_ID) and EOS_ID not in is_cut and EOS_ID < VOCAB_SIZE


def test_who_follows_is_found_in_another_order() -> None:
    one = Segment(1, 1)
    late = Arrival(at=5.0, prompt=(one,), output=one, max_new_tokens=1)
    later = Arrival(at=9.0, prompt=(one,), output=one, max_new_tokens=1, follows=0, pause_seconds=2.0)
    early = Arrival(at=1.0, prompt=(one,), output=one, max_new_tokens=1)
    moved = ordered("", [late, later, early]).arrivals
    assert [(item.at, item.follows) for item in moved] == [(1.0, -1), (5.0, -1), (9.0, 1)]
    assert moved[2].pause_seconds == 2.0


def test_the_columns_of_the_azure_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "conversations.csv"
    path.write_text(AZURE, encoding="utf-8")
    trace = read(path, max_new_tokens=64, speed=2.0)
    assert trace.name == "conversations"
    assert [item.at for item in trace.arrivals] == [0.0, pytest.approx(4.314579 / 2)]
    assert [item.num_prompt_tokens for item in trace.arrivals] == [374, 396]
    assert [len(item.output_ids()) for item in trace.arrivals] == [44, 109]
    assert [item.max_new_tokens for item in trace.arrivals] == [64, 109]


def test_prefixes_are_shared_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        '{"arrival": 3.5, "prompt_tokens": 100, "output_tokens": 3, "prefix_id": "a"}',
        '{"arrival": 2.5, "prompt_tokens": 80, "output_tokens": 3, "prefix_id": "a"}',
        "",
        '{"arrival": 4, "prompt_tokens": 90, "output_tokens": 3, "prefix_id": 7, "prefix_tokens": 64}',
        '{"arrival": 5, "prompt_tokens": 90, "output_tokens": 3, "prefix_id": 7}',
        '{"arrival": 6, "prompt_tokens": 90, "output_tokens": 3}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    arrivals = read(path, max_new_tokens=10).arrivals
    assert [item.at for item in arrivals] == [0.0, 1.0, 1.5, 2.5, 3.5]
    assert [item.num_prompt_tokens for item in arrivals] == [80, 100, 90, 90, 90]
    assert [item.prompt[0].num_tokens for item in arrivals] == [40, 40, 64, 64, 90]
    assert arrivals[0].prompt[0] == arrivals[1].prompt[0] != arrivals[2].prompt[0] == arrivals[3].prompt[0]


def test_only_the_first_requests_are_read_when_so_many_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE, encoding="utf-8")
    assert len(read(path, max_new_tokens=10, num_requests=1).arrivals) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.csv", "arrival,prompt_tokens\n1,2\n", "request 1: .*output_tokens"),
        ("trace.csv", "arrival,prompt_tokens,output_tokens\nnoon,2,3\n", "request 1: .*noon"),
        ("trace.csv", "arrival,prompt_tokens,output_tokens\n", "no requests"),
        ("trace.jsonl", "[1]\n", "line 1: an object is wanted"),
        ("trace.jsonl", "{\n", "line 1: "),
        ("trace.txt", "", r"\.csv or a \.jsonl"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Refused, match=message):
        read(path, max_new_tokens=10)
