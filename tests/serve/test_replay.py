"""Logs of agents without ids, replayed over HTTP: what of a prompt is not read again, and that it changes no answer
[X12, M125, B30; issue 5's judged replay].  The timings of the same logs are `python -m tools.replay_agent`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from pantheon.sched.shared import SchedConfig
from pantheon.serve import loading
from pantheon.serve.context import App
from pantheon.serve.loading import LoadOptions, ModelSpec, load_spec
from pantheon.serve.registry import Registry
from tests.golden_data import model_path
from tests.serve.api_server import Api, serving
from tools.replay_agent import STYLES, Answer, Ask, Style, agent_log, play

TINY = str(model_path("tiny-llama-k.Q4_K_M"))
SCALE = 0.02
#: an attribution line in front of little else
BILLED = Style("billed", 9_000, 2, 900, 900, None, attribution=True)
ANSWER = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
USERS = [pytest.param(1, id="one user"), pytest.param(3, id="three slots")]


@contextmanager
def tiny_server(users: int = 1, **options: Any) -> Iterator[Api]:
    registry = Registry()
    batch = SchedConfig(users=users) if users > 1 else None
    load_spec(registry, ModelSpec(TINY, "w"), LoadOptions(ctx=8192, threads=1, batch=batch, **options))
    with serving(App(registry=registry)) as api:
        yield api
        for entry in registry.all_entries():
            assert entry.prefix_cache is not None
            entry.prefix_cache.check_integrity()
    for entry in registry.all_entries():
        loading.free(registry, entry)


def asking(api: Api, path: str = "/v1/chat/completions") -> Any:
    def ask(asked: Ask) -> Answer:
        reply = api.post(path, asked.body(**ANSWER)).json()
        usage = reply["usage"]
        return Answer(asked.kind, 0.0, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])

    return ask


@pytest.mark.parametrize("users", USERS)
def test_ten_turns_without_ids_reuse_all_that_they_share_X12(users: int) -> None:
    """At least 90 % of what each turn has in common with the one before, with other requests in between."""
    with tiny_server(users) as api:
        for style in STYLES.values() if users == 1 else [STYLES["mini"]]:
            style = replace(style, tools=min(style.tools, 3))
            played = list(play(agent_log(style, scale=SCALE), asking(api)))
            turns = [turn for turn in played if turn.answer.kind == "turn"]
            assert len(turns) == 10 and len(played) == 12
            assert min(turn.share for turn in turns[1:]) >= 0.9, (style.name, played)


def test_two_agents_by_turns_on_one_slot_stay_warm_X12() -> None:
    """Their prompts begin alike, with the same tools; who asks comes out of the messages."""
    with tiny_server() as api:
        logs = [list(agent_log(STYLES["mini"], scale=SCALE, seed=1)) for _ in range(2)]
        other = [Ask(a.kind, [*a.messages[:1], {"role": "user", "content": "other"}, *a.messages[2:]], a.tools)
                 for a in logs[1]]  # fmt: skip
        ask, least = asking(api), [1.0, 1.0]
        before = [0, 0]
        for pair in zip(logs[0], other, strict=True):
            for who, asked in enumerate(pair):
                if asked.kind == "turn":
                    answer = ask(asked)
                    if before[who]:
                        least[who] = min(least[who], answer.cached / before[who])
                    before[who] = answer.prompt
        assert min(least) >= 0.99


def test_an_attribution_line_costs_nothing_and_off_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_server() as api:
        log = agent_log(BILLED, turns=3, scale=SCALE)
        turns = [turn for turn in play(log, asking(api)) if turn.answer.kind == "turn"]
        assert min(turn.share for turn in turns[1:]) >= 1.0
        monkeypatch.setenv("PN_STABLE_PREFIX", "off")
        log = agent_log(BILLED, turns=3, scale=SCALE)
        turns = [turn for turn in play(log, asking(api)) if turn.answer.kind == "turn"]
        assert max(turn.share for turn in turns[1:]) < 0.3


def messages_body(asked: Ask, session: str) -> dict[str, Any]:
    """The same turn as Claude Code sends it."""
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in asked.tools]
    told: list[dict[str, Any]] = []
    for message in asked.messages[1:]:
        calls = message.get("tool_calls")
        if calls:
            block = {"type": "tool_use", "id": calls[0]["id"], "name": "tool_0", "input": {"path": "a.py"}}
            told.append({"role": "assistant", "content": [block]})
        elif message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            told.append({"role": "user", "content": [block]})
        else:
            told.append(message)
    line, _, prompt = asked.messages[0]["content"].partition("\n")
    system = [{"type": "text", "text": text} for text in (line, prompt)]
    metadata = {"user_id": f"user_1_account_2_session_{session}"}
    return {"model": "w", "system": system, "messages": told, "tools": tools, "metadata": metadata, "max_tokens": 5}


def test_claude_codes_turns_stay_warm_on_the_messages_api_X12() -> None:
    with tiny_server() as api:
        before = 0
        for asked in agent_log(BILLED, turns=4, scale=SCALE):
            if asked.kind != "turn":
                continue
            answer = api.post("/v1/messages", messages_body(asked, "s"), "anthropic-version: 2023-06-01")
            assert answer.status == 200, answer.body
            usage = answer.json()["usage"]
            cached = usage["cache_read_input_tokens"]
            assert cached >= before
            before = usage["input_tokens"] + cached
        assert before > 400


@pytest.mark.parametrize("users", USERS)
def test_the_same_prompt_twice_gives_the_same_tokens_B30(users: int) -> None:
    """With nothing cached, with all but one token cached, and with a prefix copied from somebody else's."""
    with tiny_server(users) as api:
        log = [asked for asked in agent_log(STYLES["mini"], turns=3, scale=SCALE) if asked.kind == "turn"]
        seen: dict[int, list[dict[str, Any]]] = {}
        sampled = {"temperature": 1.0, "seed": 7, "logprobs": True, "top_logprobs": 3}
        for turn in (2, 0, 2, 2, 1, 0, 2, 1):
            reply = api.whole(**log[turn].body(max_tokens=12, ignore_eos=True, **sampled))
            usage, choice = reply["usage"], reply["choices"][0]
            if turn in seen:
                assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
            choice["message"].pop("tool_calls", None)
            seen.setdefault(turn, []).append(choice)
    for answers in seen.values():
        assert len(answers) > 1
        # the log-probabilities too, digit for digit
        assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("users", USERS)
