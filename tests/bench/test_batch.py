"""Eight at a time: what is counted as a pause, and two real servers with a script for a model."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.terminal import write_script
from tools.bench_batch import Stream, _gaps, compare_crowds
from tools.bench_driver import PeerError, Quiet
from tools.bench_http import Server


def test_pauses_are_those_that_reach_into_the_time_looked_at() -> None:
    assert _gaps([0.0, 1.0, 2.0, 4.0, 9.0], 1.5, 3.0) == [1.0, 2.0]
    assert _gaps([0.0, 1.0, 2.0], 1.5, 7.0) == [1.0, 5.0], "the last pause is still going on"


def test_what_is_taken_from_a_stream() -> None:
    """Text is a token, an empty text is none; usage says how many there were."""
    stream = Stream(0, {})
    for event in (
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {}}], "prompt_progress": {"total": 9}},
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}},
    ):
        stream._take(b"data: " + json.dumps(event, separators=(",", ":")).encode())
    stream._take(b": comment")
    assert (len(stream.tokens), len(stream.progress), stream.prompt_tokens, stream.made) == (1, 1, 9, 3)


def test_two_real_servers_are_compared(tmp_path: Path) -> None:
    path = write_script(tmp_path, "a", "b", eog=False, n_ctx=6000, decode_ms=1)
    words = [sys.executable, "-m", "pantheon", "serve", "--parallel", "3", "--model", path, "--port"]
    with closing(Server("one", lambda port: [*words, str(port)])) as one, closing(
        Server("two", lambda port: [*words, str(port)])
    ) as two:  # fmt: skip
        rows = list(compare_crowds("m", one, two, 3, 6, 60, 1, Quiet()))
    assert rows[0].what.startswith("3 streams of 6") and len(rows) == 7
    assert all(value > 0 for row in rows for value in (*row.ours, *row.theirs))
    assert [row.less for row in rows] == [False, False, True, True, False, True, True]


def test_a_stream_that_is_refused_says_so() -> None:
    stream = Stream(1, {"messages": []}).start()
    with pytest.raises(PeerError, match="Refused"):
        stream.join()
