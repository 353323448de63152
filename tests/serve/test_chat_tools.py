"""Tool calls and enforced formats through the chat API [B08, B09, B17, M044]."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.api_server import WEATHER, Api, scripted

HERMES_TEMPLATE = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"  # noqa: E501
LLAMA_TEMPLATE = '{% for t in tools or [] %}{"name": "x", "parameters": {{ t | tojson }}}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}'  # noqa: E501
CALL = ["<tool_", 'call>\n{"name": "get_wea', 'ther", "argum', 'ents": {"city": "Os', 'lo"}}\n</tool', "_call>"]
TWO = [*CALL, "\n", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>']
TOOLS = [WEATHER]


def message(api: Api, **body: Any) -> tuple[dict[str, Any], str]:
    choice = api.whole(**body)["choices"][0]
    return choice["message"], choice["finish_reason"]


def test_two_calls_whole_and_streamed_B17() -> None:
    with scripted(*TWO) as api:
        whole, reason = message(api, tools=TOOLS)
        stream = api.stream(tools=TOOLS)
        assert reason == stream.finish == "tool_calls"
        assert whole["content"] is None and stream.text() == ""
        calls = whole["tool_calls"]
        assert [call["type"] for call in calls] == ["function", "function"]
        assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Oslo", "Rome"]
        assert len({call["id"] for call in calls} | {call["id"] for call in stream.calls()}) == 4
        for call, streamed in zip(calls, stream.calls(), strict=True):
            assert call["function"] == {"name": streamed["name"], "arguments": streamed["arguments"]}
        assert api.stream(tools=TOOLS, stream_options={"include_usage": True}).chunks[-1]["usage"]["total_tokens"] > 8


def test_text_before_a_call_is_kept() -> None:
    with scripted("Let me look.\n", *CALL) as api:
        whole, reason = message(api, tools=TOOLS)
        assert whole["content"].strip() == "Let me look." and len(whole["tool_calls"]) == 1
        assert reason == "tool_calls"


def test_one_call_when_parallel_calls_are_off_B09d() -> None:
    with scripted(*TWO) as api:
        whole, reason = message(api, tools=TOOLS, parallel_tool_calls=False)
        stream = api.stream(tools=TOOLS, parallel_tool_calls=False)
        assert len(whole["tool_calls"]) == len(stream.calls()) == 1
        assert reason == stream.finish == "tool_calls"


def test_tool_choice_none_leaves_the_tools_out_B09c() -> None:
    with scripted("fine", template=HERMES_TEMPLATE) as api:
        none = api.whole(tools=TOOLS, tool_choice="none")
        assert none["usage"] == api.whole()["usage"]
        assert api.whole(tools=TOOLS)["usage"]["prompt_tokens"] > none["usage"]["prompt_tokens"]
    with scripted(*CALL) as api:
        whole, reason = message(api, tools=TOOLS, tool_choice="none")
        assert "tool_calls" not in whole and reason == "stop"


@pytest.mark.parametrize("text", ["<tool_call>\n{oops\n</tool_call>", "<tool_call>", '<tool_call>{"name": 5}'])
def test_malformed_calls_stay_text_M123(text: str) -> None:
    with scripted(*text) as api:
        whole, reason = message(api, tools=TOOLS)
        assert (whole["content"], reason) == (text, "stop") and "tool_calls" not in whole
        assert api.stream(tools=TOOLS).text() == text


def test_without_tools_markup_is_text() -> None:
    with scripted(*CALL) as api:
        whole, reason = message(api)
        assert whole["content"] == "".join(CALL) and reason == "stop"


def test_bare_json_is_a_call_only_by_the_name_of_a_tool() -> None:
    with scripted('{"name": "get_weather", ', '"parameters": {"city": "Oslo"}}', template=LLAMA_TEMPLATE) as api:
        whole, reason = message(api, tools=TOOLS)
        assert whole["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        assert reason == "tool_calls"
    with scripted('{"name": "Bob", "age": 3}', template=LLAMA_TEMPLATE) as api:
        whole, reason = message(api, tools=TOOLS)
        assert (whole["content"], reason) == ('{"name": "Bob", "age": 3}', "stop")


def test_cap_inside_a_call_is_length() -> None:
    """The call as far as it got, as OpenAI does; before its arguments it is text."""
    with scripted(*CALL) as api:
        whole, reason = message(api, tools=TOOLS, max_tokens=3)
        assert reason == "length" and "tool_calls" not in whole and whole["content"] == "".join(CALL[:3])
        whole, reason = message(api, tools=TOOLS, max_tokens=4)
        assert reason == "length" and whole["content"] is None
        assert whole["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Os'}
        stream = api.stream(tools=TOOLS, max_tokens=4)
        assert (stream.finish, stream.calls()[0]["arguments"]) == ("length", '{"city": "Os')


def test_arguments_are_streamed_as_they_come() -> None:
    with scripted(*CALL) as api:
        parts = [part for choice in api.stream(tools=TOOLS).choices() for part in choice["delta"].get("tool_calls", [])]
        assert [part["function"]["arguments"] for part in parts] == ["", '{"city": "Os', 'lo"}']


def test_a_call_that_breaks_within_its_arguments_is_a_call() -> None:
    with scripted('<tool_call>{"name": "get_weather", "arguments": {"city": Os', "lo}}</tool_call>") as api:
        whole, reason = message(api, tools=TOOLS)
        assert reason == "tool_calls" and whole["content"] is None
        assert whole["tool_calls"][0]["function"]["arguments"] == '{"city": Oslo}}'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_forced_call_of_a_model_that_would_rather_talk_B09a(choice: Any) -> None:
    time = {"type": "function", "function": {"name": "get_time", "parameters": _enum("zone", "utc")}}
    with scripted("It is sunny.", eog=True) as api:
        tools = [time] if choice == "required" else [WEATHER, time]
        whole, reason = message(api, tools=tools, tool_choice=choice, max_tokens=600, temperature=0)
        assert reason == "tool_calls"
        (call,) = whole["tool_calls"][:1]
        assert call["function"]["name"] == "get_time"
        assert json.loads(call["function"]["arguments"]) == {"zone": "utc"}
        stream = api.stream(tools=tools, tool_choice=choice, max_tokens=600, temperature=0)
        assert stream.finish == "tool_calls" and stream.calls()[0]["name"] == "get_time"


def _enum(key: str, value: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "enum": [value]}}
    return {"type": "object", "properties": properties, "required": [key], "additionalProperties": False}


def test_schema_is_enforced_on_prose_B08c() -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": _enum("city", "Oslo")}}
    with scripted("Once upon a time") as api:
        whole, reason = message(api, response_format=asked, temperature=0)
        assert (json.loads(whole["content"]), reason) == ({"city": "Oslo"}, "stop")
        assert json.loads(api.stream(response_format=asked, temperature=0).text()) == {"city": "Oslo"}
    # beside tools the answer is of the format or a call, whichever the model is for
    with scripted('{"city": "Oslo"}') as api:
        both, reason = message(api, response_format=asked, tools=TOOLS, temperature=0)
        assert (json.loads(both["content"]), reason) == ({"city": "Oslo"}, "stop")
    with scripted('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>') as api:
        for choice in ("auto", "none"):
            both, reason = message(api, response_format=asked, tools=TOOLS, tool_choice=choice, temperature=0)
            assert reason == ("tool_calls" if choice == "auto" else "stop")
            assert both["content"] is None if choice == "auto" else json.loads(both["content"]) == {"city": "Oslo"}


def test_a_strict_tool_gets_what_its_schema_says() -> None:
    """The call is the model's own idea; within it the schema is enforced."""
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": _enum("zone", "utc")}}
    with scripted(*'Well. <tool_call>\n{"name": "f", "arguments": {"zone": 5}}\n</tool_call>', eog=True) as api:
        whole, reason = message(api, tools=[tool], temperature=0)
        assert reason == "tool_calls" and whole["content"].strip() == "Well."
        assert json.loads(whole["tool_calls"][0]["function"]["arguments"]) == {"zone": "utc"}
    with scripted("Nothing to call.") as api:
        assert message(api, tools=[tool])[0]["content"] == "Nothing to call."
        bad = {**tool["function"], "parameters": {"type": "nonsense"}}  # type: ignore[dict-item]
        answer = api.chat(tools=[{"type": "function", "function": bad}])
        assert (answer.status, answer.json()["error"]["param"]) == (400, "tools")


