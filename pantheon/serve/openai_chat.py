"""POST /v1/chat/completions: body -> ChatRequest -> turn -> generation -> reply, whole or streamed [M024, B16]."""

from __future__ import annotations

from typing import Any

from pantheon.errors import Unavailable
from pantheon.serve import chat_reply as reply
from pantheon.serve.chat_request import ChatRequest, parse_chat_request
from pantheon.serve.context import App
from pantheon.serve.generation import Generation, Job, Logprob, Result, prepare_chat
from pantheon.serve.http_request import Request
from pantheon.serve.placement import marks_of_chat
from pantheon.serve.routes import Responder, SseStream
from pantheon.serve.stream_head import StreamHead
from pantheon.serve.turn import Turn, elsewhere, turn


def post_chat(app: App, request: Request, responder: Responder) -> None:
    """Answer one chat.  Raises PantheonError; before the first byte it becomes a JSON error, after it an event.

    The end of the answer goes out after the turn is given back: a client that has read it may ask again at once.
    """
    chat = parse_chat_request(request.json(), dict(request.headers))
    responder.will_stream = chat.stream
    prefix = marks_of_chat(chat.messages, chat.tools, chat.template_kwargs)
    try:
        with turn(app, chat.model, responder, chat.session_id, prefix) as mine:
            job = prepare_chat(mine.model, chat, mine.fit)
            mine.capped = job.dropped_tokens > 0
            if chat.stream:
                stream, tail = _stream(app, mine, chat, job, responder)
            else:
                body = _whole(mine, chat, job)
    except Unavailable as fault:
        if chat.stream or not elsewhere(app, chat.model, fault):
            raise
        return post_chat(app, request, responder)
    if chat.stream:
        for event in tail:
            stream.send(event)
        stream.done()
    else:
        responder.send_json(200, body, mine.headers)


def _whole(mine: Turn, chat: ChatRequest, job: Job) -> dict[str, Any]:
    choices, results = [], []
    for index in range(chat.n):
        message = reply.Message()
        run = mine.run(job.choice(index))
        for step in run:
            message.add(step)
        results.append(mine.note(run))
        choices.append(reply.choice(index, message, results[-1], chat.params.top_logprobs is not None))
    envelope = reply.Envelope("chat.completion", mine.entry.name)
    return envelope.wrap(choices, usage=reply.usage(results), **reply.extras(results))


def _stream(
    app: App, mine: Turn, chat: ChatRequest, job: Job, responder: Responder
) -> tuple[SseStream, list[dict[str, Any]]]:
    """Stream every choice; the events that end the last one are left to the caller."""
    envelope = reply.Envelope("chat.completion.chunk", mine.entry.name)
    first = envelope.wrap([reply.role_choice(0)])
    results: list[Result] = []
    tail: list[dict[str, Any]] = []
    with StreamHead(responder, mine.headers, first, app.early_head_s) as head:
        for index in range(chat.n):
            if index:
                for event in (*tail, envelope.wrap([reply.role_choice(index)])):
                    head.open().send(event)
            run = mine.run(job.choice(index), head)
            rest = _stream_steps(run, index, envelope, head)
            results.append(mine.note(run))
            tail = [envelope.wrap([reply.finish_choice(index, results[-1], rest)], **reply.extras(results))]
        if chat.include_usage:
            tail.append(envelope.wrap([], usage=reply.usage(results)))
        return head.open(), tail


def _stream_steps(run: Generation, index: int, envelope: reply.Envelope, head: StreamHead) -> list[Logprob]:
    """Send what each token brings; log-probabilities wait for the text they belong to, and the rest is returned."""
    waiting: list[Logprob] = []
    texts = reply.TextChunks(envelope, index)
    for step in run:
        stream = head.open()
        if step.logprob is not None:
            waiting.append(step.logprob)
        elif not waiting and (data := texts.json(step.deltas)) is not None:
            stream.send_json(data)
            continue
        for choice in reply.step_choices(index, step.deltas, waiting):
            stream.send(envelope.wrap([choice]))
        if step.deltas:
            waiting = []
    return waiting
