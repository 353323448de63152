"""A constraint that ends a thought which has had its tokens, by making the model write the closing tag.

Stands around whatever else holds the answer.  Knows no templates and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pantheon.engine.sampler import Constraint


class ThoughtBudget:
    """One answer; a `sampler.Constraint`.  Not thread-safe: one owner."""

    def __init__(
        self,
        budget: int,
        closing_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
        *,
        thought: tuple[bytes, bytes],
        opens_reasoning: bool,
        inner: Constraint | None = None,
    ) -> None:
        """`budget` tokens, the opening tag included where the model writes it; `closing_ids` spell the closing tag."""
        self._left, self._closing, self._bytes, self._thought = budget, list(closing_ids), token_bytes, thought
        self._inner = inner
        self._text = b""
        self._thinking: bool | None = True if opens_reasoning else None
        self._forced: list[int] = []
        self._spend(0)

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Leave only the next token of the closing tag once the budget is spent."""
        if self._inner is not None:
            self._inner.mask(logits)
        if self._forced:
            logits[:] = -np.inf
            logits[self._forced[0]] = 0.0

    def allowed(self) -> NDArray[np.int32] | None:
        """As `mask`, in bits."""
        inner = None if self._inner is None else self._inner.allowed()
        if not self._forced:
            return inner
        word, bit = divmod(self._forced[0], 32)
        words = np.zeros(word + 1, np.uint32)
        words[word] = 1 << bit
        return words.view(np.int32)

    def accept(self, token: int) -> None:
        """Move on by one token."""
        if self._inner is not None:
            self._inner.accept(token)
        if self._forced:
            self._forced.pop(0)
            self._thinking = bool(self._forced)
            return
        if self._thinking is not False:
            self._text += self._bytes(token)
            self._look()
            self._spend(1)

    @property
    def done(self) -> bool:
        """What is held inside says so."""
        return self._inner is not None and self._inner.done

    def _look(self) -> None:
        opening, closing = self._thought
        if self._thinking is None:
            lead = self._text.lstrip()
            if lead.startswith(opening):
                self._thinking = True
            elif not opening.startswith(lead):
                self._thinking = False
        if self._thinking and closing in self._text:
            self._thinking = False
        self._text = self._text if self._thinking is None else self._text[-len(closing) :]

    def _spend(self, tokens: int) -> None:
        self._left -= tokens
        if self._thinking and self._left <= 0:
            self._forced = list(self._closing)
