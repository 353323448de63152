"""Nearly right requests to every POST route: none is answered by a fault of ours, and each refusal names its field."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pantheon.serve import openapi
from pantheon.serve.context import App
from tests.serve.api_server import Api, serving
from tests.serve.http_client import Answer, ask, request
from tests.serve.mutations import Mutant, Mutator

MUTATOR = Mutator(json.loads(json.dumps(openapi.document())))
#: 400s that are about the body as a whole, or about what a model can take
WHOLE = {"invalid_json", "bad_http_request", "bad_encoding", "context_length_exceeded", "template_error"}
#: what a server may say of itself: not supported here, not now, too slow, no room
ALLOWED = {501, 503, 504, 507}
#: refused by name, and not offered in the document
UNOFFERED = {"functions"}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    root = tmp_path_factory.mktemp("models")
    (root / "hi").write_bytes(b"no model")
    with serving(App(model_roots=(root,), request_timeout_s=5.0)) as api:
        api.add(pieces=["Hel", "lo", {"user": "<think>"}, '{"a": 1}'], n_ctx=256)
        yield api


def check(route: str, mutant: Mutant, answer: Answer) -> None:
    assert answer.status < 500 or answer.status in ALLOWED, (answer.status, answer.body)
    text = answer.body.decode("utf-8")
    assert "Traceback" not in text and "internal_error" not in text, text
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert text.endswith("\n\n")
        return
    body = json.loads(text)
    if answer.status < 400:
        return
    error = body["error"]
    assert error["message"], body
    if answer.status == 400 and error.get("code") not in WHOLE and "param" in error:
        root = re.split(r"[.\[]", error["param"] or "")[0]
        assert root in MUTATOR.names(route) | UNOFFERED, body


def attempt(api: Api, route: str, mutant: Mutant, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    check(route, mutant, ask(api.server, request("POST", mutant.path, mutant.body, *mutant.fields)))
    # logged by the connection's own thread, before it closes
    faults = [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert faults == [], faults[0].exc_text
    assert api.app.registry.count() == 1, "the model is gone"


HI = [{"role": "user", "content": "hi"}]
#: what these mutants found
FOUND = [
    ("/v1/completions", {"prompt": "hi", "json_schema": {"type": 7}}, "json_schema"),
    ("/completion", {"prompt": "hi", "grammar": "root ::= nothing"}, "grammar"),
    ("/v1/chat/completions", {"messages": HI, "json_schema": {"type": 7}}, "json_schema"),
    ("/v1/completions", {"prompt": "hi", "repeat_penalty": 1e-320, "max_tokens": 3}, None),
]


@pytest.mark.parametrize(("path", "body", "param"), FOUND)
def test_what_was_found(api: Api, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = api.post(path, body)
    assert answer.status == (200 if param is None else 400), answer.body
    if param is not None:
        error = answer.json()["error"]
        assert error["param"] == param and error["message"].startswith(param)


def search(api: Api, caplog: pytest.LogCaptureFixture, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def each(random) -> None:  # type: ignore[no-untyped-def]
        route, mutant = MUTATOR.request(random)
        attempt(api, route, mutant, caplog)

    each()


def test_some_hundred_mutants_meet_no_fault(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    search(api, caplog, 300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_five_thousand_mutants_meet_no_fault(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    search(api, caplog, 5000)
