"""Ids to text as they come: never half a character, and the same text as all at once."""

from headrace_router.text.detokenizer import Detokenizer
from headrace_router.text.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st

texts = st.text(st.characters(codec="utf-8"), max_size=40)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.add(token_id) for token_id in ids]


@given(text=texts)
def test_pieces_join_to_the_text(byte_level: Tokenizer, text: str) -> None:
    assert "".join(pieces(byte_level, byte_level.encode_ids(text, False))) == text


@given(text=texts)
def test_pieces_join_to_the_text_behind_a_prompt(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode_ids(f"a {text}", False)
    assert "".join(pieces(sentencepiece, ids)) == f" a {text}"


@given(ids=st.lists(st.integers(0, 290), max_size=40))
def test_any_tokens_read_as_utf8_does(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Also ids that make no text: malformed bytes are U+FFFD once they are sure to be, unfinished ones go."""
    expected, run = "", b""
    for token_id in ids:
        if tokenizer.is_special(token_id):
            expected += finished(run) + tokenizer.token_text(token_id)
            run = b""
        else:
            run += tokenizer.token_bytes(token_id)
    assert "".join(pieces(tokenizer, ids)) == expected + finished(run)


def finished(data: bytes) -> str:
    """`data` in UTF-8, malformed parts replaced, without a beginning of a character at the end."""
    for length in (1, 2, 3):
        tail = data[-length:]
        if len(tail) == length and tail[0] >= 0xC0:
            try:
                tail.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    data = data[:-length]
                break
    return data.decode("utf-8", "replace")


def test_a_character_comes_whole_with_its_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_ids("🎉", False)
    shown = pieces(tokenizer, ids)
    assert len(ids) > 1 and shown[-1] == "🎉" and "".join(shown[:-1]).strip() == ""


def test_a_real_replacement_character_comes_through(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, tokenizer.encode_ids("a\ufffdb", False))).lstrip() == "a\ufffdb"


def test_an_unfinished_character_never_shows(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_ids("a🎉", False)[:-1]
    assert "".join(pieces(tokenizer, ids)).strip() == "a"


def test_a_special_token_ends_what_is_unfinished(byte_level: Tokenizer) -> None:
    start, *_, end = byte_level.encode_ids("🎉", False)
    assert pieces(byte_level, [start, 2, end]) == ["", "<|im_end|>", "\ufffd"]


def test_bytes_that_never_become_text_hold_back_nothing(byte_level: Tokenizer) -> None:
    (lead, *_) = byte_level.encode_ids("🎉", False)
    shown = pieces(byte_level, [lead] * 100)
    assert len("".join(shown)) >= 99
