"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the one way of an answer."""

from __future__ import annotations

from pantheon.serve.answer import answer
from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.messages_reply import MessagesReply
from pantheon.serve.messages_request import parse_messages_request
from pantheon.serve.native_text import looking, render
from pantheon.serve.routes import Responder


def post_message(app: App, request: Request, responder: Responder) -> None:
    """Answer one request; errors and the end of the answer as `answer` says."""
    chat = parse_messages_request(request.json(), dict(request.headers), app.defaults.fill)
    answer(
        app, chat, responder,
        lambda mine, job: MessagesReply(mine.entry.name, len(job.prompt_ids), stream=chat.stream),
    )  # fmt: skip


def post_count_tokens(app: App, request: Request, responder: Responder) -> None:
    """How many tokens the same request would be read as; nothing is generated, and nobody is waited for."""
    chat = parse_messages_request(request.json(), counting=True)
    with looking(app, chat.model) as model:
        count = len(render(model, chat).ids)
    responder.send_json(200, {"input_tokens": count})
