"""Tokenising long texts in pieces, of which those met before cost nothing.

A conversation comes back with every turn, and a document with every question about it. Where a byte-level
tokenizer cuts a text into words before anything else, each word's tokens depend on that word alone; so a text
may be cut between two words, and its pieces be tokenised by themselves (several at once) and remembered.
Cuts are counted from the beginning: texts that begin alike are cut alike.

Knows the tokenizers library and which of its steps cut text where; knows no request. Safe to use from several
threads.
"""

import json
import re
import unicodedata
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import tokenizers

PIECE_CHARS = 512
"""Characters of a piece, or a few more: up to the next place where a cut is safe."""

MAX_KEPT_PIECES = 4096
"""Pieces that are remembered: two million characters, with their ids some 6 MB, or 40 MB at worst."""

# Between two words of plain letters. All patterns below end a match after a letter that a space follows, and
# begin the next one with that space; they look neither back nor further ahead.
_CUT = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LATER_WORDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    # GPT-2, also what `ByteLevel` does by itself.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3 (cl100k), and Qwen 2 with single digits.
    *(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LATER_WORDS}"
        for digits in (r"\p{N}{1,3}", r"\p{N}")
    ),
    # GPT-4o (o200k), gpt-oss.
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LATER_WORDS}",
}


def can_cut(inner: tokenizers.Tokenizer) -> bool:
    """Whether no token, and no choice between tokens, reaches over a cut between two words."""
    if not isinstance(inner.model, tokenizers.models.BPE) or inner.model.dropout:
        return False
    for token in inner.get_added_tokens_decoder().values():
        # These look at what stands beside them, or may hold the place of a cut.
        written = token.content + "\n" + unicodedata.normalize("NFC", token.content)
        if token.lstrip or token.rstrip or token.single_word or re.search("[A-Za-z] ", written):
            return False
    # Composing characters (NFC) changes neither a space nor a plain letter before one.
    if not {step["type"] for step in steps(inner.normalizer, "normalizers")} <= {"NFC"}:
        return False
    is_cut = False
    for step in steps(inner.pre_tokenizer, "pretokenizers"):
        if _cuts_words(step):
            is_cut = True
        # Bytes are spelled as letters: whoever looks for words behind that finds others.
        elif step["type"] != "Digits" and not (is_cut and _spells_bytes(step)):
            return False
    return is_cut


def _cuts_words(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        is_plain = step["behavior"] == "Isolated" and not step["invert"]
        return is_plain and step["pattern"].get("Regex") in _PATTERNS
    return _spells_bytes(step) and bool(step["use_regex"])


def _spells_bytes(step: dict[str, Any]) -> bool:
    return step["type"] == "ByteLevel" and not step["add_prefix_space"]


def steps(component: Any, members: str) -> list[dict[str, Any]]:
    """The steps that a normalizer, pre-tokenizer or decoder consists of, as in tokenizer.json."""
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state[members] if state["type"] == "Sequence" else [state]


class PieceEncoder:
    """Encodes texts for a tokenizer that `can_cut`.

    `piece_chars` and `max_kept_pieces` are as the constants; only tests give others. What is remembered is
    touched in single steps of the interpreter only, so threads need not wait for one another; at worst one
    tokenises what another is just looking up.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        piece_chars: int = PIECE_CHARS,
        max_kept_pieces: int = MAX_KEPT_PIECES,
    ) -> None:
        self._inner = inner
        self._piece_chars = piece_chars
        self._max_kept_pieces = max_kept_pieces
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def encode(self, text: str, salt: str | None) -> list[int]:
        """Ids of `text`, without tokens that the tokenizer would add.

        Pieces that texts of another `salt` have left behind are not made use of. (The library keeps single
        words it has met, whoever sent them.) Without a salt nothing is made use of, or left behind.
        """
        pieces = list(self._cut(text))
        found = {piece: ids for piece in pieces if (ids := self._recall(piece, salt)) is not None}
        if missing := [piece for piece in dict.fromkeys(pieces) if piece not in found]:
            encodings = self._inner.encode_batch_fast(missing, add_special_tokens=False)
            for piece, encoding in zip(missing, encodings, strict=True):
                found[piece] = array("I", encoding.ids)
                self._keep(piece, salt, found[piece])
        all_ids: list[int] = []
        for piece in pieces:
            all_ids.extend(found[piece])
        return all_ids

    def _cut(self, text: str) -> Iterator[str]:
        start = 0
        while cut := _CUT.search(text, start + self._piece_chars):
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def _recall(self, piece: str, salt: str | None) -> "array[int] | None":
        if salt is None:
            return None
        ids = self._kept.get((salt, piece))
        if ids is not None:
            # Behind all others, as the one that was met last; another thread may have let go of it meanwhile.
            with suppress(KeyError):
                self._kept.move_to_end((salt, piece))
        return ids

    def _keep(self, piece: str, salt: str | None, ids: "array[int]") -> None:
        # Where there is no cut for long, as in other scripts, a piece is as long.
        if salt is not None and max(len(piece), len(ids)) <= 2 * self._piece_chars:
            self._kept[salt, piece] = ids
        while len(self._kept) > self._max_kept_pieces:
            self._kept.popitem(last=False)
