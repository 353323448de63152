"""The way of an answer, whichever API asked: a turn, a job, its generations, the reply in that API's words.

What differs between the APIs is a `Reply`, which turns steps into events or a body; when what goes out is decided here
alone.  Must not know the shape of a request body or of a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from pantheon.errors import Unavailable
from pantheon.serve.chat_job import Job, prepare_chat
from pantheon.serve.chat_request import ChatRequest
from pantheon.serve.context import App
from pantheon.serve.generation import Result, Step
from pantheon.serve.placement import marks_of_chat
from pantheon.serve.routes import Responder
from pantheon.serve.stream_head import StreamHead
from pantheon.serve.turn import Turn, elsewhere, turn
from pantheon.serve.voice import Voice

Frames = Iterable[bytes]


class Reply(Protocol):
    """One answer in the words of one API; made anew for each attempt at it.

    The answers to several jobs come one after the other: begin, step…, end for each, then close.  What these return
    are whole events for a stream; for a plain answer it is dropped, and `body` is asked for at the end.  A reply may
    have a `progress`, which makes an event of how far the prompt is read: see StreamHead.
    """

    voice: Voice

    def begin(self, index: int) -> Sequence[bytes]:
        """The index-th answer begins."""

    def step(self, step: Step) -> Frames:
        """One token of it."""

    def end(self, result: Result) -> Frames:
        """It is complete."""

    def close(self) -> Frames:
        """All are."""

    def body(self) -> Any:
        """The whole, as JSON."""


def answer(app: App, chat: ChatRequest, responder: Responder, new_reply: Callable[[Turn, Job], Reply]) -> None:
    """Answer one conversation.  Raises PantheonError; before the first byte it becomes a JSON error, after it an event.

    The end of the answer goes out after the turn is given back: a client that has read it may ask again at once.
    """
    responder.will_stream = chat.stream
    prefix = marks_of_chat(chat.messages, chat.tools, chat.template_kwargs)
    try:
        with turn(app, chat.model, responder, chat.session_id, prefix) as mine:
            job = prepare_chat(mine.model, chat, mine.fit)
            mine.capped = job.dropped_tokens > 0
            jobs = [job.choice(index) for index in range(chat.n)]
            rest = deliver(app, mine, jobs, new_reply(mine, job), responder, stream=chat.stream)
    except Unavailable as fault:
        if chat.stream or not elsewhere(app, chat.model, fault):
            raise
        return answer(app, chat, responder, new_reply)
    rest()


def deliver(
    app: App, mine: Turn, jobs: Sequence[Job], reply: Reply, responder: Responder, *, stream: bool
) -> Callable[[], None]:
    """Run the jobs; what is left to call, once the turn is given back, sends the end of the answer."""
    if stream:
        return _stream(app, mine, jobs, reply, responder)
    for index, job in enumerate(jobs):
        reply.begin(index)
        run = mine.run(job)
        for step in run:
            reply.step(step)
        reply.end(mine.note(run))
    reply.close()
    return partial(responder.send_json, 200, reply.body(), mine.headers)


def _stream(app: App, mine: Turn, jobs: Sequence[Job], reply: Reply, responder: Responder) -> Callable[[], None]:
    responder.voice = reply.voice
    tail: Frames = ()
    with StreamHead(responder, mine.headers, reply.begin(0), app.early_head_s) as head:
        head.progress = getattr(reply, "progress", None)
        for index, job in enumerate(jobs):
            if index:
                for frame in (*tail, *reply.begin(index)):
                    head.open().send_frame(frame)
            run = mine.run(job, head)
            for step in run:
                stream = head.open()
                for frame in reply.step(step):
                    stream.send_frame(frame)
            tail = reply.end(mine.note(run))
        return partial(head.open().done, b"".join((*tail, *reply.close())))
