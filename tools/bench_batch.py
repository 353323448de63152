"""Eight at a time, through HTTP: what all streams make together, what a joiner costs the others, and what it waits.

Two servers in turns, as in bench_http.  Knows no engine.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.bench_driver import PATIENCE_S, PeerError, Quiet, Row, take_turns
from tools.bench_http import Server, prompts

#: tokens that each decoder has when the joiner comes
_WARM = 8


@dataclass
class Stream:
    """One streamed answer on a thread of its own: when each token came, seconds on the clock of perf_counter."""

    port: int
    body: dict[str, Any]
    stalled: threading.Event | None = None
    began: float = 0.0
    tokens: list[float] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    made: int = 0
    fault: str | None = None

    def __post_init__(self) -> None:
        self._left = threading.Event()
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Stream:
        """Send the request."""
        self.began = time.perf_counter()
        self._thread.start()
        return self

    def join(self) -> Stream:
        """Until the end.  Raises PeerError."""
        self._thread.join(PATIENCE_S)
        if self.fault is not None and not self._left.is_set():
            raise PeerError(f"a stream: {self.fault}")
        return self

    def leave(self) -> None:
        """Hang up."""
        self._left.set()
        if self._sock is not None:
            self._sock.shutdown(socket.SHUT_RDWR)

    def until(self, n: int) -> None:
        """Wait for n tokens.  Raises PeerError when they do not come."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.tokens) < n:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise PeerError(f"a stream ended after {len(self.tokens)} tokens: {self.fault}")
            time.sleep(0.01)

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.connect()
            self._sock = connection.sock
            data = json.dumps(self.body | {"stream": True}).encode()
            connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise PeerError(f"status {answer.status}: {answer.read(300)!r}")
            for line in answer:
                self._take(line)
                if self.stalled is not None and self.tokens:
                    self.stalled.wait(PATIENCE_S)
        except (OSError, ValueError, http.client.HTTPException, PeerError) as fault:
            self.fault = f"{type(fault).__name__}: {fault}"
        finally:
            connection.close()

    def _take(self, line: bytes) -> None:
        at = time.perf_counter()
        if not line.startswith(b"data: {"):
            return
        # cheap looks first: eight of these share the machine with what they time
        if b'"prompt_progress"' in line:
            self.progress.append(at)
        elif b'"error"' in line[:20]:
            raise PeerError(line.decode("utf-8", "replace"))
        elif b'"content":"' in line and b'"content":""' not in line:
            self.tokens.append(at)
        if b'"prompt_tokens"' in line:
            usage = json.loads(line[6:])["usage"]
            self.prompt_tokens, self.made = usage["prompt_tokens"], usage["completion_tokens"]


