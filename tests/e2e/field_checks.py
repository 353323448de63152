"""What each field case asks for beyond its status: one function per case, named by its id.

`case` is the case, `world` the servers, `answer` what came back for the case's own request.  Cases whose steps need a
clock or a queue of their own run here in a small form; tests/serve has them at full length.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.field_world import SAY_HI, Case, World
from tests.serve.api_server import Api, Stream
from tests.serve.http_client import Answer, ask, eventually, read_all, read_until, request

CHECKS: dict[str, Any] = {}


def check(*ids: str) -> Any:
    def keep(function: Any) -> Any:
        CHECKS.update(dict.fromkeys(ids, function))
        return function

    return keep


def content(answer: Answer) -> Any:
    return answer.json()["choices"][0]["message"]["content"]


def reason(answer: Answer) -> str:
    return str(answer.json()["choices"][0]["finish_reason"])


def fault(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(found) and "Traceback" not in found["message"]
    return found


def names(answer: Answer, *params: str) -> None:
    """A refusal that names one of the fields."""
    assert fault(answer)["type"] == "invalid_request_error" and fault(answer)["param"] in params, answer.body


def rendered(api: Api, messages: Any, **more: Any) -> str:
    (entry,) = api.app.registry.all_entries()
    assert entry.model is not None
    return entry.model.prompt(messages, **more).text


def body_of(case: Case, **changes: Any) -> dict[str, Any]:
    return {**case.body, **changes}


# ---- parse ----------------------------------------------------------------------------------------------------------


@check("B01a", "B03a")
def same_as_plain(case: Case, world: World, answer: Answer) -> None:
    system = {"B01a": "Answer briefly.", "B03a": "Answer in one word."}[case.id]
    user = {"B01a": "Say hi.", "B03a": "hi"}[case.id]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    other = world.real.chat(**body_of(case, messages=messages))
    assert content(answer) == content(other) and answer.json()["usage"]["prompt_tokens"] > 5
    assert answer.json()["usage"]["prompt_tokens"] == other.json()["usage"]["prompt_tokens"]


@check("B01b")
def names_the_part(case: Case, world: World, answer: Answer) -> None:
    assert "messages[0].content[1]" in fault(answer)["message"]


@check("B02a")
def calls_in_the_prompt(case: Case, world: World, answer: Answer) -> None:
    text = rendered(world.real, case.body["messages"], tools=case.body["tools"])
    assert text.index("get_weather") < text.rindex("Oslo") < text.index("12 C") and "None" not in text


@check("B02b")
def the_history_counts(case: Case, world: World, answer: Answer) -> None:
    alone = world.real.chat(messages=case.body["messages"][:1], tools=case.body["tools"], max_tokens=1)
    assert answer.json()["usage"]["prompt_tokens"] > alone.json()["usage"]["prompt_tokens"] + 5


@check("B03b")
def lists_the_roles(case: Case, world: World, answer: Answer) -> None:
    assert fault(answer)["type"] == "invalid_request_error" and "assistant" in fault(answer)["message"]


@check("B04a")
def both_texts_arrive(case: Case, world: World, answer: Answer) -> None:
    (entry,) = world.last.app.registry.all_entries()
    assert entry.model is not None
    text = entry.model.prompt(case.body["messages"]).text
    assert "the key is 7" in text and "What is the key?" in text


@check("B05a", "B05b", "B06c", "B08a", "B11e", "B13d", "B35b")
def ends_well(case: Case, world: World, answer: Answer) -> None:
    assert reason(answer) in ("stop", "length")


@check("B05c", "B06d", "B09b", "B11b", "B11d", "B13c", "B05d")
def names_the_field(case: Case, world: World, answer: Answer) -> None:
    if case.id == "B05d":
        assert fault(answer)["type"] == "invalid_request_error"
        return
    field = {"B05c": "temperature", "B06d": "max_tokens", "B09b": "tool_choice", "B11b": "n", "B11d": "logit_bias"}
    names(answer, field.get(case.id, "messages"))
    streamed = world.real.chat(**body_of(case, stream=True))
    assert streamed.status == 400 and streamed.headers["content-type"] == "application/json"


@check("B06a")
def counts_five(case: Case, world: World, answer: Answer) -> None:
    assert (answer.json()["usage"]["completion_tokens"], reason(answer)) == (5, "length")


@check("B06b")
def no_small_default(case: Case, world: World, answer: Answer) -> None:
    assert answer.json()["usage"]["completion_tokens"] > 16


@check("B06e")
def clamped(case: Case, world: World, answer: Answer) -> None:
    assert answer.json()["usage"]["total_tokens"] <= world.real_ctx


@check("B08b", "B08c")
def json_or_its_start(case: Case, world: World, answer: Answer) -> None:
    if reason(answer) == "stop":
        value = json.loads(content(answer))
        assert isinstance(value, dict)
        assert case.id == "B08b" or set(value) == {"city", "population"}
    else:
        assert content(answer).lstrip().startswith("{")


@check("B08d")
def harms_nobody(case: Case, world: World, answer: Answer) -> None:
    names(answer, "response_format")
    assert world.real.chat(messages=SAY_HI, max_tokens=2).status == 200


@check("B09a")
def only_the_named_tool(case: Case, world: World, answer: Answer) -> None:
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert calls and {call["function"]["name"] for call in calls} == {"get_time"}


@check("B09c")
def no_calls(case: Case, world: World, answer: Answer) -> None:
    assert not answer.json()["choices"][0]["message"].get("tool_calls") and reason(answer) != "tool_calls"


@check("B09d")
def at_most_one_call(case: Case, world: World, answer: Answer) -> None:
    assert len(answer.json()["choices"][0]["message"].get("tool_calls") or []) <= 1
    assert len(Stream(world.real.chat(**body_of(case, stream=True)).events).calls()) <= 1


@check("B11a")
def two_choices(case: Case, world: World, answer: Answer) -> None:
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]


@check("B11c")
def logprobs(case: Case, world: World, answer: Answer) -> None:
    items = answer.json()["choices"][0]["logprobs"]["content"]
    assert len(items) == answer.json()["usage"]["completion_tokens"]
    assert all(isinstance(i["bytes"], list) and len(i["top_logprobs"]) == 2 and i["logprob"] <= 0 for i in items)


@check("B11f")
def seeds(case: Case, world: World, answer: Answer) -> None:
    assert content(world.real.chat(**case.body)) == content(answer)
    free = body_of(case, seed=None)
    assert len({content(world.real.chat(**free)) for _ in range(4)}) > 1


@check("B13a", "B13b", "B13e", "B13f")
def still_there(case: Case, world: World, answer: Answer) -> None:
    assert answer.headers["content-type"] == "application/json"
    assert answer.status == 200 or fault(answer)["type"] == "invalid_request_error"
    assert world.real.get("/v1/models").status == 200


# ---- streams, reasoning ---------------------------------------------------------------------------------------------


@check("B14")
def whole_characters(case: Case, world: World, answer: Answer) -> None:
    stream = Stream(answer.events)
    assert stream.text() == content(world.last.chat(**body_of(case, stream=False)))
    assert "\ufffd" not in answer.body.decode() and "🤖" in stream.text()


@check("B16a")
def envelope(case: Case, world: World, answer: Answer) -> None:
    chunks = Stream(answer.events).chunks
    assert len({chunk["id"] for chunk in chunks}) == 1
    roles = [choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"]]
    assert roles[0] == "assistant" and not any(roles[1:])
    usage = chunks[-1]["usage"]
    assert chunks[-1]["choices"] == []
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer.body.endswith(b"data: [DONE]\n\n")


@check("B16b")
def no_empty_choices(case: Case, world: World, answer: Answer) -> None:
    assert all(chunk["choices"] for chunk in Stream(answer.events).chunks)


@check("B16c")
def never_sse(case: Case, world: World, answer: Answer) -> None:
    assert answer.headers["content-type"] == "application/json"


@check("B17a")
def streamed_calls(case: Case, world: World, answer: Answer) -> None:
    stream = Stream(answer.events)
    assert [json.loads(call["arguments"])["city"] for call in stream.calls()] == ["Oslo", "Rome"]
    assert stream.finish == "tool_calls" and stream.text() == ""


@check("B17b")
def whole_calls(case: Case, world: World, answer: Answer) -> None:
    call = answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]
    assert isinstance(call["arguments"], str) and reason(answer) == "tool_calls"
    streamed = Stream(world.last.chat(**body_of(case, stream=True)).events).calls()[0]
    assert (streamed["name"], streamed["arguments"]) == (call["name"], call["arguments"])


@check("B19")
def silence_is_filled(case: Case, world: World, answer: Answer) -> None:
    lines = answer.body.decode().split("\n")
    assert all(line == "" or line.startswith((":", "data: ")) for line in lines)
    assert any(line.startswith(": ") for line in lines) and lines[-3] == "data: [DONE]"


@check("B20a", "B20b")
def stops(case: Case, world: World, answer: Answer) -> None:
    stream = Stream(answer.events)
    assert (stream.text().strip(), stream.finish) == ({"B20a": "north", "B20b": "abce"}[case.id], "stop")
    assert not any("sou" in delta for delta in stream.deltas())
    assert content(world.last.chat(**body_of(case, stream=False))) == stream.text()


@check("B21a")
def thought_apart(case: Case, world: World, answer: Answer) -> None:
    stream = Stream(answer.events)
    assert (stream.text("reasoning_content").strip(), stream.text()) == ("plan", "answer")


@check("B21b", "B21c")
def thought_whole(case: Case, world: World, answer: Answer) -> None:
    message = answer.json()["choices"][0]["message"]
    if case.id == "B21b":
        assert not message.get("reasoning_content") and message["content"] and "think" not in message["content"]
    else:
        assert not message["content"] and message["reasoning_content"] and reason(answer) == "length"


# ---- errors, cancel, context ----------------------------------------------------------------------------------------


@check("B23a")
def error_in_a_stream(case: Case, world: World, answer: Answer) -> None:
    assert answer.events[-1] == "[DONE]" and json.loads(answer.events[-2])["error"]["type"] == "server_error"
    assert not any('"finish_reason":"stop"' in event.replace(" ", "") for event in answer.events)
    assert world.last.chat(**body_of(case, max_tokens=3)).status == 200


@check("B23b")
def error_before_it(case: Case, world: World, answer: Answer) -> None:
    assert fault(answer)["type"] == "server_error" and answer.headers["content-type"] == "application/json"


@check("B24a", "B24b", "B24c")
def gone(case: Case, world: World, answer: Answer) -> None:
    """The step of the case: a client that leaves while it is answered, and the next one right behind."""
    with world.scripted(*"ab" * 20, eog=False, decode_ms=5, prefill_ms=20) as api:
        sock = api.open_chat(**body_of(case, messages=SAY_HI))
        if case.id == "B24a":
            read_until(sock, b"data: ")
        sock.close()
        assert eventually(lambda: api.chat(messages=SAY_HI, max_tokens=4).status == 200, 5)


@check("B26a", "B26b", "B26c")
def context(case: Case, world: World, answer: Answer) -> None:
    if case.id == "B26c":
        assert (answer.json()["usage"]["completion_tokens"], reason(answer)) == (1, "length")
        return
    assert fault(answer)["code"] == "context_length_exceeded" and str(world.n_ctx) in fault(answer)["message"]
    streamed = world.last.chat(**body_of(case, stream=True))
    assert (streamed.status, fault(streamed)["code"]) == (400, "context_length_exceeded")


@check("B28a", "B28b", "B29a")
def neighbours(case: Case, world: World, answer: Answer) -> None:
    """Every one hears its own words: a model that repeats its prompt, asked from several sides."""
    with world.echo() as api:

        def say(i: int) -> bool:
            word = f"XK{i:02}-PEAR"
            answer = api.chat(messages=[{"role": "user", "content": word}], max_tokens=30)
            return answer.status == 429 or word in content(answer)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(say, range(12)))


@check("B29b")
def busy_or_served(case: Case, world: World, answer: Answer) -> None:
    with world.scripted("hi", decode_ms=30) as api, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: api.chat(**case.body), range(8)))
    refused = [other for other in answers if other.status == 429]
    assert all(other.headers.get("retry-after") and fault(other)["code"] for other in refused)
    assert {other.status for other in answers} <= {200, 429} and len(refused) < 8


# ---- tokens and templates over HTTP ---------------------------------------------------------------------------------


@check("B31a")
def markers_are_text(case: Case, world: World, answer: Answer) -> None:
    empty = world.real.chat(**body_of(case, messages=[{"role": "user", "content": ""}]))
    assert answer.json()["usage"]["prompt_tokens"] - empty.json()["usage"]["prompt_tokens"] >= 4


@check("B32d")
def ends_at_the_turns_end(case: Case, world: World, answer: Answer) -> None:
    assert (content(answer), reason(answer)) == ("ok", "stop")


# ---- HTTP -----------------------------------------------------------------------------------------------------------


@check("B41a")
def hundred_first(case: Case, world: World, answer: Answer) -> None:
    assert answer.interim == (100,)


@check("B41b")
def chunked_body(case: Case, world: World, answer: Answer) -> None:
    assert content(answer)


@check("B41c", "B41d", "B41e", "B41f", "B41g", "B41h")
def refused_and_closed(case: Case, world: World, answer: Answer) -> None:
    assert fault(answer)["message"]


@check("B44a")
def preflight(case: Case, world: World, answer: Answer) -> None:
    granted = answer.headers["access-control-allow-headers"].lower()
    asked = case.headers["Access-Control-Request-Headers"]
    assert all(name in granted for name in asked.split(",")) and world.keyed_status(case) in (200, 204)


@check("B44b")
def origin_everywhere(case: Case, world: World, answer: Answer) -> None:
    origin = "Origin: http://localhost:5173"
    for body in (case.body, {**case.body, "n": 0}):
        other = world.real.post("/v1/chat/completions", body, origin)
        assert other.headers["access-control-allow-origin"]


@check("B44c")
def rebound_host(case: Case, world: World, answer: Answer) -> None:
    assert b"smol" not in answer.body.lower()
    for host in ("localhost", "127.0.0.1", "[::1]"):
        assert ask(world.real.server, request("GET", "/v1/models", None, host=host)).status == 200


@check("B44d")
def no_simple_post(case: Case, world: World, answer: Answer) -> None:
    assert world.real.chat(messages=SAY_HI, max_tokens=1).status == 200


@check("B44e")
def key_wanted(case: Case, world: World, answer: Answer) -> None:
    assert fault(answer)["code"] == "invalid_api_key" and world.last.get("/health").status == 200


# ---- admin, memory, ops ---------------------------------------------------------------------------------------------


@check("B45a")
def unloaded_in_order(case: Case, world: World, answer: Answer) -> None:
    """The answer that runs ends as it should; who comes after hears at once that the model goes."""
    with world.scripted(*"abcdefgh", decode_ms=20) as api:
        sock = api.open_chat(stream=True)
        read_until(sock, b"data: ")
        done: list[Answer] = []
        thread = threading.Thread(target=lambda: done.append(api.post("/admin/models/unload", {"name": "m"})))
        thread.start()
        assert eventually(lambda: api.chat(messages=SAY_HI).status == 503, 5)
        with sock:
            rest = read_all(sock).replace(b" ", b"")
        thread.join(10)
        assert b'"finish_reason":"stop"' in rest and done[0].status == 200


@check("B45b")
def one_of_two_loads(case: Case, world: World, answer: Answer) -> None:
    assert answer.status == 200
    again = world.last.post("/admin/models/load", {**case.body, "path": "script:small.json"})
    assert again.status == 409
    listed = [item["id"] for item in world.last.get("/v1/models").json()["data"]]
    assert listed.count("dup") == 1


@check("B45c")
def confined(case: Case, world: World, answer: Answer) -> None:
    for path in (case.body["path"], "../../etc/passwd", "/", "", "a\0b"):
        other = world.last.post("/admin/models/load", {"path": path, "name": "x"})
        assert other.status in (400, 403, 404) and b"root:" not in other.body


@check("B46b")
def refused_for_memory(case: Case, world: World, answer: Answer) -> None:
    assert fault(answer)["code"] and (answer.status != 503 or answer.headers["retry-after"])
    assert world.last.chat(messages=SAY_HI, max_tokens=2).status == 200


@check("B47a")
def head_is_get(case: Case, world: World, answer: Answer) -> None:
    head = ask(world.real.server, request("HEAD", "/health"))
    assert (head.status, head.body) == (answer.status, b"")


@check("B47b")
def model_list(case: Case, world: World, answer: Answer) -> None:
    listed = answer.json()
    assert listed["object"] == "list"
    for item in listed["data"]:
        assert item["id"] and item["object"] == "model" and item["created"] > 0 and item["owned_by"]
        assert item["max_model_len"] == world.real_ctx


@check("B47c")
def metrics(case: Case, world: World, answer: Answer) -> None:
    def counters() -> dict[str, float]:
        lines = world.real.get("/metrics").body.decode().splitlines()
        values = (line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
        return {name: float(value) for name, value in values if "_total" in name}

    before = counters()
    world.real.chat(messages=SAY_HI, max_tokens=1)
    after = counters()
    assert all(after[name] >= value for name, value in before.items()) and sum(after.values()) > sum(before.values())

