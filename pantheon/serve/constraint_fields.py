"""`json_schema` and `grammar`, the fields in which llama-server's clients say what an answer is held to.

Pure; gives what engine.constraint.make_constraint takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pantheon.engine.gbnf import to_lark
from pantheon.serve.request_fields import Fields


def read_constraint(fields: Fields) -> dict[str, Any] | None:
    """What the body asks for; None for nothing.  Raises BadRequest (json_schema, grammar)."""
    grammar = fields.text("grammar")
    if fields.given("json_schema"):
        if grammar:
            raise fields.fault("grammar", "can not be combined with json_schema")
        schema = fields.object("json_schema")
        return {"type": "json_schema", "json_schema": {"schema": schema}, "field": "json_schema"}
    if not grammar:
        return None
    return {"type": "grammar", "syntax": "lark", "grammar": to_lark(grammar), "field": "grammar"}


def constraint_names(spec: Mapping[str, Any] | None) -> dict[str, str]:
    """For `named_as`: the field that a fault of this constraint is told as one of."""
    return {"response_format": spec["field"]} if spec and "field" in spec else {}
