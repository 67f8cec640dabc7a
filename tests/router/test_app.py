"""The application as a whole: its URLs, what it imports, and that real clients are content with it."""

import subprocess
import sys
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient

from tests.router.running import MODEL, RunningRouter

FORBIDDEN = ("torch", "transformers", "headrace_shard")


def test_the_router_never_meets_torch() -> None:
    code = (
        "import sys\n"
        f"for name in {FORBIDDEN!r}: sys.modules[name] = None\n"
        "import headrace_router.app, headrace_router.__main__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def openai_client(router: RunningRouter) -> Any:
    """Untyped: its overloads want messages and streams in types of its own."""
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)


def test_the_openai_client(router: RunningRouter) -> None:
    router.says("turns the wheel")
    with openai_client(router) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, n=2, logprobs=True)
        assert [choice.message.content for choice in answer.choices] == ["turns the wheel"] * 2
        parts = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "turns the wheel"
        completion = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, echo=True)
        assert [choice.text for choice in completion.choices] == ["aturns the wheel", "bturns the wheel"]
        pieces = client.completions.create(model=MODEL, prompt="a", stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == "turns the wheel"
        with pytest.raises(openai.NotFoundError, match="no/such"):
            client.chat.completions.create(model="no/such", messages=messages)
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="a", max_tokens=10_000)
        assert caught.value.code == "context_length_exceeded"


def test_an_error_in_a_stream_reaches_the_openai_client(router: RunningRouter) -> None:
    router.says("a", ends=False)
    router.shard.sequence_error = lambda one: "no more" if one.num_generated == 3 else None
    with openai_client(router) as client:
        pieces = client.completions.create(model=MODEL, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="no more"):
            list(pieces)
    router.shard.sequence_error = lambda one: None


def test_the_hugging_face_client(router: RunningRouter) -> None:
    router.says("turns the wheel")
    client = InferenceClient(router.url)
    # It posts to /, where the prompt is part of the text unless declined.
    assert client.text_generation("the water", return_full_text=False) == "turns the wheel"
    details = client.text_generation(
        "the water", details=True, decoder_input_details=True, return_full_text=False
    )
    assert details.generated_text == "turns the wheel" and details.details is not None
    assert details.details.finish_reason == "eos_token" and details.details.prefill
    parts = list(client.text_generation("the water", stream=True, details=True))
    assert parts[-1].generated_text == "the waterturns the wheel"
    messages = [{"role": "user", "content": "hi"}]
    assert client.chat_completion(messages).choices[0].message.content == "turns the wheel"
    chunks = client.chat_completion(messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "turns the wheel"
