"""Tool calls as templates want them: mappings for those that walk them, JSON text for those that print them [B35].

Plain values; this module must not know templates, messages or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class JsonArguments(dict[str, Any]):
    """The arguments of a call.

    A mapping (`arguments | items`, `arguments.city`, `arguments | tojson`) that prints, and joins with text, as JSON:
    as the text that the client sent where there was one.
    """

    __slots__ = ("_text",)

    def __init__(self, values: Any = (), text: str | None = None) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False) if self._text is None else self._text

    def __add__(self, other: object) -> str:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + str(self) if isinstance(other, str) else NotImplemented

    def mapped(self, keys: Callable[[str], str], values: Callable[[Any], Any]) -> JsonArguments:
        """A copy with every key and value (and the text) passed through a function."""
        text = None if self._text is None else keys(self._text)
        return JsonArguments({keys(key): values(value) for key, value in self.items()}, text)


class ToolCall(dict[str, Any]):
    """One call in OpenAI's form, whose function's `name` and `arguments` can also be read from the call itself.

    They are no keys of it, so that a template that prints the call prints what the client sent.
    """

    __slots__ = ()

    def __missing__(self, key: str) -> Any:
        if key in ("name", "arguments"):
            return self["function"][key]
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default


def parse_arguments(arguments: dict[str, Any] | str | None) -> JsonArguments | str:
    """What a client sent as arguments: "", null and "null" are no arguments; text that is no JSON object stays text."""
    if isinstance(arguments, dict):
        return JsonArguments(arguments)
    if arguments is None or not arguments.strip():
        return JsonArguments()
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if value is None:
        return JsonArguments()
    return JsonArguments(value, arguments) if isinstance(value, dict) else arguments
