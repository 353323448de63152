"""POST /v1/chat/completions: the chat API over the one way of an answer [M024, B16]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pantheon.serve import chat_reply as reply
from pantheon.serve.answer import Frames, Reply, answer
from pantheon.serve.chat_job import Job
from pantheon.serve.chat_request import ChatRequest, parse_chat_request
from pantheon.serve.context import App
from pantheon.serve.generation import Logprob, Result, Step
from pantheon.serve.http_request import Request
from pantheon.serve.native_settings import settings_of
from pantheon.serve.routes import Responder
from pantheon.serve.turn import Turn
from pantheon.serve.voice import OPENAI, frame


def post_chat(app: App, request: Request, responder: Responder) -> None:
    """Answer one chat; errors and the end of the answer as `answer` says."""
    chat = parse_chat_request(app.defaults.fill(request.json()), dict(request.headers))

    def new_reply(mine: Turn, job: Job) -> Reply:
        more = _inside(chat, mine, job)
        if not chat.stream:
            return ChatWhole(chat, mine.entry.name, more)
        return ChatStream(chat, mine.entry.name, more, mine.flight.timings if chat.timings_per_token else None)

    answer(app, chat, responder, new_reply)


def _inside(chat: ChatRequest, mine: Turn, job: Job) -> dict[str, Any]:
    """What a verbose reply shows beside the answer, under llama-server's name."""
    if not chat.verbose:
        return {}
    prompt = mine.model.detokenize(job.prompt_ids, special=True)
    settings = settings_of(chat.params, chat.max_tokens, stream=chat.stream)
    return {"__verbose": {"prompt": prompt, "generation_settings": settings}}


class ChatWhole:
    """A plain answer: one object with all choices."""

    voice = OPENAI

    def __init__(self, chat: ChatRequest, model: str, more: dict[str, Any] | None = None) -> None:
        """more: members of the reply beside the usual ones."""
        self._envelope, self._more = reply.Envelope("chat.completion", model), more or {}
        self._with_logprobs, self._legacy = chat.params.top_logprobs is not None, chat.legacy_functions
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
        choice = reply.choice(len(self._choices), self._message, result, self._with_logprobs)
        self._choices.append(reply.as_function_call(choice) if self._legacy else choice)
        self._results.append(result)
        return ()

    def close(self) -> Frames:
        return ()

    def body(self) -> dict[str, Any]:
        extras = reply.extras(self._results) | self._more
        return self._envelope.wrap(self._choices, usage=reply.usage(self._results), **extras)


class ChatStream:
    """A streamed answer: chunks, the log-probabilities of a token with the text that it belongs to."""

    voice = OPENAI

    def __init__(
        self,
        chat: ChatRequest,
        model: str,
        more: dict[str, Any] | None = None,
        timings: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """more: members of the last chunk of an answer beside the usual ones; timings: told with every chunk."""
        self._timings = timings
        self._envelope, self._more = reply.Envelope("chat.completion.chunk", model), more or {}
        self._include_usage, self._legacy = chat.include_usage, chat.legacy_functions
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
        elif not self._waiting and self._timings is None and (data := self._texts.frame(step.deltas)) is not None:
            return (data,)
        more = {"timings": self._timings()} if self._timings is not None else {}
        choices = reply.step_choices(self._index, step.deltas, self._waiting)
        frames = [self._frame(choice, **more) for choice in choices]
        if frames:
            self._waiting = []
        return frames

    def end(self, result: Result) -> Frames:
        self._results.append(result)
        choice = reply.finish_choice(self._index, result, self._waiting)
        return (self._frame(choice, **(reply.extras(self._results) | self._more)),)

    def close(self) -> Frames:
        usage = reply.usage(self._results)
        return (frame(self._envelope.wrap([], usage=usage)),) if self._include_usage else ()

    def body(self) -> Any:
        raise AssertionError("a streamed answer has no body")

    def _progress(self, report: dict[str, Any]) -> bytes:
        return self._frame(reply.empty_choice(self._index), prompt_progress=report)

    def _frame(self, choice: dict[str, Any], **more: Any) -> bytes:
        return frame(self._envelope.wrap([reply.as_function_call(choice) if self._legacy else choice], **more))
