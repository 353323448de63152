"""Loads and unloads that nobody waits for, replicas, plans and views over HTTP [area K, X04, X31, X36, M028]."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pantheon import seams
from pantheon.accel.die import virtual_dies
from pantheon.accel.die_manager import DieManager
from pantheon.mem.mem_state import HostState, MemState
from pantheon.serve import dry_run
from pantheon.serve.context import App
from pantheon.serve.load_jobs import LoadJobs
from pantheon.serve.loading import LoadOptions
from pantheon.serve.registry import Registry
from tests.serve.api_server import Api, free, serving
from tests.serve.http_client import Answer, ask, connect, read_all, read_until, request

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "models" / "tiny-llama.Q4_0.gguf"
LOAD, UNLOAD = "/admin/models/load", "/admin/models/unload"
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.json").write_text(json.dumps({"pieces": ["x"]}))
    (tmp_path / "broken.json").write_text("{")
    shutil.copy(TINY, tmp_path / "tiny.gguf")
    (tmp_path / "cut.gguf").write_bytes(TINY.read_bytes()[:5000])
    return tmp_path


@pytest.fixture
def api(folder: Path) -> Iterator[Api]:
    with serving(App(model_roots=(folder,), load_options=LoadOptions(threads=1))) as server:
        yield server


@pytest.fixture
def four(folder: Path) -> Iterator[Api]:
    """Four virtual dies of 32 MiB."""
    registry = Registry(dies=DieManager(virtual_dies([32 * MIB] * 4)))
    with serving(App(registry, model_roots=(folder,), load_options=LoadOptions(threads=1))) as server:
        yield server


def settled(api: Api, name: str) -> dict[str, Any]:
    """The state of a name once nothing changes any more: the events end there."""
    answer = api.get(f"/admin/models/{name}", "Accept: text/event-stream")
    assert answer.events[-1] == "[DONE]"
    last: dict[str, Any] = json.loads(answer.events[-2])
    return last


def load(api: Api, **body: Any) -> Answer:
    return api.post(LOAD, {"path": "script:tiny.json", **body})


# ---- loads in the background ----------------------------------------------------------------------------------------


def test_a_load_that_nobody_waits_for_X36(api: Api) -> None:
    """202 at once, progress while it runs, ready at the end."""
    with api.app.registry.upload_lock:
        begun = load(api, name="org/a b", wait=False)
        assert begun.status == 202 and begun.headers["location"] == "/admin/models/org%2Fa%20b"
        assert begun.json()["status"] == "loading" and begun.json()["name"] == "org/a b"
        state = api.get(begun.headers["location"]).json()
        assert state["status"] == "loading" and 0 <= state["progress"] <= 1
        assert api.chat(model="org/a b").code == "model_loading"
        assert load(api, name="org/a b").code == "model_exists"
    last = settled(api, "org%2Fa%20b")
    assert last["status"] == "ready" and last["progress"] == 1.0 and "error" not in last
    assert api.whole(model="org/a b")["choices"][0]["message"]["content"] == "x"
    assert not api.app.jobs.running


def test_the_events_of_a_load_tell_each_change_X36(api: Api) -> None:
    with api.app.registry.upload_lock:
        load(api, name="a", wait=False)
        sock = None
        try:
            entry = api.app.registry.all_entries()[0]
            sock = api_socket(api, "/admin/models/a", "Accept: text/event-stream")
            read_until(sock, b'"progress":0.0')
            entry.report("weights", 1, 4)
            read_until(sock, b'"progress":0.25')
        except BaseException:
            if sock is not None:
                sock.close()
            raise
    events = answer_of_rest(sock)
    assert events.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"status":"ready"' in events


def api_socket(api: Api, path: str, *headers: str) -> Any:
    sock = connect(api.server)
    sock.sendall(request("GET", path, None, *headers))
    return sock


def answer_of_rest(sock: Any) -> bytes:
    with sock:
        return read_all(sock)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"path": "cut.gguf", "name": "bad"}, 422, "invalid_model_file"),
        ({"path": "script:broken.json", "name": "bad"}, 422, "invalid_script"),
    ],
)
def test_a_load_that_fails_says_why_and_leaves_nothing_M204_X36(
    api: Api, body: dict[str, Any], status: int, code: str
) -> None:
    assert api.post(LOAD, {**body, "wait": False}).status == 202
    last = settled(api, "bad")
    assert last["status"] == "failed" and last["instances"] == []
    assert (last["error"]["status"], last["error"]["code"], last["error"]["action"]) == (status, code, "load")
    assert list(api.get("/admin/models").json()["failed"]) == ["bad"]
    assert api.app.registry.all_entries() == []
    assert load(api, name="bad").status == 200
    assert "error" not in api.get("/admin/models/bad").json() and api.get("/admin/models").json()["failed"] == {}


def test_an_internal_fault_of_a_load_is_noted_without_details(api: Api) -> None:
    seams.arm("load")
    load(api, name="a", wait=False)
    last = settled(api, "a")
    assert last["status"] == "failed" and last["error"]["message"] == "internal error: InjectedFailure"
    assert load(api, name="a").status == 200


def test_no_thread_for_a_load_gives_its_place_back(api: Api) -> None:
    """Bounded like a connection that gets no thread [X24]: 503, and nothing stays."""

    reserve = api.app.registry.reserve

    def then_arm(*args: Any) -> Any:
        entry = reserve(*args)
        seams.arm("thread_start")
        return entry

    with mock.patch.object(api.app.registry, "reserve", then_arm):
        answer = load(api, name="a", wait=False)
    seams.arm("")
    assert (answer.status, answer.code) == (503, "no_thread") and answer.headers["retry-after"] == "1"
    assert api.app.registry.all_entries() == [] and not api.app.jobs.running
    assert load(api, name="a").status == 200


def test_failures_are_remembered_for_a_while_only() -> None:
    jobs = LoadJobs()
    for number in range(40):
        with pytest.raises(ZeroDivisionError), jobs.noting("load", f"m{number}"):
            raise ZeroDivisionError
    assert len(jobs.failures()) == 32 and jobs.failure("m0") is None and jobs.failure("m39") is not None
    with jobs.noting("load", "m39"):
        pass
    assert jobs.failure("m39") is None


def test_two_loads_move_weights_one_after_the_other_M145(api: Api) -> None:
    """The second one waits, the registry serves on, and nothing is stacked."""
    api.add("old", pieces=["y"])
    with api.app.registry.upload_lock:
        for name in ("a", "b"):
            assert load(api, name=name, wait=False).status == 202
        assert api.whole(model="old")["choices"][0]["message"]["content"] == "y"
        states = {m["name"]: m["status"] for m in api.get("/admin/models").json()["models"]}
        assert states == {"old": "ready", "a": "loading", "b": "loading"}
    assert settled(api, "a")["status"] == settled(api, "b")["status"] == "ready"


def test_ten_loads_of_one_name_are_one_load_and_nine_conflicts_B45b(api: Api) -> None:
    answers: list[tuple[int, int]] = []
    with api.app.registry.upload_lock:
        threads = [
            threading.Thread(target=lambda: answers.append((load(api, name="dup", wait=False).status, 0)))
            for _ in range(10)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert sorted(status for status, _ in answers) == [202] + [409] * 9
    assert settled(api, "dup")["status"] == "ready" and len(api.app.registry.all_entries()) == 1


# ---- unloads --------------------------------------------------------------------------------------------------------


def test_an_unload_lets_the_running_answer_end_B45a_M142(api: Api) -> None:
    entry = api.add("a", pieces=[str(number) for number in range(1, 13)], decode_ms=40)
    api.add("b", pieces=["y"])
    sock = api.open_chat(model="a", stream=True)
    read_until(sock, b'"content":"1"')
    assert api.post(UNLOAD, {"name": "a", "wait": False}).status == 202
    while not entry.unloading:
        assert api.get("/admin/models/a").json()["status"] == "unloading"
    refused = api.chat(model="a")
    assert (refused.status, refused.code) == (503, "model_unloading")
    rest = answer_of_rest(sock)
    assert b'"finish_reason":"stop"' in rest and b"[DONE]" in rest and b"error" not in rest
    last = api.get("/admin/models/a", "Accept: text/event-stream")
    assert last.status == 404 or json.loads(last.events[-2])["status"] == "gone"
    assert [m["name"] for m in api.get("/admin/models").json()["models"]] == ["b"]


def test_an_unload_that_nobody_waits_for_notes_that_it_is_busy_X02(api: Api) -> None:
    entry = api.add("a", pieces=["x"])
    with api.app.registry.lease("a"):
        assert api.post(UNLOAD, {"name": "a", "timeout_s": 0.05, "wait": False}).status == 202
        last = settled(api, "a")
    assert last["status"] == "ready" and last["error"]["code"] == "still_busy" and entry.ready
    assert api.post(UNLOAD, {"name": "nope", "wait": False}).code == "model_not_found"
    assert api.post(UNLOAD, {"name": "a"}).status == 200
    assert api.post(UNLOAD, {"name": "a"}).status == 404


def test_force_ends_the_stream_with_an_error_event_X02(api: Api) -> None:
    entry = api.add("a", pieces=["x"], eog=False, decode_ms=20)
    sock = api.open_chat(model="a", stream=True)
    read_until(sock, b'"content":"x"')
    answer = api.post(UNLOAD, {"name": "a", "timeout_s": 0, "force": True})
    assert answer.status == 200, answer.body
    rest = answer_of_rest(sock)
    assert b'"code":"model_unloading"' in rest and b"[DONE]" in rest
    free(entry)


@pytest.mark.parametrize(
    ("body", "status", "gone"),
    [
        ({}, 200, [0, 1, 2]),
        ({"all": True}, 200, [0, 1, 2]),
        ({"slot": 1}, 200, [1]),
        ({"instance": 2}, 200, [2]),
        ({"dies": [0]}, 200, [0]),
        ({"dies": [3]}, 404, []),
        ({"slot": 7}, 404, []),
        ({"slot": 1, "dies": [0]}, 404, []),
        ({"all": True, "slot": 1}, 400, []),
        ({"slot": -1}, 400, []),
        ({"dies": "0"}, 400, []),
    ],
)
def test_one_replica_or_all_of_them_X04_M070(four: Api, body: dict[str, Any], status: int, gone: list[int]) -> None:
    for die in range(3):
        assert load(four, name="w", dies=[die]).status == 200
    answer = four.post(UNLOAD, {"name": "w", **body})
    assert answer.status == status, answer.body
    if status == 200:
        assert answer.json()["instances"] == [{"slot": slot, "dies": [slot]} for slot in gone]
    left = [entry.index for entry in four.app.registry.all_entries()]
    assert left == [slot for slot in range(3) if slot not in gone]
    taken = [die["slot"] for die in four.get("/admin/dies").json()["dies"] if die["model"]]
    assert taken == left


# ---- dies -----------------------------------------------------------------------------------------------------------


def test_dies_show_budget_use_and_model_M143(four: Api) -> None:
    before = four.get("/admin/dies").json()["dies"]
    assert [die["index"] for die in before] == [0, 1, 2, 3]
    assert all(die["budget_bytes"] == 32 * MIB and not die["used_bytes"] and die["model"] is None for die in before)
    assert four.post(LOAD, {"path": "tiny.gguf", "name": "t", "dies": [2], "ctx": 64}).status == 200
    after = four.get("/admin/dies").json()["dies"]
    assert after[2]["used_bytes"] > 0 and after[2]["model"] == "t" and after[2]["kind"] == "virtual"
    assert {"total_bytes", "free_bytes", "uuid"} <= set(after[2])
    assert four.post(UNLOAD, {"name": "t"}).status == 200
    assert four.get("/admin/dies").json()["dies"] == before


def test_the_status_map_of_loads_M144_K11(four: Api, folder: Path) -> None:
    def status(**body: Any) -> tuple[int, str]:
        answer = four.post(LOAD, {"path": "script:tiny.json", **body})
        return answer.status, answer.json().get("error", {}).get("code", "")

    assert status(name="a", dies=[0]) == (200, "")
    assert status(name="a", dies=[0]) == (409, "model_exists")
    assert status(name="b", dies=[0]) == (409, "die_taken")
    assert status(name="a", dies=[1]) == (200, "")
    assert status(name="b", dies=[9]) == (400, "no_such_die")
    assert status(name="b", dies=[1, 1])[0] == 400
    assert status(path="nope.gguf", name="b") == (404, "file_not_found")
    big = four.post(LOAD, {"path": "tiny.gguf", "name": "b", "dies": [2], "ctx": 1 << 17})
    assert big.status == 507 and big.json()["error"]["largest_ctx"] > 0, big.body
    with mock.patch("pantheon.serve.loading.load_model", side_effect=ZeroDivisionError):
        assert status(name="b", dies=[2]) == (500, "internal_error")
    four.app.registry.check_integrity()
    four.app.dies.check_integrity()
    # what was refused or failed took nothing
    assert status(name="b", dies=[2]) == (200, "")


# ---- plans ----------------------------------------------------------------------------------------------------------


def roomy(free_bytes: int = 1 << 30) -> MemState:
    return MemState(HostState(4 << 30, free_bytes + (1 << 30), reserve_bytes=1 << 30), alive=True)


@pytest.fixture
def _gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 1 GiB above its reserve."""
    monkeypatch.setattr(dry_run, "memory_now", lambda options: roomy())


