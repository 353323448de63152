"""The thread team: many runners at once, closing, exit, hostile columns."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pantheon.accel.executor import Columns
from tests.accel.cpu.test_invariance import VOCAB, all_logits, running, small_model

ROOT = Path(__file__).resolve().parents[3]


def test_two_models_decode_at_the_same_time() -> None:
    """Two runners, five members on any number of cores, two Python threads: no deadlock, the right numbers."""
    models = [small_model(("Q4_1",), 1), small_model(("Q8_0", "F32"), 2)]
    tokens = np.random.default_rng(0).integers(0, VOCAB, 60)
    with running(*models[0], 1) as one, running(*models[1], 1) as two:
        want = [all_logits(r, tokens, 1) for r in (one, two)]
    with running(*models[0], 3) as a, running(*models[1], 2) as b:
        got: dict[tuple[int, int], np.ndarray] = {}

        def work(which: int) -> None:
            for turn in range(4):
                got[which, turn] = all_logits((a, b)[which], tokens, 1 + turn)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(timeout=100)
            assert not t.is_alive()
    for (which, _), logits in got.items():
        assert np.array_equal(logits, want[which])
    assert len(got) == 8


def test_close_is_idempotent_and_dismisses_the_members() -> None:
    plan, source = small_model(("Q4_1",))
    before = threading.active_count()
    with running(plan, source, 3) as runner:
        all_logits(runner, np.arange(5), 5)
        assert threading.active_count() == before + 2
        runner.close()
        runner.close()
        assert threading.active_count() == before
        with pytest.raises(RuntimeError, match="closed"):
            all_logits(runner, np.arange(5), 5)


def test_a_runner_that_is_forgotten_lets_its_threads_go() -> None:
    plan, source = small_model(("Q4_1",))
    before = threading.active_count()
    for _ in range(3):
        with running(plan, source, 2) as runner:
            all_logits(runner, np.arange(3), 3)
        del runner
    assert threading.active_count() == before


def test_interpreter_exit_does_not_hang_or_crash() -> None:
    """An open runner, and one in use on a daemon thread, at the end of the main thread."""
    code = """
import threading, time
import numpy as np
from pantheon.accel.cpu.executor import CpuExecutor
from pantheon.plan.state_spec import KVType
from tests.accel.cpu.test_invariance import all_logits, small_model
plan, source = small_model(("Q4_1",))
runners = [CpuExecutor(3).load(plan, source, n_ctx=512, kv_type=KVType.F16) for _ in range(2)]
for r in runners: all_logits(r, np.arange(9), 3)
busy = threading.Event()
def work():
    while True:
        all_logits(runners[1], np.arange(50), 50); busy.set()
threading.Thread(target=work, daemon=True).start()
busy.wait()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


@pytest.mark.parametrize(
    ("tokens", "slots", "positions", "wanted"),
    [([VOCAB], [0], [0], []), ([-1], [0], [0], []), ([0], [1], [0], []), ([0], [0], [64], []), ([0], [0], [0], [1]),
     ([], [], [], []), ([0, 1], [0], [0], []), ([0], [0], [-1], []), ([0], [-1], [0], []),
     ([0] * 257, [0] * 257, [0] * 257, [])],
)  # fmt: skip
def test_columns_out_of_range_never_reach_a_kernel(
    tokens: list[int], slots: list[int], positions: list[int], wanted: list[int]
) -> None:
    plan, source = small_model(("Q4_1",))
    with running(plan, source, 1) as runner:
        arrays = [np.array(a, np.int32) for a in (tokens, slots, positions, wanted)]
        with pytest.raises(ValueError):
            runner.forward(runner.new_state(1, 64), Columns(*arrays))


def test_states_of_another_shape_are_refused() -> None:
    plan, source = small_model(("Q4_1",))
    with running(plan, source, 1) as runner:
        with pytest.raises(ValueError, match="513"):
            runner.new_state(1, 513)
        for n_slots, n_ctx in ((0, 5), (1, 0)):
            with pytest.raises(ValueError):
                runner.new_state(n_slots, n_ctx)
        state = runner.new_state(2, 100)
        assert state.nbytes() >= 2 * 100 * plan.state.bytes_per_token(runner.kv_type)
        with pytest.raises(ValueError):
            state.reset(2)
