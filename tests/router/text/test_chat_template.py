"""Templates from all their places, rendered as transformers renders them, in bounds."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from headrace_router.errors import StartupError, TemplateError
from headrace_router.text.chat_template import MAX_LOOP_TURNS, MAX_PROMPT_CHARS, ChatTemplate
from transformers.utils.chat_template_utils import render_jinja_template

from tests.tiny import CHAT_TEMPLATE

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Wer <b> da?"},
    {"role": "assistant", "content": "Ich. "},
]

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ulm", "days": [1, 2]}'},
}
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "fair", "name": "weather", "tool_call_id": "call_1"},
]

WRITTEN_FOR_TRANSFORMERS = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{{ bos_token }}
{% for message in loop_messages %}
    {% if message['role'] == 'tool' %}
        {% continue %}
    {% endif %}
    {% if message.tool_calls is defined and message.tool_calls %}
{{ message.tool_calls | tojson(indent=2) }}
    {% endif %}
{% generation %}
[{{ message['role'] | upper }}] {{ (message['content'] or '') | trim }}{{ eos_token }}
{% endgeneration %}
    {% if loop.last %}
({{ loop.index }} of {{ loop.length }}, {{ messages[::-1] | length }})
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
[ASSISTANT]{{ ' ' ~ mood if mood is defined }}
{%- endif %}
"""


def of_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    # Its annotations are not those of what it takes and returns.
    render: Any = render_jinja_template
    ((prompt,), _) = render(conversations=[messages], chat_template=source, **options)
    assert isinstance(prompt, str)
    return prompt


def clock(form: str) -> str:
    return datetime(2024, 7, 4).strftime(form)


def rendered(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, clock).render(CHAT if messages is None else messages, **options)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, WRITTEN_FOR_TRANSFORMERS])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("has_system", [False, True])
def test_prompts_are_those_of_transformers(
    source: str, add_generation_prompt: bool, has_system: bool
) -> None:
    messages = [{"role": "system", "content": " Sei nett. "}] * has_system + CHAT
    options: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_generation_prompt": add_generation_prompt,
    }
    expected = of_transformers(source, messages, mood="friendly", **options)
    assert ChatTemplate(source, clock).render(messages, kwargs={"mood": "friendly"}, **options) == expected


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, WRITTEN_FOR_TRANSFORMERS])
def test_a_continued_message_is_left_open(source: str) -> None:
    expected = of_transformers(source, CHAT, continue_final_message=True, bos_token="", eos_token="")
    prompt = rendered(source, add_generation_prompt=False, continue_final_message=True)
    assert prompt == expected and prompt.rstrip().endswith("Ich.")


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    with pytest.raises(TemplateError, match="no content to continue"):
        rendered(CHAT_TEMPLATE, [{"role": "assistant", "content": ""}], continue_final_message=True)
    with pytest.raises(TemplateError, match="changes its text"):
        rendered("{{ messages[-1].content | length }}", continue_final_message=True)


def test_the_words_of_the_template_come_through() -> None:
    with pytest.raises(TemplateError) as caught:
        rendered("{{ raise_exception('only user and assistant') }}")
    assert caught.value.message == "Template error: only user and assistant"
    assert (caught.value.status, caught.value.openai_status) == (422, 400)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ {}['x'] + 1 }}", "has no attribute 'x'"),
        ("{{ strftime_now(5) }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ messages | tojson(indent='x' ~ messages) | first | nothing }}", "nothing"),
    ],
)
def test_whatever_goes_wrong_is_an_error_of_the_request(source: str, message: str) -> None:
    try:
        template = ChatTemplate(source, clock)
    except jinja2.TemplateSyntaxError as error:
        assert message in str(error)
        return
    with pytest.raises(TemplateError, match=message):
        template.render(CHAT)


def test_loops_end() -> None:
    with pytest.raises(TemplateError, match=f"exceed {MAX_LOOP_TURNS} turns"):
        rendered("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}")
    macro = "{% for i in range(9999) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endfor %}"
    with pytest.raises(TemplateError, match="turns"):
        rendered(f"{{% macro f(n) %}}{macro}{{% endmacro %}}{{{{ f(3) }}}}")


