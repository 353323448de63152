"""Byte-level BPE ('gpt2') and its raw UTF-8 variant ('gemma4'): text fragment to ids, id to bytes.

Knows nothing of special-token syntax; it gets plain fragments.  Plain text never becomes a control token, even where a
merge would spell one.
"""

from __future__ import annotations

from pantheon.text.merge import Find, merge
from pantheon.text.pretokenize import IGNORE_MERGES, Pretokenizer
from pantheon.text.vocab import Vocab
from pantheon.text.words import Bridges, WordCache

_BLANK = "\u2581"
_PART = 8192


def byte_alphabet() -> list[str]:
    """GPT-2's printable character of each byte value: itself where printable, else U+0100 and up in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


_ALPHABET = byte_alphabet()
_TO_ALPHABET = str.maketrans({chr(b): c for b, c in enumerate(_ALPHABET)})
_TO_BYTE = {c: bytes([b]) for b, c in enumerate(_ALPHABET)}


def rank_table(merges: list[str]) -> dict[str, int]:
    """`"left right"` -> rank; the first of equal merges counts."""
    last = len(merges) - 1
    return {pair: last - n for n, pair in enumerate(reversed(merges))}


class ByteBpe:
    """Words from the pre-tokenizer, mapped to the byte alphabet, merged by rank."""

    def __init__(self, vocab: Vocab, pre: Pretokenizer, forbidden: frozenset[str]) -> None:
        self._pre = pre
        self._ids = {t: i for t, i in vocab.ids.items() if t not in forbidden} if forbidden else vocab.ids
        self._find = find_rank(vocab.merges, forbidden)
        self.keeps_all = all(c in self._ids for c in _ALPHABET)
        self._whole_words = pre.name in IGNORE_MERGES
        self._cache = WordCache(self._word)

    def encode(self, text: str) -> list[int]:
        """Ids of a fragment of valid text."""
        ids: list[int] = []
        for words in self._pre.words(text):
            self._cache.extend(ids, words)
        return ids

    def _word(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in self._pre.refine(word):
            ids += self._piece(_spell(piece))
        return tuple(ids)

    def _piece(self, piece: str) -> list[int]:
        ids = self._ids
        if self._whole_words and piece in ids:
            return [ids[piece]]
        parts = merge(list(piece), self._find)
        # A merge product that is no token falls back to its bytes; bytes without a token are dropped.
        return [ids[p] for part in parts for p in ([part] if part in ids else part) if p in ids]

    def token_bytes(self, text: str) -> bytes:
        """What a normal token prints."""
        return b"".join(_TO_BYTE.get(c) or c.encode("utf-8", "surrogateescape") for c in text)


def _spell(piece: str) -> str:
    """The piece in the byte alphabet; a long one in parts, since one call holds the GIL."""
    text = piece.encode().decode("latin-1")
    if len(text) <= _PART:
        return text.translate(_TO_ALPHABET)
    return "".join([text[at : at + _PART].translate(_TO_ALPHABET) for at in range(0, len(text), _PART)])


class RawBpe:
    """Merges over whole lines of UTF-8 with U+2581 for the space; unknown characters become <0xXX> tokens."""

    def __init__(self, vocab: Vocab, pre: Pretokenizer, forbidden: frozenset[str]) -> None:
        self._pre = pre
        self._ids = {t: i for t, i in vocab.ids.items() if t not in forbidden}
        self._find = find_rank(vocab.merges, forbidden)
        self.keeps_all = all(f"<0x{b:02X}>" in self._ids for b in range(256))
        self._bridges = Bridges(vocab.merges)
        self._whole_breaks = pre.name == "gemma4"
        self._cache = WordCache(self._word)

    def encode(self, text: str) -> list[int]:
        """Ids of a fragment of valid text."""
        ids: list[int] = []
        for words in self._pre.words(text.replace(" ", _BLANK)):
            for line in words:
                for part in self._bridges.words(line):
                    self._cache.extend(ids, part)
        return ids

    def _word(self, word: str) -> tuple[int, ...]:
        ids = self._ids
        if self._whole_breaks and word[0] == "\n" and word in ids:
            return (ids[word],)
        out: list[int] = []
        for part in merge(list(word), self._find):
            if part in ids:
                out.append(ids[part])
            else:
                names = (f"<0x{b:02X}>" for b in part.encode())
                out += [ids[n] for n in names if n in ids]
        return tuple(out)

    def token_bytes(self, text: str) -> bytes:
        """What a normal token prints."""
        return text.replace(_BLANK, " ").encode("utf-8", "surrogateescape")


def find_rank(merges: list[str], forbidden: frozenset[str]) -> Find:
    """The pair order for `merge`; a pair that would spell a control token does not merge."""
    ranks = rank_table(merges)
    get = ranks.get

    def find(left: str, right: str) -> int | None:
        rank = get(f"{left} {right}")
        return None if rank is None or left + right in forbidden else rank

    return find
