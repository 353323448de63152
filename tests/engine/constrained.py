"""A small byte-level tokenizer, random answers under a constraint, and a naive validator: for tests of constraints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from pantheon.engine.constraint import make_constraint
from pantheon.engine.sampler import Sampler, SamplingParams

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "[TOOL_CALLS]")
USER = ("<tool_call>", "</tool_call>")
WORDS = ('{"', '": "', '", "', '"}', "{}", "true", "null", "hello", " world", "\n  ", "12", '\\"', "é", '"name": "')


class ByteTokenizer:
    """256 bytes, control tokens, user-defined ones and a few words: what constraints read of a tokenizer."""

    def __init__(self) -> None:
        self.texts = [bytes([b]) for b in range(256)] + [t.encode() for t in (*CONTROL, *USER, *WORDS)]
        self.n_vocab = len(self.texts)
        self.bos_id = None
        self.eog_ids = frozenset((257, 258))

    def is_control(self, token: int) -> bool:
        return 256 <= token < 256 + len(CONTROL)

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        return b"" if self.is_control(token) and not special else self.texts[token]

    def token_text(self, token: int) -> str:
        return self.texts[token].decode("latin-1" if token < 256 else "utf-8")

    def token_id(self, text: str) -> int | None:
        return self.texts.index(text.encode()) if text.encode() in self.texts else None

    def encode(self, text: str | bytes, *, add_special: bool = True) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        parts = re.split(rb"(</?tool_call>)", data)
        ids = [[self.texts.index(p)] if p.decode("utf-8", "replace") in USER else list(p) for p in parts]
        return [i for part in ids for i in part]


TOKENIZER: Any = ByteTokenizer()
N = TOKENIZER.n_vocab


def run(spec: Mapping[str, Any], seed: int, limit: int = 600, bias: Mapping[int, float] | None = None, **options: Any):
    """(text, complete): tokens drawn from random logits under the constraint, control tokens spelled out."""
    constraint = make_constraint(TOKENIZER, spec, **options)
    assert constraint is not None
    rng = np.random.default_rng(seed)
    # closing a value is made likelier than going on, or random JSON never ends
    tilt = np.zeros(N, np.float32)
    for token, value in ({ord("}"): 5, ord("]"): 5, ord('"'): 4, 257: 9} | dict(bias or {})).items():
        tilt[token] = value
    sampler = Sampler(SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=seed), N, constraint)
    sampler.prime([])
    out = b""
    for _ in range(limit):
        token = sampler.sample(rng.standard_normal(N).astype(np.float32) + tilt).token
        sampler.accept(token)
        if token in TOKENIZER.eog_ids:
            assert constraint.done
            return out.decode(), True
        out += TOKENIZER.token_bytes(token, special=True)
        if constraint.done:
            return out.decode(), True
    return out.decode("utf-8", "ignore"), False


def valid(schema: Any, value: Any) -> bool:
    """A naive validator of the keywords that the property test draws."""
    if schema is True or schema == {}:
        return True
    if "anyOf" in schema:
        return any(valid(s, value) for s in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        known = schema.get("properties", {})
        return (
            isinstance(value, dict)
            and all(k in value for k in schema.get("required", []))
            and all(valid(known[k], v) for k, v in value.items() if k in known)
            and (schema.get("additionalProperties", True) or set(value) <= set(known))
        )
    if kind == "array":
        bounds = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99) if isinstance(value, list) else 0
        return bool(bounds) and all(valid(schema["items"], v) for v in value)
    if kind == "string":
        return isinstance(value, str) and re.search(schema.get("pattern", ""), value) is not None
    if kind == "integer":
        fits = isinstance(value, int) and not isinstance(value, bool)
        return fits and schema.get("minimum", -(10**99)) <= value <= schema.get("maximum", 10**99)
    return {"number": (int, float), "boolean": bool, "null": type(None)}[kind] and isinstance(
        value, {"number": (int, float), "boolean": bool, "null": type(None)}[kind]
    )
