"""Loading and unloading over HTTP, status routes, metrics [area K, B38, B40, B44, B45, B47]."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pantheon.errors import PantheonError
from pantheon.serve.admin import confined
from pantheon.serve.context import App
from pantheon.serve.metrics import Metrics
from tests.serve.api_server import Api, serving
from tests.serve.http_client import ask, request

HOSTILE = Path(__file__).parents[1] / "data" / "hostile"
LOAD, UNLOAD = "/admin/models/load", "/admin/models/unload"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    root.mkdir()
    (root / "tiny.json").write_text(json.dumps({"pieces": ["x"]}))
    (tmp_path / "secret.json").write_text(json.dumps({"pieces": ["secret"]}))
    (root / "link.json").symlink_to(tmp_path / "secret.json")
    (root / "sub").mkdir()
    os.mkfifo(root / "pipe.gguf")
    return root


@pytest.fixture
def api(folder: Path) -> Iterator[Api]:
    with serving(App(model_roots=(folder,))) as server:
        yield server


def code(answer: Any) -> tuple[int, str]:
    return answer.status, answer.json()["error"]["code"]


def test_load_use_unload_M141_M142_M148(api: Api) -> None:
    assert api.chat().status == 503
    loaded = api.post(LOAD, {"path": "script:tiny.json", "name": "a"})
    assert loaded.status == 200, loaded.body
    assert loaded.json()["name"] == "a"
    assert [item["id"] for item in api.get("/v1/models").json()["data"]] == ["a"]
    assert api.whole(model="a")["choices"][0]["message"]["content"] == "x"
    resident = api.get("/admin/dies").json()
    assert resident["dies"] == [] and [m["name"] for m in resident["cpu"]["models"]] == ["a"]
    gone = api.post(UNLOAD, {"name": "a"})
    assert gone.status == 200
    assert gone.json() == {"status": "unloaded", "name": "a", "instances": [{"slot": 0, "dies": []}]}
    assert code(api.chat(model="a")) == (503, "no_model_loaded")
    assert code(api.post(UNLOAD, {"name": "a"})) == (404, "model_not_found")


def test_name_defaults_to_the_files(api: Api, folder: Path) -> None:
    assert api.post(LOAD, {"path": f"script:{folder}/tiny.json"}).json()["name"] == "tiny"
    assert code(api.post(LOAD, {"path": "script:tiny.json"})) == (409, "model_exists")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/etc/passwd", 403),
        ("../../etc/passwd", 403),
        ("../secret.json", 403),
        ("script:../secret.json", 403),
        ("link.json", 403),
        ("script:link.json", 403),
        ("nope.gguf", 404),
        ("sub", 400),
        ("pipe.gguf", 400),
        ("", 400),
        (None, 400),
        (5, 400),
        ("a\0b", 400),
        ("x" * 5000, 400),
        ("script:", 400),
    ],
)
def test_paths_are_confined_B45c(api: Api, path: Any, status: int) -> None:
    answer = api.post(LOAD, {"path": path, "name": "x"})
    assert answer.status == status
    error = answer.json()["error"]
    assert error["param"] == "path" and "root:" not in error["message"] and "secret" not in error["message"]
    assert api.app.registry.all_entries() == []


def test_no_root_means_no_load() -> None:
    with pytest.raises(PantheonError) as fault:
        confined("/etc/passwd", ())
    assert fault.value.code == "path_not_allowed"


FILES = sorted(path.name for path in HOSTILE.glob("*.gguf"))


@pytest.fixture(scope="module")
def with_hostile() -> Iterator[Api]:
    with serving(App(model_roots=(HOSTILE,))) as api:
        api.add("good", pieces=["fine"])
        yield api


@pytest.mark.parametrize("name", FILES)
def test_hostile_files_are_refused_by_name_B38_B40(with_hostile: Api, name: str) -> None:
    answer = with_hostile.post(LOAD, {"path": name, "name": "hostile"})
    assert answer.status in (400, 422), answer.body
    message = answer.json()["error"]["message"]
    assert name.split("-0000")[0] in message and "Traceback" not in message
    if name.startswith("m-"):
        assert "m-00003-of-00003.gguf" in message
    assert [item["id"] for item in with_hostile.get("/v1/models").json()["data"]] == ["good"]
    assert with_hostile.whole(model="good")["choices"][0]["message"]["content"] == "fine"


def test_only_json_of_our_own_pages_B44d(api: Api) -> None:
    api.post(LOAD, {"path": "script:tiny.json", "name": "a"})
    body = json.dumps({"name": "a"}).encode()
    plain = ask(api.server, request("POST", UNLOAD, body, "Content-Type: text/plain"))
    assert code(plain) == (415, "unsupported_media_type")
    evil = api.post(UNLOAD, {"name": "a"}, "Origin: https://evil.example")
    assert evil.status == 403
    assert api.get("/v1/models/a").status == 200
    assert api.post(UNLOAD, {"name": "a"}, "Origin: http://localhost:3000").status == 200


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (LOAD, {"path": "script:tiny.json", "ctx": 0}, "ctx"),
        (LOAD, {"path": "script:tiny.json", "ctx": "x"}, "ctx"),
        (LOAD, {"path": "script:tiny.json", "name": "a\nb"}, "name"),
        (LOAD, {"path": "script:tiny.json", "name": "x" * 200}, "name"),
        (LOAD, {"path": "script:tiny.json", "quantize": True}, "quantize"),
        (LOAD, {"path": "script:tiny.json", "dies": [0]}, "dies"),
        (UNLOAD, {}, "name"),
        (UNLOAD, {"name": 5}, "name"),
        (UNLOAD, {"name": "a", "timeout_s": -1}, "timeout_s"),
        (UNLOAD, {"name": "a", "force": "yes"}, "force"),
    ],
)
def test_bad_fields_M146(api: Api, route: str, body: dict[str, Any], param: str) -> None:
    answer = api.post(route, body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


def test_table_full_is_507_M144(api: Api) -> None:
    for i in range(16):
        api.app.registry.reserve(f"m{i}", "x")
    assert code(api.post(LOAD, {"path": "script:tiny.json"})) == (507, "model_table_full")


def test_two_loads_of_one_name_at_once_B45b(api: Api) -> None:
    answers: list[int] = []

    def load() -> None:
        answers.append(api.post(LOAD, {"path": "script:tiny.json", "name": "dup"}).status)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(answers) == [200, 409, 409, 409]
    assert [entry.name for entry in api.app.registry.all_entries()] == ["dup"]


def test_unload_of_a_busy_model_gives_up_in_time_X02(api: Api) -> None:
    entry = api.add("a", pieces=["x"])
    with api.app.registry.lease("a"):
        answer = api.post(UNLOAD, {"name": "a", "timeout_s": 0.05})
        assert code(answer) == (409, "still_busy") and answer.json()["error"]["in_flight"] == 1
    assert api.whole(model="a")["model"] == "a" and entry.ready


def test_an_unload_of_an_unknown_name_is_no_attempt_X36(api: Api) -> None:
    """It leaves no failure behind, and why a load of that name failed stays known."""
    (api.app.model_roots[0] / "bad.gguf").write_bytes(b"GGUF")
    assert api.post(LOAD, {"path": "bad.gguf", "name": "bad"}).status == 422
    for name in ("nope", "bad"):
        for wait in (True, False):
            assert code(api.post(UNLOAD, {"name": name, "wait": wait})) == (404, "model_not_found")
    assert api.get("/admin/models/nope").status == 404
    assert api.get("/admin/models/bad").json()["error"]["action"] == "load"


def test_models_list_B47b() -> None:
    with serving() as api:
        api.add("a", pieces=["x"], n_ctx=99)
        api.add("vendor/b", pieces=["x"])
        body = api.get("/v1/models").json()
        assert body["object"] == "list" and [item["id"] for item in body["data"]] == ["a", "vendor/b"]
        first = body["data"][0]
        assert (first["object"], first["owned_by"]) == ("model", "pantheon")
        assert isinstance(first["created"], int) and first["created"] > 0
        assert first["max_model_len"] == first["context_length"] == 99
        assert api.get("/v1/models/a").json() == first
        assert api.get("/v1/models/vendor%2Fb").json()["id"] == api.get("/v1/models/vendor/b").json()["id"]
        assert code(api.get("/v1/models/nope")) == (404, "model_not_found")


def test_health_B47a() -> None:
    with serving() as api:
        api.add("a", pieces=["x"])
        for path in ("/health", "/v1/health", "/ready"):
            assert api.get(path).json() == {"status": "ok"}
            head = ask(api.server, request("HEAD", path))
            assert (head.status, head.body) == (200, b"")


def test_metrics_parse_and_never_fall_B47c() -> None:
    with serving() as api:
        api.add("a", pieces=["x", "y"])
        before: dict[str, float] = {}
        for _ in range(3):
            api.whole()
            api.chat(n=0)
            answer = api.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            now = samples(answer.body.decode())
            assert all(now[key] >= value for key, value in before.items() if "_total" in key)
            before = now
        assert before['pantheon_completion_tokens_total{die="cpu",model="a",replica="0"}'] == 6
        assert before['pantheon_requests_total{outcome="ok"}'] == 3
        assert before["pantheon_models_loaded"] == 1 and before["pantheon_requests_in_flight"] == 0


def samples(text: str) -> dict[str, float]:
    """A strict reading of the text format: every sample belongs to a family that has HELP and TYPE."""
    assert text.endswith("\n")
    found, kinds = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            key, _, value = line.rpartition(" ")
            name = key.partition("{")[0]
            if kinds.get(name) not in ("counter", "gauge"):
                assert kinds[re.sub("_(bucket|sum|count)$", "", name)] == "histogram"
            assert key not in found, "a sample that is there twice"
            found[key] = float(value)
    return found


def test_labels_are_escaped() -> None:
    metrics = Metrics()
    metrics.add("requests_total", outcome='a"b\\c\nd')
    assert 'pantheon_requests_total{outcome="a\\"b\\\\c\\nd"} 1' in metrics.render()
