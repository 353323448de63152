"""What the translations of other APIs into chat requests share: the fields of sampling, and faults named as the caller
knows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pantheon.errors import BadRequest, PantheonError

#: fields that mean the same in every API
SAME_FIELDS = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "repetition_penalty",
    "repeat_last_n",
    "logit_bias",
    "ignore_eos",
    "session_id",
    "prompt_cache_key",
    "conversation_id",
    "thread_id",
    "chat_id",
    "metadata",
    "client_metadata",
    "chat_template_kwargs",
    "enable_thinking",
)


def same_fields(body: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """The fields of a body that the chat API has under the same name."""
    return {name: body[name] for name in (*SAME_FIELDS, *more) if name in body}


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """A fault of a field of the chat request (a key) is told as one of the caller's field (its value)."""
    try:
        yield
    except PantheonError as fault:
        if (theirs := names.get(fault.param or "")) is not None:
            fault.message = _renamed(fault.message, fault.param or "", theirs)
            fault.param = theirs
        raise


def _renamed(message: str, ours: str, theirs: str) -> str:
    return theirs + message.removeprefix(ours) if message.startswith((ours + ":", ours + " ")) else message


def text_of(parts: Any, at: str, kinds: Mapping[str, str], *, joint: str = "", skip: Iterable[str] = ()) -> str:
    """The text of a string or of an array of parts; `kinds`: type of a part -> its field with the text.

    Parts of the types in `skip` leave a remark in place of what can not be read.  Raises BadRequest for others.
    """
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise BadRequest(f"{at}: must be a string or an array of parts", param=at)
    texts = []
    for i, part in enumerate(parts):
        here = f"{at}[{i}]"
        if not isinstance(part, dict):
            raise BadRequest(f"{here}: must be an object with a type", param=here)
        kind = part.get("type")
        if isinstance(kind, str) and kind in skip:
            texts.append(f"({kind}: this model reads text only)")
            continue
        key = kinds.get(kind) if isinstance(kind, str) else None
        if key is None:
            why = f"{kind!r:.60} can't be used, this server reads text only"
            raise BadRequest(f"{here}.type: {why}", param=f"{here}.type")
        if not isinstance(part.get(key), str):
            raise BadRequest(f"{here}.{key}: must be a string", param=f"{here}.{key}")
        texts.append(part[key])
    return joint.join(texts)
