"""The runner and its states in the simulator: the asynchronous seam, several dies, conversations, memory.

M080, M081, M130, M197, M216-M219, M226.
"""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pantheon.accel.cuda import row_kernels
from pantheon.accel.cuda.context import Device
from pantheon.accel.cuda.executor import CudaExecutor
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.runner import CudaRunner, reach
from pantheon.accel.cuda.staging import Uploader
from pantheon.accel.cuda.state import CudaState
from pantheon.accel.executor import Columns
from pantheon.errors import ModelFileError, Unavailable
from pantheon.models.architectures import make_plan
from pantheon.plan.state_spec import KVType
from tests.accel.cuda.bench import need_dies
from tests.models.random_models import Shapes, Source, decoder, hybrid

IDS, VOCAB = [5, 11, 2, 7, 13], 20


def little(arch: str = "llama") -> tuple[dict[str, Any], Shapes]:
    """Metadata and shapes: the simulator needs a microsecond for what a device does in a picosecond."""
    if arch.startswith("qwen35"):
        return hybrid(arch, width=16, ff=16, heads=2, dim=8, vocab=VOCAB, value_heads=2, inner=8)
    return decoder(arch, width=16, ff=16, heads=2, kv=1, dim=8, vocab=VOCAB)


def load(arch: str = "llama", dies: int = 1, **options: Any) -> CudaRunner:
    """A runner of a little model on so many dies: of the simulator, which has any number, or of this machine."""
    need_dies(dies)
    metadata, shapes = little(arch)
    plan = make_plan(metadata, shapes)
    cuts = [len(plan.body) * i // dies for i in range(1, dies)]
    return CudaExecutor(range(dies), cuts).load(plan, Source(shapes, 3), **dict(n_ctx=16, kv_type=KVType.F32) | options)


def rows_of(runner: CudaRunner, ids: list[int] = IDS) -> np.ndarray:
    return runner.forward(runner.new_state(1, 16), Columns.of_slot(ids, 0, wanted="all"))


def first_row(state: CudaState) -> np.ndarray:
    out = np.empty((1, VOCAB), np.float32)
    state.read_logits(out)
    return out[0]


class Mark:
    """A mark on a stream that comes true when the test says so."""

    def __init__(self) -> None:
        self.set = 0
        self.begun = threading.Event()
        self.done = False
        self.raw = SimpleNamespace(record=self._record)

    def _record(self, stream: object) -> None:
        self.set += 1
        self.begun.set()


# ---- the asynchronous seam ----------------------------------------------------------------------------------------


def test_a_forward_is_begun_looked_at_and_ended() -> None:
    runner, mark = load(), Mark()
    wanted = rows_of(runner)[-1]
    runner._marks = [mark]
    state = runner.new_state(1, 16)
    runner.forward_begin(state, Columns.of_slot(IDS, 0))
    assert mark.set == 1 and [runner.forward_poll() for _ in range(3)] == [False] * 3
    mark.done = True
    assert runner.forward_poll() and runner.forward_poll()
    assert len(runner.forward_end()) == 1
    assert np.array_equal(first_row(state), wanted)
    with pytest.raises(RuntimeError, match="no forward"):
        runner.forward_poll()


def test_a_second_begin_is_refused_and_disturbs_nothing() -> None:
    """M219: what is on its way reads the host's columns."""
    runner, mark = load(), Mark()
    wanted = rows_of(runner)[-1]
    runner._marks = [mark]
    state, other = runner.new_state(1, 16), runner.new_state(1, 16)
    runner.forward_begin(state, Columns.of_slot(IDS, 0))
    for call in (runner.forward_begin, runner.forward, runner.hidden):
        with pytest.raises(RuntimeError, match="on its way"):
            call(other, Columns.of_slot([1, 2], 0))
    mark.done = True
    assert runner.forward_poll()
    assert len(runner.forward_end()) == 1 and np.array_equal(first_row(state), wanted)


def test_a_forward_goes_from_die_to_die_as_each_is_done() -> None:
    runner, marks = load(dies=3), [Mark() for _ in range(3)]
    wanted = rows_of(load())[-1]
    runner._marks = marks
    state = runner.new_state(1, 16)
    runner.forward_begin(state, Columns.of_slot(IDS, 0))
    for i, mark in enumerate(marks):
        assert not runner.forward_poll()
        assert [mark.set for mark in marks] == [1] * (i + 1) + [0] * (2 - i)
        mark.done = True
    assert runner.forward_poll()
    assert len(runner.forward_end()) == 1 and np.array_equal(first_row(state), wanted)


def test_a_fault_on_the_way_ends_that_forward_only(monkeypatch) -> None:
    runner = load(dies=2)
    wanted = rows_of(runner)
    state = runner.new_state(1, 16)
    second = runner._stages[1]

    def broken(count: int) -> None:
        raise RuntimeError("the link is down")

    monkeypatch.setattr(second, "take_inbox", broken)
    with pytest.raises(RuntimeError, match="link"):
        runner.forward(state, Columns.of_slot(IDS, 0))
    monkeypatch.undo()
    assert np.array_equal(rows_of(runner), wanted)


def test_eight_threads_drive_eight_dies_at_once() -> None:
    """M081: nobody's forward waits for another's; each thread sleeps between two looks at its own die."""
    runners = [load() for _ in range(8)]
    wanted = rows_of(runners[0])[-1:]
    marks = [Mark() for _ in runners]
    ends = [threading.Event() for _ in runners]
    found: dict[int, np.ndarray] = {}

    def drive(i: int) -> None:
        state = runners[i].new_state(1, 16)
        runners[i].forward_rows(state, Columns.of_slot(IDS, 0))
        found[i] = first_row(state)[None]
        ends[i].set()

    for runner, mark in zip(runners, marks, strict=True):
        runner._marks = [mark]
    threads = [threading.Thread(target=drive, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    assert all(mark.begun.wait(60) for mark in marks), "a forward waited for another one's end"
    assert not found
    for i in reversed(range(8)):
        marks[i].done = True
        assert ends[i].wait(60)
    assert all(np.array_equal(rows, wanted) for rows in found.values()) and len(found) == 8


# ---- columns and states -------------------------------------------------------------------------------------------


def test_more_rows_than_a_state_has_are_read_in_parts() -> None:
    runner, ids = load(), IDS + IDS
    all_at_once = runner.forward(runner.new_state(5, 16), Columns.of_slot(ids, 0, wanted="all"))
    state = runner.new_state(1, 16)
    assert len(ids) > state.n_rows and np.array_equal(rows_of(runner, ids), all_at_once)
    with pytest.raises(ValueError, match="room for 1 rows"):
        runner.forward_begin(state, Columns.of_slot(IDS, 0, wanted="all"))


def test_columns_out_of_range_and_strange_states_are_refused() -> None:
    runner, other = load(), load()
    state = runner.new_state(1, 8)
    for columns in (Columns.of_slot([VOCAB], 0), Columns.of_slot([1], 8), Columns.of_slot([1], 0, slot=1)):
        with pytest.raises(ValueError, match="out of range"):
            runner.forward(state, columns)
    with pytest.raises(ValueError, match="another runner"):
        other.forward(state, Columns.of_slot([1], 0))
    with pytest.raises(ValueError, match="beyond the 16"):
        runner.new_state(1, 17)
    with pytest.raises(ValueError, match="at most 256"):
        runner.forward(state, Columns.of_slot([1] * 257, 0))
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.forward(state, Columns.of_slot([1], 0))


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
@pytest.mark.parametrize("dies", [1, 2])
def test_conversations_are_copied_cut_and_forgotten(arch, dies) -> None:
    runner = load(arch, dies)
    wanted = rows_of(runner)
    state = runner.new_state(3, 16)
    runner.forward(state, Columns.of_slot(IDS[:3], 0))
    if not state.can_truncate:
        state.checkpoint(0, 3)
        assert state.checkpoints(0) == [3]
    runner.forward(state, Columns.of_slot([1, 1], 3))
    state.copy_prefix(0, 2, 3)
    state.truncate(0, 3)
    for slot in (0, 2):
        got = runner.forward(state, Columns.of_slot(IDS[3:], 3, slot=slot, wanted="all"))
        assert np.array_equal(got, wanted[3:]), slot
    state.reset(0)
    assert np.array_equal(runner.forward(state, Columns.of_slot(IDS, 0, wanted="all")), wanted)
    with pytest.raises(ValueError, match="can not copy"):
        state.copy_prefix(0, 0, 3)
    with pytest.raises(ValueError, match="out of range"):
        state.reset(3)


def test_hidden_rows_are_the_oracles() -> None:
    from pantheon.accel.reference import ReferenceExecutor

    metadata, shapes = little("qwen3")
    plan, columns = make_plan(metadata, shapes), Columns.of_slot(IDS, 0, wanted="all")
    oracle = ReferenceExecutor().load(plan, Source(shapes, 3), n_ctx=16, kv_type=KVType.F32)
    runner = load("qwen3", 2)
    got = runner.hidden(runner.new_state(1, 16), columns)
    assert np.abs(got - oracle.hidden(oracle.new_state(1, 16), columns)).max() < 1e-3


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize("dies", [1, 2])
def test_what_is_taken_is_what_was_predicted(monkeypatch, kv_type, dies) -> None:
    """Within 5 % is asked; it is the same arithmetic, but that samplers take smaller bites in the simulator."""
    taken: list[int] = []
    make = Device.array

    def counted(self: Device, n: int, dtype: Any) -> Any:
        if dtype is not np.uint8:  # raw rows are there for a while only
            taken.append(max(1, n) * np.dtype(dtype).itemsize)
        return make(self, n, dtype)

    monkeypatch.setattr(Device, "array", counted)
    metadata, shapes = little()
    plan = make_plan(metadata, shapes)
    runner = load("llama", dies, kv_type=kv_type)
    runner.new_state(3, 16)
    executor = CudaExecutor(range(dies), [len(plan.body) * i // dies for i in range(1, dies)])
    types = dict.fromkeys(shapes, "F32")
    parts = executor.predict(plan, types, n_ctx=16, n_slots=3, kv_type=kv_type)
    assert {name: parts[name] for name in ("weights", "scratch", "tables")} == runner.memory()
    assert sum(parts.values()) == pytest.approx(sum(taken), rel=0.02)


def test_slots_of_a_state_never_move() -> None:
    """M216, M218, M221: arrays are made once, whatever joins and leaves."""
    runner = load("qwen35")
    state = runner.new_state(4, 16)
    before = [{name: id(array) for name, array in arrays.items()} for arrays in state.arrays]
    shared = {name: id(array) for name, array in runner._stages[0].arrays.items()}
    for slot in (0, 3, 1):
        runner.forward(state, Columns.of_slot(IDS, 0, slot=slot, wanted="all"))
        state.reset(slot)
    assert before == [{name: id(array) for name, array in arrays.items()} for arrays in state.arrays]
    assert shared == {name: id(array) for name, array in runner._stages[0].arrays.items()}


def test_a_closed_state_lets_go_of_its_arrays_whoever_still_has_it(monkeypatch) -> None:
    made: list[weakref.ref[Any]] = []
    make = Device.array

    def noted(self: Device, n: int, dtype: Any) -> Any:
        array = make(self, n, dtype)
        made.append(weakref.ref(array))
        return array

    runner = load("qwen35", 2)
    monkeypatch.setattr(Device, "array", noted)
    state = runner.new_state(2, 16)
    runner.forward(state, Columns.of_slot(IDS, 0))
    state.close()
    state.close()
    assert len(made) > 8 and [ref for ref in made if ref() is not None] == []


@pytest.mark.parametrize("dies", [1, 2])
def test_a_load_that_fails_gives_everything_back(monkeypatch, dies) -> None:
    """M204."""
    given: list[int] = []
    upload, calls = Uploader.upload, iter(range(99))

    def torn(self: Uploader, *args: Any) -> None:
        if next(calls) == 12:
            raise ModelFileError("torn.gguf", "can not be read")
        upload(self, *args)

    monkeypatch.setattr(Uploader, "upload", torn)
    monkeypatch.setattr(Device, "give_back", lambda self: given.append(self.index))
    with pytest.raises(ModelFileError, match="torn"):
        load("llama", dies)
    assert set(given) == set(range(dies))


def test_a_die_that_is_full_gives_back_what_it_had_given(monkeypatch) -> None:
    """M204: the stage that could not be made has nobody to close it."""
    given: list[int] = []
    array = Device.array

    def full(self: Device, n: int, dtype: Any) -> Any:
        if self.index == 1 and dtype is np.float32:
            raise MemoryError("no room")
        return array(self, n, dtype)

    monkeypatch.setattr(Device, "array", full)
    monkeypatch.setattr(Device, "give_back", lambda self: given.append(self.index))
    with pytest.raises(MemoryError, match="no room"):
        load(dies=2)
    assert set(given) == {0, 1}


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_a_state_that_is_closed_has_no_memory_left(arch) -> None:
    """Though somebody still holds it: what is refused to the next model would be."""
    state = load(arch, 2).new_state(2, 16)
    held = [weakref.ref(array) for arrays in state.arrays for array in arrays.values()]
    assert held and all(array() is not None for array in held)
    state.close()
    state.close()
    assert all(array() is None for array in held)


def test_a_state_that_does_not_fit_gives_back_what_it_got(monkeypatch) -> None:
    runner, made = load(), []
    array = Device.array

    def full(self: Device, n: int, dtype: Any) -> Any:
        if dtype is np.int64:
            raise MemoryError("no room")
        made.append(weakref.ref(found := array(self, n, dtype)))
        return found

    monkeypatch.setattr(Device, "array", full)
    with pytest.raises(MemoryError, match="no room") as caught:
        runner.new_state(1, 16)
    # the fault is still being told, and its traceback has the state in it, and the logits that rows were made of
    assert caught.tb is not None and len(made) == 4 and all(array() is None for array in made[:3])


LOST = type("CudaAPIError", (Exception,), {"__module__": "numba.cuda.cudadrv.driver"})("lost")


@pytest.mark.parametrize(
    ("call", "work"),
    [
        ("read", lambda runner, state: runner.hidden(state, Columns.of_slot([1], len(IDS)))),
        ("read", lambda runner, state: state.checkpoint(0, len(IDS))),
        ("write", lambda runner, state: state.reset(0)),
        ("copy", lambda runner, state: state.copy_prefix(0, 1, len(IDS))),
    ],
)
def test_a_die_that_is_lost_is_named_whatever_is_asked_of_it(call, work, monkeypatch) -> None:
    runner = load("qwen35", 2)
    state = runner.new_state(2, 16)
    runner.forward(state, Columns.of_slot(IDS, 0))

    def lost(*args: Any) -> None:
        raise LOST

    monkeypatch.setattr(Device, call, lost)
    with pytest.raises(Unavailable, match=r"dies? [01].*: the device failed"):
        work(runner, state)


@pytest.mark.parametrize("kv_type", [KVType.F32, KVType.Q8_0])
def test_a_state_for_a_short_text_is_as_long_as_the_text(kv_type) -> None:
    """Beside the state that a server loads with there is little room."""
    runner = load(n_ctx=600, kv_type=kv_type)
    layout = runner._stages[0].place.memory.kv
    for n_slots, n_ctx, blocks in ((1, 16, 1), (3, 130, 12), (2, 600, 10)):
        state = runner.new_state(n_slots, n_ctx)
        sizes = {name: array.size for name, array in state.arrays[0].items()}
        assert sizes["kv"] == blocks * layout.block_words and sizes["kv_scales"] == max(1, blocks * layout.block_scales)
    whole, short = (runner.new_state(1, n_ctx) for n_ctx in (600, 5))
    assert np.array_equal(*(runner.forward(state, Columns.of_slot(IDS, 0, wanted="all")) for state in (whole, short)))


def test_warm_up_compiles_what_a_batch_and_every_sampler_will_need(monkeypatch) -> None:
    """X07: a head for several rows and edited rows are first met by somebody's answer otherwise."""
    met: set[str] = set()
    monkeypatch.setattr("pantheon.accel.cuda.runner._WARM_UP", (1, 2, 8))
    monkeypatch.setattr(Kernel, "compiled", lambda self: met.add(self.name))
    runner = load(dies=2)
    runner.warm_up()
    head = {bound.pick(n).name for bound in runner._stages[-1].head for n in (1, 2, 8)}
    assert len(head) > 3 and head <= met
    assert {kernel.name for kernel in row_kernels.kernels()} <= met


@pytest.mark.parametrize(("last", "expected"), [(0, 256), (254, 256), (255, 256), (256, 512), (5000, 8192)])
def test_reach_is_a_power_of_two_beyond_the_last_position(last, expected) -> None:
    assert reach(Columns.of_slot([1], last)) == expected
