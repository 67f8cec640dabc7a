"""Tokens with stop strings: any split into tokens shows what one piece would."""

import pytest
from headrace_router.text.output import OutputOptions, OutputText, TokenText
from headrace_router.text.stop_strings import StopStrings
from headrace_router.text.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st

# Ids of every kind: special tokens, letters, parts of characters, whole words.
ids_of_all_kinds = st.lists(
    st.one_of(st.integers(0, 2), st.integers(3, 380), st.sampled_from(range(66, 76))), max_size=40
)
words = st.text("abcdefgh the🎉", max_size=30)


def run(tokenizer: Tokenizer, options: OutputOptions, ids: list[int]) -> tuple[OutputText, list[TokenText]]:
    """The output after all tokens, and what was released, checked on the way."""
    output = OutputText(tokenizer, options)
    released: list[TokenText] = []
    for token_id in ids:
        is_over = output.is_stopped
        new = output.add(token_id)
        assert not options.keeps_stop or len(new) == (0 if is_over else 1)
        released += new
        assert output.text == "".join(token.text for token in released)
    released += output.flush()
    assert output.text == "".join(token.text for token in released)
    assert [token.index for token in released] == list(range(len(released)))
    assert not output.is_stopped or output.add(70) == []
    return output, released


def whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    return run(tokenizer, OutputOptions(), ids)[0].text


@given(ids=ids_of_all_kinds, data=st.data())
def test_any_tokens_give_the_text_that_the_whole_would(
    byte_level: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    text = whole(byte_level, ids)
    # Strings that are likely to be found: cut from the text, or made of its characters.
    cut = st.integers(0, max(len(text) - 1, 0)).flatmap(
        lambda start: st.integers(1, 6).map(lambda length: text[start : start + length])
    )
    some = data.draw(st.lists(cut | st.text("ab ", min_size=1, max_size=3), max_size=4))
    stop = tuple(string for string in some if string)
    match = StopStrings(stop).feed(text)

    cut_before, shown = run(byte_level, OutputOptions(stop=stop), ids)
    assert cut_before.is_stopped == (match is not None)
    assert cut_before.text == (text[: match.start] if match else text)
    assert match or len(shown) == len(ids)

    cut_behind, _ = run(byte_level, OutputOptions(stop=stop, keeps_stop=True), ids)
    assert cut_behind.text == (text[: match.end] if match else text)


@given(text=words, stop=st.lists(st.text("abcdefgh the🎉", min_size=1, max_size=5), max_size=3))
def test_two_ways_to_cut_a_text_into_tokens_agree(byte_level: Tokenizer, text: str, stop: list[str]) -> None:
    merged = byte_level.encode_ids(text, False)
    single = [token_id for char in text for token_id in byte_level.encode_ids(char, False)]
    for keeps_stop in (False, True):
        options = OutputOptions(stop=tuple(stop), keeps_stop=keeps_stop)
        assert run(byte_level, options, merged)[0].text == run(byte_level, options, single)[0].text


def texts(tokens: list[TokenText]) -> list[str]:
    return [token.text for token in tokens]


def single_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [token_id for char in text for token_id in tokenizer.encode_ids(char, False)]


def test_only_what_may_become_a_match_is_held_back(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, OutputOptions(stop=("cde",)))
    released = [texts(output.add(token_id)) for token_id in single_ids(byte_level, "abcdcx")]
    assert released == [["a"], ["b"], [], [], ["c", "d"], ["c", "x"]]


def test_without_stop_strings_nothing_is_held_back(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, OutputOptions())
    assert all(len(output.add(token_id)) == 1 for token_id in single_ids(byte_level, "abc"))
    assert output.flush() == []


def test_what_was_held_back_comes_at_the_end(byte_level: Tokenizer) -> None:
    output = OutputText(byte_level, OutputOptions(stop=("bcd",)))
    for token_id in single_ids(byte_level, "abc"):
        output.add(token_id)
    assert output.text == "a" and texts(output.flush()) == ["b", "c"] and output.text == "abc"


def test_a_match_ends_the_text_before_or_behind_it(byte_level: Tokenizer) -> None:
    ids = byte_level.encode_ids("The water turns the wheel", False)
    before, released = run(byte_level, OutputOptions(stop=("turns",)), ids)
    assert before.is_stopped and before.text == "The water " and released[-1].text != ""
    behind, _ = run(byte_level, OutputOptions(stop=("turns",), keeps_stop=True), ids)
    assert behind.is_stopped and behind.text == "The water turns"


def test_a_match_inside_a_token_cuts_the_token(byte_level: Tokenizer) -> None:
    token_id = max(range(3, byte_level.vocab_size), key=lambda one: len(byte_level.token_bytes(one)))
    text = byte_level.token_text(token_id)
    (token,) = OutputText(byte_level, OutputOptions(stop=(text[1:3],))).add(token_id)
    assert (token.text, token.raw) == (text[:1], text)
    (token,) = OutputText(byte_level, OutputOptions(stop=(text[1:3],), keeps_stop=True)).add(token_id)
    assert token.text == text[:3]


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_special_tokens_are_no_text(byte_level: Tokenizer, keeps_stop: bool) -> None:
    (a,), (b,) = byte_level.encode_ids("a", False), byte_level.encode_ids("b", False)
    output, released = run(byte_level, OutputOptions(keeps_stop=keeps_stop), [1, a, 2, b])
    assert output.text == "ab"
    assert [(token.raw, token.text, token.is_special) for token in released] == [
        ("<|im_start|>", "", True),
        ("a", "a", False),
        ("<|im_end|>", "", True),
        ("b", "b", False),
    ]
    # They stand between characters and do not part them.
    output, released = run(byte_level, OutputOptions(stop=("ab",), keeps_stop=keeps_stop), [a, 2, b])
    assert output.is_stopped and output.text == ("ab" if keeps_stop else "")


def test_parts_of_a_character_share_its_fate(byte_level: Tokenizer) -> None:
    parts = byte_level.encode_ids("🎉", False)
    (a,) = byte_level.encode_ids("a", False)
    output, released = run(byte_level, OutputOptions(stop=("🎉",)), [a, *parts])
    assert output.text == "a" and texts(released) == ["a"]
    output, released = run(byte_level, OutputOptions(stop=("🎉!",)), [a, *parts])
    assert output.text == "a🎉" and len(released) == 1 + len(parts)


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_an_unfinished_character_is_dropped_at_the_end(byte_level: Tokenizer, keeps_stop: bool) -> None:
    ids = byte_level.encode_ids("a🎉", False)[:-1]
    output, released = run(byte_level, OutputOptions(keeps_stop=keeps_stop), ids)
    assert output.text == "a" and len(released) == len(ids)
    assert [token.raw for token in released[1:]] == [""] * (len(ids) - 1)
