"""Reads text that comes in pieces: a scanner for parsers written as generators, and JSON values read with it.

A parser `yield`s when it needs more text and goes on where it was, so that its result does not depend on where the text
was cut.  What it has taken since the last `commit` can be had back.  Pure; must not know what the text is about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Out = Callable[[str], object]

#: Deeper JSON is no call that anybody meant.
MAX_DEPTH = 100
BLANKS = " \t\n\r"

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]")
_WORD_CHARS = re.compile(r"[A-Za-z]")
_KEY_CHARS = re.compile(r"[^:,{}\[\]<>\"\s]")
_HEX = re.compile(r"[0-9a-fA-F]")
# models that have read much Python write it by mistake
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}


class Malformed(Exception):
    """The text is not what the parser reads."""


class Ended(Exception):
    """The text ended in the middle."""


class Match(NamedTuple):
    """Where a pattern stands in a text."""

    start: int
    end: int
    pattern: str


def first(text: str, patterns: Sequence[str]) -> Match | None:
    """The pattern that is complete first; of those that end together the longest."""
    found = [Match(at, at + len(p), p) for p in patterns if (at := text.find(p)) >= 0]
    return min(found, key=lambda m: (m.end, m.start), default=None)


def held(text: str, patterns: Sequence[str]) -> int:
    """The length of the longest suffix of text that a pattern begins with."""
    longest = min(len(text), max((len(p) - 1 for p in patterns), default=0))
    for size in range(longest, 0, -1):
        if any(p.startswith(text[-size:]) for p in patterns if len(p) > size):
            return size
    return 0


def escaped(text: str) -> str:
    """A text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Scan:
    """The text of one parser.  `last`: no more will come; `cut`: because of a cap, not because it was over.  `closing`:
    where a parser that went wrong may be left."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._taken: list[str] = []
        self.last = self.cut = False
        self.closing: tuple[str, ...] = ()

    def feed(self, text: str, last: bool = False, cut: bool = False) -> None:
        self._text, self._at = self._text[self._at :] + text, 0
        self.last, self.cut = self.last or last, self.cut or cut

    @property
    def rest(self) -> str:
        """What nobody has taken yet."""
        return self._text[self._at :]

    def commit(self) -> None:
        """What was taken so far is used."""
        self._taken.clear()

    def taken(self) -> str:
        """What was taken since the last commit."""
        return "".join(self._taken)

    def take(self, n: int = 1) -> str:
        """The next n characters, which must be here."""
        text = self._text[self._at : self._at + n]
        self._at += n
        self._taken.append(text)
        return text

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self._at >= len(self._text) and not self.last:
            yield
        return self._text[self._at : self._at + 1]

    def need(self, *, blanks: bool = False) -> Steps[str]:
        """The next character, behind blanks when they do not count.  Raises Ended."""
        while True:
            c = yield from self.peek()
            if c == "":
                raise Ended
            if not blanks or c not in BLANKS:
                return c
            self.take()

    def blanks(self) -> Steps[str]:
        """Skip blanks; the next character, "" at the end."""
        while (c := (yield from self.peek())) and c in BLANKS:
            self.take()
        return c

    def run(self, pattern: re.Pattern[str]) -> str:
        """What is here already of a run, which a pattern of one or more characters matches."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def word(self, char: re.Pattern[str], most: int = 400) -> Steps[str]:
        """A whole run of characters, which the pattern of one matches.  Raises Malformed for more than `most`."""
        found: list[str] = []
        while (c := (yield from self.peek())) and char.fullmatch(c):
            found.append(self.take())
            if len(found) > most:
                raise Malformed
        return "".join(found)

    def which(self, *texts: str) -> Steps[str]:
        """The one of the texts that comes next, "" for none; nothing is taken."""
        while True:
            here = self.rest
            found = max((text for text in texts if here.startswith(text)), key=len, default="")
            if self.last or not any(len(text) > len(here) and text.startswith(here) for text in texts):
                return found
            yield

    def cut_within(self, *texts: str) -> bool:
        """Whether a cap ended the text here, or within one of these."""
        return self.last and self.cut and any(text.startswith(self.rest) for text in texts)

    def behind(self, n: int, *texts: str) -> Steps[bool]:
        """Whether one of the texts, or the end, comes behind the next n characters and blanks; nothing is taken.
        Raises Ended where a cap leaves that open."""
        while True:
            here = self.rest[n:].lstrip(BLANKS)
            if any(here.startswith(text) for text in texts):
                return True
            unclear = any(text.startswith(here) for text in texts)
            if self.last and self.cut and unclear:
                raise Ended
            if self.last or not unclear:
                return here == ""
            yield

    def until(self, ends: Sequence[str], out: Out) -> Steps[str]:
        """Hand text out up to the first of the ends, which is not taken; "" when there is none.  Where a cap cut an end
        in two, its beginning is left."""
        while True:
            here = self.rest
            found = first(here, ends)
            if found is not None:
                _hand(self, found.start, out)
                return found.pattern
            whole = self.last and not self.cut
            _hand(self, len(here) if whole else len(here) - held(here, ends), out)
            if self.last:
                return ""
            yield


