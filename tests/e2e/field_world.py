"""The field cases and the servers that they are sent to: a real model, or the seam that a case's `needs` names."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheon import seams
from pantheon.engine.load import load_model
from pantheon.serve.api import build_router
from pantheon.serve.context import App
from pantheon.serve.http_server import HttpConfig, PantheonServer
from tests.serve.api_server import Api, scripted, serving
from tests.serve.http_client import Answer, ask, connect, parse_answer, read_all, read_until, request

FILE = Path(__file__).parents[1] / "data" / "field_cases.jsonl"
SAY_HI = [{"role": "user", "content": "Say hi."}]
REAL_CTX = 1024
SMALL_CTX = 64

_BODY = "{% for m in messages %}{{ m.content }}{% endfor %}"
_ALTERNATES = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
_THINKS = _BODY + "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
_CODER = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>\n<function=f>{% endfor %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<function={{ c.name }}>{% for k, v in c.arguments | items %}{{ k }}{{ v }}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
_CALLS = [
    "<tool_", 'call>\n{"name": "get_wea', 'ther", "argum', 'ents": {"city": "Os', 'lo"}}\n</tool', "_call>", "\n",
    '<tool_call>\n{"name": "get_weather", ', '"arguments": {"city": "Rome"}}\n</tool_call>',
]  # fmt: skip

#: what a case needs, as a script of the scripted engine
SCRIPTS: dict[str, dict[str, Any]] = {
    "B04a": {"pieces": ["ok"], "template": _ALTERNATES},
    "B14": {"pieces": [{"hex": part} for part in ("68", "69", "20", "f09f", "a496", "20", "e697", "a5", "21")]},
    "B17a": {"pieces": _CALLS},
    "B17b": {"pieces": _CALLS[:6]},
    "B19": {"pieces": ["a"], "prefill_ms": 2},
    "B20a": {"pieces": ["north", " sou", "th ea", "st", " west"]},
    "B20b": {"pieces": ["ab", "c", "e"]},
    "B21a": {"pieces": ["plan\n", "</th", "ink>", "\n\n", "answer"], "template": _THINKS},
    "B21b": {"pieces": ["hi"], "template": _THINKS},
    "B21c": {"pieces": ["a", "b", "c", "d", "</think>", "x"], "template": _THINKS},
    "B23a": {"pieces": list("abcdefgh"), "fail_at": 5},
    "B23b": {"pieces": ["a"]},
    "B24c": {"pieces": ["a"]},
    "B26a": {"pieces": ["a", "b"], "n_ctx": SMALL_CTX, "template": _BODY},
    "B26b": {"pieces": ["a", "b"], "n_ctx": SMALL_CTX, "template": _BODY},
    "B26c": {"pieces": ["a", "b"], "n_ctx": SMALL_CTX, "template": _BODY},
    "B32d": {"pieces": ["ok", {"special": "<|eot_id|>"}, "more"]},
    "B35b": {"pieces": ["ok"], "template": _CODER},
    "B45a": {"pieces": ["x"]},
}
_FILLERS = {"B26a": SMALL_CTX + 1000, "B26b": SMALL_CTX, "B26c": SMALL_CTX - 1}


@dataclass(frozen=True)
class Case:
    """One line of the file, made ready: `body` is what the request says, None for one that is not JSON."""

    raw: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.raw["id"])

    @property
    def request(self) -> dict[str, Any]:
        return dict(self.raw["request"])

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.request.get("headers", {"Content-Type": "application/json"}))

    @property
    def body(self) -> dict[str, Any]:
        made: dict[str, Any] = _expanded(self.request.get("body", {}))
        if self.id in _FILLERS:
            made["messages"] = [{"role": "user", "content": "x" * _FILLERS[self.id]}]
        return {key: value for key, value in made.items() if key != "model"}

    @property
    def statuses(self) -> list[int]:
        wanted = self.raw["expect"].get("status")
        return wanted if isinstance(wanted, list) else [wanted]

    def sent(self, models: Path) -> bytes:
        """The request as bytes."""
        asked = self.request
        if "raw_b64" in asked:
            return base64.b64decode(asked["raw_b64"])
        if "body_raw_b64" in asked:
            data: bytes | None = base64.b64decode(asked["body_raw_b64"])
        elif "body_recipe" in asked:
            # an expression of literals: "'[' * 100000"
            data = eval(asked["body_recipe"], {"__builtins__": {}}).encode()
        else:
            body = self.body if self.request.get("path") is None else _expanded(asked.get("body"))
            data = None if body is None else json.dumps(body).replace("<MODELS>", str(models)).encode()
        fields = [f"{name}: {value}" for name, value in self.headers.items()]
        return request(asked.get("method", "POST"), asked.get("path", "/v1/chat/completions"), data, *fields)


def _expanded(value: Any) -> Any:
    """Long texts are kept as {"repeat", "times", "then"}."""
    if isinstance(value, dict) and set(value) == {"repeat", "times", "then"}:
        return value["repeat"] * value["times"] + value["then"]
    if isinstance(value, dict):
        return {key: _expanded(item) for key, item in value.items()}
    return [_expanded(item) for item in value] if isinstance(value, list) else value


def cases(kind: str) -> list[Case]:
    lines = FILE.read_text("utf-8").splitlines()
    return [Case(raw) for raw in map(json.loads, lines) if raw["kind"] == kind]


class World:
    """One real model behind a socket for all cases, and a server of its own for every case that needs another."""

    real_ctx, n_ctx = REAL_CTX, SMALL_CTX

    def __init__(self, real: Api, folder: Path) -> None:
        self.real = self.last = real
        self.folder = folder

    @contextmanager
    def asked(self, case: Case) -> Iterator[Answer]:
        """Send the case to the server that it wants, which stays up for the checks as `last`."""
        with ExitStack() as stack:
            if case.id in SCRIPTS:
                self.last = stack.enter_context(serving())
                self.last.add(**SCRIPTS[case.id])
            elif case.id in ("B45b", "B45c"):
                self.last = stack.enter_context(serving(App(model_roots=(self.folder,))))
            elif case.id == "B44e":
                self.last = stack.enter_context(self._keyed())
            else:
                self.last = self.real
            yield self._send(case)

    def _send(self, case: Case) -> Answer:
        data = case.sent(self.folder)
        if case.id == "B23b":
            seams.arm("forward")
        if case.id == "B45a":
            data = data.replace(b"MODEL", b"m").replace(b"Content-Length: 17", b"Content-Length: 13")
        if case.id == "B45b":
            body = json.dumps({"path": "script:small.json", "name": "dup"}).encode()
            data = request("POST", "/admin/models/load", body, "Content-Type: application/json")
        with connect(self.last.server, 60) as sock:
            sock.sendall(data)
            early = b""
            if "then_b64" in case.request:
                early = read_until(sock, b"100 Continue\r\n\r\n")
                sock.sendall(base64.b64decode(case.request["then_b64"]))
            elif b"\r\nConnection: close" not in data:
                return _one_answer(sock, data, self.last)
            return parse_answer(early + read_all(sock))

    def keyed_status(self, case: Case) -> int:
        """The case without a key, at a server that wants one."""
        with self._keyed() as api:
            return ask(api.server, case.sent(self.folder)).status

    @contextmanager
    def _keyed(self) -> Iterator[Api]:
        app = App()
        server = PantheonServer(build_router(app), HttpConfig(port=0, api_keys=("sesame",)))
        server.start(0.01)
        try:
            api = Api(server, app)
            api.add(pieces=["x"])
            yield api
        finally:
            server.stop(1.0)

    @contextmanager
    def scripted(self, *pieces: Any, **script: Any) -> Iterator[Api]:
        with scripted(*pieces, **script) as api:
            yield api

    @contextmanager
    def echo(self) -> Iterator[Api]:
        """A model that answers with the code word of its prompt."""
        words = [f"XK{i:02}-PEAR" for i in range(12)]
        with scripted("?", then={word: [word] for word in words}) as api:
            yield api


def _one_answer(sock: Any, data: bytes, api: Api) -> Answer:
    """One answer on a connection that stays open: ask the server to close it."""
    sock.shutdown(1)
    return parse_answer(read_all(sock))


@contextmanager
def world(folder: Path, path: Path) -> Iterator[World]:
    (folder / "small.json").write_text(json.dumps({"pieces": ["x"]}))
    with serving() as api:
        model = load_model(path, ctx=REAL_CTX)
        entry = api.app.registry.reserve("smol", str(path))
        api.app.registry.publish(entry, model, model.new_state())
        yield World(api, folder)
