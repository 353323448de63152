"""Loading into the registry: one code path, nothing left behind by a failure [M057, M060, M204, X22, R M227]."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pantheon import seams
from pantheon.engine import load
from pantheon.errors import PantheonError
from pantheon.serve import loading
from pantheon.serve.loading import LoadOptions, ModelSpec, StartUp, default_name, load_spec
from pantheon.serve.registry import Registry

PATIENCE_S = 20.0


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({"pieces": ["x"]}))
    return f"script:{path}"


def start(registry: Registry, *specs: ModelSpec) -> StartUp:
    """Load and wait for the end."""
    start_up = StartUp(registry, specs, LoadOptions())
    done = threading.Event()
    start_up.start(done.set)
    assert done.wait(PATIENCE_S)
    return start_up


def test_load_publishes_under_the_given_name(script: str) -> None:
    registry = Registry()
    entry = load_spec(registry, ModelSpec(script, "a"), LoadOptions())
    assert entry.ready and registry.snapshot() == [entry] and entry.created > 1_700_000_000
    registry.check_integrity()


@pytest.mark.parametrize("point", ["load"])
def test_a_failed_load_leaves_nothing_and_may_be_tried_again_M204(script: str, point: str) -> None:
    registry = Registry()
    seams.arm(point)
    with pytest.raises(seams.InjectedFailure):
        load_spec(registry, ModelSpec(script, "a"), LoadOptions())
    assert registry.all_entries() == [] and not registry.upload_lock.locked()
    load_spec(registry, ModelSpec(script, "a"), LoadOptions())


def test_a_state_that_does_not_fit_is_507(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, n_slots: int = 1) -> None:
        raise MemoryError

    registry = Registry()
    monkeypatch.setattr("pantheon.engine.model.Model.new_state", full)
    with pytest.raises(PantheonError) as fault:
        load_spec(registry, ModelSpec(script, "a"), LoadOptions())
    assert (fault.value.status, fault.value.code) == (507, "out_of_memory")
    assert registry.all_entries() == []


def test_missing_file_is_404(tmp_path: Path) -> None:
    with pytest.raises(PantheonError) as fault:
        load_spec(Registry(), ModelSpec(str(tmp_path / "nope.gguf"), "a"), LoadOptions())
    assert fault.value.status == 404 and "nope.gguf" in fault.value.message


def test_start_up_reserves_all_names_first(script: str) -> None:
    registry = Registry()
    start_up = StartUp(registry, [ModelSpec(script, "a"), ModelSpec(script, "b")], LoadOptions())
    assert [item["name"] for item in registry.loading()] == ["a", "b"]
    assert not start_up.running
    with pytest.raises(PantheonError):
        StartUp(registry, [ModelSpec(script, "a")], LoadOptions())


def test_start_up_loads_all_in_order_M002(script: str) -> None:
    registry = Registry()
    start_up = start(registry, *(ModelSpec(script, name) for name in "abc"))
    assert start_up.failure is None
    assert [entry.name for entry in registry.snapshot()] == ["a", "b", "c"]


def test_start_up_tells_why_it_failed(script: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    registry = Registry()
    start_up = start(registry, ModelSpec(script, "a"), ModelSpec(str(bad), "b"), ModelSpec(script, "c"))
    assert start_up.failure is not None and "bad.gguf" in start_up.failure
    assert registry.loading() == [{"name": "c", "progress": 0.0, "stage": "waiting"}]


def test_a_fault_of_ours_is_told_in_one_line(script: str) -> None:
    seams.arm("load")
    start_up = start(Registry(), ModelSpec(script, "a"))
    assert start_up.failure is not None and "injected failure at load" in start_up.failure


def test_progress_is_seen_while_it_loads_X22(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    seen: list[Any] = []
    reports: list[Any] = []

    def slow(path: str, *, progress: Any, **options: Any) -> Any:
        progress("weights", 1, 4)
        seen.append(registry.loading())
        return load.load_model(path)

    monkeypatch.setattr(loading, "load_model", slow)
    load_spec(registry, ModelSpec(script, "a"), LoadOptions(), lambda *report: reports.append(report))
    assert seen == [[{"name": "a", "progress": 0.25, "stage": "weights"}]]
    assert reports == [("a", "weights", 1, 4)]


def test_only_one_load_at_a_time_M060(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    inside, most = [0], [0]

    def counted(path: str, **options: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        assert registry.upload_lock.locked()
        # readers of the table are not held up by a load
        registry.snapshot()
        inside[0] -= 1
        return load.load_model(path)

    monkeypatch.setattr(loading, "load_model", counted)
    specs = [ModelSpec(script, name) for name in "abcd"]
    threads = [threading.Thread(target=load_spec, args=(registry, spec, LoadOptions())) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert most[0] == 1 and registry.count() == 4


@pytest.mark.parametrize(
    ("path", "name"),
    [("/a/b/Model-Q4.gguf", "Model-Q4"), ("script:/x/fake.json", "fake"), ("m.v1.gguf", "m.v1")],
)
def test_default_name(path: str, name: str) -> None:
    assert default_name(path) == name
