"""Messages as clients send them become what a template takes, or a 400 that names the field (B01-B04, B35)."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pantheon.errors import BadRequest
from pantheon.text.chat_template import CHATML, ChatTemplate, TemplateError
from pantheon.text.messages import ROLES, normalise, render

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + STRICT
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
DROPS_SYSTEM = (
    "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
WALKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for tc in m.tool_calls or [] %}"
    "{% set tc = tc.function if tc.function else tc %}<function={{ tc.name }}>"
    "{% for k, v in tc.arguments|items %}<p={{ k }}>{{ v }}</p>{% endfor %}{% endfor %}{% endfor %}"
)
SHOWS = "{{% for m in messages %}}{{% for c in m.tool_calls or [] %}}{0}{{% endfor %}}{{% endfor %}}"
ASKED = {"role": "user", "content": "Weather?"}


def call(arguments: Any = '{"city":"Oslo"}', call_id: str | None = "call_abc123") -> dict[str, Any]:
    found = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return found if call_id is None else {"id": call_id, **found}


def loop(**assistant: Any) -> list[dict[str, Any]]:
    """The second turn of a tool loop."""
    turn = {"role": "assistant", "tool_calls": [call()], **assistant}
    return [ASKED, turn, {"role": "tool", "tool_call_id": "call_abc123", "content": "12 C, rain"}]


def shown(messages: Any, source: str = PLAIN, **kwargs: Any) -> str:
    template = ChatTemplate(source)
    before = copy.deepcopy(messages)
    ready = normalise(messages, template, **kwargs)
    assert messages == before
    assert normalise(ready, template, **kwargs) == ready
    return render(template, ready, None)


# -- B01 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined(role: str) -> None:
    """B01a: for every role, in order."""
    parts = [{"type": "text", "text": "part one "}, {"type": "text", "text": "part two"}]
    listed = [ASKED, {"role": role, "content": parts}]
    joined = [ASKED, {"role": role, "content": "part one part two"}]
    assert shown(listed) == shown(joined)
    assert "part one part two" in shown(listed)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "type"),
        ({"type": "input_audio"}, "type"),
        ({"text": "no type"}, "type"),
        ({"type": ["text"]}, "type"),
        ({"type": "text"}, "text"),
        ({"type": "text", "text": 3}, "text"),
    ],
)
def test_parts_of_no_use_are_named(part: Any, field: str) -> None:
    """B01b."""
    with pytest.raises(BadRequest) as refused:
        normalise([{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}], ChatTemplate(PLAIN))
    assert refused.value.param == f"messages[0].content[1].{field}"
    assert "messages[0].content[1]" in refused.value.message


# -- B02 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [CHATML, PLAIN, NO_SYSTEM, WALKS])
@pytest.mark.parametrize("assistant", [{"content": None}, {}, {"content": ""}])
def test_calls_without_content(assistant: dict[str, Any], source: str) -> None:
    """B02a, B02b: the call and its result reach the prompt in order, and a null never prints; templates that have no
    words for calls (PLAIN) included."""
    text = shown(loop(**assistant), source)
    assert text.index("get_weather") < text.index("Oslo") < text.index("12 C, rain")
    assert "None" not in text and "null" not in text


def test_an_empty_result_and_an_empty_answer() -> None:
    """B02b, B21c: content "" or null of an answer that was cut inside its thought may come back."""
    messages = loop()
    messages[2]["content"] = ""
    assert "<tool_response>\n\n</tool_response>" in shown(messages, CHATML)
    assert shown([ASKED, {"role": "assistant", "content": None}, ASKED]) == "[user]Weather?[assistant][user]Weather?"


def test_nulls_and_empty_calls_are_dropped_and_the_rest_is_kept() -> None:
    message = {
        "role": "assistant", "content": "a", "name": "n", "refusal": None, "tool_calls": [], "reasoning": "r",
        "extra": {"x": 1},
    }  # fmt: skip
    ready = normalise([ASKED, message], ChatTemplate(PLAIN))[1]
    assert ready == {
        "role": "assistant", "content": "a", "name": "n", "reasoning": "r", "reasoning_content": "r", "extra": {"x": 1},
    }  # fmt: skip


# -- B03 -------------------------------------------------------------------------------------------------------------


def test_developer_is_system_unless_the_template_knows_it() -> None:
    """B03a."""
    developer = [{"role": "developer", "content": "One word."}, ASKED]
    system = [{"role": "system", "content": "One word."}, ASKED]
    assert shown(developer) == shown(system) == "[system]One word.[user]Weather?"
    knows = PLAIN + "{{ '' if messages[0]['role'] == 'developer' }}"
    assert shown(developer, knows) == "[developer]One word.[user]Weather?"


@pytest.mark.parametrize("role", ["narrator", "User", "", None, 3, ["user"]])
def test_made_up_roles_are_refused(role: Any) -> None:
    """B03b."""
    with pytest.raises(BadRequest) as refused:
        normalise([{"role": role, "content": "x"}, ASKED], ChatTemplate(PLAIN))
    assert refused.value.param == "messages[0].role"
    assert all(known in refused.value.message for known in ROLES)


@pytest.mark.parametrize("source", [SYSTEM_FIRST, DROPS_SYSTEM])
def test_system_turns_are_merged_where_only_the_first_counts(source: str) -> None:
    """B03: refused or dropped without a word, both lead to one leading system turn."""
    messages = [{"role": "system", "content": "S1"}, ASKED, {"role": "developer", "content": "S2"}]
    assert "S1\n\nS2" in shown(messages, source)
    assert shown(messages) == "[system]S1[user]Weather?[system]S2"


# -- B04 -------------------------------------------------------------------------------------------------------------


def test_neighbours_are_merged_only_where_they_are_refused() -> None:
    """B04b."""
    messages = [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
    assert shown(messages) == "[user]A[user]B"
    assert shown(messages, STRICT) == "[user]A\n\nB"


def test_a_system_text_finds_its_place_in_the_first_user_turn() -> None:
    """B04a: Gemma-2 has no system role."""
    messages = [{"role": r, "content": c} for r, c in (("system", "Be brief."), ("user", "A"), ("user", "B"))]
    assert shown(messages, NO_SYSTEM) == "[user]Be brief.\n\nA\n\nB"
    assert shown([{"role": "system", "content": "Alone"}], NO_SYSTEM) == "[user]Alone"


def test_what_no_form_satisfies_is_400_with_the_templates_words() -> None:
    with pytest.raises(TemplateError, match="roles must alternate") as refused:
        normalise([{"role": "assistant", "content": "first"}, ASKED], ChatTemplate(STRICT))
    assert (refused.value.status, refused.value.type) == (400, "invalid_request_error")
    assert refused.value.param == "messages"


def test_a_template_that_spends_too_much_is_tried_once() -> None:
    class Spends:
        source = "tool_calls"
        tries = 0

        def render(self, *_: Any, **__: Any) -> str:
            self.tries += 1
            raise TemplateError("too slow", refused=False)

    template = Spends()
    with pytest.raises(TemplateError, match="too slow"):
        normalise([ASKED, ASKED], template)
    assert template.tries == 1


# -- B35 -------------------------------------------------------------------------------------------------------------


def test_arguments_are_a_mapping() -> None:
    """B35a."""
    assert "<function=get_weather><p=city>Oslo</p>" in shown(loop(), WALKS)
    assert shown(loop(), SHOWS.format("{{ c.arguments.city }}{{ c.function.arguments.city }}{{ c.name }}")) == (
        "OsloOsloget_weather"
    )


@pytest.mark.parametrize(
    "form",
    [
        "{{ c.function.arguments }}", "{{ '' + c.function.arguments }}", "{{ c.function.arguments + '' }}",
        "{{ c.function.arguments ~ '' }}", "{{ c.function.arguments | tojson }}", "{{ c.function.arguments | string }}",
        "{{ c.arguments if c.arguments is string else c.arguments | tojson }}",
    ],
)  # fmt: skip
def test_templates_that_print_arguments_get_json(form: str) -> None:
    """B35: valid JSON text, not Python's."""
    messages = loop(tool_calls=[call('{"city": "Zürich", "ok": true, "n": null}')])
    assert json.loads(shown(messages, SHOWS.format(form))) == {"city": "Zürich", "ok": True, "n": None}


