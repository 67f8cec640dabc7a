"""The tiny checkpoint is a real one: transformers reads it, its tokenizer gives back what it was given."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.tiny import IM_END, IM_START, make_checkpoint, make_tokenizer


def test_transformers_reads_the_tokenizer_and_its_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == f"{IM_START}user\nhi{IM_END}\n{IM_START}assistant\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.parametrize("text", ["", "plain", " ünï 水车 🌊\n\t", f"{IM_START}user\n12{IM_END}"])
def test_every_text_survives(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(make_tokenizer(tmp_path) / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_tokenizer_fills_the_default_vocabulary(tmp_path: Path) -> None:
    assert Tokenizer.from_file(str(make_checkpoint(tmp_path) / "tokenizer.json")).get_vocab_size() == 384


def test_bos_before_every_text_on_request(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_tokenizer(tmp_path, adds_bos=True) / "tokenizer.json"))
    assert tokenizer.encode("a").ids[0] == 1
    assert tokenizer.encode("a", add_special_tokens=False).ids[0] != 1


def test_the_same_arguments_make_the_same_weights(tmp_path: Path) -> None:
    one, two, other = (
        make_checkpoint(tmp_path / str(number), seed=seed) for number, seed in enumerate((0, 0, 1))
    )
    first, second, third = ((folder / "model.safetensors").read_bytes() for folder in (one, two, other))
    assert first == second != third
