"""Whole bodies to requests: defaults, limits, order of checks, prompts and their tokens."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from headrace_router.errors import (
    ContextLengthExceeded,
    ModelNotFound,
    TemplateError,
    Unavailable,
    ValidationError,
)
from headrace_router.schemas.openai import ChatRequest
from headrace_router.schemas.tgi import GenerateRequest
from headrace_router.text.output import OutputOptions

from tests.router.validation.conftest import Front


def ids(front: Front, text: str) -> tuple[int, ...]:
    return tuple(front.tokenizer.encode_ids(text, False))


# ---- lengths


def test_the_native_budget_is_honoured_or_refused(front: Front) -> None:
    prompt = "!" * 10
    assert front.generate(inputs=prompt, max_new_tokens=22).request.max_new_tokens == 22
    assert front.generate(inputs=prompt).request.max_new_tokens == 22
    with pytest.raises(ContextLengthExceeded) as caught:
        front.generate(inputs=prompt, max_new_tokens=5000)
    assert caught.value.message == (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 32. Given: 10 `inputs` tokens "
        "and 5000 `max_new_tokens`"
    )


def test_the_native_prompt_has_its_own_limit(front: Front) -> None:
    assert len(front.generate(inputs="!" * 16).request.prompt_ids) == 16
    with pytest.raises(ContextLengthExceeded) as caught:
        front.generate(inputs="!" * 17)
    assert caught.value.message == "Input validation error: `inputs` must have less than 16 tokens. Given: 17"
    # Both together are looked at first, as in Text Generation Inference.
    with pytest.raises(ContextLengthExceeded, match="Given: 33 `inputs` tokens and 1 `max_new_tokens`"):
        front.generate(inputs="!" * 33, max_new_tokens=1)


@pytest.mark.parametrize("text", ["!" * 17, "!" * 100_000])
def test_a_prompt_too_long_for_openai(front: Front, text: str) -> None:
    chat = {"messages": [{"role": "user", "content": text}]}
    for ask, fields in ((front.completion, {"prompt": text}), (front.chat, chat)):
        with pytest.raises(ContextLengthExceeded) as caught:
            ask(**fields)
        message = caught.value.openai_message
        assert message.startswith(
            "This model's maximum context length is 32 tokens, of which a prompt may have 16."
        )
        assert caught.value.code == "context_length_exceeded"
        assert ("resulted in 17 tokens" in message) == (len(text) == 17)


def test_what_is_obviously_too_long_is_not_tokenised(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(front.tokenizer, "encode_ids", fail)
    with pytest.raises(ContextLengthExceeded, match="Given: at least"):
        front.generate(inputs="a " * 50_000)


def test_an_answer_too_long_for_openai(front: Front) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        front.completion(prompt="!" * 10, max_tokens=5000)
    assert caught.value.openai_message == (
        "This model's maximum context length is 32 tokens. However, you requested 5010 tokens (10 in the "
        "prompt, 5000 in the completion). Please reduce the length of the prompt or completion."
    )
    assert front.completion(prompt="!" * 10, max_tokens=22).request.max_new_tokens == 22


def test_openai_defaults(front: Front) -> None:
    assert front.completion(prompt="!").request.max_new_tokens == 16
    assert front.completion(prompt="!" * 16).request.max_new_tokens == 16
    assert front.chat().request.max_new_tokens == 31
    front.with_limits(max_input_tokens=31)
    assert front.completion(prompt="!" * 30).request.max_new_tokens == 2


def test_the_last_tokens_are_kept(front: Front) -> None:
    text = "".join(map(chr, range(ord("!"), ord("!") + 40)))
    whole = ids(front, text)
    job = front.generate(inputs=text, truncate=5)
    assert job.request.prompt_ids == whole[-5:] and job.prompt == text
    assert front.completion(prompt=text, truncate_prompt_tokens=5).request.prompt_ids == whole[-5:]
    assert front.completion(prompt=list(whole), truncate_prompt_tokens=5).request.prompt_ids == whole[-5:]
    chat = front.chat(messages=[{"role": "user", "content": text}], truncate_prompt_tokens=5)
    assert chat.request.prompt_ids == whole[-5:] and chat.prompt == text
    assert front.generate(inputs="!", truncate=5).request.prompt_ids == ids(front, "!")


# ---- what a request is made of


def test_a_native_request(front: Front) -> None:
    job = front.generate(
        stop=["x", "y"], top_n_tokens=3, decoder_input_details=True, max_new_tokens=4, details=True
    )
    request = job.request
    assert request.prompt_ids == ids(front, "the water") and request.max_new_tokens == 4
    assert request.eos_token_ids == {0, 2} and request.stop_token_ids == frozenset()
    assert request.top_n_tokens == 3 and request.prompt_logprobs and request.prompt_top_n_tokens == 0
    assert job.options == OutputOptions(stop=("x", "y"), keeps_stop=True)


def test_special_tokens_are_added_to_texts_and_not_to_chats(make_front: Callable[..., Front]) -> None:
    front = make_front(adds_bos=True)
    assert front.generate(inputs="!").request.prompt_ids == (1, *ids(front, "!"))
    assert front.completion(prompt="!").request.prompt_ids == (1, *ids(front, "!"))
    assert front.chat().request.prompt_ids == ids(front, "a")


def test_stop_strings_that_spell_special_tokens_are_ids(front: Front) -> None:
    job = front.completion(stop=["<|endoftext|>", "x"], stop_token_ids=[9])
    assert job.options == OutputOptions(stop=("x",)) and job.request.stop_token_ids == {0, 9}
    assert job.request.eos_token_ids == {0, 2}
    assert front.generate(stop="<|im_start|>").request.stop_token_ids == {1}


def test_ends_and_minimum(front: Front) -> None:
    assert front.chat(ignore_eos=True).request.eos_token_ids == frozenset()
    assert front.chat(min_tokens=5).request.min_new_tokens == 5


def test_log_probabilities_of_the_answer(front: Front) -> None:
    assert front.chat(logprobs=True).request.top_n_tokens == 0
    assert front.chat(logprobs=True, top_logprobs=20).request.top_n_tokens == 20
    request = front.completion(logprobs=2).request
    assert request.top_n_tokens == 2 and not request.prompt_logprobs


@pytest.mark.parametrize(
    ("fields", "prompt_logprobs", "prompt_top", "max_new_tokens"),
    [
        ({"echo": True}, False, 0, 16),
        ({"echo": True, "logprobs": 2}, True, 2, 16),
        ({"echo": True, "logprobs": 0}, True, 0, 16),
        ({"echo": True, "max_tokens": 0}, True, 0, 0),
        ({"echo": True, "max_tokens": 0, "logprobs": 1}, True, 1, 0),
    ],
)
def test_echo_scores_the_prompt(
    front: Front, fields: dict[str, Any], prompt_logprobs: bool, prompt_top: int, max_new_tokens: int
) -> None:
    request = front.completion(**fields).request
    assert (request.prompt_logprobs, request.prompt_top_n_tokens) == (prompt_logprobs, prompt_top)
    assert request.max_new_tokens == max_new_tokens


def test_nothing_is_generated_only_with_echo(front: Front) -> None:
    with pytest.raises(ValidationError, match=r"`max_tokens` must be >= 1 \(0 only with `echo`\)"):
        front.completion(max_tokens=0)


def test_prompts_of_every_kind(front: Front) -> None:
    assert [job.prompt for job in front.completions(prompt=["a", "b"])] == ["a", "b"]
    job = front.completion(prompt=[1, *ids(front, "the"), 2])
    assert job.prompt == "<|im_start|>the<|im_end|>" and job.request.prompt_ids[0] == 1
    assert [job.request.prompt_ids for job in front.completions(prompt=[[5], [6, 7]])] == [(5,), (6, 7)]


def test_tokens_that_the_model_lacks_are_refused(front: Front) -> None:
    front.with_limits(vocab_size=50)
    with pytest.raises(ValidationError, match="a token that the model does not know"):
        front.generate(inputs="the water")
    with pytest.raises(ValidationError, match="token id 50 is not in the vocabulary of 50 tokens"):
        front.completion(prompt=[50])


# ---- models and templates


@pytest.mark.parametrize("model", [None, "tgi", "dummy", "served/name", "name"])
def test_names_of_the_model(front: Front, model: str | None) -> None:
    front.chat(model=model)
    front.completions(model=model)
    front.chat(model=front.config.tokenizer_name)


def test_other_models_do_not_exist(front: Front) -> None:
    for ask in (front.chat, front.completion):
        with pytest.raises(ModelNotFound, match="no/such") as caught:
            ask(model="no/such")
        assert caught.value.openai_status == 404 and "served/name" in caught.value.openai_message


def test_messages_go_through_the_template(make_front: Callable[..., Front]) -> None:
    front = make_front(
        template="{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
        "{{ '>' if add_generation_prompt }}{{ mood }}"
    )
    assert front.chat().prompt == "<|im_start|>[a]>"
    assert front.chat(add_generation_prompt=False).prompt == "<|im_start|>[a]"
    assert front.chat(continue_final_message=True).prompt == "<|im_start|>[a"
    assert front.chat(chat_template_kwargs={"mood": "!"}).prompt == "<|im_start|>[a]>!"
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert front.chat(messages=[{"role": "user", "content": parts}]).prompt == "<|im_start|>[bc]>"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_chats_that_make_no_prompt(front: Front, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        front.chat(**fields)


def test_a_prompt_without_tokens_is_refused(front: Front) -> None:
    with pytest.raises(ValidationError, match="`messages` cannot be empty"):
        front.chat(messages=[{"role": "user", "content": ""}])


def test_templates_may_be_missing_or_refuse(make_front: Callable[..., Front]) -> None:
    with pytest.raises(TemplateError) as caught:
        make_front(template=None).chat()
    assert caught.value.message == "Template error: template not found"
    with pytest.raises(TemplateError, match="Template error: no"):
        make_front(template="{{ raise_exception('no') }}").chat()


# ---- whose turn it is, and what is shared


def test_priority_and_salt_reach_the_request(front: Front) -> None:
    asks: tuple[Callable[..., Any], ...] = (front.generate, front.chat, front.completion)
    for ask in asks:
        request = ask(priority=-5, cache_salt="tenant 7").request
        assert (request.priority, request.cache_salt) == (-5, "tenant 7")
        for job in (ask(), ask(priority=None, cache_salt=None)):
            assert (job.request.priority, job.request.cache_salt) == (0, "")


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"priority": 1.5}, "priority"), ({"priority": "high"}, "priority"), ({"cache_salt": 7}, "cache_salt")],
)
def test_priority_is_a_whole_number_and_a_salt_is_text(front: Front, fields: Any, name: str) -> None:
    for ask in (front.generate, front.chat, front.completion):
        with pytest.raises(ValidationError, match=f"{name}` is of the wrong type"):
            ask(**fields)


# ---- the rest


def test_tokenising(make_front: Callable[..., Front]) -> None:
    front = make_front(adds_bos=True)
    encoding = asyncio.run(front.validator.tokenize("the"))
    assert encoding.ids == [1, *ids(front, "the")] and encoding.offsets[1][0] == 0
    body = msgspec.json.decode(
        b'{"messages": [{"role": "user", "content": "the"}], "temperature": 9}', type=ChatRequest
    )
    prompt, encoding = asyncio.run(front.validator.chat_tokenize(body))
    assert prompt == "the" and tuple(encoding.ids) == ids(front, "the")
    assert asyncio.run(front.validator.detokenize([1, *ids(front, "the"), 2])) == "the"
    with pytest.raises(ValidationError, match="`ids`"):
        asyncio.run(front.validator.detokenize([10**9]))
    with pytest.raises(ValidationError, match="`tools` is not supported"):
        asyncio.run(front.validator.chat_tokenize(msgspec.structs.replace(body, tools=[{}])))


def test_nothing_is_judged_before_the_limits_are_known(front: Front) -> None:
    front.limits = None
    for ask in (front.generate, front.chat, front.completion):
        with pytest.raises(Unavailable):
            ask()


def test_texts_are_tokenised_in_threads_of_their_own(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    encode_ids = front.tokenizer.encode_ids

    def slow(text: str, add_special_tokens: bool, salt: str) -> list[int]:
        begun.set()
        assert may_end.wait(10)
        return encode_ids(text, add_special_tokens, salt)

    monkeypatch.setattr(front.tokenizer, "encode_ids", slow)

    async def ask() -> int:
        body = GenerateRequest(inputs="!")
        asking = asyncio.create_task(front.validator.generate(body, is_stream=False))
        turns = 0
        while not asking.done() and (not begun.is_set() or turns < 10):
            await asyncio.sleep(0)
            turns += 1
        assert not asking.done()
        may_end.set()
        await asking
        return turns

    assert asyncio.run(ask()) >= 10


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_tokenised_prompts_are_shared_as_computed_ones_are(
    make_front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch, prefix_caching: bool
) -> None:
    front = make_front(prefix_caching=prefix_caching)
    salts: list[str | None] = []
    encode_ids = front.tokenizer.encode_ids

    def listening(text: str, add_special_tokens: bool, salt: str | None) -> list[int]:
        salts.append(salt)
        return encode_ids(text, add_special_tokens, salt)

    monkeypatch.setattr(front.tokenizer, "encode_ids", listening)
    for ask in (front.generate, front.chat, front.completion):
        ask()
        ask(cache_salt="one")
    assert salts == (["", "one"] * 3 if prefix_caching else [None] * 6)
