"""Texts in pieces have the tokens that they have as a whole; what was met before is not tokenised again."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from typing import Any

import pytest
import tokenizers
from headrace_router.text import pieces
from headrace_router.text.pieces import PieceEncoder, can_cut
from headrace_router.text.tokenizer import Tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the cat isn't on the mat, it's in the hat and they'll see; the cats' hats",
    "a river 1234 runs 56,789 times\n\n  over stones\tand  SHE'LL walk\r\nHello WORLD camelCase x1 2y",
    "Où est la bibliothèque ? ça va naïve 水车 🌊 — the the the cat cat",
]
BY_ITSELF = "by itself"
PATTERNS = [BY_ITSELF, *sorted(pieces._PATTERNS)]

words = st.sampled_from(
    [
        "the",
        "cat",
        "a",
        "I",
        "SHE'LL",
        "it's",
        "x1",
        "2y",
        "1234",
        "水车",
        "é",
        "e\u0301",
        "🌊",
        "<|end|>",
        "...",
        "don't",
    ]
)
gaps = st.sampled_from([" ", " ", " ", "  ", "\n", " \n", "\t", "", "\u00a0", "\r\n\r\n ", "'", " '"])
texts = st.lists(st.tuples(words, gaps), max_size=60).map(lambda parts: "".join(w + g for w, g in parts))


def byte_level_bpe(pattern: str = BY_ITSELF, **more: Any) -> tokenizers.Tokenizer:
    """A little tokenizer that cuts words by `pattern`, its merges learnt."""
    inner = tokenizers.Tokenizer(models.BPE(**more))
    if pattern == BY_ITSELF:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    inner.add_special_tokens([AddedToken("<|end|>", special=True)])
    return inner


@pytest.fixture(scope="module", params=PATTERNS)
def inner(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return byte_level_bpe(request.param)


@given(text=texts, piece_chars=st.integers(1, 30))
def test_pieces_have_the_tokens_of_the_whole(
    inner: tokenizers.Tokenizer, text: str, piece_chars: int
) -> None:
    whole = inner.encode(text, add_special_tokens=False).ids
    encoder = PieceEncoder(inner, piece_chars=piece_chars, max_kept_pieces=5)
    assert can_cut(inner)
    assert encoder.encode(text, "") == whole
    assert encoder.encode(text, "") == whole


def test_with_digits_and_composed_characters(byte_level: Tokenizer) -> None:
    inner = byte_level_bpe()
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), inner.pre_tokenizer]
    )
    assert can_cut(inner)
    text = "the cate\u0301 e\u0301 cat 1234 the cat " * 9
    encoder = PieceEncoder(inner, piece_chars=1)
    assert encoder.encode(text, "") == inner.encode(text, add_special_tokens=False).ids


class Counting:
    """A tokenizer that counts the texts it is given."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self.texts: list[str] = []

    def encode_batch_fast(self, batch: list[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        self.texts += batch
        encodings: list[tokenizers.Encoding] = self._inner.encode_batch_fast(
            batch, add_special_tokens=add_special_tokens
        )
        return encodings


@pytest.fixture
def counting() -> Counting:
    return Counting(byte_level_bpe())


def fresh_words() -> Iterator[str]:
    """Words of letters alone, none twice."""
    return ("".join(chr(97 + int(digit)) for digit in str(number)) for number in count(1000))


def test_only_what_is_new_is_tokenised(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=20)  # type: ignore[arg-type]
    words = fresh_words()
    turn = " ".join(next(words) for _ in range(100))
    encoder.encode(turn, "")
    assert "".join(counting.texts) == turn and len(counting.texts) > 15
    counting.texts.clear()
    encoder.encode(turn, "")
    assert not counting.texts
    encoder.encode(turn + " and one more", "")
    # The last piece was shorter than the others: it goes on.
    assert len(counting.texts) <= 2 and "".join(counting.texts).endswith(" and one more")


def test_another_salt_finds_nothing(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=20)  # type: ignore[arg-type]
    words = fresh_words()
    text = " ".join(next(words) for _ in range(100))
    for salt in ("", "a", "b"):
        counting.texts.clear()
        encoder.encode(text, salt)
        assert "".join(counting.texts) == text


def test_nothing_is_remembered_without_a_salt(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=20)  # type: ignore[arg-type]
    text = " ".join(islice(fresh_words(), 100))
    for salt in (None, "", None):
        counting.texts.clear()
        encoder.encode(text, salt)
        assert "".join(counting.texts) == text


def test_what_is_remembered_has_a_bound_and_the_latest_stay(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=20, max_kept_pieces=60)  # type: ignore[arg-type]
    words = fresh_words()
    often = " ".join(next(words) for _ in range(40))
    for _ in range(50):
        encoder.encode(" ".join(next(words) for _ in range(40)), "")
        encoder.encode(often, "")
    counting.texts.clear()
    encoder.encode(often, "")
    assert not counting.texts
    assert len(encoder._kept) == 60


def test_threads_do_not_disturb_one_another() -> None:
    inner = byte_level_bpe()
    encoder = PieceEncoder(inner, piece_chars=5, max_kept_pieces=20)
    words = list(islice(fresh_words(), 60))
    texts = [" ".join(words[start:] + words[:start]) for start in range(8)]
    wholes = [inner.encode(text, add_special_tokens=False).ids for text in texts]

    def encode_all(first: int) -> list[list[int]]:
        return [encoder.encode(texts[(first + i) % 8], "") for i in range(400)]

    with ThreadPoolExecutor(4) as pool:
        for first, found in enumerate(pool.map(encode_all, range(4))):
            assert found == [wholes[(first + i) % 8] for i in range(400)]
    assert len(encoder._kept) <= 20


def test_a_text_without_a_cut_is_one_piece_and_not_remembered_when_large(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=20, max_kept_pieces=60)  # type: ignore[arg-type]
    encoder.encode("水" * 300, "")
    assert counting.texts == ["水" * 300] and not encoder._kept


def lower(inner: tokenizers.Tokenizer) -> None:
    inner.normalizer = normalizers.Lowercase()


def prefixed(inner: tokenizers.Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def uncut(inner: tokenizers.Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def other_pattern(inner: tokenizers.Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\p{L}+ \p{L}+|."), "isolated")


def spelled_first(inner: tokenizers.Tokenizer) -> None:
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([spelling, inner.pre_tokenizer])


def composed(inner: tokenizers.Tokenizer) -> None:
    inner.normalizer = normalizers.NFC()
    inner.add_tokens([AddedToken("\N{KELVIN SIGN} b", normalized=True)])


def removing(inner: tokenizers.Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERNS[1]), "removed")


def adding(**options: Any) -> Callable[[tokenizers.Tokenizer], None]:
    def add(inner: tokenizers.Tokenizer) -> None:
        inner.add_tokens([AddedToken(**options)])

    return add


@pytest.mark.parametrize(
    "change",
    [
        lower,
        prefixed,
        uncut,
        other_pattern,
        removing,
        spelled_first,
        composed,
        adding(content="the cat"),
        adding(content="cat "),
        adding(content="<x>", lstrip=True),
        adding(content="<x>", rstrip=True),
        adding(content=" cat", single_word=True),
    ],
)
def test_tokenizers_that_are_left_whole(change: Callable[[tokenizers.Tokenizer], None]) -> None:
    inner = byte_level_bpe()
    assert can_cut(inner)
    change(inner)
    assert not can_cut(inner)


def test_other_models_are_left_whole(sentencepiece: Tokenizer) -> None:
    assert sentencepiece._pieces is None
    assert not can_cut(byte_level_bpe(dropout=0.1))
    assert not can_cut(tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")))


def test_the_tokenizer_adds_what_it_adds_to_short_texts() -> None:
    inner = byte_level_bpe()
    end = inner.token_to_id("<|end|>")
    inner.post_processor = processors.TemplateProcessing(
        single="<|end|> $A <|end|> <|end|>", pair=None, special_tokens=[("<|end|>", end)]
    )
    tokenizer = Tokenizer(inner)
    for text in ("the cat", "the cat sat on the mat " * 200):
        for adds in (True, False):
            assert tokenizer.encode_ids(text, adds, "") == inner.encode(text, add_special_tokens=adds).ids
    assert tokenizer._pieces is not None and tokenizer._pieces._kept


@pytest.mark.parametrize(
    "template",
    ["a $A", "a $A a", "<|end|> $A $A <|end|>", "$A a"],
)
def test_additions_that_cannot_be_told_from_the_text(template: str) -> None:
    inner = byte_level_bpe()
    special = [(token, inner.token_to_id(token)) for token in ("a", "<|end|>")]
    inner.post_processor = processors.TemplateProcessing(single=template, pair=None, special_tokens=special)
    tokenizer, text = Tokenizer(inner), "the cat sat on the mat " * 100
    assert can_cut(inner) and tokenizer._pieces is None
    assert tokenizer.encode_ids(text, True, "") == inner.encode(text).ids


def test_pieces_of_very_many_tokens_are_not_remembered(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=20)  # type: ignore[arg-type]
    encoder.encode("\N{WATER WAVE}" * 30 + "a a", "")
    assert [piece for _, piece in encoder._kept] == [" a"]


def test_a_tokenizer_whose_additions_are_unknown_is_left_whole() -> None:
    inner = tokenizers.Tokenizer(models.BPE(vocab={"b": 0}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert can_cut(inner) and Tokenizer(inner)._pieces is None


def test_what_is_met_again_outlives_what_is_met_once(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=20, max_kept_pieces=60)  # type: ignore[arg-type]
    words = fresh_words()
    often = " ".join(islice(words, 40))
    encoder.encode(often, "")
    for _ in range(50):
        latest = " ".join(islice(words, 40))
        encoder.encode(latest, "")
        counting.texts.clear()
        encoder.encode(often, "")
        encoder.encode(latest, "")
        assert not counting.texts


def test_a_piece_that_a_text_repeats_is_tokenised_once(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=1)  # type: ignore[arg-type]
    for salt in (None, ""):
        counting.texts.clear()
        encoder.encode("the cat sat" + " the cat sat" * 9, salt)
        assert sorted(counting.texts) == [" cat", " sat", " the", "the"]


def test_nothing_is_left_behind_without_a_salt(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=20)  # type: ignore[arg-type]
    encoder.encode("the cat sat on the mat " * 9, None)
    assert not encoder._kept


def test_a_long_word_of_few_tokens_is_not_remembered(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=20)  # type: ignore[arg-type]
    word = "the" * 20
    assert len(word) > 40 >= len(encoder.encode(word, ""))
    assert not encoder._kept


def test_ids_may_be_large() -> None:
    inner = tokenizers.Tokenizer(models.BPE(vocab={"a": 70_000, "\u0120": 2**31}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert can_cut(inner)
    for _ in range(2):
        assert PieceEncoder(inner, piece_chars=1).encode("a a", "") == [70_000, 2**31, 70_000]


def test_the_tokenizer_keeps_salts_apart() -> None:
    tokenizer = Tokenizer(byte_level_bpe())
    assert tokenizer._pieces is not None
    for salt in (None, "one", "two"):
        tokenizer.encode_ids("the cat sat on the mat " * 100, False, salt)
    assert {salt for salt, _ in tokenizer._pieces._kept} == {"one", "two"}


def test_an_inverted_pattern_is_left_whole() -> None:
    inner = byte_level_bpe()
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERNS[1]), "isolated", invert=True)
    assert not can_cut(inner)


PUBLISHED = {
    "Llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Qwen 2, Qwen 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-oss": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""As in the tokenizer.json files of these models."""


@pytest.mark.parametrize("pattern", PUBLISHED.values(), ids=PUBLISHED)
def test_published_tokenizers_are_cut(pattern: str) -> None:
    assert can_cut(byte_level_bpe(pattern))


class Losing(OrderedDict[tuple[str, str], "array[int]"]):
    """Another thread lets go of what was just looked up."""

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        return self.pop(key, default)


def test_what_another_thread_lets_go_of_is_made_use_of_and_stays_gone(counting: Counting) -> None:
    encoder = PieceEncoder(counting, piece_chars=20)  # type: ignore[arg-type]
    text = "the cat sat on the mat " * 9
    expected = encoder.encode(text, "")
    encoder._kept = Losing(encoder._kept)
    counting.texts.clear()
    assert encoder.encode(text, "") == expected
    assert not counting.texts and not encoder._kept
