"""Word-level reuse: a bounded cache of word -> ids, and safe places to cut text that has no pre-tokenizer.

Natural text repeats its words, so most of it is never merged twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from weakref import WeakMethod

_BLANK = "\u2581"
_MAX_WORDS = 65_536
_MAX_LENGTH = 64  # longer words hardly come twice
_LINES = re.compile(r"[^\n]+|\n+")
_BATCH = 4096  # words a list, so that no single step holds a thread long


class WordCache:
    """Remembers the ids of words.  Safe for threads: entries are immutable, and a lost entry only costs time."""

    def __init__(self, encode: Callable[[str], tuple[int, ...]]) -> None:
        """`encode` is a method of the cache's owner, which the cache does not keep alive: a circle would leave a whole
        vocabulary in memory until the next full garbage collection."""
        self._encode = WeakMethod(encode) if hasattr(encode, "__self__") else lambda: encode
        self._ids: dict[str, tuple[int, ...]] = {}

    def extend(self, ids: list[int], words: Iterable[str]) -> None:
        """Append the ids of all words."""
        get, encode = self._ids.get, self._encode()
        assert encode is not None, "the cache has outlived its tokenizer"
        for word in words:
            known = get(word)
            if known is None:
                known = encode(word)
                if len(word) <= _MAX_LENGTH:
                    if len(self._ids) >= _MAX_WORDS:
                        self._ids.clear()
                    self._ids[word] = known
            ids += known


class Bridges:
    """Cuts text where no token reaches across, which changes nothing about the merges: before U+2581, around line ends.

    `texts`: token texts, or merges ("left right", whose blank counts for nothing; text has U+2581 for every blank).
    """

    def __init__(self, texts: Iterable[str]) -> None:
        joined = "  ".join(texts)
        self._before = frozenset(re.findall(f"([^{_BLANK} ]) ?{_BLANK}", joined))
        self._lines = re.search(r"[^\n ] ?\n|\n ?[^\n ]", joined) is None

    def words(self, text: str) -> Iterator[list[str]]:
        """Lists of words which joined give the text."""
        if not self._lines:
            yield from self._blanks(text)
            return
        for line in _LINES.finditer(text):
            yield from self._blanks(line[0])

    def _blanks(self, text: str) -> Iterator[list[str]]:
        batch: list[str] = []
        start, at = 0, text.find(_BLANK, 1)
        while at >= 0:
            left = text[at - 1]
            if left != _BLANK and left not in self._before:
                batch.append(text[start:at])
                start = at
                if len(batch) == _BATCH:
                    yield batch
                    batch = []
            at = text.find(_BLANK, at + 1)
        if start < len(text):
            batch.append(text[start:])
        yield batch
