"""/openapi.json and the tables of docs/reference/http-api.md say what the routes and the parsers do, both ways."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pantheon.serve import one_model, openapi
from pantheon.serve.api import build_router
from pantheon.serve.context import App
from pantheon.serve.defaults import Defaults
from pantheon.serve.http_request import Request
from pantheon.serve.openapi import Route
from pantheon.serve.openapi_fields import Field
from tests.serve.api_server import WEATHER, Api, serving
from tests.serve.json_check import faults

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "http-api.md"
#: the least that each route takes, beside which one field is tried
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/completion": {"prompt": "hi"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": []},
    "/apply-template": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": "hi"},
    "/embedding": {"content": "hi"},
    "/admin/models/load": {"path": "bad.gguf"},
    "/admin/models/unload": {"name": "nobody"},
}
#: what a field needs beside it
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "tools": {},
    "tool_choice": {"tools": [WEATHER]},
    "stream_options": {"stream": True},
}
#: accepted by the schema, refused by a rule that no schema says
RULES = {("quantize", "True"), ("grammar", "x")}
POSTS = [route for route in openapi.ROUTES if route.method == "POST" and route.fields and not route.same_as]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    root = tmp_path_factory.mktemp("models")
    (root / "bad.gguf").write_bytes(b"no model")
    with serving(App(model_roots=(root,))) as api:
        api.add(pieces=["Hello"])
        yield api


def test_every_route_is_in_the_document_and_every_path_of_it_is_routed() -> None:
    router = build_router(App())
    real = {*router._exact, *((method, f"{prefix}{{id}}") for method, prefix in router._prefixes if prefix != "/m/")}
    listed = {(route.method, route.path) for route in openapi.ROUTES}
    assert listed - real == set(), "in openapi.py, not in api.py"
    assert real - listed == set(), "in api.py, not in openapi.py"
    assert {*one_model._GETS, *one_model._POSTS} == openapi.ONE_MODEL <= {route.path for route in openapi.ROUTES}


def test_the_document_is_served_and_its_references_and_names_are_right(api: Api) -> None:
    document = api.get("/openapi.json").json()
    assert document == json.loads(json.dumps(openapi.document()))
    assert document["openapi"] == "3.1.0" and document["info"]["version"]
    names = []
    for path, methods in document["paths"].items():
        for operation in methods.values():
            names.append(operation["operationId"])
            given = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            assert given == set(re.findall(r"{(\w+)}", path))
            assert operation["responses"] and operation["summary"]
    assert len(set(names)) == len(names)
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)):
        at = document
        for part in reference.split("/"):
            at = at[part.replace("~1", "/")]


# ---- the reference --------------------------------------------------------------------------------------------------


def _sections() -> dict[str, str]:
    parts = re.split(r"^### (.*)$", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _anchor(head: str) -> str:
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")


@pytest.mark.parametrize("route", openapi.ROUTES, ids=lambda r: f"{r.method} {r.path}")
def test_the_reference_has_each_field_as_it_is_declared(route: Route) -> None:
    """In the route's section, or in those that it points to."""
    sections = _sections()
    text = sections[f"`{route.method} {route.path}`"]
    if route.same_as:
        assert f"`{route.same_as}`" in text or not route.fields
        return
    common = "".join(part for head, part in sections.items() if f"(#{_anchor(head)})" in text)
    if "(#fields-in-common)" in common:
        common += sections["Fields in common"]
    missing = [field.row() for field in (*route.fields, *route.query) if field.row() + "\n" not in text + common]
    assert missing == [], "rows to put into docs/reference/http-api.md"
    own = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert set(own) <= {field.name for field in (*route.fields, *route.query)}


def status_rows() -> list[str]:
    """Rows of the reference: statuses, and the routes that have them."""
    groups: dict[str, list[str]] = {}
    for route in openapi.ROUTES:
        statuses = ", ".join(map(str, sorted({*(route.answers or {}), *route.faults})))
        groups.setdefault(statuses, []).append(f"`{route.method} {route.path}`")
    return [f"| {', '.join(routes)} | {statuses} |" for statuses, routes in groups.items()]


def test_the_reference_has_the_statuses_of_each_route() -> None:
    missing = [row for row in status_rows() if row + "\n" not in _sections()["Statuses"]]
    assert missing == [], "rows to put into docs/reference/http-api.md"


# ---- the parsers ----------------------------------------------------------------------------------------------------


class _Watched(dict[str, Any]):
    """A body that remembers which of its names were asked for."""

    asked: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def _names_read(api: Api, route: Route, body: dict[str, Any]) -> set[str]:
    watched = _Watched(body)
    watched.asked = set()
    plain = mock.patch.object(Defaults, "fill", lambda self, body: body)
    with plain, mock.patch.object(Request, "json", lambda self: watched):
        api.post(route.path, b"{}")
    return watched.asked


