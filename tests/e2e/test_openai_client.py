"""The official openai client against a whole server: what harnesses do, from the outside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from pantheon.engine.load import load_model
from tests.serve.api_server import WEATHER, Api, free, serving

TINY = Path(__file__).parents[1] / "data" / "models" / "tiny-llama.F32.gguf"
HI: Any = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Say hello."}]
CALL = ['<tool_call>\n{"name": "get_weather", ', '"arguments": {"city": "Oslo"}}', "\n</tool_call>"]


class City(pydantic.BaseModel):
    city: str


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as running:
        running.add("chat", pieces=["Hel", "lo", " 🤖"])
        running.add("tools", pieces=[*CALL, "\n", *CALL])
        running.add("json", pieces=['{"city": ', '"Oslo"', "}"])
        running.add("endless", eog=False, pieces=[])
        running.add("broken", pieces=list("abcdefgh"), fail_at=4)
        yield running


@pytest.fixture(scope="module")
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.server.url}/v1", api_key="any", max_retries=0, timeout=20) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["chat", "tools", "json", "endless", "broken"]
    assert client.models.retrieve("tools").id == "tools"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_responses_whole_streamed_and_parsed(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="chat", input="Say hello.", store=False)
    assert whole.output_text == "Hello 🤖" and whole.usage is not None and whole.usage.output_tokens == 3
    with client.responses.stream(model="chat", input="Say hello.") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == "Hello 🤖"
    parsed = client.responses.parse(model="json", input="Where?", text_format=City).output_parsed
    assert parsed == City(city="Oslo")
    failed = list(client.responses.create(model="broken", input="hi", stream=True))[-1]
    assert failed.type == "response.failed" and failed.response.error is not None


def test_responses_are_given_back_with_the_results_of_their_tools(client: openai.OpenAI) -> None:
    function: Any = WEATHER["function"]
    tool: Any = {"type": "function", **function, "strict": False}
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    calls = client.responses.create(model="tools", input=asked, tools=[tool]).output
    assert [json.loads(call.arguments) for call in calls if call.type == "function_call"] == [{"city": "Oslo"}] * 2
    asked += [call.model_dump(exclude_none=True) for call in calls]
    asked += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
        if call.type == "function_call"
    ]
    assert client.responses.create(model="chat", input=asked, tools=[tool]).output_text == "Hello 🤖"


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="chat", messages=HI, temperature=0, max_tokens=200)
    assert whole.choices[0].message.content == "Hello 🤖" and whole.choices[0].finish_reason == "stop"
    text, usage = "", None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(model="chat", messages=HI, stream=True, stream_options=options):
        usage = chunk.usage or usage
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert text == "Hello 🤖" and usage == whole.usage


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="chat", messages=HI) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "Hello 🤖"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tool_loop(client: openai.OpenAI, choice: Any) -> None:
    tools: Any = [WEATHER]
    reply = client.chat.completions.create(model="tools", messages=HI, tools=tools, tool_choice=choice)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls" and message.content is None and message.tool_calls
    functions = [call.function for call in message.tool_calls if call.type == "function"]
    assert {function.name for function in functions} == {"get_weather"}
    arguments = [json.loads(function.arguments) for function in functions]
    assert all(isinstance(one["city"], str) for one in arguments)
    if choice == "auto":  # a forced call is spelled in the grammar's own tokens, not in the script's
        assert arguments == [{"city": "Oslo"}] * 2
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    follow: Any = [*HI, message, *answers]
    assert client.chat.completions.create(model="chat", messages=follow, tools=tools).choices[0].message.content


def test_streamed_tools(client: openai.OpenAI) -> None:
    strict: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with client.chat.completions.stream(model="tools", messages=HI, tools=[strict], seed=5) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    # a strict call is spelled in the grammar's own tokens, too
    assert calls and all(isinstance(call.function.parsed_arguments["city"], str) for call in calls)  # type: ignore[index]


def test_parse(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model="json", messages=HI, response_format=City)
    assert reply.choices[0].message.parsed == City(city="Oslo")


def test_an_agent_reads_a_file_and_answers(api: Api, client: openai.OpenAI) -> None:
    """The loop of every harness: a call, its result, another answer; the second turn reads only what is new."""
    then = {"a tiny readme": ["It is ", "a demo."]}
    api.add("agent", pieces=["Let me look.", "\n", *CALL], then=then)
    messages: Any = list(HI)
    tools: Any = [WEATHER]
    for _ in range(3):
        with client.chat.completions.stream(model="agent", messages=messages, tools=tools) as stream:
            reply = stream.until_done().get_final_completion()
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "a tiny readme"})
    assert [m["role"] if isinstance(m, dict) else m.role for m in messages[2:]] == ["assistant", "tool", "assistant"]
    assert messages[2].content.strip() == "Let me look." and messages[-1].content == "It is a demo."


def test_embeddings(client: openai.OpenAI) -> None:
    """The SDK asks for base64 unless told otherwise: both forms are the same numbers."""
    coded = client.embeddings.create(model="chat", input=["Hello", "World"])
    plain = client.embeddings.create(model="chat", input=["Hello", "World"], encoding_format="float")
    assert [one.index for one in coded.data] == [0, 1] and coded.usage.prompt_tokens > 0
    for a, b in zip(coded.data, plain.data, strict=True):
        assert a.embedding == pytest.approx(b.embedding) and len(a.embedding) > 1
    assert coded.data[0].embedding != coded.data[1].embedding


def test_legacy_completions(client: openai.OpenAI) -> None:
    assert client.completions.create(model="chat", prompt="Hello", max_tokens=2).choices[0].text == "Hello"
    streamed = client.completions.create(model="chat", prompt="Hello", max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Hello"


def test_errors_reach_the_caller(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="chat", messages=HI, temperature=3)
    assert bad.value.param == "temperature" and "temperature" in str(bad.value)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=HI)
    assert unknown.value.code == "model_not_found"


def test_error_in_the_middle_of_a_stream_B23a(client: openai.OpenAI) -> None:
    text = ""
    with pytest.raises(openai.APIError) as fault:
        for chunk in client.chat.completions.create(model="broken", messages=HI, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "abcd" and "internal error" in str(fault.value)


def test_closing_a_stream_frees_the_model_B24a(api: Api, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="endless", messages=HI, stream=True)
    next(iter(stream))
    stream.close()
    free(next(entry for entry in api.app.registry.snapshot() if entry.name == "endless"))
    assert client.chat.completions.create(model="endless", messages=HI, max_tokens=2).usage


def test_a_real_model_answers_as_the_engine_does_M053() -> None:
    """Greedy over HTTP, whole and streamed, long prompt in chunks and short: token for token the engine's own."""
    with load_model(TINY, executor="reference", ctx=512) as model, serving() as running:
        entry = running.app.registry.reserve("tiny", str(TINY))
        running.app.registry.publish(entry, model, model.new_state())
        for text in ("hello", "word " * 90):
            messages = [{"role": "user", "content": text}]
            own = "".join(piece.text for piece in model.chat(messages, temperature=0, max_tokens=12))
            body = running.whole(messages=messages, temperature=0, max_tokens=12)
            assert body["choices"][0]["message"]["content"] == own
            assert running.stream(messages=messages, temperature=0, max_tokens=12).text() == own
            seeded = {"messages": messages, "temperature": 1.5, "seed": 11, "max_tokens": 12}
            assert running.whole(**seeded)["choices"] == running.whole(**seeded)["choices"]
