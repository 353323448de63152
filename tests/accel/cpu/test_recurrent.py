"""Convolution, gates and the delta rule on the cpu executor against naive twins, over chunks and slots (M225)."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.cpu.executor import CpuExecutor
from pantheon.plan.buffers import Buffer, Vector
from pantheon.plan.ops import Conv, DeltaGates, DeltaRule, Gate, Op, Pick, Sigmoid, SoftCap
from pantheon.plan.state_spec import KVType, RecurrentSpec, StateSpec
from tests.accel.cpu.harness import Bench, columns, evaluate, peek
from tests.accel.cpu.test_matmul import _close

KEYS, HEADS, DIM, TAPS = 2, 6, 16, 4
CHANNELS = (2 * KEYS + HEADS) * DIM
SPEC = RecurrentSpec(CHANNELS, TAPS, HEADS, DIM, DIM)
EPS = 1e-6


class RecurrentBench(Bench):
    """With two recurrent layers, so that offsets count."""

    def plan(self):  # type: ignore[no-untyped-def]
        made = super().plan()
        object.__setattr__(made, "state", StateSpec((), (SPEC, SPEC)))
        return made


def taps_of(bench: Bench, values: np.ndarray) -> tuple[Vector, ...]:
    bench.source.floats("taps", values)
    return tuple(Vector("taps", CHANNELS, j, TAPS) for j in range(TAPS))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def conv_twin(x: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """One conversation: x [n, channels], taps [channels, TAPS]."""
    padded = np.concatenate([np.zeros((TAPS - 1, x.shape[1])), x])
    out = np.array([(padded[t : t + TAPS] * taps.T).sum(0) for t in range(len(x))])
    return out * sigmoid(out)


def rule_twin(qkv: np.ndarray, beta: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """ARCH.md 4.8, step 4, head by head."""
    s, out = np.zeros((HEADS, DIM, DIM)), np.zeros((len(qkv), HEADS, DIM))
    for t, row in enumerate(qkv):
        q, k = row[: KEYS * DIM].reshape(KEYS, DIM), row[KEYS * DIM : 2 * KEYS * DIM].reshape(KEYS, DIM)
        v = row[2 * KEYS * DIM :].reshape(HEADS, DIM)
        for h in range(HEADS):
            s[h] *= decay[t, h]
            s[h] += np.outer(k[h % KEYS], beta[t, h] * (v[h] - s[h].T @ k[h % KEYS]))
            out[t, h] = s[h].T @ q[h % KEYS]
    return out.reshape(len(qkv), -1)


def _in_parts(bench: Bench, out: Buffer, n: int, threads: int, chunk: int, slot_of: list[int]) -> np.ndarray:
    """Rows of `out` of tokens 0 ... n-1, in forwards of `chunk` columns; positions count for each slot."""
    rows, seen = [], [0, 0]
    with bench.runner(threads) as runner:
        state = runner.new_state(2, 512)
        for first in range(0, n, chunk):
            tokens = list(range(first, min(first + chunk, n)))
            slots = [slot_of[t] for t in tokens]
            positions = []
            for slot in slots:
                positions.append(seen[slot])
                seen[slot] += 1
            runner.forward(state, columns(tokens, positions, slots))
            rows.append(peek(runner, out, len(tokens)))
    return np.concatenate(rows)


CUTS = [(1, 64, [0] * 20), (2, 64, [0, 1] * 10), (3, 7, [0, 0, 1, 0, 1] * 4), (1, 1, [0] * 20)]


@pytest.mark.parametrize("layer", [0, 1])
def test_convolution_goes_on_over_chunks_and_beside_others(layer: int) -> None:
    rng = np.random.default_rng(1)
    x, taps = rng.normal(size=(20, CHANNELS)), rng.normal(size=(CHANNELS, TAPS))
    for threads, chunk, slot_of in CUTS:
        bench = RecurrentBench()
        source, out = bench.input("x", x), bench.build.buffer("out", CHANNELS)
        bench.ops = [Conv(source, taps_of(bench, taps), out, layer)]
        got = _in_parts(bench, out, 20, threads, chunk, slot_of)
        for slot in set(slot_of):
            mine = [t for t in range(20) if slot_of[t] == slot]
            _close(got[mine], conv_twin(x[mine], taps), 1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_delta_rule_goes_on_over_chunks_and_beside_others(layer: int) -> None:
    """The same bits however it is cut."""
    rng = np.random.default_rng(2)
    qkv = rng.normal(size=(20, CHANNELS)) * 0.3
    beta, decay = rng.uniform(size=(20, HEADS)), rng.uniform(0.5, 1, size=(20, HEADS))
    alone = None
    for threads, chunk, slot_of in CUTS:
        bench = RecurrentBench()
        inputs = [bench.input(name, values) for name, values in (("qkv", qkv), ("beta", beta), ("decay", decay))]
        out = bench.build.buffer("out", HEADS * DIM)
        bench.ops = [DeltaRule(*inputs, out, layer, KEYS)]
        got = _in_parts(bench, out, 20, threads, chunk, slot_of)
        for slot in set(slot_of):
            mine = [t for t in range(20) if slot_of[t] == slot]
            _close(got[mine], rule_twin(qkv[mine], beta[mine], decay[mine]), 1e-5)
        if set(slot_of) == {0}:
            assert alone is None or np.array_equal(got, alone)
            alone = got


def test_gates() -> None:
    rng = np.random.default_rng(3)
    qkv, beta = rng.normal(size=(5, CHANNELS)), rng.normal(size=(5, HEADS)) * 3
    decay, rate, bias = rng.normal(size=(5, HEADS)) * 9, -rng.uniform(size=HEADS), rng.normal(size=HEADS)
    decay[0], decay[1] = 40, -40
    bench = RecurrentBench()
    buffers = [bench.input(name, values) for name, values in (("qkv", qkv), ("beta", beta), ("decay", decay))]
    op = DeltaGates(*buffers, bench.vector("rate", rate), bench.vector("bias", bias), KEYS, DIM, EPS)
    bench.ops = [op]
    with bench.runner(2) as runner:
        runner.forward(runner.new_state(1, 512), columns(np.arange(5)))
        got = [peek(runner, buffer, 5) for buffer in buffers]
    heads = qkv[:, : 2 * KEYS * DIM].reshape(5, 2 * KEYS, DIM)
    heads = heads / np.sqrt((heads**2).sum(-1, keepdims=True) + EPS)
    heads[:, :KEYS] *= DIM**-0.5
    _close(got[0], np.concatenate([heads.reshape(5, -1), qkv[:, 2 * KEYS * DIM :]], axis=1), 1e-6)
    _close(got[1], sigmoid(beta), 1e-6)
    _close(got[2], np.exp(rate * np.logaddexp(0, decay + bias)), 1e-6)


@pytest.mark.parametrize("size", [16, 24])
def test_pick_sigmoid_and_a_sigmoid_gate(size: int) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(7, 3 * 2 * size)) * 4
    bench = Bench()
    both = bench.input("x", x)
    first, second, out = (bench.build.buffer(name, 3 * size) for name in ("first", "second", "out"))
    bench.ops = [Pick(both, first, 0, size, 2 * size), Pick(both, second, size, size, 2 * size)]
    bench.ops += [Gate(second, first, out, "sigmoid"), Sigmoid(second)]
    with bench.runner(2) as runner:
        runner.forward(runner.new_state(1, 512), columns(np.arange(7)))
        got = [peek(runner, buffer, 7) for buffer in (first, second, out)]
    a, b = np.split(x.astype(np.float32).reshape(7, 3, 2 * size), 2, axis=-1)
    a, b = a.reshape(7, -1), b.reshape(7, -1)
    assert np.array_equal(got[0], a)
    _close(got[1], sigmoid(b.astype(float)), 1e-6)
    _close(got[2], sigmoid(b.astype(float)) * a, 1e-6)


def test_soft_cap() -> None:
    x = np.random.default_rng(5).normal(size=(3, 50)) * 60
    bench = Bench()
    out = bench.input("x", x)
    bench.ops = [SoftCap(out, 30.0)]
    _close(evaluate(bench, out, 3), 30 * np.tanh(x / 30), 1e-6)


def test_a_state_counts_what_it_may_remember() -> None:
    bench = RecurrentBench()
    x, out = bench.input("x", np.zeros((1, CHANNELS))), bench.build.buffer("out", CHANNELS)
    bench.ops = [Conv(x, taps_of(bench, np.zeros((CHANNELS, TAPS))), out, 0)]
    plan = bench.plan()
    die = CpuExecutor(1)
    runner = die.load(plan, bench.source, n_ctx=64, kv_type=KVType.F32)
    types = {name: "F32" for name in bench.source.tensors}
    predicted = die.predict(plan, types, n_ctx=64, n_slots=3, kv_type=KVType.F32)["kv"]
    assert runner.new_state(3, 64).nbytes() == predicted > 3 * plan.state.recurrent_bytes
    runner.close()


def _bad(bench: Bench, what: str) -> Op:
    x, narrow = bench.input("x", np.zeros((1, CHANNELS))), bench.input("narrow", np.zeros((1, CHANNELS - 16)))
    gates, few = bench.input("gates", np.zeros((1, HEADS))), bench.input("few", np.zeros((1, HEADS - 1)))
    out, wide = bench.build.buffer("out", HEADS * DIM), bench.build.buffer("wide", CHANNELS)
    rate = bench.vector("rate", np.zeros(HEADS))
    taps = taps_of(bench, np.zeros((CHANNELS, TAPS)))
    cases: dict[str, Op] = {
        "conv layer": Conv(x, taps, wide, 2),
        "conv width": Conv(narrow, taps, wide, 0),
        "conv in place": Conv(x, taps, x, 0),
        "conv taps": Conv(x, taps[1:], wide, 0),
        "conv order": Conv(x, (*taps[:2], *taps[1:3]), wide, 0),
        "gates width": DeltaGates(narrow, gates, gates, rate, rate, KEYS, DIM, EPS),
        "gates count": DeltaGates(x, few, gates, rate, rate, KEYS, DIM, EPS),
        "rule layer": DeltaRule(x, gates, gates, out, -1, KEYS),
        "rule gates": DeltaRule(x, gates, few, out, 0, KEYS),
        "rule keys": DeltaRule(x, gates, gates, out, 0, KEYS + 1),
        "rule out": DeltaRule(x, gates, gates, wide, 0, KEYS),
        "pick": Pick(x, out, DIM, DIM + 1, 2 * DIM),
    }
    return cases[what]


@pytest.mark.parametrize(
    "what",
    ["conv layer", "conv width", "conv in place", "conv taps", "conv order", "gates width", "gates count", "rule layer",
     "rule gates", "rule keys", "rule out", "pick"],
)  # fmt: skip
def test_plans_that_contradict_their_state_are_refused(what: str) -> None:
    bench = RecurrentBench()
    bench.ops = [_bad(bench, what)]
    with pytest.raises(ValueError, match="plan"):
        CpuExecutor(1).load(bench.plan(), bench.source, n_ctx=64, kv_type=KVType.F32)
