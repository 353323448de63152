"""How much a schema may ask of the grammar engine: what would cost it minutes or gigabytes is refused unread.

The engine bounds its own steps; these are the shapes whose cost lies before the first step.  Measured with llguidance
1.9 and SmolLM2's vocabulary: 5,000 optional properties 33 s, multipleOf 999,983 53 s and 300 MiB, each within what
follows at most a second or two.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pantheon.errors import BadRequest

#: of one grammar
MAX_NODES = 50_000
MAX_TEXT = 600_000
#: optional properties of one object; each costs several items of a parser row that may hold 2,000
MAX_OPTIONAL = 450
#: the sum of their squares, which is what compiling them costs
MAX_OPTIONAL_SQUARES = 1_000_000
MAX_MULTIPLE = 10_000
#: the engine cuts bounds to 64 bits without a word
_MAX_BOUND = 2**63 - 1


def check_size(schema: Any, param: str) -> None:
    """Raise BadRequest, naming the limit, for a schema that is too large to enforce."""
    nodes = text = squares = 0
    stack = [schema]
    while stack:
        item = stack.pop()
        nodes += 1
        if isinstance(item, str):
            text += len(item)
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, Mapping):
            text += sum(map(len, item))
            stack.extend(item.values())
            squares += _optional(item, param) ** 2
            _check_multiple(item.get("multipleOf"), param)
            _check_bounds(item, param)
        if nodes > MAX_NODES or text > MAX_TEXT or squares > MAX_OPTIONAL_SQUARES:
            raise BadRequest(f"{param}: the schema is too large to be enforced", param=param)


def _optional(schema: Mapping[str, Any], param: str) -> int:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return 0
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    optional = len(properties.keys() - needed)
    if optional > MAX_OPTIONAL:
        raise BadRequest(
            f"{param}: an object with {optional} optional properties can't be enforced, at most {MAX_OPTIONAL}",
            param=param,
        )
    return optional


def _check_multiple(value: Any, param: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    # what the engine counts in: 0.25 costs what 25 costs
    digits = f"{abs(value):.15f}".rstrip("0").rstrip(".").replace(".", "") if abs(value) < 1e15 else "9" * 16
    if int(digits) > MAX_MULTIPLE:
        raise BadRequest(f"{param}: multipleOf {value!r:.30} can't be enforced, at most {MAX_MULTIPLE}", param=param)


def _check_bounds(schema: Mapping[str, Any], param: str) -> None:
    for name, sign in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        value = schema.get(name)
        if isinstance(value, int) and value * sign > _MAX_BOUND:
            raise BadRequest(f"{param}: {name} {value:.3g} is beyond 64 bits and can't be enforced", param=param)