@pytest.mark.usefixtures("_gibibyte")
def test_a_plan_tells_bytes_by_part_and_loads_nothing_X31(api: Api) -> None:
    plan = api.get("/admin/plan?model=tiny.gguf&ctx=64").json()
    assert plan["fits"] is True and plan["n_ctx"] == 64 and plan["name"] == "tiny"
    assert plan["bytes"]["weights"] > 50_000 and plan["bytes"]["kv"] > 0
    assert plan["have_bytes"] == 1 << 30 and plan["reserve_bytes"] == 1 << 30 and plan["dies"] == []
    assert sum(plan["bytes"].values()) + plan["spike_bytes"] == pytest.approx(plan["need_bytes"], rel=0.01)
    assert api.app.registry.all_entries() == []


@pytest.mark.usefixtures("_gibibyte")
def test_a_plan_that_does_not_fit_says_what_would_X31_B46(api: Api) -> None:
    plan = api.get("/admin/plan?model=tiny.gguf&ctx=16000000").json()
    assert plan["fits"] is False and plan["code"] == "out_of_memory"
    assert plan["need_bytes"] > plan["have_bytes"] and 64 < plan["largest_ctx"] < 16_000_000
    assert str(plan["largest_ctx"]) in plan["reason"]
    assert api.get(f"/admin/plan?model=tiny.gguf&ctx={plan['largest_ctx']}").json()["fits"] is True


