"""Every parse rule of the chat body, table-driven from the field cases B05, B06, B08, B09, B11, B13."""

from __future__ import annotations

from typing import Any

import pytest

from pantheon.engine.sampler import SamplingParams
from pantheon.errors import BadRequest
from pantheon.serve.chat_request import ChatRequest, parse_chat_request

MESSAGES = [{"role": "user", "content": "hi"}]


def tool(name: str = "get_weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def parse(headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    return parse_chat_request({"messages": MESSAGES, **fields}, headers)


NULLABLE = """
    model temperature top_p min_p top_k presence_penalty frequency_penalty repeat_penalty repeat_last_n seed stop
    max_tokens max_completion_tokens n stream stream_options logprobs top_logprobs logit_bias tools tool_choice
    parallel_tool_calls response_format chat_template_kwargs reasoning_effort enable_thinking session_id user
    metadata store functions function_call ignore_eos
""".split()


@pytest.mark.parametrize("name", NULLABLE)
def test_null_is_the_default_B05(name: str) -> None:
    assert parse(**{name: None}) == parse()


def test_all_nulls_at_once_B05a() -> None:
    assert parse(**dict.fromkeys(NULLABLE)) == parse()


def test_unknown_fields_are_ignored_B05b() -> None:
    known = parse(reasoning_effort="low")
    extra = {"store": False, "metadata": {"k": "v"}, "service_tier": "auto", "x": {"a": 1}}
    assert parse(reasoning_effort="low", user=7, verbosity="low", prediction={"type": "content"}, **extra) == known


BAD = [
    ("temperature", "hot"), ("temperature", 3), ("temperature", -0.1), ("temperature", True), ("temperature", [1]),
    ("temperature", float("nan")), ("temperature", float("inf")),
    ("top_p", 1.5), ("top_p", -0.1), ("top_p", "1"),
    ("min_p", 1.1), ("min_p", "0"),
    ("top_k", -2), ("top_k", 1.5), ("top_k", True),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", "x"),
    ("repeat_penalty", 0), ("repeat_penalty", -1), ("repetition_penalty", 0), ("repeat_last_n", -2),
    ("seed", "x"), ("seed", 1.5), ("seed", True), ("seed", 10**30),
    ("stop", ""), ("stop", [""]), ("stop", [1]), ("stop", 5), ("stop", {"a": 1}), ("stop", ["x"] * 17),
    ("max_tokens", 0), ("max_tokens", -2), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", True),
    ("max_completion_tokens", 0), ("max_completion_tokens", -5), ("max_completion_tokens", "9"),
    ("n", 0), ("n", -1), ("n", 1.5), ("n", 1000), ("n", True), ("n", "1"),
    ("stream", "yes"), ("stream", 1), ("stream_options", []), ("stream_options", True),
    ("logprobs", 1), ("top_logprobs", 2),
    ("logit_bias", []), ("logit_bias", {"x": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": "a"}),
    ("logit_bias", {"-1": 1}), ("logit_bias", {"1": None}), ("logit_bias", {"1": True}),
    ("tools", {}), ("tools", "x"),
    ("tool_choice", "nope"), ("tool_choice", "required"), ("tool_choice", 5), ("tool_choice", {}),
    ("tool_choice", {"type": "function", "function": {"name": "nope"}}),
    ("tool_choice", {"type": "function", "function": {}}),
    ("parallel_tool_calls", "no"),
    ("response_format", "json"), ("response_format", {}), ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": "x"}}),
    ("response_format", {"type": ["text"]}),
    ("chat_template_kwargs", []), ("chat_template_kwargs", {"messages": []}), ("chat_template_kwargs", {"a b": 1}),
    ("reasoning_effort", "huge"), ("reasoning_effort", 5), ("enable_thinking", "no"),
    ("model", 5), ("functions", [{"name": 5}]), ("reasoning_format", "x"), ("thinking_budget", "x"),
    ("messages", []), ("messages", None), ("messages", "hi"), ("messages", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}={str(v)[:30]}" for n, v in BAD])
def test_wrong_type_or_range_names_the_field_B05c_B06_B08_B11(name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as fault:
        parse(**{name: value})
    assert (fault.value.status, fault.value.param) == (400, name)
    assert name in fault.value.message


def test_thinking_is_true_or_false_wherever_it_is_said() -> None:
    """A template takes the text "false" for true: what should have no thought would be nothing but one."""
    with pytest.raises(BadRequest) as fault:
        parse(chat_template_kwargs={"enable_thinking": "false"})
    assert fault.value.param == "chat_template_kwargs.enable_thinking"


def test_bad_include_usage() -> None:
    with pytest.raises(BadRequest) as fault:
        parse(stream_options={"include_usage": "x"})
    assert fault.value.param == "stream_options.include_usage"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([5], "tools[0]"),
        ([tool(), {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": "f"}], "tools[0].function"),
        ([tool("")], "tools[0].function.name"),
        ([tool(5)], "tools[0].function.name"),  # type: ignore[arg-type]
        ([tool(description=5)], "tools[0].function.description"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(strict="yes")], "tools[0].function.strict"),
    ],
)
def test_bad_tools_name_the_place(tools: list[Any], param: str) -> None:
    with pytest.raises(BadRequest) as fault:
        parse(tools=tools)
    assert fault.value.param == param


def test_bad_message_names_its_index() -> None:
    with pytest.raises(BadRequest) as fault:
        parse_chat_request({"messages": [*MESSAGES, "x"]})
    assert fault.value.param == "messages[1]"


@pytest.mark.parametrize("body", [[1, 2], "x", None, 5])
def test_a_body_that_is_no_object_B13f(body: Any) -> None:
    with pytest.raises(BadRequest):
        parse_chat_request(body)


@pytest.mark.parametrize(
    ("fields", "cap", "named"),
    [
        ({}, None, "max_tokens"),
        ({"max_tokens": -1}, None, "max_tokens"),
        ({"max_tokens": 5}, 5, "max_tokens"),
        ({"max_tokens": 5.0}, 5, "max_tokens"),
        ({"max_completion_tokens": 5}, 5, "max_completion_tokens"),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 3, "max_tokens"),
        ({"max_tokens": -1, "max_completion_tokens": 5}, 5, "max_completion_tokens"),
        ({"max_tokens": 10_000_000}, 10_000_000, "max_tokens"),
    ],
)
def test_cap_B06(fields: dict[str, Any], cap: int | None, named: str) -> None:
    request = parse(**fields)
    assert (request.max_tokens, request.max_tokens_field) == (cap, named)


@pytest.mark.parametrize(
    ("stop", "parsed"),
    [(None, ()), ([], ()), ("x", ("x",)), (["a", "b", "a"], ("a", "b")), ([" "], (" ",)), (["x"] * 16, ("x",))],
)
def test_stop_forms(stop: Any, parsed: tuple[str, ...]) -> None:
    assert parse(stop=stop).stop == parsed


def test_sampling_fields_M038() -> None:
    request = parse(
        temperature=0, top_k=5, top_p=0, min_p=0.1, repeat_penalty=1.1, repeat_last_n=-1, presence_penalty=-2,
        frequency_penalty=2, logit_bias={"7": -100, "8": 1.5}, seed=9, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert request.params == SamplingParams(
        0.0, 5, 0.0, 0.1, 1.1, -1, -2.0, 2.0, ((7, -100.0), (8, 1.5)), seed=9, top_logprobs=2
    )


def test_defaults_are_the_samplers() -> None:
    assert parse().params == SamplingParams()
    assert parse(logprobs=True).params.top_logprobs == 0
    assert parse(logit_bias={}).params.logit_bias == ()
    assert parse(seed=-1).params.seed is None
    assert parse(repetition_penalty=1.3).params.repeat_penalty == 1.3
    assert parse(top_k=0).params.top_k == parse(top_k=-1).params.top_k == 0
    assert parse(repeat_last_n=0).params.repeat_last_n == 0


def test_tools_are_completed_and_kept() -> None:
    schema = {"type": "object", "properties": {"city": {"type": ["string", "null"]}}, "x-vendor": 1}
    request = parse(tools=[tool(parameters=schema, strict=True), {"function": {"name": "f", "parameters": None}}])
    assert request.tools[0]["function"]["parameters"] == schema
    empty = {"type": "object", "properties": {}}
    assert request.tools[1] == {"type": "function", "function": {"name": "f", "parameters": empty}}
    assert parse(tools=[]).tools == ()


@pytest.mark.parametrize(
    ("choice", "parsed"),
    [
        (None, ("auto", None)),
        ("auto", ("auto", None)),
        ("none", ("none", None)),
        ("required", ("required", None)),
        ({"type": "function", "function": {"name": "get_time"}}, ("named", "get_time")),
        ({"type": "function", "name": "get_time"}, ("named", "get_time")),
    ],
)
def test_tool_choice_forms_B09(choice: Any, parsed: tuple[str, str | None]) -> None:
    request = parse(tools=[tool(), tool("get_time")], tool_choice=choice)
    assert (request.tool_choice, request.tool_name) == parsed


def test_response_format_forms_B08() -> None:
    schema = {"type": "object"}
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert parse(response_format={"type": "text"}).response_format is None
    assert parse(response_format={"type": "json_object"}).response_format == {"type": "json_object"}
    assert parse(response_format={"type": "json_object", "schema": schema}).response_format == asked
    named = {"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": schema}}
    assert parse(response_format=named).response_format == asked


def test_template_kwargs_B21b() -> None:
    assert parse(chat_template_kwargs={"enable_thinking": False}).template_kwargs == {"enable_thinking": False}
    assert parse(enable_thinking=False).template_kwargs == {"enable_thinking": False}
    assert parse(reasoning_effort="none").template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}
    assert parse(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"}).template_kwargs == {
        "reasoning_effort": "low"
    }


def test_session_comes_from_body_or_header_M039() -> None:
    assert parse().session_id is None
    assert parse(session_id="a").session_id == "a"
    assert parse({"x-session-id": "b"}).session_id == "b"
    assert parse({"X-Session-Id": "b"}, session_id="a").session_id == "a"
    # opencode, codex, vibe, OpenAI's own field: hints, which are never refused
    assert parse({"X-Session-Affinity": "c"}).session_id == "c"
    assert parse({"session-id": "d", "thread-id": "e"}).session_id == "d"
    assert parse({"x-affinity": "f" * 300}).session_id == "f" * 256
    # hints: nothing about them is refused
    assert parse(session_id="x" * 300).session_id == "x" * 256 and parse(session_id=["a"]).session_id is None
    assert parse(prompt_cache_key="g").session_id == "g" and parse(prompt_cache_key=[7]).session_id is None


def test_stream_options() -> None:
    assert parse(stream=True, stream_options={"include_usage": True, "x": 1}).include_usage
    assert not parse(stream=True, stream_options={}).include_usage


def test_a_request_can_not_be_changed() -> None:
    with pytest.raises(AttributeError):
        parse().n = 2  # type: ignore[misc]