def _hand(scan: Scan, n: int, out: Out) -> None:
    if n:
        out(scan.take(n))


# ---- JSON -----------------------------------------------------------------------------------------------------------


def json_value(scan: Scan, out: Out, quote: str = '"') -> Steps[None]:
    """Read one JSON value and hand its text out as it comes; a number or a word goes out whole.

    Small slips are put right: line breaks and stray backslashes in strings, a comma too many, Python's True and None.
    `quote` other than `"` is Gemma's way: strings between such marks, without escapes, and keys that stand bare.
    Raises Malformed or Ended.
    """
    stack: list[str] = []
    # behind an opening or a comma ("first", "next"), a value ("after"), or a colon and at the start ("value")
    state, pending = "value", ""
    while True:
        c = yield from scan.need()
        if c in BLANKS:
            if pending:
                pending += scan.take()
            else:
                out(scan.take())
            continue
        if stack and state != "value" and c == _CLOSING[stack[-1]]:
            pending = ""
            out(scan.take())
            stack.pop()
            state = "after"
        elif state == "after":
            if c != ",":
                raise Malformed
            pending, state = scan.take(), "next"
            continue
        else:
            out(pending)
            pending = ""
            if stack and stack[-1] == "{" and state != "value":
                yield from _key(scan, out, quote)
                state = "value"
                continue
            if c in _CLOSING:
                if len(stack) >= MAX_DEPTH:
                    raise Malformed
                stack.append(c)
                out(scan.take())
                state = "first"
                continue
            yield from _scalar(scan, out, quote, c)
            state = "after"
        if not stack:
            return


def _key(scan: Scan, out: Out, quote: str) -> Steps[None]:
    if (yield from scan.which(quote)):
        yield from json_string(scan, out, quote)
    elif scan.cut_within(quote):
        raise Ended
    elif quote == '"':
        raise Malformed
    else:
        name = yield from scan.word(_KEY_CHARS)
        yield from scan.need()
        if not name:
            raise Malformed
        out(f'"{escaped(name)}"')
    if (yield from scan.need(blanks=True)) != ":":
        raise Malformed
    out(scan.take())


def _scalar(scan: Scan, out: Out, quote: str, c: str) -> Steps[None]:
    if (yield from scan.which(quote)):
        yield from json_string(scan, out, quote)
    elif scan.cut_within(quote):
        raise Ended
    elif c == "-" or c.isdigit():
        number = yield from scan.word(_NUMBER_CHARS)
        if not _NUMBER.fullmatch(number):
            raise Malformed if (yield from scan.peek()) else Ended
        out(number)
    else:
        word = yield from scan.word(_WORD_CHARS, 5)
        if word not in _WORDS:
            raise Malformed if (yield from scan.peek()) else Ended
        out(_WORDS[word])


def json_string(scan: Scan, out: Out, quote: str = '"') -> Steps[None]:
    """A string with its quotes.  Raises Ended."""
    scan.take(len(quote))
    out('"')
    if quote != '"':
        if not (yield from scan.until((quote,), lambda text: out(escaped(text)))):
            raise Ended
        scan.take(len(quote))
        out('"')
        return
    while True:
        c = yield from scan.need()
        if c == '"':
            out(scan.take())
            return
        if c == "\\":
            yield from _escape(scan, out)
        elif c < " ":
            out(escaped(scan.take()))
        else:
            out(scan.run(_PLAIN))


def _escape(scan: Scan, out: Out) -> Steps[None]:
    scan.take()
    c = yield from scan.need()
    if c in '"\\/bfnrt':
        out("\\" + scan.take())
    elif c == "u":
        scan.take()
        digits = ""
        while len(digits) < 4 and _HEX.fullmatch((yield from scan.need())):
            digits += scan.take()
        out(("\\u" if len(digits) == 4 else "\\\\u") + digits)
    else:
        # the character itself is read next; Python's \' is a quote
        out("" if c == "'" else "\\\\")


def collect(reads: Callable[[Out], Steps[None]]) -> Steps[str]:
    """All that a reader hands out."""
    pieces: list[str] = []
    yield from reads(pieces.append)
    return "".join(pieces)
