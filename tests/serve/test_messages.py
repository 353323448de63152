"""POST /v1/messages over scripted models: blocks, events, usage, failures in Anthropic's words [issue 6, Claude Code].

The shapes were checked with the anthropic client 2.14; it is no dependency, so that what it reads is written out here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pantheon import seams
from pantheon.serve.api import build_router
from pantheon.serve.context import App
from pantheon.serve.generation import Delta, Result, Step
from pantheon.serve.http_server import HttpConfig, PantheonServer
from pantheon.serve.messages_reply import MessagesReply
from tests.serve.api_server import USER, Api, free, post_bytes, scripted, serving
from tests.serve.http_client import ask, connect, read_until, request
from tests.serve.named_events import Event, events_of, types

CALL = ["<tool_", 'call>\n{"name": "get_wea', 'ther", "argum', 'ents": {"city": "Os', 'lo"}}\n</tool', "_call>"]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Weather", "input_schema": CITY}
PATH = "/v1/messages"


def post(api: Api, *fields: str, **body: Any) -> Any:
    return api.post(PATH, {"max_tokens": 50, "messages": USER, **body}, *fields)


def whole(api: Api, **body: Any) -> dict[str, Any]:
    answer = post(api, **body)
    assert answer.status == 200, answer.body
    reply: dict[str, Any] = answer.json()
    return reply


def stream(api: Api, **body: Any) -> list[Event]:
    return events_of(post(api, stream=True, **body))


def gathered(events: list[Event]) -> dict[str, Any]:
    """A message put together as Anthropic's client does."""
    message: dict[str, Any] = dict(events[0]["message"])
    partial = ""
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            partial = ""
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            key = delta["type"].removesuffix("_delta")
            if key == "input_json":
                partial += delta["partial_json"]
            else:
                block[key] += delta[key]
        elif event["type"] == "content_block_stop" and partial:
            message["content"][event["index"]]["input"] = json.loads(partial)
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = {**message["usage"], **event["usage"]}
    return message


def same(api: Api, **body: Any) -> dict[str, Any]:
    """A plain message; the streamed one must come to the same."""
    plain, events = whole(api, **body), stream(api, **body)
    assert types(events)[:2] == ["message_start", "ping"] and types(events)[-2:] == ["message_delta", "message_stop"]
    told = gathered(events)
    for message in (plain, told):
        for block in message["content"]:
            block.pop("id", None)
    for key in ("type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"):
        assert told[key] == plain[key], key
    return plain


def test_text_whole_and_streamed() -> None:
    with scripted("Hel", "lo") as api:
        reply = same(api)
        assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", "m")
        assert reply["stop_reason"] == "end_turn"
        assert reply["content"] == [{"type": "text", "text": "Hello"}] and reply["id"].startswith("msg_")
        assert reply["usage"]["output_tokens"] == 2 and reply["usage"]["input_tokens"] > 2
        assert types(stream(api)) == [
            "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        body = {"max_tokens": 5, "messages": USER, "stream": True}
        answer = api.post(PATH + "?beta=true", body, "Anthropic-Version: 2023-06-01")
        assert answer.status == 200 and b"[DONE]" not in answer.body


def test_usage_tells_what_was_cached() -> None:
    reply = MessagesReply("m", 30, stream=False)
    reply.step(Step([Delta("content", "x")]))
    reply.end(Result("stop", 30, 1, 1.0, 1.0, cached_tokens=29))
    usage = reply.body()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (1, 29, 1)


def test_thinking_is_a_block_with_a_signature() -> None:
    with scripted("<think>", "hm ", "ok", "</think>", "Hi") as api:
        thought, text = same(api, thinking={"type": "enabled", "budget_tokens": 1024})["content"]
        assert thought == {"type": "thinking", "thinking": "hm ok", "signature": "pantheon"}
        assert text == {"type": "text", "text": "Hi"}


def test_a_call_is_a_block_with_its_input() -> None:
    with scripted("Let me look.\n", *CALL) as api:
        reply = same(api, tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}])
        text, call = reply["content"]
        assert text["text"].strip() == "Let me look." and reply["stop_reason"] == "tool_use"
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Oslo"})
        start = [e for e in stream(api, tools=[TOOL]) if e["type"] == "content_block_start"][1]["content_block"]
        assert start["input"] == {} and start["id"].startswith("toolu_")


def test_blanks_before_a_call_are_no_block() -> None:
    with scripted("\n\n", *CALL) as api:
        assert [block["type"] for block in same(api, tools=[TOOL])["content"]] == ["tool_use"]


def test_a_call_that_a_cap_cuts_has_no_input() -> None:
    reply = MessagesReply("m", 3, stream=False)
    for delta in (Delta("call", '{"ci', 0, "call_1", "f"), Delta("call", 'ty": ')):
        reply.step(Step([delta]))
    reply.end(Result("length", 3, 2, 1.0, 1.0))
    assert reply.body()["content"] == [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}]
    assert reply.body()["stop_reason"] == "max_tokens"


