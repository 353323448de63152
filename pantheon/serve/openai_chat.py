"""POST /v1/chat/completions: the chat API over the one way of an answer [M024, B16]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pantheon.serve import chat_reply as reply
from pantheon.serve.answer import Frames, answer
from pantheon.serve.chat_request import ChatRequest, parse_chat_request
from pantheon.serve.context import App
from pantheon.serve.generation import Logprob, Result, Step
from pantheon.serve.http_request import Request
from pantheon.serve.routes import Responder
from pantheon.serve.voice import OPENAI, frame


def post_chat(app: App, request: Request, responder: Responder) -> None:
    """Answer one chat; errors and the end of the answer as `answer` says."""
    chat = parse_chat_request(app.defaults.fill(request.json()), dict(request.headers))
    kind = ChatStream if chat.stream else ChatWhole
    answer(app, chat, responder, lambda mine, job: kind(chat, mine.entry.name))


class ChatWhole:
    """A plain answer: one object with all choices."""

    voice = OPENAI

    def __init__(self, chat: ChatRequest, model: str) -> None:
        self._envelope = reply.Envelope("chat.completion", model)
        self._with_logprobs = chat.params.top_logprobs is not None
        self._message = reply.Message()
        self._choices: list[dict[str, Any]] = []
        self._results: list[Result] = []

    def begin(self, index: int) -> Sequence[bytes]:
        self._message = reply.Message()
        return ()

    def step(self, step: Step) -> Frames:
        self._message.add(step)
        return ()

    def end(self, result: Result) -> Frames:
        self._choices.append(reply.choice(len(self._choices), self._message, result, self._with_logprobs))
        self._results.append(result)
        return ()

    def close(self) -> Frames:
        return ()

    def body(self) -> dict[str, Any]:
        return self._envelope.wrap(self._choices, usage=reply.usage(self._results), **reply.extras(self._results))


class ChatStream:
    """A streamed answer: chunks, the log-probabilities of a token with the text that it belongs to."""

    voice = OPENAI

    def __init__(self, chat: ChatRequest, model: str) -> None:
        self._envelope = reply.Envelope("chat.completion.chunk", model)
        self._include_usage = chat.include_usage
        self.progress = self._progress if chat.return_progress else None
        self._index = 0
        self._texts = reply.TextChunks(self._envelope, 0)
        self._waiting: list[Logprob] = []
        self._results: list[Result] = []

    def begin(self, index: int) -> Sequence[bytes]:
        if index:
            self._index, self._texts, self._waiting = index, reply.TextChunks(self._envelope, index), []
        return (self._frame(reply.role_choice(index)),)

    def step(self, step: Step) -> Frames:
        if step.logprob is not None:
            self._waiting.append(step.logprob)
        elif not self._waiting and (data := self._texts.frame(step.deltas)) is not None:
            return (data,)
        frames = [self._frame(choice) for choice in reply.step_choices(self._index, step.deltas, self._waiting)]
        if frames:
            self._waiting = []
        return frames

    def end(self, result: Result) -> Frames:
        self._results.append(result)
        choice = reply.finish_choice(self._index, result, self._waiting)
        return (self._frame(choice, **reply.extras(self._results)),)

    def close(self) -> Frames:
        usage = reply.usage(self._results)
        return (frame(self._envelope.wrap([], usage=usage)),) if self._include_usage else ()

    def body(self) -> Any:
        raise AssertionError("a streamed answer has no body")

    def _progress(self, report: dict[str, Any]) -> bytes:
        return self._frame(reply.empty_choice(self._index), prompt_progress=report)

    def _frame(self, choice: dict[str, Any], **more: Any) -> bytes:
        return frame(self._envelope.wrap([choice], **more))
