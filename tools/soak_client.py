"""One client of a soak: what it may ask, how it behaves while it is answered, and what came of it.

Knows HTTP and the shape of replies, nothing of the server's parts.
"""

from __future__ import annotations

import json
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, NamedTuple

#: no answer takes longer, with forty clients and a queue in front of eight slots
PATIENCE_S = 180.0
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
_WORDS = (
    "river stone bridge morning garden letter window copper lantern ship winter market silver cloud road horse "
    "music orchard wheel paper candle forest harbour mountain"
).split()


class Ask(NamedTuple):
    """A request whose answer is the same every time: greedy, or of a seed."""

    name: str
    path: str
    body: dict[str, Any]


class Given(NamedTuple):
    """All that must be equal between two answers to one ask: of each choice its text, calls and end; the tokens."""

    choices: tuple[tuple[str, str, str], ...]
    tokens: int


class Refused(Exception):
    """A status that is no 200."""

    def __init__(self, status: int, code: str, after_s: float | None, text: str) -> None:
        super().__init__(f"{status} {code}: {text[:200]}")
        self.status, self.code, self.after_s = status, code, after_s


class Left(Exception):
    """This client has hung up, as it was meant to: what it had seen by then."""


def catalogue(seed: int = 1) -> list[Ask]:
    """What the clients ask, over and over: long and short, plain, with tools, stops, schemas, several answers."""
    chance = random.Random(seed)

    def words(n: int) -> str:
        return " ".join(chance.choice(_WORDS) for _ in range(n))

    def chat(name: str, text: str, most: int, system: str = "", **more: Any) -> Ask:
        said = [{"role": "system", "content": system}] if system else []
        messages = [*said, {"role": "user", "content": text}]
        return Ask(name, CHAT, {"messages": messages, "max_tokens": most, "temperature": 0, **more})

    shared = "You help. Notes: " + words(350)
    asks = [chat(f"short {i}", f"Say something about {words(2)}.", chance.randrange(8, 48)) for i in range(5)]
    asks += [chat(f"shared {i}", f"What of {words(3)}?", 24, shared) for i in range(4)]
    asks += [chat(f"long {i}", f"{words(500 + 500 * i)}. Go on.", 16) for i in range(3)]
    asks += [
        chat(f"stop {i}", f"Tell a story about {words(2)}.", 80, stop=stop)
        for i, stop in enumerate((". ", ["the ", "\n"]))
    ]
    asks += [chat("two", f"Name {words(1)}.", 20, n=2), chat("seeded two", "Go on.", 20, n=2, temperature=0.9, seed=7)]
    asks += [chat(f"seeded {i}", f"Dream of {words(2)}.", 30, temperature=1.0, top_p=0.9, seed=i) for i in range(2)]
    asks += [chat("wordy", "Count to fifty.", 120, ignore_eos=True, logprobs=True, top_logprobs=20)]
    asks += [chat("endless", "Write.", 150, ignore_eos=True)]
    asks += [_tool(chat("tool", "Weather in Rome?", 60)), _schema(chat("schema", "A person, please.", 60))]
    asks += list(_session(chance, words))
    asks += [Ask("text", TEXT, {"prompt": f"Once upon a {words(40)}", "max_tokens": 24, "temperature": 0})]
    asks += [Ask("native", NATIVE, {"prompt": f"The {words(60)}", "n_predict": 24, "temperature": 0})]
    return asks


def _tool(ask: Ask) -> Ask:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": schema}}
    return ask._replace(body={**ask.body, "tools": [tool], "tool_choice": "required"})


def _schema(ask: Ask) -> Ask:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    return ask._replace(body={**ask.body, "response_format": form})


def _session(chance: random.Random, words: Callable[[int], str]) -> Iterator[Ask]:
    """The turns of two conversations: each prompt is the one before and more."""
    for session in ("x", "y"):
        messages = [{"role": "system", "content": words(200)}]
        for turn in range(4):
            messages = [*messages, {"role": "user", "content": words(chance.randrange(10, 60))}]
            body = {"messages": messages, "max_tokens": 16, "temperature": 0, "session_id": session}
            yield Ask(f"session {session}{turn}", CHAT, body)
            messages = [*messages, {"role": "assistant", "content": words(12)}]


# ---- asking ---------------------------------------------------------------------------------------------------------


@dataclass
class Manner:
    """How a client behaves.

    stream, pause_s (before each event of a stream), stall_s (once, after the first token), leave_s (hang up when so
    much time has passed), leave_at (hang up after so many events), reset (by a RST).
    """

    stream: bool = False
    pause_s: float = 0.0
    stall_s: float = 0.0
    leave_s: float | None = None
    leave_at: int | None = None
    reset: bool = False
    #: the furthest phase that was seen: sent, queued, reading, writing
    seen: str = field(default="sent")

    @classmethod
    def drawn(cls, chance: random.Random) -> Manner:
        """As clients are: most read to the end, some are slow, stall or leave."""
        stream = chance.random() < 0.6
        manner = cls(stream=stream, reset=chance.random() < 0.5)
        kind = chance.random()
        if kind < 0.12:
            manner.leave_s = chance.choice([0.0, 0.01, 0.1, 0.5, 1.0, 3.0])
        elif kind < 0.22 and stream:
            manner.leave_at = chance.randrange(1, 12)
        elif kind < 0.32 and stream:
            manner.pause_s = chance.choice([0.005, 0.03])
        elif kind < 0.38 and stream:
            manner.stall_s = chance.uniform(2, 8)
        return manner


