"""POST /v1/embeddings and llama-server's own doors to the same."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.serve.api_server import Api, answer_of, scripted
from tests.serve.batch_server import batching

PATH = "/v1/embeddings"


def ask(api: Api, **body: Any) -> dict[str, Any]:
    answer = api.post(PATH, {"input": "abc", **body})
    assert answer.status == 200, answer.body
    reply: dict[str, Any] = answer.json()
    return reply


def test_one_text() -> None:
    with scripted("x") as api:
        body = ask(api)
        assert body["object"] == "list" and body["model"] == "m"
        assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
        (item,) = body["data"]
        assert (item["object"], item["index"]) == ("embedding", 0)
        assert np.linalg.norm(item["embedding"]) == pytest.approx(1, abs=1e-6)


def test_inputs_of_every_form() -> None:
    with scripted("x") as api:
        several = ["abc", [97, 98, 99], [97, "bc"], {"prompt_string": "abc"},
                   {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]}]  # fmt: skip
        body = ask(api, input=several)
        vectors = [item["embedding"] for item in body["data"]]
        assert len(vectors) == 5 and all(vector == vectors[0] for vector in vectors)
        assert body["usage"]["prompt_tokens"] == 15 and [item["index"] for item in body["data"]] == [0, 1, 2, 3, 4]
        assert ask(api, input=[97, 98, 99])["data"][0]["embedding"] == vectors[0]
        assert len(ask(api, input=["a"] * 40)["data"]) == 40


def test_base64_holds_the_same_numbers() -> None:
    with scripted("x") as api:
        plain = ask(api)["data"][0]["embedding"]
        packed = ask(api, encoding_format="base64")["data"][0]["embedding"]
        assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == plain
        assert ask(api, dimensions=len(plain))["data"][0]["embedding"] == plain


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_llama_servers_shape(path: str) -> None:
    with scripted("x") as api:
        found = api.post(path, {"content": "abc"}).json()
        assert found == [{"index": 0, "embedding": [ask(api)["data"][0]["embedding"]]}]
        raw = api.post(path, {"input": ["abc", "a"], "embd_normalize": -1}).json()
        assert [len(item["embedding"]) for item in raw] == [1, 1]
        assert np.linalg.norm(raw[0]["embedding"][0]) != pytest.approx(1, abs=1e-3)
        assert api.post(path, {}).status == 400


def test_pooling() -> None:
    with scripted("x") as api:
        api.app.pooling = "none"
        rows = api.post("/embeddings", {"input": "abc"}).json()[0]["embedding"]
        assert len(rows) == 3 and np.linalg.norm(rows[0]) > 1.01
        refused = api.post(PATH, {"input": "abc"})
        assert refused.status == 400 and "--pooling" in refused.json()["error"]["message"]
        api.app.pooling = "last"
        last = ask(api)["data"][0]["embedding"]
        assert last == ask(api, input="c")["data"][0]["embedding"] != ask(api, input="a")["data"][0]["embedding"]


def test_what_can_not_be_embedded() -> None:
    with scripted("x", n_ctx=8) as api:
        for body, param, code in (
            ({"input": []}, "input", None),
            ({}, "input", None),
            ({"input": ""}, "input", None),
            ({"input": {"content": "a"}}, "input", None),
            ({"input": {"content": [{"type": "image_url"}]}}, "input", None),
            ({"input": "a" * 9}, "input", "context_length_exceeded"),
            ({"input": [10**6]}, "input", None),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format", None),
            ({"input": "a", "dimensions": 3}, "dimensions", None),
        ):
            answer = api.post(PATH, body)
            error = answer.json()["error"]
            assert (answer.status, error["param"], error["code"]) == (400, param, code), body
        assert len(ask(api, input="a" * 8)["data"]) == 1


def test_an_answer_in_the_making_is_not_disturbed() -> None:
    """Without a scheduler one request at a time uses a model, this one like any other [M049]."""
    with scripted("x", eog=False, decode_ms=5) as api:
        sock = api.open_chat(max_tokens=200, stream=True)
        assert sock.recv(1)
        assert api.post(PATH, {"input": "a"}).status == 429
        sock.close()


def test_beside_answers_of_other_users() -> None:
    """With a scheduler it has a place like everyone, and its forwards take turns with theirs."""
    with batching(2, script={"eog": False, "decode_ms": 2}) as b:
        sock = b.open(max_tokens=60, stream=True)
        b.until_load(1)
        found = b.api.post(PATH, {"input": ["abc" * 100, "abc"]})
        assert found.status == 200 and found.json()["usage"]["prompt_tokens"] == 303
        answer = answer_of(sock)
        assert answer.status == 200 and answer.events[-1] == "[DONE]"
        b.until_load(0)
        assert b.api.post("/completion", {"prompt": ["a", "b"], "n_predict": 2}).status == 200
        scored = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 1}
        assert b.api.post("/v1/completions", scored).status == 200
        b.sched.check_integrity()
