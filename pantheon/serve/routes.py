"""Routes: which handler answers a request, and what becomes of its errors.

What the rest of `serve/` codes against:

    router = Router()                                    # already answers GET / (M026)
    router.add("GET", "/v1/models", handler)             # exact path
    router.add("GET", "/v1/models/", handler)            # a path that ends in "/" is a prefix; request.tail is the rest

    def handler(request: Request, responder: Responder) -> None: ...

    request.method .path .query (dict) .headers (case-insensitive .get(name)) .body (bytes) .http_version .client .id
           .tail .json() -> dict (raises 400s)
    responder.send_json(status, obj, headers={})         # one answer; silent when the client is gone
    responder.send_bytes(status, content_type, data, headers={})
    responder.begin_sse(headers={}) -> SseStream         # 200 text/event-stream, head goes out at once
    responder.client_gone() -> bool                      # cheap; call once per decode step and prefill chunk
    responder.voice = VOICE                              # how errors and the end of a stream look, where not OpenAI's
    responder.stopping() -> bool                         # the server is shutting down
    responder.should_stop() -> bool                      # either of the two: the `cancelled` callback of generate()
    stream.send(obj) .comment(text) .error(exc) .done()  # send raises Cancelled when the client is gone

Rules for handlers
- Raise a PantheonError for every refusal.  Before the first byte it becomes its status with the OpenAI error body (429
  and 503 with Retry-After); after begin_sse() it becomes `data: {"error": …}`, `data: [DONE]` and a clean end.  Paths
  with a voice of their own (`speak`) have their own words for both, from the moment that the path is known.  Any other
  exception is a 500 without a trace of the traceback, which goes to the log.
- Let `Cancelled` pass: it is logged as cancelled when the client is gone, and answered 503 `shutting_down` (or an error
  event with that code) when it was the server that stopped.
- A handler that will stream sets `responder.will_stream = True` or calls begin_sse() before the first client_gone() or
  should_stop().  Once the client has closed its sending side, the only way to tell a half-closed client (which must be
  answered) from one that is gone is to send it something; one that is gone resets the connection.  First that is one
  urgent byte outside the stream.  If the client is still there after 3 s (or can not be asked so), and its answer has
  not begun, it is the head of a 200 JSON answer followed by blanks, which JSON allows in front of a value (with
  will_stream: the head of an event stream and a comment).  An error found after that still comes as the JSON error
  object (the error event), but under status 200, and headers given to send_json() are lost.  Clients that keep their
  sending side open, which is nearly all, never see this.
- HEAD is served by the GET handler; the body is dropped here.  Every answer closes its connection (M031).

Must not know models or chat requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches

from pantheon import log, seams
from pantheon.errors import Cancelled, PantheonError
from pantheon.serve.http_errors import HttpError, shutting_down
from pantheon.serve.http_request import Headers, Request
from pantheon.serve.http_responder import Responder
from pantheon.serve.sse import SseStream
from pantheon.serve.voice import OPENAI, Voice

__all__ = [
    "Handler",
    "Headers",
    "HttpError",
    "Request",
    "Responder",
    "Router",
    "SseStream",
    "dispatch",
    "shutting_down",
]

Handler = Callable[[Request, Responder], None]
_LOG = log.logger("http")


class Router:
    """An exact-match table of (method, path) -> handler, with a few prefixes behind it [M027]."""

    def __init__(self) -> None:
        self._exact: dict[tuple[str, str], Handler] = {}
        self._prefixes: dict[tuple[str, str], Handler] = {}
        self._voices: dict[str, Voice] = {}
        self.add("GET", "/", _root)

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Register a handler.  A path that ends in "/" (other than "/" itself) is a prefix that needs a tail.

        Raises ValueError for a pair that is taken.
        """
        table = self._prefixes if path.endswith("/") and path != "/" else self._exact
        if (method, path) in table:
            raise ValueError(f"{method} {path} has a handler already")
        table[method, path] = handler

    def speak(self, part: str, voice: Voice) -> None:
        """Answers on paths that end so, or go on below it, are given in this voice, also where no handler is."""
        self._voices[part] = voice

    def voice(self, path: str) -> Voice:
        """The voice of a path, known or not."""
        return next((voice for part, voice in self._voices.items() if part + "/" in path + "/"), OPENAI)

    def find(self, method: str, path: str) -> tuple[Handler, str]:
        """(handler, tail).  Raises HttpError: 404 for an unknown path, 405 with `Allow` for a known one."""
        choices = dict(self._candidates(path))
        wanted = "GET" if method == "HEAD" and "HEAD" not in choices else method
        if wanted in choices:
            return choices[wanted]
        if not choices:
            near = self._near(path) if len(path) < 200 else None
            hint = f"; did you mean {near}?" if near else ""
            raise HttpError(404, f"no such path: {path[:200]}{hint}", code="not_found")
        allowed = sorted({*choices, "OPTIONS", *(["HEAD"] if "GET" in choices else [])})
        message = f"{method[:40]} is not allowed on {path[:200]}; use {', '.join(choices)}"
        raise HttpError(405, message, code="method_not_allowed", headers={"Allow": ", ".join(allowed)})

    def _near(self, path: str) -> str | None:
        """The path that was probably meant: a base URL with one `/v1` too few or too many, a `/` at its end, a typo."""
        bare = path.rstrip("/")
        for near in (bare, "/v1" + bare, bare.removeprefix("/v1")):
            if near and dict(self._candidates(near)):
                return near
        return next(iter(get_close_matches(bare, sorted({known for _, known in self._exact}), 1, 0.9)), None)

    def _candidates(self, path: str) -> Iterator[tuple[str, tuple[Handler, str]]]:
        # later pairs win in dict(): longer prefixes over shorter ones, exact paths over all
        for (method, prefix), handler in sorted(self._prefixes.items(), key=lambda item: len(item[0][1])):
            if path.startswith(prefix) and len(path) > len(prefix):
                yield method, (handler, path[len(prefix) :])
        for (method, exact), handler in self._exact.items():
            if path == exact:
                yield method, (handler, "")


def _root(request: Request, responder: Responder) -> None:
    """Says that the process lives; a browser is sent on to the status page."""
    browser = "text/html" in (request.headers.get("Accept") or "")
    status, more = (302, {"Location": "/ui"}) if browser else (200, {})
    responder.send_json(status, {"service": "pantheon", "status": "ok"}, more)


def dispatch(router: Router, request: Request, responder: Responder) -> bool:
    """Let the handler answer; whatever it raises becomes an answer too [M033, M034].

    Returns False when the client was gone before its answer was complete.
    """
    try:
        if responder.stopping():
            raise shutting_down()
        handler, tail = router.find(request.method, request.path)
        seams.hit("handler")
        handler(replace(request, tail=tail), responder)
        responder.finish()
    except Cancelled:
        if responder.client_gone():
            return False  # with nobody to tell
        cancelled = HttpError(503, "the request was cancelled by the server", code="cancelled", retry_after=1)
        responder.fail(shutting_down() if responder.stopping() else cancelled)
    except PantheonError as fault:
        responder.fail(fault)
    except Exception:  # a fault of ours is answered too
        _LOG.exception("handler failed %s", log.fields(method=request.method, path=request.path, id=request.id))
        responder.fail(PantheonError("internal error; the server log has the details", code="internal_error"))
    finally:
        responder.release()
    return responder.delivered
