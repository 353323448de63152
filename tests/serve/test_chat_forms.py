"""Forms of the chat API off its main road: the first function-calling API, allowed tools, thoughts by request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pantheon.errors import BadRequest
from pantheon.serve.chat_request import parse_chat_request
from tests.serve.api_server import USER, WEATHER, Api, scripted

CALL = ["<tool_call>\n", '{"name": "get_weather", "argum', 'ents": {"city": "Os', 'lo"}}\n</tool', "_call>"]
TIME = {"type": "function", "function": {"name": "get_time"}}
FUNCTION = WEATHER["function"]
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


def parsed(**body: Any) -> Any:
    return parse_chat_request({"messages": USER, **body})


def test_functions_are_tools_and_are_answered_as_functions() -> None:
    with scripted(*CALL) as api:
        choice = api.whole(functions=[FUNCTION], function_call="auto")["choices"][0]
        assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
        assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        stream = api.stream(functions=[FUNCTION])
        parts = [c["delta"]["function_call"] for c in stream.choices() if "function_call" in c["delta"]]
        assert parts[0] == {"name": "get_weather", "arguments": ""} and stream.finish == "function_call"
        assert "".join(part["arguments"] for part in parts) == '{"city": "Oslo"}'
        none = api.whole(functions=[FUNCTION], function_call="none")["choices"][0]
        assert "function_call" not in none["message"] and none["finish_reason"] == "stop"


def test_a_named_function_is_forced() -> None:
    with scripted("I would rather talk.") as api:
        body = {"functions": [FUNCTION], "function_call": {"name": "get_weather"}, "max_tokens": 400}
        message = api.whole(**body)["choices"][0]["message"]
        assert message["function_call"]["name"] == "get_weather"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": [FUNCTION], "tools": [WEATHER]}, "functions"),
        ({"functions": [{}]}, "functions"),
        ({"functions": 5}, "functions"),
        ({"functions": [FUNCTION], "function_call": 5}, "function_call"),
        ({"functions": [FUNCTION], "function_call": {"name": "f"}}, "tool_choice"),
    ],
)
def test_bad_functions_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parsed(**body)
    assert caught.value.param == param


def prompt_of(api: Api, messages: list[dict[str, Any]]) -> str:
    model = api.app.registry.all_entries()[0].model
    assert model is not None
    return model.prompt(messages).text


def test_calls_and_results_of_the_first_api_are_history_like_any_other() -> None:
    call = {"name": "f", "arguments": '{"a":  1}'}
    old = [
        *USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "12 C"},
    ]
    new = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "12 C"},
    ]
    with scripted("ok") as api:
        assert prompt_of(api, old) == prompt_of(api, new) and '{"a": 1}' in prompt_of(api, old)
        assert api.chat(messages=old).status == 200
        lost = [*USER, {"role": "function", "name": "f", "content": "12 C"}]
        assert "12 C" in prompt_of(api, lost)
        answer = api.chat(messages=[*USER, {"role": "assistant", "function_call": "f"}])
        assert (answer.status, answer.json()["error"]["param"]) == (400, "messages[1].tool_calls[0].function")


def test_allowed_tools_leave_the_others_out() -> None:
    one = {"type": "function", "function": {"name": "get_time"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
    chat = parsed(tools=[WEATHER, TIME], tool_choice=choice)
    assert chat.tool_choice == "required" and [tool["function"]["name"] for tool in chat.tools] == ["get_time"]
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    chat = parsed(tools=[WEATHER, TIME], tool_choice=flat)
    assert chat.tool_choice == "auto" and [tool["function"]["name"] for tool in chat.tools] == ["get_time"]
    assert parsed(tools=[WEATHER], tool_choice="any").tool_choice == "required"
    for tools in ([{"name": "nope"}], [5], 7):
        with pytest.raises(BadRequest) as caught:
            parsed(tools=[WEATHER], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": tools})
        assert str(caught.value.param).startswith("tool_choice")


def test_reasoning_format_none_leaves_the_thought_in_the_text() -> None:
    with scripted("<think>", "why", "</think>", "\n\nso") as api:
        plain = api.whole()["choices"][0]["message"]
        assert (plain["reasoning_content"], plain["content"]) == ("why", "so")
        raw = api.whole(reasoning_format="none")["choices"][0]["message"]
        assert raw["content"] == "<think>why</think>\n\nso" and "reasoning_content" not in raw
        assert api.chat(reasoning_format="morse").json()["error"]["param"] == "reasoning_format"


@pytest.mark.parametrize("field", ["thinking_budget", "thinking_budget_tokens", "reasoning_budget"])
def test_a_thought_has_no_more_tokens_than_it_may(field: str) -> None:
    with scripted(*"endless thoughts", template=THINKS) as api:
        answer = api.whole(max_tokens=40, **{field: 3})["choices"][0]["message"]
        assert answer["reasoning_content"] == "end" and "less" not in answer["reasoning_content"]
        free = api.whole(max_tokens=40, **{field: -1})["choices"][0]["message"]
        assert free["reasoning_content"].startswith("endless")
        schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        held = api.whole(max_tokens=400, response_format=form, temperature=0, **{field: 2})["choices"][0]["message"]
        assert held["reasoning_content"] == "en" and json.loads(held["content"]) == {"a": 1}
