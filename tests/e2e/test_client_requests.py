"""What real clients send, replayed: every shape of their requests is answered, in the shape that they need back.

`tests/data/clients/` holds captured requests of unmodified clients with their prose taken out, one a line; each line
has a field, a kind of message or a combination of fields that no other line has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.api_server import Api, Stream, serving

CAPTURES = Path(__file__).parents[1] / "data" / "clients"
CALL = ["Let me look. ", '<tool_call>\n{"name": "read", ', '"arguments": {"path": "README.md"}}', "\n</tool_call>"]


def captures(path: str) -> list[Any]:
    files = sorted(CAPTURES.glob("*.json"))
    found = [one for file in files for one in json.loads(file.read_text()) if one["path"] == path]
    return [pytest.param(one["body"], one.get("headers", []), id=one["from"]) for one in found]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as running:
        running.add("text", pieces=["Hel", "lo", ", ", "world"])
        running.add("calls", pieces=CALL)
        yield running


def ask(api: Api, path: str, body: dict[str, Any], headers: list[str], **changes: Any) -> Any:
    answer = api.post(path, {**body, **changes}, *headers)
    assert answer.status == 200, answer.body
    return Stream(answer.events) if changes["stream"] else answer.json()


@pytest.mark.parametrize(("body", "headers"), captures("/v1/chat/completions"))
def test_chat_whole_and_streamed(api: Api, body: dict[str, Any], headers: list[str]) -> None:
    """Non-streaming and streaming carry the same answer, with every field that some client can not do without."""
    body = {"temperature": 0, "seed": 1, **body, "model": "calls" if body.get("tools") else "text"}
    if 50256 in map(int, body.get("logit_bias") or {}):
        # an id of the OpenAI vocabulary, the one request of all that depends on the model: B11d
        refusal = api.post("/v1/chat/completions", body, *headers)
        assert refusal.status == 400 and refusal.json()["error"]["param"] == "logit_bias"
        body["logit_bias"] = {"56": -100}
    whole = ask(api, "/v1/chat/completions", body, headers, stream=False)
    check_whole(whole)
    stream = ask(api, "/v1/chat/completions", body, headers, stream=True)
    check_stream(stream, whole, usage=bool((body.get("stream_options") or {}).get("include_usage")))
    if body["model"] == "calls" and body.get("tool_choice", "auto") == "auto":
        (call,) = whole["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "read", "arguments": '{"path": "README.md"}'}
        assert whole["choices"][0]["finish_reason"] == "tool_calls"


def check_whole(whole: dict[str, Any]) -> None:
    """pydantic-ai refuses a reply without id, object, created or model, langchain one without a role."""
    assert whole["object"] == "chat.completion" and whole["id"] and isinstance(whole["created"], int) and whole["model"]
    assert {"prompt_tokens", "completion_tokens", "total_tokens"} <= set(whole["usage"])
    for index, choice in enumerate(whole["choices"]):
        message = choice["message"]
        assert choice["index"] == index and choice["finish_reason"] in ("stop", "length", "tool_calls")
        assert message["role"] == "assistant" and (message["content"] or message.get("tool_calls"))
        for call in message.get("tool_calls", []):
            assert call["id"] and call["type"] == "function" and isinstance(call["function"]["arguments"], str)
            # a cap leaves a call as far as it got
            if choice["finish_reason"] != "length":
                assert isinstance(json.loads(call["function"]["arguments"]), dict)


def check_stream(stream: Stream, whole: dict[str, Any], usage: bool) -> None:
    """opencode asks for ever without a finish_reason; node's helpers want a role, an index and a delta everywhere."""
    chunks = stream.chunks
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and chunk["id"] and isinstance(chunk["created"], int)
        assert all(isinstance(choice["index"], int) and "delta" in choice for choice in chunk["choices"])
    assert bool(chunks[-1].get("usage")) == usage and (not usage or chunks[-1]["choices"] == [])
    for index, choice in enumerate(whole["choices"]):
        streamed = stream.choices(index)
        assert streamed[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in streamed if c["finish_reason"]] == [choice["finish_reason"]]
        assert stream.text(index=index) == (choice["message"]["content"] or "")
    calls = [call["function"] for call in whole["choices"][0]["message"].get("tool_calls", [])]
    assert [{"name": call["name"], "arguments": call["arguments"]} for call in stream.calls()] == calls


@pytest.mark.parametrize(("body", "headers"), captures("/v1/completions"))
def test_completions_whole_and_streamed(api: Api, body: dict[str, Any], headers: list[str]) -> None:
    whole = ask(api, "/v1/completions", {**body, "model": "text"}, headers, stream=False)
    assert whole["object"] == "text_completion" and whole["choices"][0]["text"] == "Hello, world"
    stream = ask(api, "/v1/completions", {**body, "model": "text"}, headers, stream=True)
    assert "".join(choice["text"] for choice in stream.choices()) == "Hello, world"


def named_events(api: Api, path: str, body: dict[str, Any], headers: list[str]) -> list[dict[str, Any]]:
    answer = api.post(path, {**body, "stream": True}, *headers)
    assert answer.status == 200, answer.body
    return [json.loads(line[6:]) for line in answer.body.decode().split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize("model", ["text", "calls"])
@pytest.mark.parametrize(("body", "headers"), captures("/v1/responses"))
def test_responses_whole_and_streamed(api: Api, model: str, body: dict[str, Any], headers: list[str]) -> None:
    """Codex needs output_item.done and response.completed, with usage; anything less and it asks six times."""
    body = {**body, "model": model}
    whole = ask(api, "/v1/responses", body, headers, stream=False)
    events = named_events(api, "/v1/responses", body, headers)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]
    assert last["type"] == "response.completed" and last["response"]["usage"]["total_tokens"] > 0
    for reply in (whole, last["response"]):
        assert [item["type"] for item in reply["output"]] == [item["type"] for item in items]
    wanted = ["message", "function_call"] if model == "calls" and body.get("tools") else ["message"]
    assert [item["type"] for item in items] == wanted
    if wanted[-1] == "function_call":
        assert items[-1]["call_id"] and json.loads(items[-1]["arguments"]) == {"path": "README.md"}


@pytest.mark.parametrize("model", ["text", "calls"])
@pytest.mark.parametrize(("body", "headers"), captures("/v1/messages?beta=true"))
def test_messages_whole_and_streamed(api: Api, model: str, body: dict[str, Any], headers: list[str]) -> None:
    """Claude Code always asks for adaptive thinking: what the model says must not all become a thought."""
    path, body = "/v1/messages?beta=true", {**body, "model": model}
    whole = ask(api, path, body, headers, stream=False)
    wanted = ["text", "tool_use"] if model == "calls" else ["text"]
    assert [block["type"] for block in whole["content"]] == wanted
    assert whole["stop_reason"] == {"calls": "tool_use", "text": "end_turn"}[model]
    events = named_events(api, path, body, headers)
    assert events[0]["type"] == "message_start" and events[-1] == {"type": "message_stop"}
    started = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    (ending,) = [event for event in events if event["type"] == "message_delta"]
    assert started == wanted and ending["delta"]["stop_reason"] == whole["stop_reason"]
    count = api.post("/v1/messages/count_tokens", {key: body[key] for key in ("model", "messages", "system", "tools")})
    assert count.status == 200 and count.json()["input_tokens"] > 0