def test_title_requests_under_the_same_id_push_nothing_out(users: int) -> None:
    """opencode sends its title request with the session id of the conversation."""
    with tiny_server(users) as api:
        main = [{"role": "system", "content": "You fix things. " * 20}, {"role": "user", "content": "go"}]
        first = api.post("/v1/chat/completions", {"messages": main, **ANSWER}, "x-session-id: s").json()
        for n in range(10):
            title = [{"role": "system", "content": f"{n}: a title, please."}, {"role": "user", "content": "go"}]
            api.post("/v1/chat/completions", {"messages": title, **ANSWER}, "x-session-id: s")
        main += [{"role": "assistant", "content": "done"}, {"role": "user", "content": "more"}]
        reply = api.post("/v1/chat/completions", {"messages": main, **ANSWER}, "x-session-id: s").json()
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["prompt_tokens"]


def test_logs_are_the_same_each_time_and_only_grow() -> None:
    style = Style("x", 100, 2, 50, 40, None)
    turns = [asked for asked in agent_log(style, turns=4) if asked.kind == "turn"]
    assert turns == [asked for asked in agent_log(style, turns=4) if asked.kind == "turn"]
    for n, before, now in zip(count(), turns, turns[1:], strict=False):
        assert now.messages[: len(before.messages)] == before.messages and len(now.messages) == 4 + 2 * n
