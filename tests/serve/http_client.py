"""Raw sockets for the HTTP tests: bytes out, a parsed answer back, nothing hidden in between."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pantheon.serve.http_server import PantheonServer


@dataclass(frozen=True)
class Answer:
    """One answer; `raw` is all that came, `body` is unchunked, `interim` the status codes of 1xx answers before it."""

    raw: bytes
    status: int
    headers: dict[str, str]
    body: bytes
    interim: tuple[int, ...] = ()

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The error code."""
        code: str = self.json()["error"]["code"]
        return code

    @property
    def events(self) -> list[str]:
        """The data of every event of a stream, comments left out."""
        blocks = self.body.decode("utf-8").split("\n\n")
        assert blocks.pop() == ""
        assert all(b.startswith(("data: ", ":")) and "\n" not in b for b in blocks)
        return [b.removeprefix("data: ") for b in blocks if b.startswith("data: ")]


def connect(server: PantheonServer, timeout: float = 10.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout)


def trusting() -> ssl.SSLContext:
    """A client context that takes any certificate: what is tested is ours, not the chain, nor this machine's clock."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def read_all(sock: socket.socket) -> bytes:
    """Everything up to the server's FIN; a reset is a failure of the test."""
    pieces = []
    while data := sock.recv(1 << 20):
        pieces.append(data)
    return b"".join(pieces)


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    out = b""
    while mark not in out:
        data = sock.recv(65536)
        assert data, f"the server closed after {out!r}"
        out += data
    return out


def parse_answer(raw: bytes) -> Answer:
    interim: list[int] = []
    rest = raw
    while True:
        head, mark, rest = rest.partition(b"\r\n\r\n")
        assert mark, f"no whole head in {raw!r}"
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        if status >= 200:
            break
        interim.append(status)
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(": ")
        assert name.lower() not in headers, f"{name} twice"
        headers[name.lower()] = value
    if headers.get("transfer-encoding") == "chunked":
        rest = unchunk(rest)
    return Answer(raw, status, headers, rest, tuple(interim))


def unchunk(data: bytes) -> bytes:
    out = b""
    while True:
        size, mark, data = data.partition(b"\r\n")
        assert mark
        n = int(size, 16)
        assert data[n : n + 2] == b"\r\n"
        out, data = out + data[:n], data[n + 2 :]
        if n == 0:
            assert data == b"", f"bytes after the last chunk: {data!r}"
            return out


def request(
    method: str = "GET",
    path: str = "/",
    body: bytes | None = None,
    *fields: str,
    host: str | None = "localhost",
    version: str = "1.1",
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}"]
    if host is not None:
        lines.append(f"Host: {host}")
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, *fields, "", ""]).encode("latin-1") + (body or b"")


def ask(server: PantheonServer, data: bytes, *, half_close: bool = False) -> Answer:
    """Send bytes on a new connection and read the answer to its end."""
    with connect(server) as sock:
        sock.sendall(data)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        return parse_answer(read_all(sock))


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.01)
    return True
