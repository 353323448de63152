"""Bodies of POST /v1/messages as chat requests."""

from __future__ import annotations

from typing import Any

import pytest

from pantheon.errors import BadRequest
from pantheon.serve.chat_request import ChatRequest
from pantheon.serve.messages_request import parse_messages_request

SCHEMA = {"type": "object", "properties": {}}
TOOL = {"name": "f", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
HI = [{"role": "user", "content": "hi"}]


def parse(**body: Any) -> ChatRequest:
    return parse_messages_request({"max_tokens": 9, "messages": HI, **body})


def test_blocks_become_messages() -> None:
    given = [
        {"role": "user", "content": [{"type": "text", "text": t, "cache_control": {}} for t in "ab"]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"é": 1}},
                {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    chat = parse(messages=given, system=[{"type": "text", "text": "x"}, {"type": "text", "text": "y"}])
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    system, user, said, one, two, last = chat.messages
    assert (system["content"], user["content"], last["content"]) == ("x\n\ny", "a\n\nb", "and now?")
    assert said["content"] == "Look." and said["reasoning_content"] == "hm"
    calls = [(call["id"], call["function"]["arguments"]) for call in said["tool_calls"]]
    assert calls == [("t1", '{"é": 1}'), ("t2", "{}")]
    assert (one["tool_call_id"], one["content"], two["content"]) == ("t1", "1", "error")


def test_fields_go_to_the_chat() -> None:
    chat = parse(
        model="m", max_tokens=7, stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=5,
        stream=True, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True},
        metadata={"user_id": "user_1_session_2"},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
    )  # fmt: skip
    assert (chat.model, chat.max_tokens, chat.stop, chat.stream) == ("m", 7, ("a", "b"), True)
    assert (chat.params.temperature, chat.params.top_p, chat.params.top_k) == (0.5, 0.9, 5)
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.session_id) == ("required", False, "user_1_session_2")
    assert chat.tools[0]["function"]["parameters"] == SCHEMA and chat.response_format is not None
    assert chat.template_kwargs["reasoning_effort"] == "high"


@pytest.mark.parametrize(
    ("thinking", "on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 5}, True),
        ({"type": "adaptive"}, None),
    ],
)
def test_thinking_is_off_unless_asked_for(thinking: Any, on: bool | None) -> None:
    kwargs = parse(thinking=thinking).template_kwargs
    assert kwargs.get("enable_thinking") is on
    assert kwargs.get("thinking_budget") == (5 if thinking and "budget_tokens" in thinking else None)


def test_a_last_answer_is_gone_on_with() -> None:
    assert parse(messages=[*HI, {"role": "assistant", "content": "Dear"}]).template_kwargs["continue_final"] is True


def test_deferred_tools_are_offered_once_a_search_has_found_them() -> None:
    tools = [TOOL, {**TOOL, "name": "g", "defer_loading": True}]
    found = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": "g"}]}
    assert [tool["function"]["name"] for tool in parse(tools=tools).tools] == ["f"]
    chat = parse(tools=tools, messages=[*HI, {"role": "user", "content": [found]}])
    assert [tool["function"]["name"] for tool in chat.tools] == ["f", "g"] and chat.messages[-1]["content"] == "g"


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ("auto", None)),
        ({"type": "auto"}, ("auto", None)),
        ({"type": "none"}, ("none", None)),
        ({"type": "tool", "name": "f"}, ("named", "f")),
    ],
)
def test_choices_of_tools(choice: Any, wanted: tuple[str, str | None]) -> None:
    chat = parse(tools=[TOOL], tool_choice=choice)
    assert (chat.tool_choice, chat.tool_name) == wanted


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"system": 5}, "system"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": SCHEMA}]}, "tools[0].name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"metadata": 1}, "metadata"),
    ],
)
def test_faults_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as fault:
        parse(**body)
    assert fault.value.param == param and fault.value.message.startswith(param.split("[")[0].split(".")[0])
