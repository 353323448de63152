"""What several users at once are answered is what each would be answered alone, whatever the others do.

Spec: M074, M106-M108, M112, M114, M139, B28, B30.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pantheon.sched.shared import SchedConfig
from pantheon.serve.context import App
from pantheon.serve.loading import LoadOptions, ModelSpec, load_spec
from tests.golden_data import model_path
from tests.serve.api_server import Api, serving
from tests.serve.batch_server import Later, batching
from tests.serve.http_client import eventually

USERS = 8
WORDS = ("ape", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")


@contextmanager
def tiny(batch: SchedConfig | None) -> Iterator[Api]:
    app = App(load_options=LoadOptions(threads=1, ctx=512, batch=batch))
    with serving(app) as api:
        load_spec(app.registry, ModelSpec(str(model_path("tiny-llama.Q8_0")), "m"), app.load_options)
        yield api


def bodies() -> list[dict[str, Any]]:
    """Short and long prompts in turns, streams and plain answers, greedy and sampled with a seed."""
    found = []
    for i, word in enumerate(WORDS):
        text = f"{word} " * (90 if i % 2 else 3)
        how: dict[str, Any] = {"temperature": 0} if i % 3 else {"temperature": 0.9, "seed": 7 + i}
        found.append({"messages": [{"role": "user", "content": text}], "max_tokens": 12, "stream": i % 4 == 3, **how})
    return found


def answer(api: Api, body: dict[str, Any]) -> tuple[str, int]:
    """(text, prompt tokens)."""
    if body["stream"]:
        stream = api.stream(**{k: v for k, v in body.items() if k != "stream"}, stream_options={"include_usage": True})
        return stream.text(), stream.chunks[-1]["usage"]["prompt_tokens"]
    reply = api.whole(**body)
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"]


@pytest.fixture(scope="module")
def alone(kernels: None) -> list[tuple[str, int]]:
    """Each one's answer on a server of one user."""
    with tiny(None) as api:
        return [answer(api, body) for body in bodies()]


@pytest.mark.parametrize(
    "how",
    [{}, {"mixed": False}, {"lockstep": True}, {"chunk": 1}, {"users": 3}],
    ids=lambda how: "-".join(how) or "default",
)
def test_eight_at_once_get_their_solo_answers_M074_M107_M108_M112_M114_B28(
    how: dict[str, Any], alone: list[tuple[str, int]]
) -> None:
    with tiny(SchedConfig(**{"users": USERS, **how})) as api:
        barrier = threading.Barrier(USERS)

        def one(body: dict[str, Any]) -> Any:
            barrier.wait(20)
            return answer(api, body)

        for _ in range(2):  # cold, then warm [B30]
            laters = [Later(lambda body=body: one(body)) for body in bodies()]
            assert [later.get() for later in laters] == alone
        [entry] = api.app.registry.all_entries()
        assert entry.sched is not None
        totals = entry.sched.view()["totals"]
        assert totals["cached_tokens"] > 0 and totals["faults"] == 0
        assert how.get("users") or totals["decode_columns"] > totals["steps"] - totals["prompt_columns"], "they shared"


def test_nobody_hears_of_another_ones_word_B28() -> None:
    """Sixteen at once, some of whom leave, long prompts and short ones."""
    words = [f"word{i:02}" for i in range(16)]
    then = {word: [word[:4], word[4:]] for word in words}
    with batching(8, script={"then": then, "decode_ms": 1}) as b:
        for round_ in range(4):
            gone = [
                b.open(messages=[{"role": "user", "content": words[(i + round_) % 16] + " z" * 400}]) for i in range(2)
            ]
            laters = {
                word: b.ask(messages=[{"role": "user", "content": f"say {word}" + " x" * (300 if i % 2 else 1)}])
                for i, word in enumerate(words)
            }
            for sock in gone:
                sock.close()
            for word, later in laters.items():
                reply = later.get().json()
                assert reply["choices"][0]["message"]["content"] == word
                assert reply["usage"]["prompt_tokens"] > 300 * 2 * (words.index(word) % 2)
        assert eventually(lambda: b.sched.load()[:2] == (0, 0))