@pytest.mark.usefixtures("_gibibyte")
def test_a_plan_on_dies_X31(four: Api) -> None:
    plan = four.get("/admin/plan?model=tiny.gguf&ctx=64").json()
    assert plan["fits"] and len(plan["dies"]) == 1
    assert four.get("/admin/plan?model=tiny.gguf&ctx=64&dies=3").json()["dies"] == [3]
    small = four.get("/admin/plan?model=tiny.gguf&ctx=1000000&dies=3").json()
    assert small["fits"] is False and small["have_bytes"] <= 32 * MIB and 64 < small["largest_ctx"] < 1_000_000
    assert four.get(f"/admin/plan?model=tiny.gguf&dies=3&ctx={small['largest_ctx']}").json()["fits"] is True
    assert all(die["model"] is None for die in four.get("/admin/dies").json()["dies"])


@pytest.mark.usefixtures("_gibibyte")
def test_a_plan_of_a_loaded_model_goes_by_its_name(api: Api) -> None:
    assert api.post(LOAD, {"path": "tiny.gguf", "name": "t", "ctx": 32}).status == 200
    plan = api.get("/admin/plan?model=t&ctx=64").json()
    assert plan["fits"] and plan["n_ctx"] == 64 and plan["path"].endswith("tiny.gguf")


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("", 400, "model"),
        ("?model=", 400, "model"),
        ("?model=/etc/passwd", 403, "model"),
        ("?model=nope.gguf", 404, "model"),
        ("?model=cut.gguf", 422, None),
        ("?model=tiny.gguf&ctx=x", 400, "ctx"),
        ("?model=tiny.gguf&ctx=-5", 400, "ctx"),
        ("?model=tiny.gguf&ctx=1", 400, "ctx"),
        ("?model=tiny.gguf&dies=a", 400, "dies"),
        ("?model=tiny.gguf&dies=0,0", 400, "dies"),
        ("?model=tiny.gguf&dies=0", 400, "dies"),
        ("?model=tiny.gguf&name=a%0Ab", 400, "name"),
    ],
)
def test_plans_are_refused_as_loads_are(api: Api, query: str, status: int, param: str | None) -> None:
    answer = api.get(f"/admin/plan{query}")
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (status, param), answer.body
    assert param != "model" or error["message"].startswith("model: ")


