"""Convolution, gates and the delta rule in the simulator against NumPy twins, over forwards and slots (M225)."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.cuda import recurrent
from pantheon.accel.cuda.lowering import Launch
from pantheon.plan.ops import Conv, DeltaGates, DeltaRule
from pantheon.plan.state_spec import RecurrentSpec
from tests.accel.cuda.bench import F32, Bench

KEYS, HEADS, TAPS, N = 2, 4, 4, 9
#: key and value dims that neither 8 nor each other divides
KEY, VALUE = 11, 6
CHANNELS = 2 * KEYS * KEY + HEADS * VALUE
SPEC = RecurrentSpec(CHANNELS, TAPS, HEADS, KEY, VALUE)
#: which slot each column belongs to, and how many columns each forward takes
CUTS = [([2] * N, N), ([0, 1] * 4 + [0], N), ([0, 2, 2, 0, 0, 0, 1, 2, 2], 4), ([1] * N, 1)]


def sigmoid(x: F32) -> F32:
    return 1 / (1 + np.exp(-x))


def conv_twin(x: F32, taps: F32) -> F32:
    padded = np.concatenate([np.zeros((TAPS - 1, x.shape[1])), x])
    out = np.array([(padded[t : t + TAPS] * taps).sum(0) for t in range(len(x))])
    return out * sigmoid(out)


def rule_twin(qkv: F32, beta: F32, decay: F32) -> tuple[F32, F32]:
    """(out [n, heads * values], S behind the last): one conversation, head by head."""
    s, out = np.zeros((HEADS, KEY, VALUE)), np.zeros((len(qkv), HEADS, VALUE))
    for t, row in enumerate(qkv):
        q, k = row[: KEYS * KEY].reshape(KEYS, KEY), row[KEYS * KEY : 2 * KEYS * KEY].reshape(KEYS, KEY)
        v = row[2 * KEYS * KEY :].reshape(HEADS, VALUE)
        for h in range(HEADS):
            s[h] *= decay[t, h]
            s[h] += np.outer(k[h % KEYS], beta[t, h] * (v[h] - s[h].T @ k[h % KEYS]))
            out[t, h] = s[h].T @ q[h % KEYS]
    return out.reshape(len(qkv), -1), s


def layer_of(bench: Bench, slot: int, layer: int) -> F32:
    at = bench.recurrent_at[layer]
    return bench.recurrent[slot, at : at + SPEC.floats]


def nothing_else_changed(bench: Bench, layer: int) -> None:
    """The other layer, and what lies around both."""
    left = bench.recurrent.copy()
    left[:, bench.recurrent_at[layer] : bench.recurrent_at[layer] + SPEC.floats] = 0
    assert not left.any()


@pytest.mark.parametrize(("slots", "chunk"), CUTS)
@pytest.mark.parametrize(("layer", "threads", "grid"), [(0, (1, 1), (1, 1)), (1, (4, 1), (2, 3))])
def test_convolution_goes_on_over_forwards_and_beside_others(slots, chunk, layer, threads, grid) -> None:
    rng = np.random.default_rng(1)
    x, taps = rng.normal(size=(N, CHANNELS)).astype(np.float32), rng.normal(size=(TAPS, CHANNELS)).astype(np.float32)
    bench, got = Bench((SPEC, SPEC), 3), []
    vectors = tuple(bench.vector(f"tap{j}", taps[j]) for j in range(TAPS))
    for first in range(0, N, chunk):
        part = x[first : first + chunk]
        source, out = bench.buffer("x", part), bench.empty("out", len(part), CHANNELS)
        bench.place(1, slots[first : first + chunk])
        launches = recurrent.lower_conv(Conv(source, vectors, out, layer), bench.memory())
        launches = [one for one in launches if all(one.grid(len(part), 1))]
        assert len(launches) == (1 if len(part) == 1 else 2)
        bench.run(launches, len(part), threads, grid)
        got.append(bench.get(out))
    for slot in set(slots):
        mine = [t for t in range(N) if slots[t] == slot]
        np.testing.assert_allclose(np.concatenate(got)[mine], conv_twin(x[mine], taps), rtol=1e-5, atol=1e-6)
        past = np.concatenate([np.zeros((TAPS - 1, CHANNELS), np.float32), x[mine]])[1 - TAPS :]
        assert (layer_of(bench, slot, layer)[: SPEC.conv_floats] == past.reshape(-1)).all()
    nothing_else_changed(bench, layer)


def test_a_convolution_refuses_to_write_where_it_reads() -> None:
    bench = Bench((SPEC,))
    x, taps = bench.buffer("x", np.zeros((1, CHANNELS))), tuple(bench.vector(f"{j}", np.zeros(3)) for j in range(TAPS))
    with pytest.raises(ValueError, match="a buffer of its own"):
        recurrent.lower_conv(Conv(x, taps, x, 0), bench.memory())


@pytest.mark.parametrize(("lanes", "warps", "grid"), [(1, 1, (1, 1)), (4, 2, (2, 2))])
def test_delta_gates(lanes: int, warps: int, grid: tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    x, raw = rng.normal(size=(3, CHANNELS)), rng.normal(size=(3, HEADS))
    beta, decay, rate, bias = raw, 9 * rng.normal(size=(3, HEADS)), -np.exp(raw[0]), rng.normal(size=HEADS)
    decay[0, :3] = 60, -60, 19
    bench = Bench()
    qkv, b, d = bench.buffer("qkv", x), bench.buffer("beta", beta), bench.buffer("decay", decay)
    op = DeltaGates(qkv, b, d, bench.vector("rate", rate), bench.vector("bias", bias), KEYS, KEY, 1e-6)
    (plain,) = recurrent.lower_delta_gates(op, bench.memory())
    kernel = recurrent.delta_gates(lanes, warps)
    bench.run([Launch(lambda n: kernel, plain.grid, plain.args)], 3, (lanes, warps), grid)
    heads = x[:, : 2 * KEYS * KEY].reshape(3, 2 * KEYS, KEY)
    unit = heads / np.sqrt((heads**2).sum(-1, keepdims=True) + 1e-6)
    unit[:, :KEYS] /= np.sqrt(KEY)
    want = np.concatenate([unit.reshape(3, -1), x[:, 2 * KEYS * KEY :]], axis=1)
    np.testing.assert_allclose(bench.get(qkv), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bench.get(b), sigmoid(beta), rtol=1e-5)
    np.testing.assert_allclose(bench.get(d), np.exp(rate * np.logaddexp(0, decay + bias)), rtol=1e-4, atol=1e-7)


def rule_run(slots, chunk, layer, lanes, warps, grid):
    """(bench, rows of out, inputs), the rule run on blocks of this shape."""
    rng = np.random.default_rng(3)
    qkv = rng.normal(size=(N, CHANNELS)).astype(np.float32) / 3
    beta, decay = (rng.uniform(low, 1, size=(N, HEADS)).astype(np.float32) for low in (0, 0.8))
    bench, got = Bench((SPEC, SPEC), 3), []
    kernel = recurrent.delta_rule(KEY, lanes, warps)
    for first in range(0, N, chunk):
        part = slice(first, first + chunk)
        buffers = [bench.buffer(name, values[part]) for name, values in (("qkv", qkv), ("b", beta), ("d", decay))]
        out = bench.empty("out", len(qkv[part]), HEADS * VALUE)
        bench.place(1, slots[part])
        (plain,) = recurrent.lower_delta_rule(DeltaRule(*buffers, out, layer, KEYS), bench.memory())
        launch = Launch(lambda n: kernel, plain.grid, plain.args)
        bench.run([launch], len(qkv[part]), (lanes, warps), grid)
        got.append(bench.get(out))
    return bench, np.concatenate(got), (qkv, beta, decay)


@pytest.mark.parametrize(("slots", "chunk"), CUTS)
def test_the_delta_rule_goes_on_over_forwards_and_beside_others(slots: list[int], chunk: int) -> None:
    for layer, lanes, warps, grid in ((0, 1, 1, (1, 1)), (1, 4, 2, (3, 2))):
        bench, got, inputs = rule_run(slots, chunk, layer, lanes, warps, grid)
        for slot in set(slots):
            mine = [t for t in range(N) if slots[t] == slot]
            want, s = rule_twin(*(values[mine] for values in inputs))
            np.testing.assert_allclose(got[mine], want, rtol=1e-4, atol=1e-5)
            held = layer_of(bench, slot, layer)[SPEC.conv_floats :]
            np.testing.assert_allclose(held, s.reshape(-1), rtol=1e-4, atol=1e-5)
        nothing_else_changed(bench, layer)


def test_the_delta_rule_has_the_same_bits_for_every_shape_and_company() -> None:
    alone = rule_run([0] * N, N, 0, 1, 1, (1, 1))[1]
    assert (alone == rule_run([1] * N, 2, 0, 4, 2, (2, 1))[1]).all()
    assert (alone == rule_run([0] * N, N, 0, 8, 8, (1, 1))[1]).all()
