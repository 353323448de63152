"""Keeps user text from becoming control tokens: which characters of which strings must be guarded.

A guarded character is replaced, before a template is rendered, by a private-use placeholder that occurs nowhere else;
the tokenizer puts it back after it has found the special tokens.  So the guarded text tokenises as ordinary text and
only what the template itself wrote can be a control token [B31].  Pure; knows no template and no roles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

#: Supplementary private-use planes: placeholders are the first characters from here that no input holds.
_PRIVATE = range(0xF0000, 0x10FFFE)
_THINK_TAGS = frozenset({"<think>", "</think>"})


class Guard:
    """Placeholders for one prompt.  `table` maps each placeholder to the character that it stands for."""

    def __init__(self, control_texts: Sequence[str], inputs: Iterable[str]) -> None:
        """`inputs`: every string that reaches the template, its source included."""
        taken = {c for text in inputs if not text.isascii() for c in text if ord(c) >= _PRIVATE.start}
        self._free = (chr(code) for code in _PRIVATE if chr(code) not in taken)
        self._placeholder: dict[str, str] = {}
        self.table: dict[str, str] = {}
        self._texts = [text for text in control_texts if text]
        self._longest = max(map(len, self._texts), default=0)
        groups: dict[str, list[str]] = {}
        for text in self._texts:
            groups.setdefault(text[0], []).append(text)
        self._by_first = {first: tuple(texts) for first, texts in groups.items()}
        self._firsts = re.compile("[" + re.escape("".join(groups)) + "]") if groups else None

    def text(self, text: str, *, spare_think: bool = False) -> str:
        """The string with every character guarded at which a control text begins, or could begin or go on across its
        edges; spare_think: leave the think tags of an assistant turn to the template."""
        if not text or self._firsts is None:
            return text
        at = {m.start() for m in self._firsts.finditer(text) if self._begins(text, m.start(), spare_think)}
        if self._continues(text):
            at.add(0)
        if not at:
            return text
        return "".join(self._hide(c) if i in at else c for i, c in enumerate(text))

    def value(self, value: Any, *, spare_think: bool = False) -> Any:
        """A JSON-like value with every string in it guarded, keys included."""
        if isinstance(value, str):
            return self.text(value, spare_think=spare_think)
        if isinstance(value, dict):
            pairs = ((self.text(str(k)), self.value(v, spare_think=spare_think)) for k, v in value.items())
            return type(value)(pairs)
        if isinstance(value, list):
            return [self.value(item, spare_think=spare_think) for item in value]
        return value

    def restore(self, text: str) -> str:
        """The string that the placeholders stand for."""
        return text.translate(str.maketrans(self.table)) if self.table else text

    def unescape(self, text: str) -> str:
        """Placeholders that a template printed as JSON escapes, as characters again."""
        for placeholder in self.table:
            units = placeholder.encode("utf-16-be").hex()
            text = text.replace(f"\\u{units[:4]}\\u{units[4:]}", placeholder)
        return text

    def _begins(self, text: str, at: int, spare_think: bool) -> bool:
        candidates = self._by_first[text[at]]
        if spare_think and text.startswith(tuple(_THINK_TAGS), at):
            candidates = tuple(c for c in candidates if c not in _THINK_TAGS)
        if text.startswith(candidates, at):
            return True
        tail = text[at:] if len(text) - at < self._longest else ""
        return tail != "" and any(c.startswith(tail) for c in candidates)

    def _continues(self, text: str) -> bool:
        """A control text that the template began could go on here: some of its characters are no word characters."""
        head = text[: self._longest]
        for size in range(1, min(len(head), self._longest - 1) + 1):
            part = head[:size]
            if part.replace("_", "").isalnum():
                continue
            whole = size == len(text)
            if any(c.endswith(part) or (whole and part in c) for c in self._texts):
                return True
        return False

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
        elif isinstance(item, list | tuple):
            todo += item