@pytest.mark.parametrize("route", POSTS, ids=lambda r: r.path)
def test_each_name_that_a_parser_reads_is_declared_and_the_other_way_round(api: Api, route: Route) -> None:
    declared = {field.name: field for field in route.fields}
    read = _names_read(api, route, LEAST[route.path])
    assert read - set(declared) == set(), "read, not declared in openapi_tables.py"
    assert {name for name, field in declared.items() if field.read} - read == set(), "declared, never read"


def _values(field: Field) -> Iterator[tuple[Any, bool]]:
    """(value, whether it is to be taken) by the field's schema: bounds, choices, types."""
    yield None, not field.required
    for schema in field.schema.get("anyOf", [field.schema]):
        for value, taken in _values_of(field, schema):
            yield value, taken and (field.name, str(value)) not in RULES
    kinds = {part.get("type") for part in field.schema.get("anyOf", [field.schema])}
    wrong = {"boolean": True, "string": "no-such-word", "number": 0.5, "array": [{}], "object": {"no-such": 1}}
    if "number" in kinds:
        wrong.pop("number")
    for kind, value in wrong.items():
        if kind not in kinds:
            yield value, False


def _values_of(field: Field, schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    kind = schema.get("type")
    if "enum" in schema:
        yield from ((value, True) for value in schema["enum"])
        yield "no-such-word", False
    elif kind == "boolean":
        yield from ((True, True), (False, True))
    elif kind in ("integer", "number"):
        low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1e30)), schema["maximum"]
        step = 1 if kind == "integer" else 0.5
        yield low, "exclusiveMinimum" not in schema
        yield high, True
        if abs(high) < 1 << 40:
            yield high + step, False
        if abs(low) < 1 << 40:
            yield low - step, False
    elif kind == "string":
        yield "x", True
        if "maxLength" in schema:
            yield from (("x" * schema["maxLength"], True), ("x" * (schema["maxLength"] + 1), False))
    elif kind == "array" and "maxItems" in schema:
        item = 1 if schema["items"].get("type") == "integer" else "x"
        yield from (([item] * schema["maxItems"], True), ([item] * (schema["maxItems"] + 1), False))


#: a row that several routes share is tried on the first
CASES = list({
    (id(field), route.group): (route, field) for route in reversed(POSTS) for field in route.fields
    if field.read and field.checked
}.values())  # fmt: skip


@pytest.mark.parametrize(("route", "field"), CASES, ids=lambda c: c.name if isinstance(c, Field) else c.path)
def test_bounds_choices_and_types_are_those_of_the_parser(api: Api, route: Route, field: Field) -> None:
    """What the schema takes is not refused by that name, what it does not take is a 400 with that `param`."""
    for value, taken in _values(field):
        body = {**LEAST[route.path], **BESIDE.get(field.name, {}), field.name: value}
        answer = api.post(route.path, {"max_tokens": 1, **body} if route.group == "chat" else body)
        param = answer.json()["error"].get("param") or "" if answer.status == 400 else ""
        at_fault = re.split(r"[.\[]", param)[0] == field.name
        if taken:
            assert not at_fault, (value, answer.body)
        elif not taken:
            assert answer.status == 400 and at_fault, (value, answer.status, answer.body)


# ---- the answers ----------------------------------------------------------------------------------------------------

ASKED: list[tuple[str, str, dict[str, Any] | None, int]] = [
    *(("GET", route.path, None, 200) for route in openapi.ROUTES if route.method == "GET" and not route.query),
    ("POST", "/v1/chat/completions", {"logprobs": True}, 200),
    ("POST", "/v1/completions", {"logprobs": 1}, 200),
    *(("POST", path, {"model": 1, "path": 1, "name": 1}, 400) for path in LEAST),
]


@pytest.mark.parametrize(("method", "path", "more", "status"), ASKED, ids=lambda value: str(value)[:40])
def test_answers_look_like_their_schemas(
    api: Api, method: str, path: str, more: dict[str, Any] | None, status: int
) -> None:
    where = path.replace("{id}", "m")
    answer = api.get(where) if more is None else api.post(where, {**LEAST[path], **more})
    assert answer.status == status, answer.body
    document = openapi.document()
    described = document["paths"][path][method.lower()]["responses"][str(status)]
    if "$ref" in described:
        described = document["components"]["responses"]["Error"]
    media = answer.headers["content-type"].partition(";")[0]
    schema = described["content"][media]["schema"]
    if media == "application/json":
        assert faults(document["components"]["schemas"]["Error"] if "$ref" in schema else schema, answer.json()) == []
