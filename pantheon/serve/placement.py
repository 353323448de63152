"""Which replica answers a request: the one that is warm for it, unless waiting there costs more than starting cold.

Pure: numbers in, a choice out.  Must not know entries, locks or requests.  Spec: M064, X01, X03.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pantheon import settings
from pantheon.engine.prefix_cache import Marks
from pantheon.text.stable_prefix import stable

#: A hop to another replica leaves a second copy of the conversation behind and may push out another one's: so much
#: waiting is always cheaper, and so little saving binds nobody.
HOP_S = 1.0
#: nobody is kept waiting longer than a queue would keep him
MAX_WAIT_S = 30.0
#: characters of one mark in a text that has no messages
_BLOCK = 512
_MAX_MARKS = 1024


@dataclass(frozen=True)
class Candidate:
    """One replica.  `wait_s`: when it should be free; `saved_s`: prefill that its warm prefix saves; `own`: the prefix
    is of the request's own conversation."""

    index: int
    refs: int
    last_use: int
    wait_s: float = 0.0
    saved_s: float = 0.0
    own: bool = False


class Choice(NamedTuple):
    """The replica's index, and how long its running generation may be waited for."""

    place: int
    patience_s: float


def choose(candidates: Sequence[Candidate]) -> Choice:
    """The warm replica when it is free, or free again before another one could have read the prompt; else the one with
    the fewest requests, the least recently used one among equals.  Someone who is the only one waits for nobody."""
    coolest = min(candidates, key=lambda c: (c.refs, c.last_use, c.index))
    warm = [c for c in candidates if (c.own and c.saved_s > 0) or c.saved_s >= HOP_S]
    if not warm or len(candidates) == 1:
        return Choice(coolest.index, 0.0)
    best = min(warm, key=lambda c: (not c.own, -c.saved_s, c.refs, c.last_use, c.index))
    if not best.refs:
        return Choice(best.index, 0.0)
    away_s = min(c.wait_s for c in candidates if c is not best) + max(best.saved_s, HOP_S)
    patience_s = min(away_s, MAX_WAIT_S)
    if best.wait_s <= patience_s:
        return Choice(best.index, patience_s)
    return Choice(coolest.index, 0.0)


def remaining_s(refs: int, elapsed_s: float, service_s: float) -> float:
    """When an entry with `refs` requests should be free: a generation that runs longer than usual may well run on for a
    while."""
    if not refs:
        return 0.0
    running = service_s - elapsed_s if elapsed_s < service_s else elapsed_s / 4
    return running + (refs - 1) * service_s


# ---- recognising a conversation -------------------------------------------------------------------------------------


def marks_of_chat(messages: Iterable[Any], *context: Any) -> Marks:
    """One mark for each message, which stands for it and all before it; `context` is what else shapes the prompt
    (tools, template arguments)."""
    sizes, digests = 0, []
    state = hashlib.blake2b(_canonical(context), digest_size=8)
    for message in stable(messages, settings.get("PN_STABLE_PREFIX")):
        data = _canonical(message)
        state.update(len(data).to_bytes(8, "little") + data)
        sizes += len(data)
        digests.append((int.from_bytes(state.digest(), "little"), sizes))
    return tuple(digests[:_MAX_MARKS])


def marks_of_text(text: str | Sequence[int]) -> Marks:
    """One mark for each block of a plain prompt."""
    if not isinstance(text, str):
        text = " ".join(map(str, text))
    return marks_of_chat(text[at : at + _BLOCK] for at in range(0, min(len(text), _BLOCK * _MAX_MARKS), _BLOCK))


def _canonical(value: Any) -> bytes:
    if isinstance(value, Mapping):
        value = {key: item for key, item in value.items() if item is not None}
    return json.dumps(value, sort_keys=True, default=repr).encode("utf-8", "surrogatepass")
