"""A whole server over scripted models, for the tests of the API: real sockets, sampler, loop, detokenizer, emitter."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

from pantheon.engine.prefix_cache import PrefixCache
from pantheon.engine.scripted import scripted_model
from pantheon.sched.scheduler import Scheduler
from pantheon.sched.shared import SchedConfig
from pantheon.seams import SYSTEM_CLOCK, Clock
from pantheon.serve.api import build_router
from pantheon.serve.context import App
from pantheon.serve.http_server import HttpConfig, PantheonServer
from pantheon.serve.registry import Entry
from pantheon.text.chat_template import ChatTemplate
from tests.serve.http_client import Answer, ask, connect, parse_answer, read_all, request

USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

#: compiling a template takes longer than most of these tests
_template = lru_cache(ChatTemplate)


@dataclass
class Api:
    """A running server and what is inside it."""

    server: PantheonServer
    app: App

    def add(
        self, name: str = "m", clock: Clock = SYSTEM_CLOCK, batch: SchedConfig | None = None, **script: Any
    ) -> Entry:
        """Publish one more scripted model; batch: several users share it."""
        with mock.patch("pantheon.engine.scripted.ChatTemplate", _template):
            model = scripted_model(script, clock=clock)
        entry = self.app.registry.reserve(name, f"/{name}")
        if batch is None:
            self.app.registry.publish(entry, model, model.new_state())
            return entry
        state = model.new_state(batch.users + 2)
        cache = PrefixCache(state, users=batch.users)
        self.app.registry.publish(entry, model, state, cache, Scheduler(model, state, cache, batch))
        return entry

    def post(self, path: str, body: Any, *fields: str) -> Answer:
        return ask(self.server, post_bytes(path, body, *fields))

    def get(self, path: str, *fields: str) -> Answer:
        return ask(self.server, request("GET", path, None, *fields))

    def chat(self, **body: Any) -> Answer:
        """One chat; the messages default to a short one."""
        return self.post("/v1/chat/completions", {"messages": USER, **body})

    def whole(self, **body: Any) -> dict[str, Any]:
        """The reply of a chat that must succeed."""
        answer = self.chat(**body)
        assert answer.status == 200, answer.body
        reply: dict[str, Any] = answer.json()
        return reply

    def stream(self, **body: Any) -> Stream:
        """The events of a streamed chat that must succeed."""
        answer = self.chat(stream=True, **body)
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"] == "text/event-stream"
        return Stream(answer.events)

    def open_chat(self, **body: Any) -> socket.socket:
        """Send a chat and return its socket, the answer unread."""
        sock = connect(self.server)
        sock.sendall(post_bytes("/v1/chat/completions", {"messages": USER, **body}))
        return sock


@dataclass
class Stream:
    """The data of every event in order."""

    events: list[str]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        assert self.events[-1] == "[DONE]" and self.events.count("[DONE]") == 1
        return [json.loads(event) for event in self.events[:-1]]

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def text(self, key: str = "content", index: int = 0) -> str:
        return "".join(choice["delta"].get(key) or "" for choice in self.choices(index))

    def deltas(self, key: str = "content") -> list[str]:
        return [choice["delta"][key] for choice in self.choices() if choice["delta"].get(key)]

    @property
    def finish(self) -> str | None:
        reasons = [choice["finish_reason"] for choice in self.choices() if choice["finish_reason"]]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None

    def calls(self) -> list[dict[str, Any]]:
        """Tool calls put together as clients do."""
        calls: list[dict[str, Any]] = []
        for choice in self.choices():
            for part in choice["delta"].get("tool_calls", []):
                if part["index"] == len(calls):
                    assert part["id"] and part["type"] == "function" and part["function"]["arguments"] == ""
                    calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
                else:
                    assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                    calls[part["index"]]["arguments"] += part["function"]["arguments"]
        return calls


def post_bytes(path: str, body: Any, *fields: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return request("POST", path, data, "Content-Type: application/json", *fields)


def answer_of(sock: socket.socket) -> Answer:
    """Read what an open socket still brings."""
    with sock:
        return parse_answer(read_all(sock))


def free(entry: Entry) -> None:
    """Wait until no generation runs on an entry."""
    assert entry.gen_lock.acquire(timeout=10), "the generation did not end"
    entry.gen_lock.release()


@contextmanager
def serving(app: App | None = None) -> Iterator[Api]:
    """A server without models."""
    app = app or App()
    server = PantheonServer(build_router(app), HttpConfig(port=0))
    server.start(0.01)
    try:
        yield Api(server, app)
    finally:
        server.stop(1.0)
        for entry in app.registry.all_entries():
            assert entry.refs == 0, f"{entry.name} is still in use"
            if entry.sched is not None:
                entry.sched.check_integrity()
                assert entry.sched.resting and entry.sched.load()[:2] == (0, 0), "a leaked slot or place"
                entry.sched.close()
        app.registry.check_integrity()


@contextmanager
def scripted(*pieces: Any, **script: Any) -> Iterator[Api]:
    """A server with one scripted model, m."""
    with serving() as api:
        api.add(pieces=list(pieces), **script)
        yield api
