"""`json_schema` and `grammar`, the fields in which llama-server's clients say what an answer is held to.

Pure; gives what engine.constraint.make_constraint takes.
"""

from __future__ import annotations

from typing import Any

from pantheon.engine.gbnf import to_lark
from pantheon.serve.request_fields import Fields


def read_constraint(fields: Fields) -> dict[str, Any] | None:
    """What the body asks for; None for nothing.  Raises BadRequest (json_schema, grammar)."""
    grammar = fields.text("grammar")
    if fields.given("json_schema"):
        if grammar:
            raise fields.fault("grammar", "can not be combined with json_schema")
        return {"type": "json_schema", "json_schema": {"schema": fields.object("json_schema")}}
    return {"type": "grammar", "syntax": "lark", "grammar": to_lark(grammar)} if grammar else None
