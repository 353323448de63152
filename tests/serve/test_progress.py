"""What a stream tells while the prompt is read [issue 6 point 4, X11]."""

from __future__ import annotations

from typing import Any
from unittest import mock

from pantheon.engine.generate import PREFILL_CHUNK
from tests.serve.api_server import Stream, scripted

#: a chat whose prompt takes four chunks
LONG = [{"role": "user", "content": "word " * (3 * PREFILL_CHUNK)}]


def reports(stream: Stream) -> list[dict[str, Any]]:
    return [chunk["prompt_progress"] for chunk in stream.chunks if "prompt_progress" in chunk]


def test_a_stream_that_asks_for_it_is_told_of_each_chunk_of_its_prompt() -> None:
    with scripted("a") as api:
        found = reports(api.stream(messages=LONG, return_progress=True))
        total = found[0]["total"]
        assert found[0]["processed"] == found[0]["cache"] == 0 and found[0]["time_ms"] == 0
        assert [one["processed"] for one in found] == [*range(0, total, PREFILL_CHUNK), total]
        assert all(one["total"] == total and one["cache"] == 0 for one in found)
        assert [one["time_ms"] for one in found] == sorted(one["time_ms"] for one in found)


def test_progress_begins_with_what_was_warm_and_anew_with_each_answer() -> None:
    with scripted("a") as api:
        stream = api.stream(messages=LONG, return_progress=True, n=2)
        found = reports(stream)
        half = len(found) // 2
        assert [one["processed"] for one in found[:half]] == [one["processed"] for one in found[half:]]
        assert all(len(chunk["choices"]) == 1 and chunk["choices"][0]["delta"] == {} for chunk in stream.chunks
                   if "prompt_progress" in chunk)  # fmt: skip


def test_others_get_comments_or_nothing() -> None:
    with scripted("a") as api:
        answer = api.chat(messages=LONG, stream=True)
        assert b": prefill 128/" in answer.body and b"prompt_progress" not in answer.body
        assert b"prompt_progress" not in api.chat(messages=LONG, return_progress=True).body
        assert api.chat(return_progress=1).json()["error"]["param"] == "return_progress"


def test_a_prompt_that_is_read_from_the_middle_says_so() -> None:
    from pantheon.serve.stream_head import StreamHead

    stream = mock.Mock()
    head = StreamHead(mock.Mock(begin_sse=lambda headers: stream), {}, None, 1.0)
    head.progress = lambda report: str((report["cache"], report["processed"], report["total"])).encode()
    for done in (128, 256, 300, 128, 300, 300):
        head.on_prefill(done, 300)
    sent = [call.args[0].decode() for call in stream.send_frame.call_args_list]
    first = ["(128, 128, 300)", "(128, 256, 300)", "(128, 300, 300)"]
    assert sent == [*first, "(128, 128, 300)", "(128, 300, 300)", "(300, 300, 300)"]
