"""POST /v1/responses over scripted models: items, events, usage, failures [issue 6, door of Codex]."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pantheon.serve.context import App
from pantheon.serve.generation import Delta, Result, Step
from pantheon.serve.responses_reply import ResponsesReply
from pantheon.serve.responses_request import parse_responses_request
from tests.serve.api_server import Api, answer_of, free, post_bytes, scripted, serving
from tests.serve.http_client import connect, read_until
from tests.serve.named_events import Event, events_of, types

CALL = ["<tool_", 'call>\n{"name": "get_wea', 'ther", "argum', 'ents": {"city": "Os', 'lo"}}\n</tool', "_call>"]
PATCH = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+é"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "get_weather", "description": "Weather", "parameters": CITY, "strict": False}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edit", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}  # noqa: E501
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def whole(api: Api, **body: Any) -> dict[str, Any]:
    """A response that must succeed, in the shape of the official client's types."""
    answer = api.post("/v1/responses", {"input": "hi", **body})
    assert answer.status == 200, answer.body
    reply: dict[str, Any] = answer.json()
    Response.model_validate(reply, strict=True)
    return reply


def stream(api: Api, **body: Any) -> list[Event]:
    """The events of one, numbered and in the shapes of the official client's types."""
    events = events_of(api.post("/v1/responses", {"input": "hi", "stream": True, **body}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        _EVENT.validate_python(event)
    return events


def bare(item: Any) -> Any:
    """An item without what differs each time."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def same(api: Api, **body: Any) -> dict[str, Any]:
    """A plain response; a streamed one must end with the same items, and its `done` events must have told them."""
    plain, events = whole(api, **body), stream(api, **body)
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{plain['status']}"
    assert [bare(item) for item in last["output"]] == [bare(item) for item in plain["output"]]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == last["output"]
    assert last["usage"]["output_tokens"] == plain["usage"]["output_tokens"]
    return plain


def test_text_whole_and_streamed() -> None:
    with scripted("Hel", "lo") as api:
        reply = same(api, metadata={"a": "b"}, temperature=0)
        assert (reply["status"], reply["object"], reply["model"]) == ("completed", "response", "m")
        assert reply["error"] is None
        assert reply["metadata"] == {"a": "b"} and reply["store"] is False and reply["temperature"] == 0
        [item] = reply["output"]
        assert (item["type"], item["role"], item["content"][0]["text"]) == ("message", "assistant", "Hello")
        usage = reply["usage"]
        assert usage["output_tokens"] == 2 and usage["total_tokens"] == usage["input_tokens"] + 2
        events = stream(api)
        assert events[-1]["response"]["usage"] == usage
        assert types(events) == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed",
        ]  # fmt: skip
        assert [event["delta"] for event in events if event["type"].endswith("delta")] == ["Hel", "lo"]


def test_usage_tells_what_was_cached_and_what_was_thought() -> None:
    reply = ResponsesReply(parse_responses_request({"input": "hi"}), "m")
    for channel in ("reasoning", "reasoning", "content"):
        reply.step(Step([Delta(channel, "x")]))
    reply.end(Result("stop", 30, 3, 1.0, 1.0, cached_tokens=29))
    usage = reply.body()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 29 and usage["input_tokens"] == 30
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2


def test_the_stream_ends_without_a_done_mark_and_says_which_model_it_is() -> None:
    with scripted("a") as api:
        answer = api.post("/v1/responses", {"input": "hi", "stream": True, "model": "any"})
        assert b"[DONE]" not in answer.body and answer.headers["x-pantheon-model"] == "m"


@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_is_an_item_or_its_summary(summary: str | None) -> None:
    with scripted("<think>", "hm ", "ok", "</think>", "Hi") as api:
        reasoning = {"reasoning": {"summary": summary}} if summary else {}
        reply = same(api, include=["reasoning.encrypted_content"], **reasoning)
        thought, text = reply["output"]
        held = thought["summary"] if summary else thought["content"]
        assert [part["text"] for part in held] == ["hm ok"] and text["content"][0]["text"] == "Hi"
        assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
        kind = "reasoning_summary_text" if summary else "reasoning_text"
        deltas = [e["delta"] for e in stream(api, **reasoning) if e["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == "hm ok"


def test_a_call_is_an_item_with_its_own_events() -> None:
    with scripted("Let me look.\n", *CALL) as api:
        reply = same(api, tools=[TOOL, {"type": "web_search"}])
        text, call = reply["output"]
        assert text["content"][0]["text"].strip() == "Let me look."
        assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
        assert json.loads(call["arguments"]) == {"city": "Oslo"} and call["call_id"].startswith("call_")
        events = stream(api, tools=[TOOL])
        deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
        done = next(e for e in events if e["type"] == "response.function_call_arguments.done")
        assert "".join(deltas) == done["arguments"] and json.loads(done["arguments"]) == {"city": "Oslo"}
        added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
        assert added[1]["arguments"] == "" and added[1]["name"] == "get_weather"


def test_blanks_before_a_call_are_no_message() -> None:
    with scripted("\n\n", *CALL) as api:
        assert [item["type"] for item in same(api, tools=[TOOL])["output"]] == ["function_call"]


def test_custom_tools_take_free_text() -> None:
    with scripted(PATCH) as api:
        [call] = same(api, tools=[CUSTOM])["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n+é")
        assert "response.custom_tool_call_input.done" in types(stream(api, tools=[CUSTOM]))


def test_tools_of_a_namespace_come_back_under_it() -> None:
    with scripted(*CALL) as api:
        space = {"type": "namespace", "name": "world", "description": "", "tools": [TOOL]}
        [call] = same(api, tools=[space])["output"]
        assert (call["name"], call["namespace"]) == ("get_weather", "world")


def test_length_is_incomplete() -> None:
    with scripted(*"abcdef") as api:
        reply = same(api, max_output_tokens=3)
        assert reply["status"] == "incomplete" and reply["incomplete_details"] == {"reason": "max_output_tokens"}
        assert reply["output"][0]["status"] == "incomplete" and reply["output"][0]["content"][0]["text"] == "abc"


def test_an_answer_without_text_is_an_empty_message() -> None:
    with scripted() as api:
        assert same(api)["output"][0]["content"][0]["text"] == ""


def test_format_holds_the_answer_and_logprobs_come_when_included() -> None:
    with scripted('{"city": ', '"Oslo"', "}") as api:
        form = {"type": "json_schema", "name": "c", "schema": CITY, "strict": True}
        reply = whole(api, text={"format": form}, include=["message.output_text.logprobs"], top_logprobs=2)
        [part] = reply["output"][0]["content"]
        assert json.loads(part["text"]) == {"city": "Oslo"} and len(part["logprobs"]) == 3
        assert len(part["logprobs"][0]["top_logprobs"]) == 2 and reply["text"]["format"]["name"] == "c"


def test_a_failure_in_the_middle_is_an_event_with_what_there_is() -> None:
    with scripted(*"abcdefgh", fail_at=4) as api:
        events = stream(api)
        assert events[-1]["type"] == "response.failed"
        failed = events[-1]["response"]
        assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
        assert failed["output"][0]["content"][0]["text"] == "abcd"
        assert api.post("/v1/responses", {"input": "hi"}).status == 500
        assert whole(api, max_output_tokens=2)["status"] == "incomplete", "the model is free again"


def test_a_context_that_is_full_is_said_before_the_stream() -> None:
    with scripted("a", n_ctx=32) as api:
        answer = api.post("/v1/responses", {"input": "x" * 100, "stream": True})
        error = answer.json()["error"]
        assert answer.status == 400 and (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_progress_and_timings_come_when_asked_for() -> None:
    with scripted("a", "b") as api:
        events = stream(api, return_progress=True, timings_per_token=True)
        told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert told[-1]["processed"] == told[-1]["total"] > 0
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [event["timings"]["predicted_n"] for event in deltas] == [1, 2] and "timings" in events[-1]
        assert api.post("/responses", {"input": "hi"}).status == 200


def test_leaving_ends_the_generation() -> None:
    with scripted("a", eog=False) as api:
        sock = connect(api.server)
        sock.sendall(post_bytes("/v1/responses", {"input": "hi", "stream": True}))
        read_until(sock, b"output_text.delta")
        sock.close()
        free(api.app.registry.all_entries()[0])


def test_a_request_that_takes_too_long_fails() -> None:
    with serving(App(request_timeout_s=0.2)) as api:
        api.add(pieces=["a"], eog=False, decode_ms=5)
        sock = connect(api.server)
        sock.sendall(post_bytes("/v1/responses", {"input": "hi", "stream": True}))
        error = events_of(answer_of(sock))[-1]["response"]["error"]
        assert error["message"].startswith("the request ran into its limit")
