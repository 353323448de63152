"""The same comparison through HTTP: two servers, one streamed chat answer at a time.  Knows no engine."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from tools.bench_driver import PATIENCE_S, ROOT, PeerError, Quiet, Row, take_turns

#: enough for a prompt that takes a moment; each round's differs from its first word on, so no prefix cache helps
_STORY = (
    "The river had risen in the night, and by morning the lower meadow was a lake with fence posts standing in it. "
    "Two men came down from the farm with a boat on a cart, and a dog that would not stop barking at the water. "
)


@dataclass(frozen=True)
class Streamed:
    """One answer: seconds to the first token, and tokens per second from the first to the last."""

    first_s: float
    rate: float
    tokens: int


class Server:
    """A server process that answers OpenAI chat requests on 127.0.0.1."""

    def __init__(self, name: str, command: Callable[[int], Sequence[str]], *, patience_s: float = PATIENCE_S) -> None:
        self.name, self.port = name, free_port()
        quiet = subprocess.DEVNULL
        words = list(command(self.port))
        self._process = subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet, cwd=ROOT)
        try:
            self._wait(time.monotonic() + patience_s)
        except PeerError:
            self.close()
            raise

    def _wait(self, deadline: float) -> None:
        while True:
            if self._process.poll() is not None:
                raise PeerError(f"{self.name} ended with code {self._process.returncode} before it served")
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name} does not get ready")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.1)

    def cpu_s(self) -> float:
        """CPU seconds that the process has used."""
        used = psutil.Process(self._process.pid).cpu_times()
        return float(used.user + used.system)

    def chat(self, prompt: str, max_tokens: int) -> Streamed:
        """One greedy answer of exactly max_tokens."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            data = json.dumps(body).encode()
            began = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise PeerError(f"{self.name} answered {answer.status}: {answer.read(300)!r}")
            return timing(((time.perf_counter() - began, line) for line in answer), self.name)
        except OSError as fault:
            raise PeerError(f"{self.name}: {fault}") from None
        finally:
            connection.close()

    def close(self) -> None:
        """SIGTERM, then ten seconds to leave; idempotent."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def timing(lines: Iterable[tuple[float, bytes]], name: str) -> Streamed:
    """From (seconds since the request, line of the stream): events without text carry no token."""
    first = last = 0.0
    tokens = 0
    for at, line in lines:
        if not line.startswith(b"data: {"):
            continue
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            raise PeerError(f"{name}: {event['error']}")
        delta = (event.get("choices") or [{}])[0].get("delta") or {}
        if delta.get("content") or delta.get("reasoning_content"):
            first, last = first or at, at
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if tokens < 2 or last <= first:
        raise PeerError(f"{name} streamed {tokens} tokens: too few to time")
    return Streamed(first, (tokens - 1) / (last - first), tokens)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def prompts(paragraphs: int = 6) -> Iterator[str]:
    """Prompts of about 50 tokens a paragraph, no two with the same beginning."""
    number = 0
    while True:
        yield f"{number} is the number of this story. " + _STORY * paragraphs + "Go on with the story."
        number += 1


def our_server(model: str, threads: int) -> Server:
    """`pantheon serve` as a user starts it."""
    words = [sys.executable, "-m", "pantheon", "serve", "--model", model, "--threads", str(threads), "--ctx", "4096"]
    return Server("pantheon serve", lambda port: [*words, "--port", str(port)])


def their_server(program: str, model: str, threads: int) -> Server:
    """llama-server with one slot, so that the whole context is that stream's, and no page to serve."""
    words = [program, "--model", model, "--threads", str(threads), "--ctx-size", "4096", "--parallel", "1"]
    return Server("llama-server", lambda port: [*words, "--host", "127.0.0.1", "--port", str(port)])


def find_llama_server(given: str | None) -> str | None:
    """The program named by the flag or by LLAMA_SERVER; None when there is none.  Raises PeerError for a wrong one."""
    program = given or os.environ.get("LLAMA_SERVER")
    if not program:
        return None
    if not os.access(program, os.X_OK):
        raise PeerError(f"{program} is no program")
    return os.path.abspath(program)


def version_of(program: str) -> str:
    """The line in which llama-server says its version."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")]
    return lines[0].removeprefix("version:").strip() if lines else "of unknown version"


def compare_servers(
    model: str, ours: Server, theirs: Server, n_tokens: int, rounds: int, quiet: Quiet
) -> Iterator[Row]:
    """Decode speed of one stream, and time to its first token."""
    questions = {id(side): prompts() for side in (ours, theirs)}

    def ask(side: Server) -> Streamed:
        return side.chat(next(questions[id(side)]), n_tokens)

    for side in (ours, theirs):
        ask(side)
    mine, other = take_turns((ours, theirs), rounds, quiet, ask)
    yield Row(model, f"stream of {n_tokens}, tokens/s", tuple(s.rate for s in mine), tuple(s.rate for s in other))
    first, other_first = (tuple(1e3 * s.first_s for s in side) for side in (mine, other))
    yield Row(model, "time to first token, ms", first, other_first, less=True)
