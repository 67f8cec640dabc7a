"""The model's tokenizer: text to token ids, ids to text, and the bytes that each token stands for.

Reads tokenizer.json through the `tokenizers` library, and what the files beside it say of special tokens.
Knows no chat template and no request. Safe to use from several threads.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import tokenizers

from headrace_router.errors import StartupError
from headrace_router.text.pieces import PIECE_CHARS, PieceEncoder, can_cut, steps

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Steps of a tokenizer that lose no characters; NFC makes one of at most so many.
_KEEPING_NORMALIZERS = {"Replace", "Prepend", "ByteLevel", "NFC", "NFD"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}
_MAX_COMPOSED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Token ids, and the piece of the text that each stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """(start, end) in characters, one for each id; (0, 0) for tokens that were added."""


class Tokenizer:
    """One model's tokenizer."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        special_tokens: Iterable[str] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        # Some files carry the settings of the training that made them; no prompt is cut or filled up here.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.bos_token = bos_token
        self.eos_token = eos_token
        named = {token_id for token in special_tokens if (token_id := inner.token_to_id(token)) is not None}
        eos_id = inner.token_to_id(eos_token) if eos_token is not None else None
        self.eos_token_ids = frozenset(eos_token_ids) | ({eos_id} if eos_id is not None else frozenset())
        self._added = {
            token_id: token.content for token_id, token in inner.get_added_tokens_decoder().items()
        }
        marked = {token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special}
        self._special_ids = frozenset(named | marked | self.eos_token_ids)
        self._special_by_text = {
            text: token_id
            for token_id in self._special_ids
            if (text := self._added.get(token_id) or inner.id_to_token(token_id)) is not None
        }
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the largest id."""
        self._max_token_chars = _max_token_chars(inner, vocabulary)
        self._decoder_kinds = _kinds(inner.decoder, "decoders")
        self._anchor = self._find_anchor()
        self._additions = self._find_additions()
        self._pieces = PieceEncoder(inner) if self._additions is not None and can_cut(inner) else None
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: Path, config_path: Path | None = None) -> Self:
        """The tokenizer of a model's folder.

        `config_path` is a tokenizer_config.json to read in place of the folder's. Raises `StartupError`.
        """
        file = path / "tokenizer.json"
        if not path.is_dir():
            raise StartupError(f"{path} is not a folder: give the one that holds the model's tokenizer.json")
        if not file.is_file():
            raise StartupError(
                f"{path} has no tokenizer.json: write one with transformers, "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise StartupError(f"{file} cannot be read as a tokenizer: {error}") from None
        config = read_json(config_path or path / "tokenizer_config.json", is_required=config_path is not None)
        named = read_json(path / "special_tokens_map.json")
        generation = read_json(path / "generation_config.json")
        return cls(
            inner,
            special_tokens=_special_tokens(config, named),
            bos_token=_named_token("bos_token", config, named)
            or _token_of(inner, generation.get("bos_token_id")),
            eos_token=_named_token("eos_token", config, named)
            or _token_of(inner, generation.get("eos_token_id")),
            eos_token_ids=_ids_of(generation.get("eos_token_id")),
        )

    def encode(self, text: str, add_special_tokens: bool) -> Encoding:
        """Ids and offsets. `text` holds no surrogates."""
        # The batch calls let other threads run meanwhile, `encode` does not.
        encoding = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return Encoding(ids=encoding.ids, offsets=encoding.offsets)

    def encode_ids(self, text: str, add_special_tokens: bool, salt: str | None = None) -> list[int]:
        """Ids alone, which is faster, above all for a long text that begins like one of the same `salt`.

        Without a salt no text has to do with another. `text` holds no surrogates.
        """
        if self._pieces is not None and self._additions is not None and len(text) > 2 * PIECE_CHARS:
            before, behind = self._additions if add_special_tokens else ([], [])
            return [*before, *self._pieces.encode(text, salt), *behind]
        ids: list[int] = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without tokenising it. 0 if none is known."""
        return -(-len(text) // self._max_token_chars) if self._max_token_chars else 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of `ids` as the tokenizer itself decodes it; ids without a token are left out."""
        return self._inner.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a mark and not text: such tokens are not part of an answer's text."""
        return token_id in self._special_ids

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written so."""
        return self._special_by_text.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that it does not begin; b"" for ids without a token.

        Joined and read as UTF-8 they are the text. A token may hold parts of characters.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._find_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """The token by itself, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _find_anchor(self) -> tuple[list[int], str]:
        ids = self._inner.encode("a", add_special_tokens=False).ids[-1:]
        return ids, self._inner.decode(ids, skip_special_tokens=False)

    def _find_additions(self) -> tuple[list[int], list[int]] | None:
        """Ids that are put before and behind those of any text; None where that cannot be told."""
        found = []
        for probe in ("a", "b c"):
            text = self._inner.encode(probe, add_special_tokens=False).ids
            whole = self._inner.encode(probe, add_special_tokens=True).ids
            size = len(text)
            places = [i for i in range(len(whole) - size + 1) if whole[i : i + size] == text]
            if len(places) != 1 or (probe == "a" and size != 1):
                return None
            found.append((whole[: places[0]], whole[places[0] + size :]))
        return found[0] if found[0] == found[1] else None

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoder_kinds:
            if token_id in self._added:
                return self._added[token_id].encode()
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if "ByteFallback" in self._decoder_kinds and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        # Other decoders treat the first token of a text differently (a leading space goes), so another one
        # is put before it.
        anchor, before = self._anchor
        text = self._inner.decode([*anchor, token_id], skip_special_tokens=False)
        if text.startswith(before):
            return text[len(before) :].encode()
        return self._inner.decode([token_id], skip_special_tokens=False).encode()


def read_json(file: Path, *, is_required: bool = False) -> dict[str, Any]:
    """The object in `file`, empty if there is no such file and it is not required. Raises `StartupError`."""
    if not file.is_file():
        if is_required:
            raise StartupError(f"{file} is not a file")
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{file} does not hold a JSON object")
    return value


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE's spelling of bytes as printable characters (GPT-2's bytes_to_unicode, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _content(value: Any) -> str | None:
    """A token as it is written in a config: a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_token(name: str, *configs: Mapping[str, Any]) -> str | None:
    return next((token for config in configs if (token := _content(config.get(name)))), None)


def _special_tokens(*configs: Mapping[str, Any]) -> list[str]:
    values: list[Any] = []
    for config in configs:
        values += [config.get(key) for key in _SPECIAL_KEYS]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            extra = config.get(key) or []
            values += extra.values() if isinstance(extra, dict) else extra
        decoder = config.get("added_tokens_decoder") or {}
        values += [token for token in decoder.values() if isinstance(token, dict) and token.get("special")]
    return [token for value in values if (token := _content(value))]


def _ids_of(value: Any) -> list[int]:
    """`eos_token_id` of a generation config: a number, a list or nothing."""
    return [token_id for token_id in (value if isinstance(value, list) else [value]) if type(token_id) is int]


def _token_of(inner: tokenizers.Tokenizer, value: Any) -> str | None:
    tokens = (inner.id_to_token(token_id) for token_id in _ids_of(value))
    return next((token for token in tokens if token is not None), None)


def _kinds(component: Any, members: str) -> set[str]:
    return {step["type"] for step in steps(component, members)}


def _max_token_chars(inner: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int:
    """Characters of text that one token stands for at most; 0 where that has no bound worth the name."""
    normalizers = steps(inner.normalizer, "normalizers")
    splits = steps(inner.pre_tokenizer, "pretokenizers")
    kinds = {step["type"] for step in normalizers + splits}
    # Otherwise a run of unknown characters is one token, or none.
    knows_every_byte = "ByteLevel" in kinds or getattr(inner.model, "byte_fallback", False)
    keeps_text = (
        all(step["type"] in _KEEPING_NORMALIZERS and _is_growing(step) for step in normalizers)
        and all(step["type"] in _KEEPING_PRE_TOKENIZERS for step in splits)
        and not any(step.get("behavior") == "Removed" for step in splits)
        # Such tokens swallow the white space around them.
        and not any(token.lstrip or token.rstrip for token in inner.get_added_tokens_decoder().values())
    )
    if not (knows_every_byte and keeps_text):
        return 0
    return max(map(len, vocabulary), default=0) * (_MAX_COMPOSED if "NFC" in kinds else 1)


def _is_growing(normalizer: Mapping[str, Any]) -> bool:
    """Whether its output is at least as long as its input, composing aside."""
    if normalizer["type"] != "Replace":
        return True
    pattern = normalizer["pattern"].get("String")
    return pattern is not None and len(normalizer["content"]) >= len(pattern)
