"""Tokenizers made from GGUF metadata: how text is cut, and SentencePiece merges against their definition."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from headrace_shard.checkpoint.gguf_tokenizer import write_tokenizer
from headrace_shard.errors import CheckpointError, UnsupportedModel
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.tiny import make_tokenizer

SOURCE = Path("model.gguf")

PIECES = ("▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "cc", "▁▁", "ca", "bca")
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{value:02X}>" for value in range(256))


def byte_level(folder: Path, pre: str) -> Tokenizer:
    """A GPT-2 tokenizer with the merges of the tiny one, but its text cut as `pre` says."""
    model = json.loads((make_tokenizer(folder) / "tokenizer.json").read_text())["model"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(model["vocab"], key=model["vocab"].__getitem__),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
    }
    write_tokenizer(SOURCE, metadata, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll pay 1234  ok", ["I", "'ll", "Ġpay", "Ġ1234", "Ġ", "Ġok"]),
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("llama-bpe", "I'LL pay 1234", ["I", "'LL", "Ġpay", "Ġ", "123", "4"]),
        ("qwen2", "pay 1234", ["pay", "Ġ", "1", "2", "3", "4"]),
        ("tekken", "fooBar 12", ["foo", "Bar", "Ġ", "1", "2"]),
    ],
)
def test_text_is_cut_as_the_file_names_it(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    pre_tokenizer = byte_level(tmp_path, pre).pre_tokenizer
    assert pre_tokenizer is not None
    assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "qwen2")
    assert tokenizer.encode("u\u0308").ids == tokenizer.encode("\u00fc").ids


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    tokens = [*SPECIAL, *BYTES, *PIECES]
    scores = [0.0] * (len(tokens) - len(PIECES)) + [-float(index) for index in range(len(PIECES), 0, -1)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


def joined_by_score(text: str) -> list[str]:
    """SentencePiece's rule: again and again, join the neighbours that make the best piece, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        candidates = [
            (PIECES.index(left + right), -index)
            for index, (left, right) in enumerate(pairwise(parts))
            if left + right in PIECES
        ]
        if not candidates:
            return parts
        index = -max(candidates)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("sentencepiece")
    write_tokenizer(SOURCE, sentencepiece_metadata(), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abc ", max_size=12))
def test_sentencepiece_merges_follow_from_scores(sentencepiece: Tokenizer, text: str) -> None:
    expected = joined_by_score(text) if text else []
    assert sentencepiece.encode(text, add_special_tokens=False).tokens == expected
    assert sentencepiece.decode(sentencepiece.encode(text).ids) == text


def test_sentencepiece_falls_back_to_bytes_and_begins_with_bos(sentencepiece: Tokenizer) -> None:
    encoding = sentencepiece.encode("aü")
    assert encoding.tokens == ["<s>", "▁a", "<0xC3>", "<0xBC>"]
    assert sentencepiece.decode(encoding.ids) == "aü"


def test_bos_only_where_the_file_wants_it(tmp_path: Path) -> None:
    special = write_tokenizer(
        SOURCE, sentencepiece_metadata(**{"tokenizer.ggml.add_bos_token": False}), tmp_path
    )
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").tokens == ["▁a"]
    assert (special.bos_id, special.eos_ids, special.pad_id) == (1, [2], None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokenizer.ggml.tokens": []}, CheckpointError, "tokens is missing"),
        ({"tokenizer.ggml.scores": None}, CheckpointError, "scores is missing"),
        ({"tokenizer.ggml.eos_token_id": 9999}, CheckpointError, "token id 9999 is outside of 272 tokens"),
        (
            {"tokenizer.ggml.model": "t5"},
            UnsupportedModel,
            "'t5' is not supported; supported are gpt2, llama",
        ),
    ],
)
def test_wrong_metadata_are_named(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write_tokenizer(SOURCE, sentencepiece_metadata(**changes), tmp_path)