def test_printed_arguments_are_the_clients_text() -> None:
    text = '{ "b":1,"a" : 2 }'
    assert shown(loop(tool_calls=[call(text)]), SHOWS.format("{{ c.arguments }}")) == text


def test_a_printed_call_is_what_the_client_sent() -> None:
    printed = json.loads(shown(loop(), SHOWS.format("{{ c | tojson }}")))
    assert printed == call({"city": "Oslo"})


@pytest.mark.parametrize("arguments", ["", None, "  ", "null"])
def test_no_arguments_are_an_empty_mapping(arguments: Any) -> None:
    """B35b."""
    messages = loop(tool_calls=[call(arguments)])
    assert "<function=get_weather>[tool]" in shown(messages, WALKS)
    assert shown(messages, SHOWS.format("{{ c.arguments | tojson }}")) == "{}"


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]", "3", "Oslo", "[" * 100_000])
def test_arguments_that_do_not_parse_stay_text(arguments: str) -> None:
    """B35: they reach a template that prints text and do not crash one that walks a mapping."""
    messages = loop(tool_calls=[call(arguments)])
    assert shown(messages, SHOWS.format("{{ c.function.arguments }}")) == arguments
    assert arguments in shown(messages, WALKS)


# -- calls that some templates refuse --------------------------------------------------------------------------------


MISTRAL = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if not c.id is defined or c.id | length != 9 %}"
    "{{ raise_exception('ids of 9') }}{% endif %}<{{ c.id }}>{% endfor %}{% if m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('ids of 9') }}{% endif %}"
    "({{ m.tool_call_id }}){% endif %}{% endfor %}"
)