def ask_once(port: int, ask: Ask, manner: Manner, model: str | None = None) -> Given:
    """Ask and read the answer in that manner.  Raises Refused, Left, and HTTPException or OSError for what is wrong."""
    body = dict(ask.body) if model is None else {**ask.body, "model": model}
    if manner.stream:
        body |= {"stream": True} | ({} if ask.path == NATIVE else {"stream_options": {"include_usage": True}})
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.sock = _socket(port, small=manner.stall_s > 0)
    try:
        connection.request("POST", ask.path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if manner.leave_s is not None:
            _linger(connection.sock, manner)
        reply = connection.getresponse()
        if reply.status != 200:
            raise _refusal(reply)
        return (
            _streamed(reply, ask, manner, connection.sock) if manner.stream else _whole(json.loads(reply.read()), ask)
        )
    finally:
        if manner.reset and connection.sock is not None:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def _socket(port: int, small: bool) -> socket.socket:
    sock = socket.socket()
    if small:  # so that a reader that stalls is felt
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(PATIENCE_S)
    sock.connect(("127.0.0.1", port))
    return sock


def _linger(sock: socket.socket, manner: Manner) -> None:
    """Wait before hanging up, and look at what came meanwhile without taking it."""
    assert manner.leave_s is not None
    time.sleep(manner.leave_s)
    if not select.select([sock], [], [], 0)[0]:
        raise Left
    seen = sock.recv(1 << 16, socket.MSG_PEEK)
    manner.seen = (
        "writing" if b"data: " in seen or not manner.stream else "queued" if b": queued" in seen else "reading"
    )
    raise Left


def _refusal(reply: HTTPResponse) -> Refused:
    text = reply.read()
    after = reply.headers.get("Retry-After")
    try:
        code = str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        code = "none"
    return Refused(reply.status, code, float(after) if after else None, text.decode("utf-8", "replace"))


def _whole(reply: dict[str, Any], ask: Ask) -> Given:
    if ask.path == NATIVE:
        return Given(((reply["content"], "[]", reply["stop_type"]),), reply["tokens_predicted"])
    choices = []
    for choice in sorted(reply["choices"], key=lambda choice: choice["index"]):
        message = choice.get("message") or {"content": choice["text"]}
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        choices.append((message.get("content") or "", json.dumps(calls), choice["finish_reason"]))
    return Given(tuple(choices), reply["usage"]["completion_tokens"])


def _streamed(reply: HTTPResponse, ask: Ask, manner: Manner, sock: socket.socket) -> Given:
    found = _Joined(ask.path)
    for line in reply:
        if line.startswith(b": "):
            manner.seen = "queued" if line.startswith(b": queued") else "reading"
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            fault = event["error"]
            raise Refused(int(fault.get("status") or 0), str(fault["code"]), fault.get("retry_after"), str(fault))
        found.add(event)
        if not found.began:
            continue
        manner.seen = "writing"
        if manner.leave_at is not None and found.events >= manner.leave_at:
            raise Left
        time.sleep(manner.pause_s + (manner.stall_s if found.events == 1 else 0.0))
    if not found.complete:
        raise HTTPException("the stream ended in the middle")
    return found.given()


class _Joined:
    """The events of a stream, put together."""

    def __init__(self, path: str) -> None:
        self._native = path == NATIVE
        self._texts: dict[int, str] = {}
        self._calls: dict[int, list[list[str]]] = {}
        self._ends: dict[int, str] = {}
        self._tokens: int | None = None
        self.events = 0

    @property
    def began(self) -> bool:
        return self.events > 0

    @property
    def complete(self) -> bool:
        return self._tokens is not None and bool(self._ends)

    def add(self, event: dict[str, Any]) -> None:
        if self._native:
            self._texts[0] = self._texts.get(0, "") + event["content"]
            self.events += bool(event["content"])
            if event.get("stop"):
                self._ends[0], self._tokens = event["stop_type"], event["tokens_predicted"]
            return
        for choice in event.get("choices") or ():
            self._choice(choice)
        if event.get("usage"):
            self._tokens = event["usage"]["completion_tokens"]

    def _choice(self, choice: dict[str, Any]) -> None:
        index, delta = choice["index"], choice.get("delta") or {"content": choice.get("text")}
        self._texts[index] = self._texts.get(index, "") + (delta.get("content") or "")
        calls = self._calls.setdefault(index, [])
        for piece in delta.get("tool_calls") or ():
            if piece["index"] == len(calls):
                calls.append(["", ""])
            call = calls[piece["index"]]
            call[0] += piece["function"].get("name") or ""
            call[1] += piece["function"].get("arguments") or ""
        self.events += bool(delta.get("content") or delta.get("tool_calls"))
        if choice.get("finish_reason"):
            self._ends[index] = choice["finish_reason"]

    def given(self) -> Given:
        indexes = sorted(self._texts)
        calls = {index: json.dumps(self._calls.get(index, [])) for index in indexes}
        choices = ((self._texts[i], calls[i], self._ends.get(i, "none")) for i in indexes)
        return Given(tuple(choices), self._tokens or 0)
