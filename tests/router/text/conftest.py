"""Two tokenizers of the two families: byte-level BPE, and sentencepiece's way with spaces and byte tokens."""

from pathlib import Path

import pytest
import tokenizers
from headrace_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, processors

from tests.tiny import make_tokenizer


def make_sentencepiece() -> tokenizers.Tokenizer:
    """A little Llama 2: "▁" for spaces and before the text, `<0xNN>` for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorstw", "é"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "w"), ("o", "r")]
    pieces += [left + right for left, right in merges]
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 1)]
    )
    inner.add_special_tokens([AddedToken(token, special=True) for token in pieces[:3]])
    return inner


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_tokenizer(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(make_sentencepiece(), bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path)
