"""POST /v1/responses: OpenAI's Responses API over the one way of an answer."""

from __future__ import annotations

from pantheon.serve.answer import answer
from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.responses_reply import ResponsesReply
from pantheon.serve.responses_request import NAMES, parse_responses_request
from pantheon.serve.routes import Responder
from pantheon.serve.translated import named_as


def post_response(app: App, request: Request, responder: Responder) -> None:
    """Answer one request; errors and the end of the answer as `answer` says."""
    asked = parse_responses_request(request.json(), dict(request.headers), app.defaults.fill)
    with named_as(NAMES):
        answer(
            app, asked.chat, responder,
            lambda mine, job: ResponsesReply(asked, mine.entry.name, mine.flight.timings),
        )  # fmt: skip
