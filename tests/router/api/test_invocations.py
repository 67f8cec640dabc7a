"""/invocations speaks the language of the body it is given."""

from tests.router.running import CHAT, RunningRouter

PATH = "/invocations"


def test_a_generate_body(router: RunningRouter) -> None:
    router.says(" turns")
    assert router.post(PATH, {"inputs": "the water"}).json() == [{"generated_text": "the water turns"}]
    events = router.events(PATH, {"inputs": "the water", "stream": True}, is_done=False)
    assert events[-1]["generated_text"] == "the water turns"


def test_a_chat_body(router: RunningRouter) -> None:
    router.says("turns")
    assert router.post(PATH, CHAT).json()["choices"][0]["message"]["content"] == "turns"
    assert router.events(PATH, CHAT | {"stream": True}, is_done=True)[0]["object"] == "chat.completion.chunk"


def test_a_completion_body(router: RunningRouter) -> None:
    router.says("turns")
    assert router.post(PATH, {"prompt": "the"}).json()["choices"][0]["text"] == "turns"


def test_errors_in_the_face_of_the_body(router: RunningRouter) -> None:
    native = router.post(PATH, {"inputs": ""})
    assert native.status_code == 422 and native.json()["error_type"] == "validation"
    openai = router.post(PATH, CHAT | {"top_p": 2})
    assert openai.status_code == 400 and openai.json()["error"]["param"] == "top_p"
    neither = router.post(PATH, {"text": "a"})
    assert neither.status_code == 422 and neither.json()["error_type"] == "validation"