def test_json_object_B08b() -> None:
    with scripted('{"a"', ": [1, 2]}", " and more") as api:
        whole, reason = message(api, response_format={"type": "json_object"})
        assert (json.loads(whole["content"]), reason) == ({"a": [1, 2]}, "stop")
        assert message(api, response_format={"type": "text"})[0]["content"].endswith("and more")


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_schema_is_400_and_harms_nobody_B08d(stream: bool) -> None:
    broken = {"type": "nonsense", "$ref": "#/definitions/missing"}
    with scripted("x") as api:
        answer = api.chat(
            stream=stream, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": broken}}
        )
        assert (answer.status, answer.json()["error"]["param"]) == (400, "response_format")
        assert api.whole()["choices"][0]["message"]["content"] == "x"


def test_a_name_that_is_no_tool_B09b() -> None:
    with scripted("x") as api:
        answer = api.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "nope"}})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "tool_choice")


def test_tools_of_every_shape_are_accepted() -> None:
    bare = {"type": "function", "function": {"name": "list_agents"}}
    odd = {"type": "function", "function": {"name": "f", "parameters": {"type": ["object", "null"], "x-y": 1}}}
    with scripted("x", template=HERMES_TEMPLATE) as api:
        assert api.whole(tools=[WEATHER, bare, odd], tool_choice="auto")["choices"][0]["finish_reason"] == "stop"
