"""The tokenizer in a GGUF's metadata becomes tokenizer.json and tokenizer_config.json. Knows no tensors.

Two kinds: byte-level BPE ("gpt2"), where the file names how text is cut before merging, and SentencePiece BPE
("llama"), where merges follow from the scores of the pieces. A cut that is not in the table is refused: with
a wrong one the ids would be nearly right, which is worse than none.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace_shard.errors import CheckpointError, UnsupportedModel

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """How text is divided before merging."""

    regex: str | None = None
    """None: GPT-2's own."""
    is_digit_alone: bool = False
    """Whether every digit is cut out first."""
    ignores_merges: bool = False
    """Whether a piece that is a token is taken whole, whatever the merges say."""
    is_nfc: bool = False


# `tokenizer.ggml.pre` to what it stands for, as llama.cpp (src/llama-vocab.cpp) has it.
_CUTS = {
    "gpt-2": _Cut(),
    "smollm": _Cut(is_digit_alone=True),
    "llama-bpe": _Cut(regex=_LLAMA3, ignores_merges=True),
    "qwen2": _Cut(regex=_LLAMA3.replace("{1,3}", ""), is_nfc=True),
    "tekken": _Cut(regex=_TEKKEN, ignores_merges=True),
}

# Control tokens that end a turn in the formats they belong to, beside the ids that the metadata name.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Ids for generation_config.json."""

    bos_id: int | None
    eos_ids: list[int]
    pad_id: int | None


def write_tokenizer(source: Path, metadata: dict[str, Any], folder: Path) -> SpecialIds:
    """Write the two files to `folder`.

    Raises CheckpointError when metadata are missing, UnsupportedModel when the tokenizer is of another kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if not tokens:
        raise CheckpointError(f"{source} holds no tokenizer: tokenizer.ggml.tokens is missing")
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    # Unused ids pad the embedding; as text they stand for nothing.
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != TokenType.UNUSED}
    if kind == "gpt2":
        tokenizer = _byte_level(source, metadata, vocab)
    elif kind == "llama":
        tokenizer = _sentencepiece(source, metadata, vocab)
    else:
        raise UnsupportedModel(
            f"{source}: GGUF tokenizer {kind!r} is not supported; supported are gpt2, llama"
        )
    for index, token in enumerate(tokens):
        if types[index] == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif types[index] == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and bos_id is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A",
            pair=f"{tokens[bos_id]} $A {tokens[bos_id]}:1 $B:1",
            special_tokens=[(tokens[bos_id], bos_id)],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = _special_ids(source, metadata, tokens, types)
    _write_config(metadata, tokens, special, folder)
    return special


def _byte_level(source: Path, metadata: dict[str, Any], vocab: dict[str, int]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _CUTS:
        raise UnsupportedModel(
            f"{source}: GGUF pre-tokenizer {pre!r} is not supported; supported are {', '.join(_CUTS)}"
        )
    cut = _CUTS[pre]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.ignores_merges))
    if cut.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.is_digit_alone:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.regex:
        steps.append(pre_tokenizers.Split(Regex(cut.regex), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(source: Path, metadata: dict[str, Any], vocab: dict[str, int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise CheckpointError(f"{source}: tokenizer.ggml.scores is missing")
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unknown = next((token for token, index in vocab.items() if index == unknown_id), None)
    model = models.BPE(
        vocab=vocab, merges=_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    replaced: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        replaced.insert(0, normalizers.Prepend("▁"))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(replaced)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece, best piece first: the order in which SentencePiece joins."""
    pairs = [
        (-scores[index], vocab[piece[:cut]], vocab[piece[cut:]], piece[:cut], piece[cut:])
        for piece, index in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _special_ids(source: Path, metadata: dict[str, Any], tokens: list[str], types: list[int]) -> SpecialIds:
    eos_ids = [
        metadata[key]
        for key in (
            "tokenizer.ggml.eos_token_id",
            "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.eom_token_id",
        )
        if key in metadata
    ]
    eos_ids += [
        index
        for index, token in enumerate(tokens)
        if types[index] == TokenType.CONTROL and token in _END_OF_TURN
    ]
    bos_id, pad_id = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding"))
    for index in (*eos_ids, bos_id, pad_id):
        if index is not None and not 0 <= index < len(tokens):
            raise CheckpointError(f"{source}: special token id {index} is outside of {len(tokens)} tokens")
    return SpecialIds(bos_id=bos_id, eos_ids=list(dict.fromkeys(eos_ids)), pad_id=pad_id)


def _write_config(metadata: dict[str, Any], tokens: list[str], special: SpecialIds, folder: Path) -> None:
    named = {
        "bos_token": special.bos_id,
        "eos_token": special.eos_ids[0] if special.eos_ids else None,
        "pad_token": special.pad_id,
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[index] for name, index in named.items() if index is not None},
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
