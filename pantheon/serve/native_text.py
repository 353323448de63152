"""POST /tokenize, /detokenize, /apply-template and …/input_tokens: a model's tokenizer and template, without a forward.

They take no place of a conversation: they answer while the model generates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pantheon.errors import BadRequest
from pantheon.serve.chat_request import ChatRequest, parse_chat_request
from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.request_fields import Fields
from pantheon.serve.routes import Responder
from pantheon.serve.text_request import read_sequence, text_ids

if TYPE_CHECKING:
    from pantheon.engine.model import Model
    from pantheon.text.prompt import Prompt


def post_tokenize(app: App, request: Request, responder: Responder) -> None:
    """`content` (a text, or texts and ids mixed) -> `tokens`: ids, or {id, piece} with `with_pieces`."""
    fields = Fields(request.json())
    content = _content(fields)
    add, parse = fields.flag("add_special", False), fields.flag("parse_special", True)
    pieces = fields.flag("with_pieces", False)
    with looking(app, fields.text("model")) as model:
        ids: list[Any] = text_ids(model, content, "content", add_special=add, parse_special=parse)
        if pieces:
            ids = [{"id": token, "piece": _piece(model.tokenizer.token_bytes(token, special=True))} for token in ids]
    responder.send_json(200, {"tokens": ids})


def _content(fields: Fields) -> tuple[str | int, ...]:
    if isinstance(fields.body.get("content"), list):
        return read_sequence(fields, "content", fields.body["content"])
    return (fields.text("content") or "",)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


def post_detokenize(app: App, request: Request, responder: Responder) -> None:
    """`tokens` -> `content`; control tokens show their text."""
    fields = Fields(request.json())
    tokens = fields.items("tokens")
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise fields.fault("tokens", "must be an array of token ids")
    with looking(app, fields.text("model")) as model:
        n_vocab = min(model.n_vocab, model.tokenizer.n_vocab)
        if any(not 0 <= token < n_vocab for token in tokens):
            raise fields.fault("tokens", f"a token is outside the vocabulary of {n_vocab}")
        content = model.tokenizer.decode(tokens, special=True)
    responder.send_json(200, {"content": content})


def post_apply_template(app: App, request: Request, responder: Responder) -> None:
    """The prompt that a chat with these fields would be read as, as text."""
    body = app.defaults.fill(request.json())
    wanted = Fields(body).flag("add_generation_prompt", True)
    chat = parse_chat_request(body)
    with looking(app, chat.model) as model:
        prompt = render(model, chat, add_generation_prompt=wanted)
    responder.send_json(200, {"prompt": prompt.text})


def post_input_tokens(app: App, request: Request, responder: Responder) -> None:
    """How many tokens a chat would be read as."""
    chat = parse_chat_request(app.defaults.fill(request.json()))
    with looking(app, chat.model) as model:
        count = len(render(model, chat).ids)
    responder.send_json(200, {"object": "response.input_tokens", "input_tokens": count})


def render(model: Model, chat: ChatRequest, **more: Any) -> Prompt:
    """What the model reads for a chat."""
    offered = [] if chat.tool_choice == "none" else list(chat.tools)
    return model.prompt(chat.messages, offered or None, **{**chat.template_kwargs, **more})


@contextmanager
def looking(app: App, name: str | None) -> Iterator[Model]:
    """The model of this name, kept from being freed meanwhile.  Raises as a chat does: NotFound, Unavailable."""
    with app.registry.lease(name, strict=app.strict_model) as entry:
        if entry.model is None:
            raise BadRequest(f"the model {entry.name!r} is being unloaded", code="model_unloading")
        yield entry.model
