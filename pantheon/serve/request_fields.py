"""Reading the fields of a JSON body: one reader per type, one message per fault.

A null counts as absent for every optional field, an unknown field is ignored, a wrong type or range is a
`BadRequest` whose `param` is the field [B05].  Knows nothing of chat, models or sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pantheon.errors import BadRequest


def json_object(value: Any) -> dict[str, Any]:
    """The body as an object.  Raises BadRequest when it is not one."""
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {kind(value)}")
    return value


def kind(value: Any) -> str:
    """What JSON calls this value."""
    names = {bool: "a boolean", str: "a string", list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number")


class Fields:
    """Typed access to the members of one object; `prefix` is put before a name in messages (`tools[0].`)."""

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self.body = body
        self.prefix = prefix

    def given(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.body.get(name) is not None

    def fault(self, name: str, text: str) -> BadRequest:
        """The error that names this field."""
        return BadRequest(f"{self.prefix}{name}: {text}", param=self.prefix + name)

    def number(self, name: str, low: float, high: float, default: float, *, above: bool = False) -> float:
        """A number in [low, high], or in (low, high] with `above`."""
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(name, f"must be a number, not {kind(value)}")
        if not (low < value <= high if above else low <= value <= high):
            limits = f"above {low:g}, at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise self.fault(name, f"must be {limits}, not {value:g}" if abs(value) < 1e300 else f"must be {limits}")
        return float(value)

    def integer(self, name: str, low: int, high: int, default: int | None) -> int | None:
        """A whole number in [low, high]; 5.0 counts as 5, true does not count as 1."""
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            what = "a fraction" if isinstance(value, float) else kind(value)
            raise self.fault(name, f"must be a whole number, not {what}")
        if not low <= value <= high:
            limits = f"at least {low}" if value < low and high >= 1 << 32 else f"from {low} to {high}"
            raise self.fault(name, f"must be {limits}" + (f", not {value}" if abs(value) < 1 << 64 else ""))
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(name, f"must be true or false, not {kind(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string."""
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fault(name, f"must be a string, not {kind(value)}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object; {} when absent."""
        value = self.body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fault(name, f"must be an object, not {kind(value)}")
        return value

    def items(self, name: str) -> list[Any]:
        """An array; [] when absent."""
        value = self.body.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fault(name, f"must be an array, not {kind(value)}")
        return value
