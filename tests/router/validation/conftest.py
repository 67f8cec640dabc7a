"""A validator over a tiny tokenizer: prompts of at most 16 tokens, 32 with the answer."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from headrace_router.config import RouterConfig
from headrace_router.scheduling.limits import Limits
from headrace_router.schemas.decode import decode
from headrace_router.schemas.openai import ChatRequest, CompletionRequest
from headrace_router.schemas.tgi import GenerateRequest
from headrace_router.text.chat_template import ChatTemplate
from headrace_router.text.tokenizer import Tokenizer
from headrace_router.validation import Job, Validator

from tests.tiny import make_tokenizer

LIMITS = Limits(
    max_input_tokens=16,
    max_total_tokens=32,
    max_step_tokens=16,
    max_step_sequences=4,
    num_blocks=8,
    block_size=16,
    vocab_size=400,
    eos_token_ids=frozenset({0}),
)


class Front:
    """What the routes do with a validator: decode a body, ask for its job."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.limits: Limits | None = LIMITS
        self.config = RouterConfig(tokenizer_name=str(folder), **settings)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.validator = Validator(
            self.config,
            self.tokenizer,
            ChatTemplate.from_folder(folder, strftime_now=str),
            lambda: self.limits,
        )

    def with_limits(self, **changes: Any) -> None:
        self.limits = replace(LIMITS, **changes)

    def generate(self, *, is_stream: bool = False, inputs: str = "the water", **parameters: Any) -> Job:
        body = _decoded({"inputs": inputs, "parameters": parameters}, GenerateRequest)
        return asyncio.run(self.validator.generate(body, is_stream=is_stream))

    def sampled(self) -> Job:
        body = GenerateRequest(inputs="the water")
        return asyncio.run(self.validator.generate(body, is_stream=False))

    def chat(self, **fields: Any) -> Job:
        body = _decoded({"messages": [{"role": "user", "content": "a"}]} | fields, ChatRequest)
        return asyncio.run(self.validator.chat(body))

    def completions(self, **fields: Any) -> list[Job]:
        body = _decoded({"prompt": "the water"} | fields, CompletionRequest)
        return asyncio.run(self.validator.completion(body))

    def completion(self, **fields: Any) -> Job:
        (job,) = self.completions(**fields)
        return job


def _decoded(body: dict[str, Any], kind: Any) -> Any:
    return decode(msgspec.json.encode(body), kind)


@pytest.fixture(scope="session")
def make_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Front]]:
    """Takes settings, and `template` and `adds_bos` of the tokenizer."""
    made: list[Front] = []

    def make(
        *, template: str | None = "{{ messages[-1].content }}", adds_bos: bool = False, **settings: Any
    ) -> Front:
        folder = make_tokenizer(tmp_path_factory.mktemp("model"), chat_template=template, adds_bos=adds_bos)
        made.append(Front(folder, **settings))
        return made[-1]

    yield make
    for front in made:
        front.validator.close()


@pytest.fixture
def front(make_front: Callable[..., Front], shared_front: Front) -> Front:
    shared_front.limits = LIMITS
    return shared_front


@pytest.fixture(scope="session")
def shared_front(make_front: Callable[..., Front]) -> Front:
    return make_front(model_id="served/name")