def test_stop_sequences_and_length() -> None:
    with scripted(*"abcdef") as api:
        reply = same(api, stop_sequences=["xx", "de"])
        assert reply["content"][0]["text"] == "abc"
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "de")
        reply = same(api, max_tokens=2)
        assert reply["content"][0]["text"] == "ab"
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("max_tokens", None)


def test_an_answer_without_text_has_an_empty_block() -> None:
    """Callers read content[0].text."""
    with scripted() as api:
        assert same(api)["content"] == [{"type": "text", "text": ""}]


def test_tokens_are_counted_without_generating() -> None:
    with scripted("a") as api:
        held = api.app.registry.all_entries()[0].gen_lock
        with held:
            counted = api.post(PATH + "/count_tokens", {"messages": USER, "system": "be brief", "tools": [TOOL]})
        assert counted.status == 200 and set(counted.json()) == {"input_tokens"}
        reply = whole(api, system="be brief", tools=[TOOL])
        assert counted.json()["input_tokens"] == reply["usage"]["input_tokens"]


# ---- failures -------------------------------------------------------------------------------------------------------


def error(answer: Any) -> dict[str, Any]:
    body = answer.json()
    assert body["type"] == "error" and {"type", "message"} <= set(body["error"])
    found: dict[str, Any] = body["error"]
    return found


@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens"])
def test_faults_are_told_in_its_own_shape_whoever_finds_them(path: str) -> None:
    with scripted("a") as api:
        for body, status, kind in (
            (b"{", 400, "invalid_request_error"),
            ({"messages": [], "max_tokens": 1}, 400, "invalid_request_error"),
            ({"messages": "x", "max_tokens": 1}, 400, "invalid_request_error"),
        ):
            answer = api.post(path, body)
            assert (answer.status, error(answer)["type"]) == (status, kind)
        assert error(api.get(path))["type"] == "invalid_request_error"
        api.add("other", pieces=["b"])
        answer = api.post(path, {"messages": USER, "max_tokens": 1, "model": "nobody"})
        assert (answer.status, error(answer)["type"]) == (404, "not_found_error")
    with serving() as api:
        answer = api.post(path, {"messages": USER, "max_tokens": 1})
        assert (answer.status, error(answer)["type"]) == (503, "overloaded_error") and "retry-after" in answer.headers


@pytest.mark.parametrize("path", [PATH + "/batches", PATH + "/", "/m/org/name" + PATH + "/batches/x"])
def test_what_this_api_does_not_have_is_told_in_its_own_shape(path: str) -> None:
    with serving() as api:
        answer = api.get(path)
        assert (answer.status, error(answer)["type"]) == (404, "not_found_error")


def test_a_missing_key_is_told_in_its_own_shape() -> None:
    server = PantheonServer(build_router(App()), HttpConfig(port=0, api_keys=("k",)))
    server.start(0.01)
    try:
        answer = ask(server, post_bytes(PATH, {"messages": USER, "max_tokens": 1}))
        assert (answer.status, error(answer)["type"]) == (401, "authentication_error")
        answer = ask(server, post_bytes(PATH, {"messages": USER, "max_tokens": 1}, "X-Api-Key: k"))
        assert answer.status == 503
        assert "error" in ask(server, request("GET", "/v1/models", None)).json()
    finally:
        server.stop(1.0)


def test_a_busy_model_and_a_fault_of_ours() -> None:
    with scripted("a") as api:
        seams.arm("forward")
        assert (answer := post(api)).status == 500 and error(answer)["type"] == "api_error"


def test_a_failure_in_the_middle_is_an_event() -> None:
    with scripted(*"abcdefgh", fail_at=4) as api:
        events = stream(api)
        assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
        assert "message_stop" not in types(events)
        assert whole(api, max_tokens=2)["stop_reason"] == "max_tokens", "the model is free again"


def test_a_prompt_that_is_too_long_is_told_in_words_that_clients_know() -> None:
    with scripted("a", n_ctx=64) as api:
        fault = error(post(api, messages=[{"role": "user", "content": "x" * 100}]))
        assert fault["type"] == "invalid_request_error" and fault["code"] == "context_length_exceeded"
        assert fault["message"].startswith("prompt is too long: ") and "> 64 maximum" in fault["message"]


def test_leaving_ends_the_generation() -> None:
    with scripted("a", eog=False) as api:
        sock = connect(api.server)
        sock.sendall(post_bytes(PATH, {"messages": USER, "max_tokens": 9999, "stream": True}))
        read_until(sock, b"text_delta")
        sock.close()
        free(api.app.registry.all_entries()[0])


def test_models_are_listed_for_its_clients_too() -> None:
    with scripted("a") as api:
        listed = api.get("/v1/models", "Anthropic-Version: 2023-06-01").json()
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("m", "m", False)
        [model] = listed["data"]
        assert (model["id"], model["type"], model["display_name"]) == ("m", "model", "m")
        assert model["created_at"].endswith("Z") and "T" in model["created_at"]
        assert api.get("/v1/models/m", "Anthropic-Version: 2023-06-01").json()["type"] == "model"
        assert "type" not in api.get("/v1/models").json()["data"][0]
