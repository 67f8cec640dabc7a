"""Stop strings on characters, against a plain search over the whole text."""

import pytest
from headrace_router.text.stop_strings import Match, StopStrings
from hypothesis import given
from hypothesis import strategies as st

letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4).map(tuple)


def naive(text: str, strings: tuple[str, ...]) -> Match | None:
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            return Match(end - max(map(len, found)), end)
    return None


def held(text: str, strings: tuple[str, ...]) -> int:
    lengths = [
        length for string in strings for length in range(len(string)) if text.endswith(string[:length])
    ]
    return max(lengths, default=0)


@given(text=letters, strings=stops, data=st.data())
def test_any_pieces_give_the_same_match(text: str, strings: tuple[str, ...], data: st.DataObject) -> None:
    expected = naive(text, strings)
    search = StopStrings(strings)
    done = 0
    found = None
    while done < len(text) and found is None:
        size = data.draw(st.integers(0, len(text) - done)) or 1
        found = search.feed(text[done : done + size])
        done += size
        if found is None:
            assert search.num_held == held(text[:done], strings)
    assert found == expected


@pytest.mark.parametrize(
    ("strings", "text", "expected"),
    [
        (("world", "llo"), "hello world", Match(2, 5)),
        (("lo wo",), "hello world", Match(3, 8)),
        (("abcd", "bc"), "abcd", Match(1, 3)),
        (("c", "bc", "abc"), "abc", Match(0, 3)),
        (("aab",), "aaab", Match(1, 4)),
        (("🌊🌊",), "a🌊🌊b", Match(1, 3)),
        (("x", "x"), "ax", Match(1, 2)),
        ((), "anything", None),
    ],
)
def test_the_first_to_be_complete_wins_and_then_the_longest(
    strings: tuple[str, ...], text: str, expected: Match | None
) -> None:
    assert StopStrings(strings).feed(text) == expected


def test_only_what_may_still_match_is_held() -> None:
    search = StopStrings(("</answer>", "ans"))
    assert search.feed("1 < 2, so <") is None and search.num_held == 1
    assert search.feed("/a") is None and search.num_held == 3
    assert search.feed("b") is None and search.num_held == 0
