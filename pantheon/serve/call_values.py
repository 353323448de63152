"""Values of tool calls that are not written as JSON: XML parameters by their schema, and calls in Python.  Pure."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from pantheon.serve.scan import MAX_DEPTH

#: Longer calls are no calls; the reader of Python's grammar is not built for strangers.
_MAX_PYTHON = 4000


def typed_text(text: str, kinds: set[str]) -> str:
    """A parameter's text as JSON of one of these types; a JSON string when it is none of them."""
    if "string" in kinds and not ("null" in kinds and text.strip() == "null"):
        return json.dumps(text, ensure_ascii=False)
    plain = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        if _depth(plain) <= MAX_DEPTH:
            return json.dumps(json.loads(plain, parse_constant=_refuse), ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _depth(text: str) -> int:
    depth = most = 0
    for c in text:
        depth += (c in "[{") - (c in "]}")
        most = max(most, depth)
    return most


def code_key(schema: Any) -> str:
    """The parameter of a Python tool that takes the code, as it stands in JSON: the only one, else `code`."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or len(properties) != 1:
        return "code"
    return json.dumps(next(iter(properties)))[1:-1]


def python_call(text: str, offered: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of calls like `name(key=1)` or `name.call(key=1)`; [] when it is anything else."""
    if not text.strip() or len(text) > _MAX_PYTHON:
        return []
    try:
        body = ast.parse(text.strip()).body
        if len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.List):
            return [_python_call(item, offered) for item in body[0].value.elts]
        return [_python_call(item.value if isinstance(item, ast.Expr) else item, offered) for item in body]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.AST, offered: Mapping[str, Any]) -> tuple[str, str]:
    if not isinstance(node, ast.Call):
        raise ValueError
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "call":
        function = function.value
    if isinstance(function, ast.Name) and function.id == "print" and len(node.args) == 1:
        return _python_call(node.args[0], offered)
    if not isinstance(function, ast.Name) or function.id not in offered:
        raise ValueError
    schema = offered[function.id]
    keys = list(schema.get("properties") or ()) if isinstance(schema, dict) else []
    arguments = {key: ast.literal_eval(value) for key, value in zip(keys, node.args, strict=False)}
    if len(node.args) > len(keys):
        raise ValueError
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return function.id, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
