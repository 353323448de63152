"""One tool block of an answer: feeds a grammar with text as it comes and turns what it finds into pieces of calls.

What is no call is handed back whole, from the opening marker on; what goes wrong inside the arguments of a call
that has begun stays in its arguments, so that nothing is lost.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pantheon.serve.call_xml import Grammar, Offered
from pantheon.serve.scan import Ended, Malformed, Scan, Steps

#: takes a piece: its channel, its text, and the name of the call that begins with it
Emit = Callable[[Literal["content", "call"], str, str], None]


class Block:
    """Feed it until it says that it is done.  `spilled`: it ended as text; `calls`: how many are complete."""

    def __init__(self, grammar: Grammar, offered: Offered, emit: Emit) -> None:
        self._scan, self._emit = Scan(), emit
        self._steps = self._run(grammar, offered)
        self.open = False
        self.spilled = False
        self.calls = 0

    @property
    def rest(self) -> str:
        """What stands behind a block that is done; the block itself when it was none."""
        return (self._scan.taken() if self.spilled else "") + self._scan.rest

    def feed(self, text: str, last: bool = False, cut: bool = False) -> bool:
        """Take text; True when the block is over.  `last`: so is the answer; `cut`: because of a cap."""
        self._scan.feed(text, last, cut)
        try:
            next(self._steps)
        except StopIteration:
            return True
        return False

    def _run(self, grammar: Grammar, offered: Offered) -> Steps[None]:
        try:
            yield from grammar(self._scan, self, offered)
        except Malformed:
            if not self.open:
                self.spilled = True
                return
            self.arguments(self._scan.taken())
            found = yield from self._scan.until(self._scan.closing, self.arguments)
            self._scan.take(len(found))
            self.end()
        except Ended:
            self.spilled = not self.open

    def begin(self, name: str) -> None:
        self.open = True
        self._emit("call", "", name)

    def arguments(self, text: str) -> None:
        if text:
            self._emit("call", text, "")
            self._scan.commit()

    def end(self) -> None:
        self.open = False
        self.calls += 1

    def content(self, text: str) -> None:
        self._emit("content", text, "")
