"""Bodies of the native face: what is read and refused; the shape and key order of answers."""

import msgspec
from headrace_router.schemas import tgi

TOKEN = tgi.Token(id=5, text="a", logprob=-0.5, special=False)


def encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


def test_details_in_the_order_of_the_contract() -> None:
    details = tgi.Details(finish_reason="length", generated_tokens=1, seed=None, prefill=[], tokens=[TOKEN])
    assert encoded(tgi.GenerateResponse(generated_text="a", details=details)) == (
        '{"generated_text":"a","details":{"finish_reason":"length","generated_tokens":1,"seed":null,'
        '"prefill":[],"tokens":[{"id":5,"text":"a","logprob":-0.5,"special":false}]}}'
    )
    details.top_tokens = [[TOKEN]]
    details.best_of_sequences = []
    keys = list(msgspec.json.decode(encoded(details)))
    assert keys[-2:] == ["best_of_sequences", "top_tokens"]


def test_an_answer_without_details_has_no_such_key() -> None:
    assert encoded(tgi.GenerateResponse(generated_text="")) == '{"generated_text":""}'


def test_the_events_of_a_stream() -> None:
    token = '{"id":5,"text":"a","logprob":-0.5,"special":false}'
    assert encoded(tgi.StreamResponse(index=1, token=TOKEN)) == (
        f'{{"index":1,"token":{token},"generated_text":null,"details":null}}'
    )
    last = tgi.StreamResponse(index=2, token=TOKEN, top_tokens=[TOKEN], generated_text="aa")
    last.details = tgi.StreamDetails(finish_reason="eos_token", generated_tokens=2, seed=7, input_length=3)
    assert encoded(last) == (
        f'{{"index":2,"token":{token},"top_tokens":[{token}],"generated_text":"aa","details":'
        '{"finish_reason":"eos_token","generated_tokens":2,"seed":7,"input_length":3}}'
    )


def test_tokens_without_log_probability() -> None:
    assert encoded(tgi.PrefillToken(id=1, text="<s>", logprob=None)) == '{"id":1,"text":"<s>","logprob":null}'
    assert (
        encoded(tgi.SimpleToken(id=1, text="a", start=0, stop=1)) == '{"id":1,"text":"a","start":0,"stop":1}'
    )


def test_a_compatible_body_may_ask_for_a_stream() -> None:
    body = msgspec.json.decode(b'{"inputs":"a","stream":true}', type=tgi.CompatGenerateRequest)
    assert isinstance(body, tgi.GenerateRequest) and body.stream is True
