"""The HTTP side of the benchmark: timing of streams, a real `pantheon serve`, and what goes wrong."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.terminal import write_script
from tools.bench_driver import PeerError, Quiet
from tools.bench_http import Server, compare_servers, find_llama_server, our_server, prompts, timing


def stream(*events: tuple[float, dict[str, object]]) -> Iterator[tuple[float, bytes]]:
    """Lines as a server sends them, blank ones and the end included."""
    yield 0.0, b": ping\n"
    for at, event in events:
        yield at, b"data: " + json.dumps(event).encode() + b"\n"
        yield at, b"\n"
    yield 99.0, b"data: [DONE]\n"


def piece(text: str | None, key: str = "content") -> dict[str, object]:
    return {"choices": [{"delta": {key: text}}]}


def test_speed_is_tokens_after_the_first_over_the_time_since_it() -> None:
    """The role comes early and the usage late; neither is a token.  One event may carry several tokens, or none."""
    timed = timing(
        stream(
            (0.5, {"choices": [{"delta": {"role": "assistant", "content": None}}]}),
            (1.0, piece("think", "reasoning_content")),
            (2.0, piece("a")),
            (3.0, piece("bc")),
            (5.0, {"choices": [{"delta": {}, "finish_reason": "length"}]}),
            (6.0, {"choices": [], "usage": {"completion_tokens": 9}}),
        ),
        "server",
    )
    assert (timed.first_s, timed.rate, timed.tokens) == (1.0, 4.0, 9)


def test_a_stream_that_fails_or_is_too_short_is_no_figure() -> None:
    with pytest.raises(PeerError, match="server: .*overloaded"):
        timing(stream((1.0, {"error": {"message": "overloaded"}})), "server")
    with pytest.raises(PeerError, match="server streamed 1 tokens"):
        timing(stream((1.0, piece("a")), (2.0, {"usage": {"completion_tokens": 1}})), "server")


def test_no_two_prompts_begin_alike() -> None:
    some = list(itertools.islice(prompts(), 5))
    assert len({text.split()[0] for text in some}) == 5 and len({text.split(" ", 1)[1] for text in some}) == 1


def test_two_real_servers_are_compared(tmp_path: Path) -> None:
    """A scripted model on both sides: what is measured is the client's end of a real stream."""
    path = write_script(tmp_path, "x", eog=False, decode_ms=1)
    with closing(our_server(path, 1)) as ours, closing(our_server(path, 1)) as theirs:
        speed, first = compare_servers("m", ours, theirs, 8, 2, Quiet())
    assert speed.what == "stream of 8, tokens/s" and first.what == "time to first token, ms"
    assert len(speed.ours) == len(first.theirs) == 2 and first.less and not speed.less
    assert all(0 < rate <= 1000 for rate in speed.ours + speed.theirs), "a step sleeps a millisecond"


def test_an_answer_that_is_refused_names_the_server(tmp_path: Path) -> None:
    path = write_script(tmp_path, "x")
    with closing(our_server(path, 1)) as server, pytest.raises(PeerError, match="pantheon serve answered 400"):
        server.chat("hello", -5)


def test_a_server_that_ends_early_is_said_plainly() -> None:
    with pytest.raises(PeerError, match="llama-server ended with code 3 before it served"):
        Server("llama-server", lambda port: [sys.executable, "-c", "raise SystemExit(3)"])


def test_a_server_that_never_gets_ready_is_ended() -> None:
    with pytest.raises(PeerError, match="name does not get ready"):
        Server("name", lambda port: [sys.executable, "-c", "import time; time.sleep(60)"], patience_s=0.1)


def test_llama_server_comes_from_the_flag_then_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    assert find_llama_server(None) is None
    monkeypatch.setenv("LLAMA_SERVER", sys.executable)
    assert find_llama_server(None) == sys.executable
    with pytest.raises(PeerError, match="is no program"):
        find_llama_server(str(tmp_path / "llama-server"))
