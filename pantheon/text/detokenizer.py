"""Ids to text one at a time: what is whole is given out at once, half a character waits for the rest.

At most three bytes wait.  Bytes that can not become UTF-8 print U+FFFD exactly as a decode of the whole would [B14].
The pieces joined are `Tokenizer.decode(ids, clean=False)`.
"""

from __future__ import annotations

import codecs

from pantheon.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer as it grows; one thread."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._strip = tokenizer.strips_first(special)
        self._decoder = _utf8("replace")

    def push(self, id: int) -> str:
        """The text that this id completes, perhaps none."""
        data = self._tokenizer.token_bytes(id, special=self._special)
        if self._strip:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What still waits, at the end of the answer: U+FFFD when a character was left half."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
