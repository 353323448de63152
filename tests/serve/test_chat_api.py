"""Chats end to end over scripted models: shapes, streams, stop strings, reasoning [B14, B16, B20, B21, M041-M054]."""

from __future__ import annotations

from typing import Any

import pytest

from pantheon.serve.context import new_id
from tests.serve.api_server import USER, scripted, serving

THINK_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:\n<think>\n"
SWITCH_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"  # noqa: E501


def test_whole_reply_has_the_fields_that_clients_read_M024() -> None:
    with scripted("Hel", "lo") as api:
        answer = api.chat()
        body = answer.json()
        assert answer.headers["x-pantheon-model"] == "m"
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-") and len(body["id"]) == 9 + 32
        assert isinstance(body["created"], int) and body["model"] == "m"
        (choice,) = body["choices"]
        assert choice == {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
        usage = body["usage"]
        assert usage["completion_tokens"] == 2
        assert usage["total_tokens"] == usage["prompt_tokens"] + 2 and usage["prompt_tokens"] > 0
        timings = body["timings"]
        assert (timings["prompt_n"], timings["predicted_n"]) == (usage["prompt_tokens"], 2)
        assert "context_capped" not in body
        assert api.whole()["id"] != body["id"]


def test_ids_do_not_repeat_X05_M050() -> None:
    assert len({new_id("chatcmpl") for _ in range(100_000)}) == 100_000


def test_stream_envelope_B16() -> None:
    with scripted("Hel", "lo") as api:
        plain, with_usage = api.stream(), api.stream(stream_options={"include_usage": True})
        chunks = plain.chunks
        for key in ("id", "created", "model", "object"):
            assert len({chunk[key] for chunk in chunks}) == 1
        assert chunks[0]["object"] == "chat.completion.chunk" and chunks[0]["model"] == "m"
        deltas = [choice["delta"] for choice in plain.choices()]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
        assert [choice["finish_reason"] for choice in plain.choices()] == [None, None, None, "stop"]
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
        last = with_usage.chunks[-1]
        assert last["choices"] == [] and last["usage"] == api.whole()["usage"]
        assert sum("usage" in chunk for chunk in with_usage.chunks) == 1


def test_timings_come_with_each_chunk_when_asked_for() -> None:
    with scripted("a", "b") as api:
        chunks = api.stream(timings_per_token=True).chunks
        chunks = [chunk for chunk in chunks if chunk["choices"][0]["delta"].get("content")]
        assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [1, 2]


def test_sse_is_decided_by_the_body_alone() -> None:
    with scripted("x") as api:
        body = {"messages": USER}
        answer = api.post("/v1/chat/completions", body, "Accept: text/event-stream")
        assert answer.headers["content-type"] == "application/json"
        quiet = api.chat(stream=False, stream_options={"include_usage": True})
        assert quiet.headers["content-type"] == "application/json"


EMOJI = "naïve 🤖👩‍👩‍👧 日本語".encode()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_split_characters_come_whole_B14(size: int) -> None:
    pieces = [{"hex": EMOJI[i : i + size].hex()} for i in range(0, len(EMOJI), size)]
    with scripted(*pieces) as api:
        stream = api.stream()
        assert stream.text() == EMOJI.decode() == api.whole()["choices"][0]["message"]["content"]
        assert all("\ufffd" not in delta for delta in stream.deltas())


def test_bytes_that_are_no_text_become_one_mark_B14() -> None:
    with scripted("a", {"hex": "f09f"}) as api:
        assert api.stream().text() == "a\ufffd"


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason", "tokens"),
    [
        (["north", " sou", "th ea", "st", " west"], ["south east"], "north ", "stop", 4),
        (["ab", "c", "e"], ["abcd", "bcx"], "abce", "stop", 3),
        (["ab", "cd", "ef"], "d", "abc", "stop", 2),
        (["one", "\n", "two"], ["\n"], "one", "stop", 2),
        (["x", "aa", "ab", "z"], ["aab"], "xa", "stop", 3),
        (["sou", "th"], ["south east"], "south", "stop", 2),
        (["STOP"], ["STOP"], "", "stop", 1),
    ],
)
def test_stop_strings_B20_M042_M046(pieces: list[str], stop: Any, text: str, reason: str, tokens: int) -> None:
    with scripted(*pieces) as api:
        whole, stream = api.whole(stop=stop), api.stream(stop=stop, stream_options={"include_usage": True})
        (choice,) = whole["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)
        assert (stream.text(), stream.finish) == (text, reason)
        assert whole["usage"]["completion_tokens"] == tokens
        assert stream.chunks[-1]["usage"] == whole["usage"]


def test_generation_ends_at_the_stop_string_X06() -> None:
    with serving() as api:
        entry = api.add(pieces=["a", "b", "STOP"], eog=False)
        api.whole(stop=["STOP"], max_tokens=2000)
        state: Any = entry.state
        assert state.asked[0] == 3


def test_length_B06a() -> None:
    with scripted(eog=False) as api:
        for field in ("max_tokens", "max_completion_tokens"):
            body = api.whole(**{field: 5})
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["completion_tokens"] == 5
        assert api.stream(max_tokens=5).finish == "length"


def test_end_token_at_the_very_cap_is_stop() -> None:
    with scripted("a", "b") as api:
        body = api.whole(max_tokens=3)
        assert body["choices"][0]["finish_reason"] == "stop" and body["usage"]["completion_tokens"] == 2
        assert api.whole(max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_no_cap_means_until_the_model_ends_B06b() -> None:
    with scripted(*["word "] * 40) as api:
        for cap in ({}, {"max_tokens": -1}, {"max_tokens": None}, {"max_tokens": 10_000_000}):
            assert api.whole(**cap)["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("text", ["<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|eom_id|>"])
def test_every_end_token_ends_and_none_is_shown_B32d(text: str) -> None:
    with scripted("fine", {"special": text}, "never") as api:
        choice = api.whole()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("fine", "stop")
        assert api.stream().text() == "fine"


def test_a_control_token_in_the_answer_is_not_shown_B31() -> None:
    with scripted("a", {"special": "<|start_header_id|>"}, "b") as api:
        assert api.whole()["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize(
    ("template", "pieces"),
    [
        (THINK_TEMPLATE, ["plan\n", "</th", "ink>", "\n\n", "answer"]),
        (None, ["<th", "ink>", "\nplan", "\n</think>", "\n\nanswer"]),
        (THINK_TEMPLATE, ["plan", {"user": "</think>"}, "\n\n", "answer"]),
        (THINK_TEMPLATE, ["plan", {"special": "</think>"}, "\n\n", "answer"]),
    ],
)
def test_reasoning_B21a_M043(template: str | None, pieces: list[Any]) -> None:
    with scripted(*pieces, template=template) as api:
        message, stream = api.whole()["choices"][0]["message"], api.stream()
        assert message == {"role": "assistant", "content": "answer", "reasoning_content": "plan"}
        assert (stream.text("reasoning_content"), stream.text()) == ("plan", "answer")


def test_lone_closing_tag_is_dropped_B21() -> None:
    with scripted("</think>", "answer") as api:
        message = api.whole()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "answer"}


def test_cap_inside_the_thought_B21c() -> None:
    with scripted("a", " b", " c", " d", template=THINK_TEMPLATE) as api:
        choice = api.whole(max_tokens=3)["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"] == {"role": "assistant", "content": "", "reasoning_content": "a b c"}


def test_thinking_can_be_switched_off_B21b() -> None:
    with scripted("answer", template=SWITCH_TEMPLATE) as api:
        off = api.whole(chat_template_kwargs={"enable_thinking": False})["choices"][0]["message"]
        assert off == {"role": "assistant", "content": "answer"}
        assert api.whole(enable_thinking=False)["choices"][0]["message"] == off
        on = api.whole()["choices"][0]["message"]
        assert on == {"role": "assistant", "content": "", "reasoning_content": "answer"}


def test_logprobs_B11c() -> None:
    with scripted("a", "é", {"hex": "f09f"}, {"hex": "a496"}) as api:
        body = api.whole(logprobs=True, top_logprobs=2)
        content = body["choices"][0]["logprobs"]["content"]
        assert len(content) == body["usage"]["completion_tokens"] == 4
        assert bytes(b for item in content for b in item["bytes"]).decode() == "aé🤖"
        for item in content:
            assert item["logprob"] <= 0 and len(item["top_logprobs"]) == 2
            assert set(item["top_logprobs"][0]) == {"token", "logprob", "bytes"}
        stream = api.stream(logprobs=True, top_logprobs=2)
        streamed = [item for choice in stream.choices() if choice["logprobs"] for item in choice["logprobs"]["content"]]
        assert streamed == content
        assert api.whole(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_logprobs_of_tokens_that_a_stop_string_ate() -> None:
    with scripted("a", "ST", "OP") as api:
        stream = api.stream(logprobs=True, stop=["STOP"])
        items = [item for choice in stream.choices() if choice["logprobs"] for item in choice["logprobs"]["content"]]
        assert [item["token"] for item in items] == ["a", "ST", "OP"]


def test_several_choices_B11a() -> None:
    with scripted("x", "y") as api:
        body = api.whole(n=2)
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert body["usage"]["completion_tokens"] == 4
        stream = api.stream(n=2, stream_options={"include_usage": True})
        assert [stream.text(index=i) for i in range(2)] == ["xy", "xy"]
        for index in range(2):
            choices = stream.choices(index)
            assert choices[0]["delta"]["role"] == "assistant" and choices[-1]["finish_reason"] == "stop"
        assert stream.chunks[-1]["usage"] == body["usage"]


def test_seed_B11f() -> None:
    """The script's certainty leaves nothing to draw, so a grammar that forbids its token does."""
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    asked = {
        "temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 12,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }  # fmt: skip
    with scripted(eog=False, filler="~~") as api:

        def text(**more: Any) -> str:
            return str(api.whole(**asked, **more)["choices"][0]["message"]["content"])

        assert text(seed=7) == text(seed=7)
        assert len({text() for _ in range(6)}) > 1
        choices = api.whole(**asked, seed=7, n=2)["choices"]
        assert choices[0]["message"]["content"] == text(seed=7)
        assert choices[1]["message"]["content"] == text(seed=8)


def test_session_header_and_unknown_fields_are_fine_B05() -> None:
    with scripted("x") as api:
        body = {"messages": USER, "model": "anything", "store": False, "metadata": {}, "x_vendor": [1]}
        assert api.post("/v1/chat/completions", body, "X-Session-Id: s1").status == 200


def test_parts_and_nulls_in_messages_B01a_B02() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
    with scripted("x") as api:
        joined = api.whole(messages=[{"role": "user", "content": "Say hi."}])
        parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi."}]
        assert api.whole(messages=[{"role": "user", "content": parts}])["usage"] == joined["usage"]
        for assistant in ({"content": None}, {}, {"content": ""}):
            turns = [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "tool_calls": [call], **assistant},
                {"role": "tool", "tool_call_id": "c1", "content": "12 C"},
            ]
            assert api.whole(messages=turns)["usage"]["prompt_tokens"] > joined["usage"]["prompt_tokens"]


def test_empty_content_is_legal_B13d() -> None:
    with scripted("x") as api:
        empty = [{"role": "system", "content": ""}, {"role": "user", "content": ""}]
        assert api.whole(messages=empty)["choices"][0]["finish_reason"] == "stop"


def test_an_answer_without_text() -> None:
    with scripted() as api:
        assert api.whole()["choices"][0]["message"]["content"] == ""
        stream = api.stream()
        assert stream.text() == "" and stream.finish == "stop"