def _body(prompt: str, most: int, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": prompt}]
    return {
        "messages": said,
        "max_tokens": most,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        **more,
    }


@dataclass(frozen=True)
class Together:
    """One turn of a side: tokens per second of k streams; of all but one, with that one reading and stalled."""

    all_rate: float
    others_rate: float
    beside_stalled: float


class Crowd:
    """The questions of one side; no two prompts begin alike."""

    def __init__(self, server: Server, k: int, n: int, join: int) -> None:
        self.server, self._k, self._n, self._join = server, k, n, join
        self._short, self._words = prompts(0), itertools.count(1)

    def cpu_s(self) -> float:
        """See Server."""
        return self.server.cpu_s()

    def streams(self) -> Together:
        """k at a time, twice; the second time one of them stops reading."""
        rates = []
        for stall in (False, True):
            gate = threading.Event()
            all_of = [
                Stream(self.server.port, _body(next(self._short), self._n), gate if stall and i == 0 else None)
                for i in range(self._k)
            ]
            for stream in all_of:
                stream.start()
            for stream in all_of[1:]:
                stream.join()
            gate.set()
            all_of[0].join()
            rates.append((_rate(all_of), _rate(all_of[1:])))
        return Together(rates[0][0], rates[0][1], rates[1][1])

    def joined(self) -> Joined:
        """A long prompt alone, then one like it while k - 1 decode."""
        alone = self._joiner().start().join()
        others = [Stream(self.server.port, _body(next(self._short), 4000)).start() for _ in range(self._k - 1)]
        try:
            for stream in others:
                stream.until(_WARM)
            joiner = self._joiner().start().join()
        finally:
            for stream in others:
                stream.leave()
            for stream in others:
                stream.join()
        end = joiner.tokens[0]
        gaps = [gap for stream in others for gap in _gaps(stream.tokens, joiner.began, end)]
        made = sum(joiner.began <= at <= end for stream in others for at in stream.tokens)
        chunk_s = max(b - a for a, b in itertools.pairwise([*alone.progress, alone.tokens[0]]))
        return Joined(
            alone.tokens[0] - alone.began, end - joiner.began, max(gaps), chunk_s, made / (end - joiner.began),
            joiner.prompt_tokens,
        )  # fmt: skip

    def _joiner(self) -> Stream:
        # one token a word, more or less; the first words make it unlike any other
        number = next(self._words)
        text = f"{number} {number * 7} begins. " + "the river was high and the boat went down to the sea again " * (
            self._join // 13
        )
        return Stream(self.server.port, _body(text, 4, return_progress=True))


@dataclass(frozen=True)
class Joined:
    """Seconds to the first token, alone and beside decoders; the longest pause of those; the longest chunk of the
    prompt when it is read alone; what the decoders made meanwhile, tokens per second."""

    alone_s: float
    beside_s: float
    gap_s: float
    chunk_s: float
    rate: float
    prompt_tokens: int


def _gaps(times: Sequence[float], start: float, end: float) -> list[float]:
    """Pauses that lie at least partly between start and end; the last one may be going on."""
    inside = [b - a for a, b in itertools.pairwise(times) if b > start and a < end]
    return [*inside, end - times[-1]] if times[-1] < end else inside


def _rate(streams: Sequence[Stream]) -> float:
    """Tokens per second of all together, from the first request to the last token."""
    seconds = max(stream.tokens[-1] for stream in streams) - min(stream.began for stream in streams)
    return sum(stream.made for stream in streams) / seconds


def our_crowd_server(model: str, threads: int, k: int, mixed: bool = True) -> Server:
    """`pantheon serve` for k users."""
    words = [sys.executable, "-m", "pantheon", "serve", "--model", model, "--threads", str(threads)]
    words = ["env", f"PN_BS_MIXED={int(mixed)}", *words, "--ctx", "8192", "--parallel", str(k)]
    return Server("pantheon serve", lambda port: [*words, "--port", str(port)])


def their_crowd_server(program: str, model: str, threads: int, k: int) -> Server:
    """llama-server with a slot and as much context for each."""
    words = [program, "--model", model, "--threads", str(threads), "--ctx-size", str(8192 * k), "--parallel", str(k)]
    return Server("llama-server", lambda port: [*words, "--host", "127.0.0.1", "--port", str(port)])


def compare_crowds(
    model: str, ours: Server, theirs: Server, k: int, n: int, join: int, rounds: int, quiet: Quiet
) -> Iterator[Row]:
    """k streams, one of them stalled, and one long prompt that joins; the last is measured once in two rounds."""
    sides = [Crowd(side, k, n, join) for side in (ours, theirs)]
    for side in sides:
        side.streams()
    turns = take_turns(sides, rounds, quiet, Crowd.streams)

    def row(what: str, pick: Callable[[Any], float], taken: Sequence[Sequence[Any]], less: bool = False) -> Row:
        mine, other = (tuple(pick(turn) for turn in side) for side in taken)
        return Row(model, what, mine, other, less)

    yield row(f"{k} streams of {n}, tokens/s", lambda t: t.all_rate, turns)
    kept = f"rate of {k - 1} beside a stalled reader ÷ beside one that reads"
    yield row(kept, lambda t: t.beside_stalled / t.others_rate, turns)
    if not join:
        return
    joins = take_turns(sides, (rounds + 1) // 2, quiet, Crowd.joined)
    size = joins[0][0].prompt_tokens
    yield row(
        f"longest pause of {k - 1} decoders while a prompt of {size} joins, ms", lambda j: 1e3 * j.gap_s, joins, True
    )
    yield row("that pause ÷ the longest chunk of such a prompt alone", lambda j: j.gap_s / j.chunk_s, joins, True)
    yield row("the decoders meanwhile, tokens/s", lambda j: j.rate, joins)
    yield row("the joiner's time to first token, s", lambda j: j.beside_s, joins, True)
    yield row("that time ÷ alone", lambda j: j.beside_s / j.alone_s, joins, True)
