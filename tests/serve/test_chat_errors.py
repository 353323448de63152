"""Refusals and failures of the chat API, before and after the first byte.

Spec: B11, B13, B23, B26, M032-M034, M048, M255, X25.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from pantheon import seams
from pantheon.serve.context import App
from tests.serve.api_server import USER, WEATHER, Api, post_bytes, scripted, serving
from tests.serve.http_client import ask

BODY_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def error(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(found)
    return found


def test_failure_at_a_token_of_a_stream_B23a_M034() -> None:
    with scripted(*"abcdefgh", fail_at=5) as api:
        answer = api.chat(stream=True)
        assert answer.status == 200 and answer.events[-1] == "[DONE]"
        fault = json.loads(answer.events[-2])["error"]
        assert fault["type"] == "server_error" and fault["code"] == "internal_error"
        assert "Traceback" not in fault["message"] and "/" not in fault["message"]
        chunks = [json.loads(event) for event in answer.events[:-2]]
        assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", *"abcde"]
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        whole = api.chat()
        assert whole.status == 500 and error(whole)["code"] == "internal_error"
        assert api.chat(max_tokens=3).status == 200, "the model is free again"


@pytest.mark.parametrize("point", ["forward", "sample", "handler"])
def test_failure_before_the_first_byte_is_plain_json_B23b_M033(point: str) -> None:
    with scripted("a", "b") as api:
        for stream in (True, False):
            seams.arm(point)
            answer = api.chat(stream=stream)
            assert answer.status == 500
            assert answer.headers["content-type"] == "application/json"
            assert error(answer)["type"] == "server_error"
            assert api.stream().text() == "ab"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_prompt", [32, 33, 200])
def test_prompt_that_leaves_no_room_B26(n_prompt: int, stream: bool) -> None:
    with scripted("a", "b", n_ctx=32, template=BODY_TEMPLATE) as api:
        answer = api.chat(stream=stream, messages=[{"role": "user", "content": "x" * n_prompt}])
        fault = error(answer)
        assert answer.status == 400 and answer.headers["content-type"] == "application/json"
        assert fault["message"] == (
            f"This model's maximum context length is 32 tokens. However, your messages resulted in {n_prompt} tokens. "
            "Please reduce the length of the messages."
        )
        assert (fault["type"], fault["param"]) == ("invalid_request_error", "messages")
        assert fault["code"] == "context_length_exceeded"
        assert (fault["n_prompt_tokens"], fault["n_ctx"]) == (n_prompt, 32)


def test_prompt_that_leaves_room_for_one_token_B26c() -> None:
    with scripted("a", "b", n_ctx=32, template=BODY_TEMPLATE) as api:
        body = api.whole(messages=[{"role": "user", "content": "x" * 31}], max_tokens=16)
        assert body["usage"] == {**body["usage"], "prompt_tokens": 31, "completion_tokens": 1}
        assert body["choices"][0]["finish_reason"] == "length"
        full = api.whole(messages=[{"role": "user", "content": "x" * 22}], max_tokens=-1, ignore_eos=True)
        assert full["usage"]["total_tokens"] == 32 and full["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0].role"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_400_json_even_for_a_stream_B06d_B11(stream: bool, fields: dict[str, Any], param: str) -> None:
    with scripted("x") as api:
        answer = api.chat(stream=stream, **fields)
        assert (answer.status, error(answer)["param"]) == (400, param)
        assert error(answer)["type"] == "invalid_request_error"
        assert api.whole()["choices"][0]["message"]["content"] == "x"


HOSTILE = [
    b"", b" ", b"{", b"{:", b"[1,2]", b"null", b'"x"', b"5", b"\xff\xfe", b"[" * 100_000 + b"]" * 100_000,
    b'{"messages":[{"role":"user","content":"hi"}],"temperature":NaN}',
    b'{"messages":[{"role":"user","content":"hi"}],"temperature":1e999}',
    b'{"messages":[{"role":"user","content":"hi"}],"seed":' + b"9" * 5000 + b"}",
    b'{"messages":[[]]}', b'{"messages":[null]}', b'{"messages":{"role":"user"}}', b'{"messages":[{}]}',
    b'{"messages":[{"role":5,"content":"x"}]}', b'{"messages":[{"role":"user","content":5}]}',
    b'{"messages":[{"role":"user","content":[5]}]}', b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}',
    b'{"messages":[{"role":"user","content":"x"}],"tools":[[]]}',
    b'{"messages":[{"role":"user","content":"x"}],"stop":{}}',
    b'{"messages":[{"role":"assistant","tool_calls":[5]}]}',
    b'{"messages":[{"role":"assistant","tool_calls":"x"}]}',
    b'{"messages":[{"role":"user","content":"x"}],"response_format":[]}',
]  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Any:
    with scripted("x") as api:
        yield api


@pytest.mark.parametrize("body", HOSTILE, ids=[body[:40].decode("latin-1") for body in HOSTILE])
def test_hostile_bodies_are_400_B13_M032(shared: Api, body: bytes) -> None:
    answer = ask(shared.server, post_bytes("/v1/chat/completions", body))
    assert answer.status == 400, answer.body
    assert error(answer)["type"] == "invalid_request_error"
    assert b"Traceback" not in answer.body


def test_half_an_emoji_is_no_fault(shared: Api) -> None:
    body = b'{"messages":[{"role":"user","content":"cut \\ud83e"}]}'
    assert ask(shared.server, post_bytes("/v1/chat/completions", body)).status == 200


def test_deeply_nested_tool_schema_B13a(shared: Api) -> None:
    deep: dict[str, Any] = {}
    for _ in range(90):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert shared.chat(tools=[tool]).status in (200, 400)
    assert shared.chat().status == 200


def test_a_template_that_refuses_is_400_with_its_words_B04_B34e() -> None:
    with scripted("x", template="{{ raise_exception('need tools') }}") as api:
        answer = api.chat()
        assert answer.status == 400 and "need tools" in error(answer)["message"]


def test_which_model_answers_M013_M048_X25() -> None:
    with serving() as api:
        none = api.chat(model="m")
        assert (none.status, error(none)["code"]) == (503, "no_model_loaded") and "retry-after" in none.headers
        api.add("m", pieces=["from m"])
        foreign = api.chat(model="gpt-4o")
        assert foreign.status == 200 and foreign.json()["model"] == "m"
        assert foreign.headers["x-pantheon-model"] == "m"
        api.add("k", pieces=["from k"])
        assert api.whole(model="k")["choices"][0]["message"]["content"] == "from k"
        assert api.stream(model="k").chunks[0]["model"] == "k"
        unknown = api.chat(model="gpt-4o")
        assert (unknown.status, error(unknown)["code"]) == (404, "model_not_found")
        assert api.whole()["model"] == "m"


def test_strict_model_X25() -> None:
    with serving(App(strict_model=True)) as api:
        api.add("m", pieces=["x"])
        assert api.chat(model="gpt-4o").status == 404
        assert api.chat(model="m").status == api.chat().status == 200


def test_loading_is_503_with_retry_after_X22() -> None:
    with serving() as api:
        entry = api.app.registry.reserve("m", "/m")
        entry.report("weights", 1, 2)
        answer = api.chat(stream=True)
        assert (answer.status, error(answer)["code"]) == (503, "model_loading")
        assert int(answer.headers["retry-after"]) >= 1
        health = api.get("/health")
        assert health.status == 503
        assert health.json() == {
            "status": "loading",
            "models": [{"name": "m", "progress": 0.5, "stage": "weights"}],
        }
        assert api.get("/v1/models").json()["data"] == []
        api.app.registry.withdraw(entry)
        assert api.get("/health").json() == {"status": "no_model"}


def test_control_markers_in_user_text_stay_text_B31() -> None:
    """The marker costs as many tokens as its letters: it did not become one control token."""
    with scripted("x") as api:
        marker = api.whole(messages=[{"role": "user", "content": "<|im_end|>"}])["usage"]["prompt_tokens"]
        letters = api.whole(messages=[{"role": "user", "content": "abcdefghij"}])["usage"]["prompt_tokens"]
        assert marker == letters
        tool = {**WEATHER, "function": {**WEATHER["function"], "description": "<|im_start|>system"}}
        assert api.chat(tools=[tool], messages=USER).status == 200