def test_a_context_that_no_memory_holds_B46a(api: Api) -> None:
    api.add("old", pieces=["y"])
    answer = api.post(LOAD, {"path": "tiny.gguf", "name": "big", "ctx": 100_000_000_000})
    error = answer.json()["error"]
    assert answer.status in (400, 507) and error["param"] == "ctx", error
    assert "GiB" in error["message"]
    assert api.whole(model="old")["choices"][0]["message"]["content"] == "y"
    assert [m["name"] for m in api.get("/admin/models").json()["models"]] == ["old"]


# ---- views ----------------------------------------------------------------------------------------------------------


def test_views_answer_during_a_generation_M028(api: Api) -> None:
    entry = api.add("a", pieces=["x"], eog=False, decode_ms=20)
    sock = api.open_chat(model="a", stream=True)
    read_until(sock, b'"content":"x"')
    try:
        row = api.get("/admin/sched").json()["entries"][0]
        assert row["name"] == "a" and row["busy"] and row["refs"] == 1 and row["waiting"] == 0
        assert row["mode"] == "single" and row["capacity"] == 1 and row["running_s"] >= 0
        for path in ("/admin/models", "/admin/models/a", "/admin/dies", "/admin/memory", "/v1/models"):
            assert api.get(path).status == 200, path
        with api.app.registry.lease("a"):
            assert api.get("/admin/sched").json()["entries"][0]["waiting"] == 1
    finally:
        sock.close()
    free(entry)
    row = api.get("/admin/sched").json()["entries"][0]
    assert not row["busy"] and row["running_s"] is None