def test_each_rendering_has_its_own_turns() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}done", clock)
    assert {template.render(CHAT) for _ in range(12)} == {"done"}


def test_prompts_end() -> None:
    with pytest.raises(TemplateError, match=f"exceeds {MAX_PROMPT_CHARS} characters"):
        rendered("{% for i in range(99999) %}{{ 'long' * 1000 }}{% endfor %}")


def test_loops_know_where_they_are() -> None:
    source = (
        "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
        "{{ loop.previtem.role if not loop.first }};{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
        "{% for x in [] %}{% else %}none{% endfor %}{% for m in messages if m.role == 'user' %}{{ m.role }}"
        "{% endfor %}{% for a in [1, [2, [3]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}"
    )
    assert rendered(source) == "0TrueFalse2;1FalseTrue2user;a1noneuser123"


def test_json_is_not_escaped_and_time_is_given() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }} {{ strftime_now('%d %b %Y') }}", clock)
    assert template.render(CHAT) == '{"role": "user", "content": "Wer <b> da?"} 04 Jul 2024'


def test_missing_tokens_are_empty_and_variables_stay_what_they_are() -> None:
    kwargs = {"flag": True, "bos_token": "mine", "messages": "mine"}
    source = "[{{ bos_token + eos_token }}]{{ flag }}{{ tools }}{{ messages | length }}"
    assert rendered(source, kwargs=kwargs) == "[]TrueNone2"


def test_arguments_are_objects_for_templates_that_can_do_with_them() -> None:
    source = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    assert json.loads(rendered(source, CALLS)) == {"city": "Ulm", "days": [1, 2]}


def test_arguments_are_strings_for_templates_that_join_them() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id + ':' + c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    assert rendered(source, CALLS) == 'call_1:{"city": "Ulm", "days": [1, 2]}'


def test_arguments_that_are_no_object_stay_strings() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"cut": '}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert rendered("{{ messages[0].tool_calls[0].function.arguments }}", messages) == '{"cut": '


def test_null_content_stays_only_for_templates_that_ask() -> None:
    assert rendered("{{ '<' + messages[1].content + '>' }}", CALLS) == "<>"
    assert rendered("{{ 'null' if messages[1]['content'] is none else 'text' }}", CALLS) == "null"


def test_names_and_ids_of_tools_reach_the_template() -> None:
    assert rendered("{{ messages[2].name }} {{ messages[2].tool_call_id }}", CALLS) == "weather call_1"


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{stem}.{suffix}").write_text(text)
    return folder


def test_the_template_is_found_in_its_order(tmp_path: Path) -> None:
    def found(config_path: Path | None = None) -> str | None:
        template = ChatTemplate.from_folder(tmp_path, config_path, strftime_now=clock)
        return template.render(CHAT) if template else None

    assert found() is None
    write(tmp_path, tokenizer_config_json={"chat_template": None})
    assert found() is None
    write(tmp_path, tokenizer_config_json={"chat_template": "config"})
    assert found() == "config"
    write(tmp_path, chat_template_json={"chat_template": "json"})
    assert found() == "json"
    write(tmp_path, chat_template_jinja="jinja")
    assert found() == "jinja"
    write(tmp_path, other_json={"chat_template": "other"})
    assert found(tmp_path / "other.json") == "other"
    write(tmp_path, other_json={})
    assert found(tmp_path / "other.json") == "jinja"
    with pytest.raises(StartupError, match="is not a file"):
        found(tmp_path / "nowhere.json")


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    template = ChatTemplate.from_folder(
        write(tmp_path, tokenizer_config_json={"chat_template": named}), strftime_now=clock
    )
    assert template is not None and template.render(CHAT) == "chat"
    write(tmp_path, tokenizer_config_json={"chat_template": named[:1]})
    assert ChatTemplate.from_folder(tmp_path, strftime_now=clock) is None


def test_a_template_that_is_none_stops_the_start(tmp_path: Path) -> None:
    write(tmp_path, chat_template_jinja="{% for %}")
    with pytest.raises(
        StartupError, match=r"chat_template\.jinja cannot be read: line 1: .*--tokenizer-config-path"
    ):
        ChatTemplate.from_folder(tmp_path, strftime_now=clock)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(StartupError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.from_folder(tmp_path, strftime_now=clock)
