"""POST /v1/embeddings, and /embedding and /embeddings in llama-server's shape: texts as vectors.

A vector is made of the hidden states of the tokens behind the last norm, pooled (`--pooling`, by default their mean),
and normalised.  The models here were made to write, not to compare texts: what their vectors are good for is modest.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.engine.embed import embed, normalised
from pantheon.engine.model import Model
from pantheon.errors import BadRequest
from pantheon.serve.context import App
from pantheon.serve.http_request import Request
from pantheon.serve.request_fields import Fields, kind
from pantheon.serve.routes import Responder
from pantheon.serve.text_request import Prompt, prompt_ids, read_items, read_sequence
from pantheon.serve.turn import turn

MAX_INPUTS = 2048
_EUCLID = 2


def post_openai(app: App, request: Request, responder: Responder) -> None:
    """`input` -> `data`: one vector for each, as numbers or as base64 of little-endian float32."""
    fields = Fields(request.json())
    packed = fields.text("encoding_format", "float")
    if packed not in ("float", "base64"):
        raise fields.fault("encoding_format", "must be float or base64")
    if app.pooling == "none":
        raise fields.fault("input", "this API has one vector for a text, and --pooling none makes one for each token")
    vectors, count, headers, name = _vectors(app, fields, "input", _EUCLID, responder)
    width = vectors[0].shape[-1]
    if fields.integer("dimensions", 1, 1 << 20, width) != width:
        raise fields.fault("dimensions", f"must be {width}, the width of this model")
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if packed == "base64" else vector.tolist()}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    responder.send_json(200, {"object": "list", "data": data, "model": name, "usage": usage}, headers)


def post_native(app: App, request: Request, responder: Responder) -> None:
    """`content` (or `input`) -> an array of {index, embedding: rows}: one row, without pooling one for each token."""
    fields = Fields(request.json())
    name = "content" if fields.given("content") else "input"
    norm = fields.integer("embd_normalize", -1, 64, _EUCLID if app.pooling != "none" else -1)
    assert norm is not None
    vectors, _, headers, _ = _vectors(app, fields, name, norm, responder)
    body = [{"index": index, "embedding": np.atleast_2d(vector).tolist()} for index, vector in enumerate(vectors)]
    responder.send_json(200, body, headers)


Vectors = list[NDArray[np.float32]]


def _vectors(
    app: App, fields: Fields, name: str, norm: int, responder: Responder
) -> tuple[Vectors, int, dict[str, str], str]:
    """(a vector or a matrix for each input, how many tokens they are, headers, the model's name)."""
    inputs = [_input(fields, name, item) for item in read_items(fields, name, MAX_INPUTS)]
    with turn(app, fields.text("model"), responder) as mine:
        ids = [_ids(mine.model, item, name) for item in inputs]
        with mine.reading(max(map(len, ids))) as (state, forward):
            vectors = []
            for one in ids:
                mine.flight.begin(len(one), 0, 0)
                vectors.append(embed(mine.model, state, one, app.pooling, cancelled=mine.cancelled, turn=forward))
                mine.flight.on_prefill(len(one), len(one))
                mine.flight.end("stop")
        headers, model_name = mine.headers, mine.entry.name
    shown = [normalised(v, norm) if v.ndim == 1 else np.stack([normalised(row, norm) for row in v]) for v in vectors]
    return shown, sum(map(len, ids)), headers, model_name


def _input(fields: Fields, name: str, item: Any) -> Prompt:
    """A text, token ids, both mixed, {"prompt_string": …}, or {"content": [{"type": "text", "text": …}, …]}."""
    if isinstance(item, dict) and "content" in item:
        parts = item["content"]
        if not isinstance(parts, list) or not parts:
            raise fields.fault(name, f"content must be an array of parts, not {kind(parts)}")
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise fields.fault(name, "content: parts must be of type text; this model reads text only")
        return ("".join(texts),)  # type: ignore[arg-type]
    if isinstance(item, dict):
        item = item.get("prompt_string")
    return (item,) if isinstance(item, str) else read_sequence(fields, name, item)


def _ids(model: Model, item: Prompt, name: str) -> list[int]:
    ids = prompt_ids(model, item, name)
    if not ids:
        raise BadRequest(f"{name}: a text is empty, and this model adds no begin token", param=name)
    if len(ids) > model.n_ctx:
        raise BadRequest(
            f"{name}: a text of {len(ids)} tokens is too large for a context of {model.n_ctx}",
            code="context_length_exceeded", param=name, n_prompt_tokens=len(ids), n_ctx=model.n_ctx,
        )  # fmt: skip
    return ids


def _packed(vector: Sequence[float] | NDArray[np.float32]) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
