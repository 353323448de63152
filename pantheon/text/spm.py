"""SentencePiece with scores ('llama'): text fragment to ids, id to bytes.

The pair whose text is the token with the highest score merges first.  Knows nothing of special-token syntax; plain text
never becomes a control token, even where merges would spell one.  Bytes that are no UTF-8 come in as surrogate escapes.
"""

from __future__ import annotations

import re

from pantheon.text.merge import merge
from pantheon.text.vocab import Vocab
from pantheon.text.words import Bridges, WordCache

_BLANK = "\u2581"
_ESCAPED = re.compile("[\udc80-\udcff]")


class Spm:
    """Merges by score, split at words where no token spans them; what is no token becomes <0xXX> bytes."""

    keeps_all = True

    def __init__(self, vocab: Vocab, forbidden: frozenset[str]) -> None:
        self._ids = vocab.ids
        place = {s: n for n, s in enumerate(sorted(set(vocab.scores), reverse=True))}
        self._order = {t: place[s] for t, s in zip(vocab.tokens, vocab.scores, strict=True) if t not in forbidden}
        self._bridges = Bridges(vocab.tokens)
        self._unknown = vocab.special.get("unknown", 0)
        self._byte_ids = [self._byte(b) for b in range(256)]
        self._cache = WordCache(self._word)

    def _byte(self, value: int) -> int:
        name = f"<0x{value:02X}>"
        return self._ids.get(name, self._ids.get(chr(value), self._unknown) if value < 128 else self._unknown)

    def encode(self, text: str) -> list[int]:
        """Ids of a fragment; the caller has put the space prefix."""
        text = text.replace(" ", _BLANK)
        if _ESCAPED.search(text):
            return self._merge(_split_bytes(text.encode("utf-8", "surrogateescape")))
        ids: list[int] = []
        for words in self._bridges.words(text):
            self._cache.extend(ids, words)
        return ids

    def _word(self, word: str) -> tuple[int, ...]:
        return tuple(self._merge(list(word)))

    def _merge(self, symbols: list[str]) -> list[int]:
        order = self._order
        ids: list[int] = []
        for part in merge(symbols, lambda left, right: order.get(left + right)):
            if part in order:
                ids.append(self._ids[part])
            else:
                ids += [self._byte_ids[b] for b in part.encode("utf-8", "surrogateescape")]
        return ids

    def token_bytes(self, text: str) -> bytes:
        """What a normal token prints."""
        return text.replace(_BLANK, " ").encode("utf-8", "surrogateescape")


def _split_bytes(data: bytes) -> list[str]:
    """Symbols as llama.cpp cuts broken UTF-8: by the length that each first byte claims."""
    symbols, at = [], 0
    while at < len(data):
        high = data[at] >> 4
        size = 1 if high < 12 else 2 if high < 14 else 3 if high == 14 else 4
        symbols.append(data[at : at + size].decode("utf-8", "surrogateescape"))
        at += size
    return symbols
