"""Keeps user text from becoming control tokens: which characters of which strings must be guarded [B31].

A guarded character is replaced, before a template is rendered, by a private-use placeholder that occurs nowhere else;
the tokenizer puts it back after it has found the special tokens.  So the guarded text tokenises as ordinary text and
only what the template itself wrote can be a control token.  Pure; knows no template and no roles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from pantheon.text.template_values import JsonArguments

#: Supplementary private-use planes: placeholders are the first characters from here that no input holds.
_PRIVATE = range(0xF0000, 0x10FFFE)
_THINK_TAGS = ("<think>", "</think>")


class ControlTexts:
    """The control texts of one vocabulary, indexed for looking them up at a place in a text."""

    def __init__(self, texts: Sequence[str]) -> None:
        texts = [text for text in texts if text]
        self.whole = frozenset(texts)
        self.lengths = tuple(sorted(set(map(len, texts))))
        self.starts = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self.ends = frozenset(text[n:] for text in texts for n in range(1, len(text)))
        self.longest = max(self.lengths, default=0)
        self.joined = "\0".join(texts)
        firsts = "".join({text[0] for text in texts})
        self.firsts = re.compile(f"[{re.escape(firsts)}]") if firsts else None

    def places(self, text: str, spared: Sequence[str] = ()) -> set[int]:
        """Where `text` must be guarded: where a control text begins in it, or could begin at its end, go on at its
        start, or run through all of it once a template has written around it (white space at the ends aside)."""
        if self.firsts is None or not text:
            return set()
        end = len(text.rstrip())
        places = {m.start() for m in self.firsts.finditer(text) if self._begins(text, m.start(), end, spared)}
        bare = text.strip()
        if bare and self._continues(bare, spared):
            places.add(len(text) - len(text.lstrip()))
        if text != bare and self._continues(text, spared):
            places.add(0)
        return places

    def _begins(self, text: str, at: int, end: int, spared: Sequence[str]) -> bool:
        for length in self.lengths:
            part = text[at : at + length]
            if part in self.whole and part not in spared:
                return True
        tail = len(text) - at < self.longest
        return tail and (text[at:] in self.starts or text[at:end] in self.starts)

    def _continues(self, text: str, spared: Sequence[str]) -> bool:
        """A word alone is no risk worth hiding from templates that compare with it."""
        if any(text.startswith(tag) for tag in spared):
            return False
        for size in range(1, min(len(text), self.longest) + 1):
            if text[:size] in self.ends and not _is_word(text[:size]):
                return True
        return len(text) < self.longest and not _is_word(text) and "\0" not in text and text in self.joined


def _is_word(text: str) -> bool:
    return text.replace("_", "a").isalnum()


@lru_cache(maxsize=8)
def control_texts(texts: tuple[str, ...]) -> ControlTexts:
    """The index of a vocabulary's control texts, made once."""
    return ControlTexts(texts)


class Guard:
    """Placeholders for one prompt.  `table` maps each placeholder to the character that it stands for."""

    def __init__(self, texts: Sequence[str], inputs: Iterable[str]) -> None:
        """`texts`: the vocabulary's control texts; `inputs`: every string that reaches the template, its source too."""
        taken = {c for text in inputs if not text.isascii() for c in text if ord(c) >= _PRIVATE.start}
        self._free = (chr(code) for code in _PRIVATE if chr(code) not in taken)
        self._controls = control_texts(tuple(texts))
        self._placeholder: dict[str, str] = {}
        self.table: dict[str, str] = {}

    def text(self, text: str, *, spare_think: bool = False) -> str:
        """The guarded string, as long as before.  spare_think: leave think tags to a template that cuts them out."""
        places = self._controls.places(text, _THINK_TAGS if spare_think else ())
        if not places:
            return text
        return "".join(self._hide(c) if i in places else c for i, c in enumerate(text))

    def key(self, key: str) -> str:
        """A key that is a word is what templates ask for, never a marker."""
        return key if _is_word(key) else self.text(key)

    def value(self, value: Any, *, spare_think: bool = False) -> Any:
        """A JSON-like value with every string in it guarded, odd keys included."""
        if isinstance(value, str):
            return self.text(value, spare_think=spare_think)
        if isinstance(value, JsonArguments):
            return value.mapped(self.text, self.value)
        if isinstance(value, dict):
            pairs = ((self.key(str(k)), self.value(v, spare_think=spare_think)) for k, v in value.items())
            return type(value)(pairs)
        if isinstance(value, (list, tuple)):
            return [self.value(item, spare_think=spare_think) for item in value]
        return value

    def restore(self, text: str) -> str:
        """The string that the placeholders stand for."""
        return text.translate({ord(key): char for key, char in self.table.items()})

    def unescape(self, text: str) -> str:
        """Placeholders that a template printed as ASCII JSON, as they would have been printed without the guard."""
        for placeholder, char in self.table.items():
            shown = placeholder if char.isascii() else json.dumps(char)[1:-1]
            text = text.replace(json.dumps(placeholder)[1:-1], shown)
        return text

    def _hide(self, char: str) -> str:
        if char not in self._placeholder:
            placeholder = next(self._free)
            self._placeholder[char] = placeholder
            self.table[placeholder] = char
        return self._placeholder[char]


def strings(value: Any) -> Iterable[str]:
    """Every string in a JSON-like value, keys included."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, (list, tuple)):
            todo += item
