"""The clients people use, unchanged, against a whole server."""

import huggingface_hub
import openai
import pytest

from tests.end_to_end.server import Server, generate

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def hub(server: Server) -> huggingface_hub.InferenceClient:
    return huggingface_hub.InferenceClient(model=server.url, timeout=60)


@pytest.fixture
def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60)


def test_hub_text_generation(hub: huggingface_hub.InferenceClient, server: Server) -> None:
    text = hub.text_generation("hello there", max_new_tokens=12, do_sample=False, return_full_text=False)
    assert text == generate(server, "hello there", max_new_tokens=12)["generated_text"]
    full = hub.text_generation("hello there", max_new_tokens=12, do_sample=False, return_full_text=True)
    assert full == "hello there" + text


def test_hub_text_generation_details(hub: huggingface_hub.InferenceClient) -> None:
    answer = hub.text_generation(
        "hello there",
        max_new_tokens=12,
        details=True,
        decoder_input_details=True,
        top_n_tokens=2,
        return_full_text=False,
        seed=7,
        temperature=0.9,
    )
    details = answer.details
    assert details is not None
    assert details.generated_tokens == len(details.tokens) <= 12
    assert details.finish_reason in ("length", "eos_token")
    assert details.seed == 7
    assert details.prefill[0].logprob is None and all(token.logprob < 0 for token in details.prefill[1:])
    assert details.top_tokens is not None and all(len(top) == 2 for top in details.top_tokens)
    assert "".join(token.text for token in details.tokens if not token.special) == answer.generated_text


def test_hub_text_generation_stream(hub: huggingface_hub.InferenceClient, server: Server) -> None:
    plain = generate(server, "hello there", max_new_tokens=12)
    pieces = list(hub.text_generation("hello there", max_new_tokens=12, stream=True))
    assert len(pieces) > 1 and "".join(pieces) == plain["generated_text"]
    events = list(
        hub.text_generation(
            "hello there", max_new_tokens=12, stream=True, details=True, return_full_text=False
        )
    )
    assert [event.token.id for event in events] == [token["id"] for token in plain["details"]["tokens"]]
    assert all(event.generated_text is None for event in events[:-1])
    assert events[-1].generated_text == plain["generated_text"]
    assert events[-1].details is not None and events[-1].details.generated_tokens == len(events)


def test_hub_chat(hub: huggingface_hub.InferenceClient) -> None:
    plain = hub.chat_completion(MESSAGES, max_tokens=12, temperature=0)
    assert plain.choices[0].message.role == "assistant"
    assert plain.usage.completion_tokens <= 12
    chunks = list(hub.chat_completion(MESSAGES, max_tokens=12, temperature=0, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason


def test_openai_chat(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(
        model="tgi", messages=[{"role": "user", "content": "hello there"}], max_tokens=12, temperature=0,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-") and choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert all(
        entry.logprob == pytest.approx(entry.top_logprobs[0].logprob) for entry in choice.logprobs.content
    )


def test_openai_chat_stream(openai_client: openai.OpenAI) -> None:
    plain = openai_client.chat.completions.create(
        model="tgi", messages=[{"role": "user", "content": "hello there"}], max_tokens=12, temperature=0
    )
    chunks = list(
        openai_client.chat.completions.create(
            model="tgi", messages=[{"role": "user", "content": "hello there"}], max_tokens=12, temperature=0,
            stream=True, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage == plain.usage
    with_choice = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in with_choice) == plain.choices[0].message.content
    assert [choice.finish_reason for choice in with_choice if choice.finish_reason] == [
        plain.choices[0].finish_reason
    ]


def test_openai_completions(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model="tgi", prompt=["hello there", "the sun"], max_tokens=8, temperature=0, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    echoed = openai_client.completions.create(
        model="tgi", prompt="hello there", max_tokens=0, echo=True, logprobs=2
    )
    logprobs = echoed.choices[0].logprobs
    assert echoed.choices[0].text == "hello there"
    assert logprobs is not None and logprobs.tokens is not None and "".join(logprobs.tokens) == "hello there"
    assert logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None


def test_openai_completions_stream(openai_client: openai.OpenAI) -> None:
    plain = openai_client.completions.create(model="tgi", prompt="the sun", max_tokens=12, temperature=0)
    chunks = list(
        openai_client.completions.create(
            model="tgi", prompt="the sun", max_tokens=12, temperature=0, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason


def test_openai_models(openai_client: openai.OpenAI) -> None:
    models = list(openai_client.models.list())
    assert len(models) == 1
    assert openai_client.models.retrieve(models[0].id).id == models[0].id
    with pytest.raises(openai.NotFoundError):
        openai_client.chat.completions.create(
            model="no-such-model", messages=[{"role": "user", "content": "hi"}]
        )
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        openai_client.completions.create(model=models[0].id, prompt="hello", max_tokens=10**6)