@pytest.mark.parametrize("ids", [("call_abc123", "call_abc123"), (None, None), ("short", "short"), (None, "x")])
def test_mistral_ids_are_nine_characters(ids: tuple[str | None, str | None]) -> None:
    messages = loop(tool_calls=[call(call_id=ids[0])])
    messages[2]["tool_call_id"] = ids[1]
    text = shown(messages, MISTRAL)
    given, answered = text[1:10], text[12:21]
    assert given.isalnum() and answered.isalnum()
    assert (given == answered) == (ids[0] == ids[1])


def test_ids_that_fit_are_kept() -> None:
    messages = loop(tool_calls=[call(call_id="abcdef123")])
    messages[2]["tool_call_id"] = "abcdef123"
    assert shown(messages, MISTRAL) == "<abcdef123>(abcdef123)"


def test_parallel_calls_go_one_by_one_where_refused() -> None:
    """Llama-3 takes one call at a time."""
    single = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one') }}"
        "{% endif %}{{ m.tool_calls[0].id if m.tool_calls else m.content }};{% endfor %}"
    )
    messages = loop(tool_calls=[call(call_id="a"), call(call_id="b")])[:2]
    messages += [{"role": "tool", "tool_call_id": i, "content": f"r{i}"} for i in "ba"] + [ASKED]
    assert shown(messages, single) == "Weather?;a;ra;b;rb;Weather?;"


def test_tools_of_hermes_may_not_be_none() -> None:
    assert shown([ASKED], "{% for t in tools %}{{ t }}{% endfor %}" + PLAIN) == "[user]Weather?"


# -- malformed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"), ("hi", "messages"), ({}, "messages"), ([], "messages"),
        (["hi"], "messages[0]"), ([ASKED, None], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"), ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "tool", "tool_call_id": "1"}], "messages[0].content"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "tool", "content": "x", "tool_call_id": 3}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": [call(3)]}], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": [{**call(), "id": 3}]}], "messages[0].tool_calls[0].id"),
    ],
)  # fmt: skip
def test_malformed_messages_are_named(messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        normalise(messages, ChatTemplate(PLAIN))
    assert refused.value.param == param and param in refused.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "id"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from([*ROLES, "x"])}, optional={
    "content": JSON, "tool_calls": st.lists(st.just(call()) | JSON, max_size=3), "name": JSON, "tool_call_id": JSON,
})  # fmt: skip


compiled = lru_cache(ChatTemplate)


@settings(deadline=None, max_examples=200)
@given(st.lists(MESSAGE, max_size=4) | JSON, st.sampled_from([PLAIN, STRICT, NO_SYSTEM, WALKS, MISTRAL, CHATML]))
def test_anything_is_rendered_or_refused(messages: Any, source: str) -> None:
    """Never anything but a BadRequest; the input stays as it was."""
    before = copy.deepcopy(messages)
    template = compiled(source)
    try:
        ready = normalise(messages, template)
    except BadRequest as fault:
        assert fault.param
    else:
        render(template, ready, None)
    assert messages == before
