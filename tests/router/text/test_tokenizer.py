"""Tokenizers of several kinds: ids, offsets, special tokens, files that are missing or broken."""

from pathlib import Path

import pytest
import tokenizers
from headrace_router.errors import StartupError
from headrace_router.text.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tests.tiny import make_tokenizer

TEXT = "Où est la bibliothèque ? 水车 🌊👩‍👩‍👧 \ufffd\n\n"


def test_special_tokens_and_ends_come_from_the_files_beside_it(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_token_ids == {2}
    assert [tokenizer.is_special(token_id) for token_id in (0, 1, 2, 3)] == [True, True, True, False]
    assert tokenizer.special_id("<|im_end|>") == 2 and tokenizer.special_id("the") is None
    assert tokenizer.vocab_size == 384


def test_every_end_of_the_generation_config_counts_and_names_the_tokens(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [0, 7]}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == {0, 7}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|endoftext|>")
    assert tokenizer.is_special(7)


def test_another_config_takes_the_place_of_the_folders(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other") / "config.json"
    other.write_text('{"bos_token": null, "eos_token": {"content": "<|endoftext|>"}}')
    tokenizer = Tokenizer.from_folder(folder, other)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (None, "<|endoftext|>")


def test_special_tokens_map_and_added_tokens_are_read(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(
        '{"added_tokens_decoder": {"5": {"content": "#", "special": true}, "6": "odd"}}'
    )
    (folder / "special_tokens_map.json").write_text('{"additional_special_tokens": ["$", {"content": "%"}]}')
    tokenizer = Tokenizer.from_folder(folder)
    special = {text for text in "#$%&" if tokenizer.special_id(text) is not None}
    assert special == {"#", "$", "%"}


def test_truncation_and_padding_of_the_file_do_not_act(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=100)
    inner.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert len(tokenizer.encode_ids("!" * 10, False)) == 10
    assert len(tokenizer.encode("!" * 10, False).ids) == 10


def test_offsets_are_the_characters_that_a_token_stands_for(tokenizer: Tokenizer) -> None:
    text = "hello 水 world"
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert encoding.ids == tokenizer.encode_ids(text, False)
    covered = {place for start, end in encoding.offsets for place in range(start, end)}
    assert covered >= set(range(len(text))) - {5, 7}
    assert encoding.offsets[-1][1] == len(text)


def test_added_tokens_have_no_place(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(make_tokenizer(tmp_path, adds_bos=True))
    encoding = tokenizer.encode("the", add_special_tokens=True)
    assert encoding.ids[0] == 1 and encoding.offsets[0] == (0, 0)
    assert tokenizer.encode_ids("the", True)[0] == 1 and tokenizer.encode_ids("the", False)[0] != 1


def test_bytes_of_tokens_are_those_of_the_text(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    ids = byte_level.encode_ids(TEXT, False)
    assert b"".join(map(byte_level.token_bytes, ids)) == TEXT.encode()
    ids = sentencepiece.encode_ids(TEXT, False)
    assert b"".join(map(sentencepiece.token_bytes, ids)) == b" " + TEXT.encode()


def test_a_token_inside_a_text_keeps_its_space(sentencepiece: Tokenizer) -> None:
    (token_id,) = sentencepiece.encode_ids("hello", False)
    assert sentencepiece.token_text(token_id) == " hello"
    assert sentencepiece.decode([token_id], skip_special_tokens=True) == "hello"


def test_parts_of_characters_and_unknown_ids(tokenizer: Tokenizer) -> None:
    part = tokenizer.encode_ids("🎉", False)[-1]
    assert tokenizer.token_text(part) == "\ufffd" and len(tokenizer.token_bytes(part)) == 1
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.decode([10**6], skip_special_tokens=False) == ""


def test_special_tokens_are_shown_or_skipped(byte_level: Tokenizer) -> None:
    ids = [1, *byte_level.encode_ids("the", False), 2]
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|im_start|>the<|im_end|>"
    assert byte_level.decode(ids, skip_special_tokens=True) == "the"
    assert byte_level.token_text(2) == "<|im_end|>"


def test_added_tokens_are_not_read_as_spelled_bytes(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens([AddedToken("é", special=False), AddedToken("<\uff5cend\uff5c>", special=True)])
    tokenizer = Tokenizer(inner)
    ids = {token.content: token_id for token_id, token in inner.get_added_tokens_decoder().items()}
    assert tokenizer.token_text(ids["é"]) == "é"
    assert tokenizer.token_text(ids["<\uff5cend\uff5c>"]) == "<\uff5cend\uff5c>"


def test_word_pieces_bring_their_spaces() -> None:
    inner = tokenizers.Tokenizer(models.WordPiece(vocab={"a": 0, "mill": 1, "##s": 2, "[UNK]": 3}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(inner)
    assert [tokenizer.token_text(token_id) for token_id in (1, 2)] == [" mill", "s"]
    # A word that is not known becomes one token however long it is.
    assert tokenizer.least_tokens("x" * 1000) == 0


@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_least_tokens_is_no_more_than_there_are(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode_ids(text, False))


def test_least_tokens_grow_with_the_text(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert byte_level.least_tokens("") == 0
    assert 0 < byte_level.least_tokens("a" * 10000) < byte_level.least_tokens("a" * 20000)
    assert sentencepiece.least_tokens("a" * 10000) > 0


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Strip(),
        normalizers.Replace("ab", "c"),
        normalizers.Replace(tokenizers.Regex(" +"), " "),
        normalizers.NFKC(),
    ],
)
def test_least_tokens_are_unknown_where_text_is_lost(
    folder: Path, normalizer: normalizers.Normalizer
) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.normalizer = normalizer
    assert Tokenizer(inner).least_tokens("a" * 10000) == 0


def test_least_tokens_count_composed_characters_once(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.normalizer = normalizers.NFC()
    text = "e\u0301" * 500
    assert 0 < Tokenizer(inner).least_tokens(text) <= len(inner.encode(text).ids)


def test_tokens_that_swallow_spaces_leave_no_bound(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens([AddedToken("<sep>", lstrip=True)])
    assert Tokenizer(inner).least_tokens("a" * 10000) == 0


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(StartupError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "no json"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "\udcff"),
        ("generation_config.json", "1"),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(StartupError, match=name) as caught:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(caught.value)


def test_a_config_that_was_asked_for_must_be_there(folder: Path) -> None:
    with pytest.raises(StartupError, match="is not a file"):
        Tokenizer.from_folder(folder, folder / "missing.json")
