"""Tokens of texts and texts of tokens, over a real socket."""

import itertools
import threading

import pytest
from headrace_router.api import tokenizing
from headrace_router.text.tokenizer import Encoding

from tests.router.running import RunningRouter


def test_tokenize_counts_bytes(router: RunningRouter) -> None:
    text = "水 the wheel"
    tokens = router.post("/tokenize", {"inputs": text, "parameters": {"truncate": 0}}).json()
    assert list(tokens[0]) == ["id", "text", "start", "stop"]
    assert tokens[-1]["stop"] == len(text.encode())
    assert all(token["text"] == text.encode()[token["start"] : token["stop"]].decode() for token in tokens)


def test_chat_tokenize_shows_the_prompt(router: RunningRouter) -> None:
    answer = router.post("/chat_tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert list(answer) == ["tokenize_response", "templated_text"]
    assert answer["templated_text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_detokenize_is_the_way_back(router: RunningRouter) -> None:
    ids = [token["id"] for token in router.post("/tokenize", {"inputs": "the wheel"}).json()]
    assert router.post("/detokenize", {"ids": [*ids, 2]}).json() == {"text": "the wheel"}
    response = router.post("/detokenize", {})
    assert response.status_code == 422 and "ids" in response.json()["error"]
    assert router.post("/detokenize", {"ids": [10**9]}).status_code == 422
    assert router.post("/detokenize", {"ids": [-1]}).status_code == 422


def test_a_long_list_is_whole(router: RunningRouter) -> None:
    text = "水 the wheel 🌊 " * tokenizing.TOKENS_AT_ONCE
    tokens = router.post("/tokenize", {"inputs": text}).json()
    assert len(tokens) > 2 * tokenizing.TOKENS_AT_ONCE
    assert tokens[0]["start"] == 0 and tokens[-1]["stop"] == len(text.encode())
    assert all(one["start"] <= other["start"] for one, other in itertools.pairwise(tokens))
    chat = {"messages": [{"role": "user", "content": text}]}
    answer = router.post("/chat_tokenize", chat).json()
    assert len(answer["tokenize_response"]) >= len(tokens)


def test_lists_are_written_where_prompts_are_tokenised(
    router: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the event loop, and not in more threads than there may be."""
    token_list, threads = tokenizing.token_list, list[str]()

    def told(text: str, encoding: Encoding) -> bytes:
        threads.append(threading.current_thread().name)
        return token_list(text, encoding)

    monkeypatch.setattr(tokenizing, "token_list", told)
    router.post("/tokenize", {"inputs": "a"})
    router.post("/chat_tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert len(threads) == 2 and all(name.startswith("validation") for name in threads)


def test_no_tokens_are_an_empty_list(router: RunningRouter) -> None:
    assert router.post("/tokenize", {"inputs": ""}).json() == []
