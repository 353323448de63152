"""A constraint that sleeps until the model begins a call by itself, and then holds it to the call's grammar.

For tools marked `strict` under tool_choice auto: text stays free, and costs nothing.  Knows no templates and no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pantheon.engine.sampler import Constraint

#: Bytes of the answer that are looked at again with the next token; more than any mark and the name of a tool.
_TAIL = 512


class LazyConstraint:
    """One answer; a `sampler.Constraint`.  Not thread-safe: one owner."""

    def __init__(
        self,
        openings: Sequence[tuple[re.Pattern[bytes], Callable[[bytes], Constraint | None]]],
        token_bytes: Callable[[int], bytes],
        *,
        thought: tuple[bytes, bytes],
        opens_reasoning: bool,
    ) -> None:
        """`openings`: what the text of the answer ends with when a call begins -> the constraint of the rest, given the
        bytes that the last token has beyond (None when they do not fit).  A thought begins no calls."""
        self._openings, self._bytes, self._thought = openings, token_bytes, thought
        self._text = b""
        self._thinking: bool | None = True if opens_reasoning else None
        self._inner: Constraint | None = None

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Forbid what the call that is open can not go on with; nothing outside of calls."""
        if self._inner is not None:
            self._inner.mask(logits)

    def allowed(self) -> NDArray[np.int32] | None:
        """As `mask`, in bits."""
        return None if self._inner is None else self._inner.allowed()

    def accept(self, token: int) -> None:
        """Move on by one token."""
        if self._inner is not None:
            self._inner.accept(token)
            if self._inner.done:
                # only the start of an answer is one; what follows a call is not
                self._inner, self._text = None, b"\0"
            return
        self._text += self._bytes(token)
        if self._in_thought():
            return
        found = [(match.end(), make) for pattern, make in self._openings if (match := pattern.search(self._text))]
        if found:
            end, make = min(found, key=lambda item: item[0])
            self._inner = make(self._text[end:])
            self._text = b"\0"
            if self._inner is not None and self._inner.done:
                self._inner = None
        elif len(self._text) > 2 * _TAIL:
            self._text = b"\0" + self._text[-_TAIL:]

    @property
    def done(self) -> bool:
        """Never: the model ends the answer."""
        return False

    def _in_thought(self) -> bool:
        """Whether the answer is in its thought, or may still open one."""
        opening, closing = self._thought
        if self._thinking is None:
            lead = self._text.lstrip()
            if lead.startswith(opening):
                self._thinking = True
            elif not opening.startswith(lead):
                self._thinking = False
        if self._thinking and (end := self._text.find(closing)) >= 0:
            self._text, self._thinking = self._text[end + len(closing) :], False
        elif self._thinking and len(self._text) > 2 * _TAIL:
            self._text = self._text[-_TAIL:]
        return self._thinking is not False