def test_memory_shows_the_process_and_what_each_model_holds(api: Api) -> None:
    api.post(LOAD, {"path": "tiny.gguf", "name": "t", "ctx": 32})
    body = api.get("/admin/memory").json()
    assert body["process"]["rss_bytes"] > MIB
    (model,) = body["models"]
    assert model["name"] == "t" and model["memory"]["weights"] > 50_000
    assert body["admission"] == "off"  # nobody watches in this test, and it says so [X20]


def test_models_and_their_states(api: Api) -> None:
    load(api, name="a")
    (model,) = api.get("/admin/models").json()["models"]
    assert model["status"] == "ready" and model["path"].endswith("tiny.json") and model["architecture"] == "scripted"
    assert api.get("/admin/models/nope").code == "model_not_found"
    assert api.get("/admin/models/nope", "Accept: text/event-stream").status == 404


# ---- paths and files ------------------------------------------------------------------------------------------------


def test_no_part_of_a_split_model_may_lie_elsewhere_B45c(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    (tmp_path / "secret").write_text("s3cr3t")
    shutil.copy(TINY, root / "m-00001-of-00002.gguf")
    (root / "m-00002-of-00002.gguf").symlink_to(tmp_path / "secret")
    with serving(App(model_roots=(root,))) as api:
        answer = api.post(LOAD, {"path": "m-00001-of-00002.gguf"})
        assert (answer.status, answer.code) == (403, "path_not_allowed") and b"s3cr3t" not in answer.body


HOSTILE = sorted((DATA / "hostile").glob("*.gguf"))


def test_hostile_files_in_the_background_B38_B40() -> None:
    with serving(App(model_roots=(DATA / "hostile",))) as api:
        api.add("good", pieces=["fine"])
        for path in HOSTILE:
            assert api.post(LOAD, {"path": path.name, "name": "h", "wait": False}).status == 202
            last = settled(api, "h")
            assert last["status"] == "failed" and last["error"]["status"] in (400, 422), path.name
            plan = api.get(f"/admin/plan?model={path.name}")
            assert plan.status in (400, 422), path.name
        assert [m["name"] for m in api.get("/admin/models").json()["models"]] == ["good"]
        assert api.whole(model="good")["choices"][0]["message"]["content"] == "fine"


def test_only_json_changes_anything_B44d(api: Api) -> None:
    load(api, name="a")
    body = json.dumps({"path": "script:tiny.json", "name": "b"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = ask(api.server, request("POST", LOAD, body, f"Content-Type: {kind}"))
        assert (answer.status, answer.code) == (415, "unsupported_media_type")
    assert [entry.name for entry in api.app.registry.all_entries()] == ["a"]


