"""Bodies of POST /v1/responses as chat requests, and the captured requests of Codex."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pantheon.errors import BadRequest
from pantheon.serve.responses_items import seal, unseal
from pantheon.serve.responses_request import ResponsesRequest, parse_responses_request

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def parse(**body: Any) -> ResponsesRequest:
    return parse_responses_request({"input": "hi", **body})


def messages(items: Any, **body: Any) -> list[dict[str, Any]]:
    return parse(input=items, **body).chat.messages


def test_items_of_one_turn_are_one_message() -> None:
    found = messages(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "text"},
            {"type": "web_search_call", "id": "ws_1"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_image", "image_url": "x"}]},
            {"role": "assistant", "content": "done"},
        ],
        instructions="be brief",
    )
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert found[1]["content"] == "ab" and found[2]["reasoning_content"] == "hm" and found[2]["content"] == "Look."
    calls = [call["function"] for call in found[2]["tool_calls"]]
    assert calls == [{"name": "f", "arguments": '{"x": 1}'}, {"name": "g", "arguments": '{"input": "text"}'}]
    assert found[3] == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    assert "text only" in found[4]["content"] and found[5]["content"] == "done"


def test_turns_are_kept_apart() -> None:
    items = [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": "after the call"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "again"}]},
        {"role": "assistant", "content": "x"},
    ]
    found = messages(items)
    assert [("tool_calls" in m, m["content"]) for m in found] == [(True, None), (False, "after the call"), (False, "x")]
    assert found[2]["reasoning_content"] == "again"


@given(st.text())
def test_a_sealed_thought_comes_back(thought: str) -> None:
    assert unseal(seal(thought)) == thought


@pytest.mark.parametrize("data", [None, 5, "", "gAAAAB", "pantheon1.", "pantheon1.!!", "pantheon1.AAAA"])
def test_what_another_server_sealed_is_ignored(data: Any) -> None:
    assert not unseal(data)
    item = {"type": "reasoning", "summary": [], "encrypted_content": data}
    assert [m["role"] for m in messages([item, {"role": "user", "content": "x"}])] == ["user"]


def test_fields_go_to_the_chat() -> None:
    asked = parse(
        model="m", max_output_tokens=7, reasoning={"effort": "low", "summary": "auto"}, temperature=0.5, top_p=0.9,
        parallel_tool_calls=False, tools=[FUNCTION], tool_choice={"type": "function", "name": "f"},
        prompt_cache_key="k", stream=True, include=["reasoning.encrypted_content"],
    )  # fmt: skip
    chat = asked.chat
    assert (chat.model, chat.max_tokens, chat.stream, chat.parallel_tool_calls) == ("m", 7, True, False)
    assert chat.template_kwargs["reasoning_effort"] == "low" and chat.params.temperature == 0.5
    assert (chat.tool_choice, chat.tool_name, chat.session_id) == ("named", "f", "k")
    assert asked.summary and asked.seal


def test_tools_of_the_same_name_in_two_namespaces_are_told_apart() -> None:
    space = {"type": "namespace", "name": "n", "tools": [FUNCTION]}
    asked = parse(tools=[FUNCTION, space])
    assert [tool["function"]["name"] for tool in asked.chat.tools] == ["f", "n__f"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"}
    [message] = messages([call], tools=[FUNCTION, space])
    assert message["tool_calls"][0]["function"]["name"] == "n__f"


def test_a_last_answer_is_not_gone_on_with() -> None:
    asked = parse(input=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert "continue_final" not in asked.chat.template_kwargs


def test_allowed_tools_are_those_that_are_offered() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    asked = parse(tools=[FUNCTION, {**FUNCTION, "name": "g"}], tool_choice=choice)
    assert [tool["function"]["name"] for tool in asked.chat.tools] == ["g"] and asked.chat.tool_choice == "required"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "mystery"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"instructions": 5}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"reasoning": {"effort": "mega"}}, "reasoning.effort"),
        ({"reasoning": 1}, "reasoning"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [1]}]}, "tools[0].tools[0]"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"metadata": 1}, "metadata"),
        ({"include": 1}, "include"),
    ],
)
def test_faults_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as fault:
        parse(**body)
    assert fault.value.param == param and fault.value.message.startswith(param.split("[")[0].split(".")[0])


def test_the_echo_is_json() -> None:
    asked = parse(tools=[FUNCTION], text={"verbosity": "low"}, metadata={})
    assert json.loads(json.dumps(asked.echo))["tools"] == [FUNCTION]
