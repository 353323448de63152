"""`/m/{model}/…`: the API of one model, for what expects one behind a URL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.api_server import USER, Api, Stream, serving
from tests.serve.http_client import ask, request


@pytest.fixture
def api() -> Iterator[Api]:
    with serving() as server:
        server.add("a", pieces=["A"])
        server.add("org/b", pieces=["B"])
        yield server


@pytest.mark.parametrize(
    ("base", "name", "text"), [("/m/a", "a", "A"), ("/m/org/b", "org/b", "B"), ("/m/org%2Fb", "org/b", "B")]
)
def test_that_model_answers_whatever_the_body_names(api: Api, base: str, name: str, text: str) -> None:
    for model in ({}, {"model": "a"}, {"model": "nonsense"}):
        answer = api.post(f"{base}/v1/chat/completions", {"messages": USER, **model})
        assert answer.status == 200 and answer.headers["x-pantheon-model"] == name
        assert answer.json()["choices"][0]["message"]["content"] == text
    stream = Stream(api.post(f"{base}/v1/chat/completions", {"messages": USER, "stream": True}).events)
    assert stream.text() == text
    whole = api.post(f"{base}/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert whole.status == 200 and whole.json()["model"] == name
    listed = api.get(f"{base}/v1/models").json()
    assert [item["id"] for item in listed["data"]] == [name] and listed["object"] == "list"
    assert api.get(f"{base}/health").json() == api.get(f"{base}/v1/health").json() == {"status": "ok"}


def test_no_other_model_answers_in_its_place(api: Api) -> None:
    api.app.registry.unload("org/b", timeout_s=0)
    gone = api.post("/m/org/b/v1/chat/completions", {"messages": USER})
    assert (gone.status, gone.code) == (404, "model_not_found")
    assert api.get("/m/org/b/health").status == 503 and api.get("/m/org/b/v1/models").json()["data"] == []
    api.app.registry.reserve("c", "/c")
    assert api.get("/m/c/health").json()["status"] == "loading"
    assert api.post("/m/c/v1/chat/completions", {"messages": USER}).code == "model_loading"
    assert api.post("/m/default/v1/chat/completions", {"messages": USER}).code == "model_not_found"
    # the server itself is as lenient as it was
    assert api.whole(model="nonsense")["model"] == "a"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/m/a", 404),
        ("GET", "/m/a/", 404),
        ("GET", "/m/a/v1", 404),
        ("GET", "/m//health", 404),
        ("GET", "/m/a/admin/dies", 404),
        ("GET", "/m/a/v1/chat/completions", 405),
        ("POST", "/m/a/health", 405),
        ("POST", "/m/a/admin/models/unload", 404),
        ("HEAD", "/m/a/health", 200),
    ],
)
def test_other_paths(api: Api, method: str, path: str, status: int) -> None:
    body: Any = b"{}" if method == "POST" else None
    answer = ask(api.server, request(method, path, body))
    assert answer.status == status


def test_a_server_that_leaves_says_so_and_still_answers(api: Api) -> None:
    """What a router asks while the process drains."""
    api.app.draining.set()
    for path in ("/health", "/ready", "/m/a/health"):
        answer = api.get(path)
        assert (answer.status, answer.json()) == (503, {"status": "stopping"}), path
    assert api.whole(model="a")["choices"][0]["message"]["content"] == "A"
    assert api.post("/m/a/v1/chat/completions", {"messages": USER}).status == 200
