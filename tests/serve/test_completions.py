"""POST /v1/completions over the same generation path."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest

from pantheon.errors import BadRequest
from pantheon.serve.completions import parse_completion_request
from tests.serve.api_server import Api, Stream, scripted

PATH = "/v1/completions"


def ask(api: Api, **body: Any) -> dict[str, Any]:
    answer = api.post(PATH, {"prompt": "abc", **body})
    assert answer.status == 200, answer.body
    reply: dict[str, Any] = answer.json()
    return reply


def test_whole_reply() -> None:
    with scripted("x", "y") as api:
        body = ask(api)
        assert body["object"] == "text_completion" and body["id"].startswith("cmpl-") and body["model"] == "m"
        assert body["choices"] == [{"index": 0, "text": "xy", "logprobs": None, "finish_reason": "stop"}]
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 2, 5)


def test_sixteen_tokens_unless_asked_for_more() -> None:
    with scripted(eog=False) as api:
        assert ask(api)["usage"]["completion_tokens"] == 16
        assert ask(api, max_tokens=20)["usage"]["completion_tokens"] == 20
        assert ask(api)["choices"][0]["finish_reason"] == "length"
        assert ask(api, max_tokens=None)["usage"]["completion_tokens"] == 16


def test_minus_one_runs_to_the_end_of_the_window() -> None:
    with scripted(eog=False, n_ctx=40) as api:
        assert ask(api, max_tokens=-1)["usage"]["total_tokens"] == 40


def test_prompts_of_every_form_and_echo() -> None:
    with scripted("x") as api:
        assert ask(api, prompt=[97, 98])["usage"]["prompt_tokens"] == 2
        several = ask(api, prompt=["ab", "c"], echo=True, n=2)
        assert [choice["text"] for choice in several["choices"]] == ["abx", "abx", "cx", "cx"]
        assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
        assert several["usage"]["prompt_tokens"] == 3 and several["usage"]["completion_tokens"] == 4
        assert ask(api, prompt=[[97, 98], "c"], echo=True)["choices"][0]["text"] == "abx"


def test_markup_in_the_prompt_is_the_callers_own() -> None:
    with scripted("x") as api:
        assert ask(api, prompt="<|im_start|>")["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize("echo", [False, True])
def test_stream_equals_whole(echo: bool) -> None:
    with scripted("x", " ST", "OP y") as api:
        body = {"stop": [" STOP"], "echo": echo}
        whole = ask(api, **body)
        answer = api.post(PATH, {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}, **body})
        chunks = Stream(answer.events).chunks
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole["choices"][0]["text"]
        assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "stop"
        assert chunks[-1]["usage"] == whole["usage"]
        assert len({chunk["id"] for chunk in chunks}) == 1


def test_stream_of_several_prompts_keeps_them_apart() -> None:
    with scripted("x") as api:
        events = api.post(PATH, {"prompt": ["a", "b"], "stream": True, "echo": True}).events
        choices = [choice for chunk in Stream(events).chunks for choice in chunk["choices"]]
        for index, text in enumerate(["ax", "bx"]):
            mine = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in mine) == text
            assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]


def test_thinking_is_plain_text_here() -> None:
    with scripted("<think>", "a", "</think>", "b") as api:
        assert ask(api)["choices"][0]["text"] == "<think>a</think>b"


def test_old_logprobs_shape() -> None:
    with scripted("x", "yz") as api:
        found = ask(api, logprobs=1)["choices"][0]["logprobs"]
        assert found["tokens"] == ["x", "yz"] and found["text_offset"] == [0, 1]
        assert len(found["token_logprobs"]) == 2 and found["top_logprobs"][0].keys() == {"x"}


def test_an_echoed_prompt_is_scored_and_with_no_tokens_nothing_else_is_done() -> None:
    with scripted("x", "y") as api:
        found = ask(api, prompt="abc", echo=True, logprobs=2)["choices"][0]
        assert found["text"] == "abcxy" and found["logprobs"]["tokens"] == ["a", "b", "c", "x", "y"]
        assert found["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        numbers = found["logprobs"]["token_logprobs"]
        assert numbers[0] is None and all(number <= 0 for number in numbers[1:])
        tops = found["logprobs"]["top_logprobs"]
        # the script begins at the second token of what is scored
        assert tops[0] is None and next(iter(tops[1])) == "x" and all(len(top) == 2 for top in tops[1:])
        body = ask(api, prompt=["abc", "d"], echo=True, logprobs=0, max_tokens=0)
        assert [choice["text"] for choice in body["choices"]] == ["abc", "d"]
        assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [3, 1]
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4, 0)
        events = api.post(PATH, {"prompt": "abc", "echo": True, "logprobs": 0, "stream": True}).events
        first = Stream(events).chunks[0]["choices"][0]
        assert first["text"] == "abc" and len(first["logprobs"]["tokens"]) == 3


def test_the_best_of_several_answers() -> None:
    with scripted("x", "y") as api:
        body = ask(api, prompt=["a", "b"], best_of=3, n=2)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["completion_tokens"] == 12 and body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 40}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 9}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
        ({"suffix": 1}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["a"]}}, "prompt"),
        ({"json_schema": 1}, "json_schema"),
        ({"stop": ""}, "stop"),
        ({"echo": 1}, "echo"),
    ],
)
def test_bad_fields(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as fault:
        parse_completion_request({"prompt": "x", **fields})
    assert fault.value.param == param


def test_faults_that_need_the_model_name_the_prompt() -> None:
    with scripted("x", n_ctx=8) as api:
        for body, code in (({"prompt": "x" * 8}, "context_length_exceeded"), ({"prompt": [10**6]}, None)):
            answer = api.post(PATH, body)
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["param"], error["code"]) == (400, "prompt", code)
        assert api.post(PATH, {"prompt": ""}).status == 400


def test_a_text_that_can_not_fit_is_refused_unread() -> None:
    """The longest token bounds the number of tokens from below: nobody waits for a tokenizer to find out."""
    with scripted("x", n_ctx=8) as api:
        entry = api.app.registry.all_entries()[0]
        assert entry.model is not None
        with mock.patch.object(entry.model.tokenizer, "encode", side_effect=AssertionError("tokenised")):
            for path, body, param in (
                (PATH, {"prompt": "x" * 5000}, "prompt"),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
            ):
                answer = api.post(path, body)
                error = json.loads(answer.body)["error"]
                assert (answer.status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
                assert "can not be fewer than" in error["message"] and 8 <= error["n_prompt_tokens"] <= 5000
