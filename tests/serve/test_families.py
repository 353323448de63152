"""Every family through HTTP: what a prompt begins with, what ends an answer, and that recurrent models and mixtures
answer several users, second turns and those after a cancelled one as they answer alone [M224, M225, M226; X12, B28].
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from pantheon.sched.shared import SchedConfig
from pantheon.serve.context import App
from pantheon.serve.loading import LoadOptions, ModelSpec, free, load_spec
from tests.golden_data import model_path
from tests.serve.api_server import Api, serving
from tests.serve.batch_server import Later
from tests.serve.http_client import eventually, read_until

HYBRID = "tiny-qwen35.Q8_0"
STATEFUL = (HYBRID, "tiny-qwen35moe.Q4_0")
USERS = 4


@contextmanager
def server(stem: str, users: int = 1) -> Iterator[Api]:
    batch = SchedConfig(users=users) if users > 1 else None
    app = App(load_options=LoadOptions(threads=1, ctx=512, batch=batch))
    with serving(app) as api:
        load_spec(app.registry, ModelSpec(str(model_path(stem)), "m"), app.load_options)
        yield api
        for entry in app.registry.all_entries():
            assert entry.prefix_cache is not None
            entry.prefix_cache.check_integrity()
    for entry in app.registry.all_entries():
        free(app.registry, entry)


def said(text: str, *before: tuple[str, str]) -> list[dict[str, str]]:
    turns = [{"role": role, "content": content} for role, content in before]
    return [*turns, {"role": "user", "content": text}]


def answer(api: Api, messages: list[dict[str, str]], n: int = 10, **how: Any) -> tuple[str, int]:
    """(text, prompt tokens that were not read again)."""
    reply = api.whole(messages=messages, max_tokens=n, ignore_eos=True, **{"temperature": 0, **how})
    cached = reply["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return reply["choices"][0]["message"]["content"], cached


CHATS: list[tuple[list[dict[str, str]], dict[str, Any]]] = [
    (said("hi"), {}),
    (said("one two three " * 30), {}),
    (said("and then?", ("user", "tell me"), ("assistant", "once upon a time")), {"temperature": 0.8, "seed": 5}),
    (said("one two three " * 20 + "four"), {"temperature": 0.9, "seed": 6}),
]


@pytest.fixture(scope="module", params=[*STATEFUL, "tiny-qwen3moe.Q8_0"])
def alone(request: pytest.FixtureRequest, kernels: None) -> tuple[str, list[str]]:
    """A model, and what it answers each chat on a server that has heard nothing else."""
    answers = []
    for messages, how in CHATS:
        with server(request.param) as api:
            answers.append(answer(api, messages, **how)[0])
    return request.param, answers


def test_four_at_once_are_answered_as_each_alone(alone: tuple[str, list[str]]) -> None:
    """Cold and then warm; each slot has a recurrent state of its own [M226, B28, B30]."""
    stem, want = alone
    with server(stem, USERS) as api:
        barrier = threading.Barrier(USERS)

        def one(i: int) -> Any:
            barrier.wait(20)
            return answer(api, CHATS[i][0], **CHATS[i][1])[0]

        for _ in range(2):
            laters: list[Any] = [Later(partial(one, i)) for i in range(USERS)]
            assert [later.get() for later in laters] == want


def test_by_turns_on_one_slot_each_is_answered_as_alone(alone: tuple[str, list[str]]) -> None:
    stem, want = alone
    with server(stem) as api:
        for _ in range(2):
            assert [answer(api, messages, **how)[0] for messages, how in CHATS] == want


@pytest.mark.parametrize("users", [1, USERS])
@pytest.mark.parametrize("stem", STATEFUL)
def test_a_second_turn_goes_on_from_a_checkpoint_X12(stem: str, users: int, kernels: None) -> None:
    """Less is read, and the answer is that of a server which reads it all."""
    first = said("once upon a time there was a fox " * 4)
    with server(stem, users) as api:
        told, _ = answer(api, first)
        second = [*first, {"role": "assistant", "content": told}, *said("and then?")]
        warm, cached = answer(api, second)
        other, _ = answer(api, [*first, {"role": "assistant", "content": "no"}, *said("and then?")])
    assert cached >= 60
    with server(stem) as api:
        assert answer(api, second) == (warm, 0)
    with server(stem) as api:
        assert answer(api, [*first, {"role": "assistant", "content": "no"}, *said("and then?")])[0] == other


@pytest.mark.parametrize("users", [1, USERS])
def test_a_cancelled_request_leaves_no_trace_in_the_next_M226(users: int, kernels: None) -> None:
    """Cut while it is answered: the same chat, one that begins like it and another are answered as ever."""
    chats = [said("a b c d " * 20), said("a b c d " * 20 + "e"), said("z")]
    with server(HYBRID) as api:
        want = [answer(api, chat)[0] for chat in chats[:1]]
    for chat in chats[1:]:
        with server(HYBRID) as api:
            want.append(answer(api, chat)[0])
    with server(HYBRID, users) as api:
        for chat, expected in zip(chats, want, strict=True):
            stream = api.open_chat(stream=True, messages=chats[0], max_tokens=300, ignore_eos=True, temperature=0)
            read_until(stream, b'"content"')
            stream.close()
            assert eventually(lambda: api.app.metrics.value("requests_in_flight") == 0)
            assert answer(api, chat)[0] == expected


@pytest.mark.parametrize(
    ("stem", "begins"),
    [
        ("tiny-gemma3.Q4_0", "<bos><start_of_turn>user\n"),
        ("tiny-mixtral.Q4_0", "<s>[INST]"),
        ("tiny-p3.Q8_0", "<|user|>"),
        ("tiny-qwen3moe.Q8_0", "<|im_start|>user\n"),
        (HYBRID, "<|im_start|>user\n"),
    ],
)
def test_a_prompt_begins_as_the_family_wants_it_B32(stem: str, begins: str, kernels: None) -> None:
    """One BOS where the model has one, whether the template prints it or not; and an answer comes."""
    with server(stem) as api:
        text = api.post("/apply-template", {"messages": said("hi")}).json()["prompt"]
        assert text.startswith(begins), text
        reply = api.whole(messages=said("hi"), max_tokens=3, ignore_eos=True, temperature=0)
        ids = api.post("/tokenize", {"content": text, "add_special": False, "parse_special": True}).json()["tokens"]
        assert reply["usage"] == reply["usage"] | {"prompt_tokens": len(ids), "completion_tokens": 3}
