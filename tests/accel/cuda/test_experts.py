"""Mixtures of experts in the simulator: routing, products of every type, the shared sum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pantheon.accel.cuda import experts, quantise
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.layouts import FLOATS, KINDS
from pantheon.accel.cuda.lowering import Launch
from pantheon.plan.buffers import Experts
from pantheon.plan.ops import ExpertMatMul, Mix, Route
from tests.accel.cpu import twins
from tests.accel.cpu.test_experts import route_twin
from tests.accel.cuda.bench import MARK, Bench
from tests.accel.cuda.packer import block_values
from tests.accel.cuda.test_products import close, weights

N, K = 5, 3


@pytest.mark.parametrize(("n", "k"), [(2, 1), (7, 3), (33, 33), (65, 8)])
@pytest.mark.parametrize("threads", [1, 6])
def test_routes_and_shares(n: int, k: int, threads: int) -> None:
    """Equal logits go to the lower id first; a k of n takes all."""
    logits = np.round(np.random.default_rng(n).normal(size=(4, n)) * 3, 1)
    bench = Bench()
    source, chosen, shares = bench.buffer("logits", logits), bench.empty("chosen", 4, k), bench.empty("shares", 4, k)
    bench.run(experts.lower_route(Route(source, chosen, shares), bench.memory()), 3, (threads, 1), (2, 1))
    ids, want = route_twin(logits[:3].astype(np.float32).astype(np.float64), k)
    assert np.array_equal(bench.get(chosen)[:3], ids)
    np.testing.assert_allclose(bench.get(shares)[:3], want, rtol=2e-6)
    assert (bench.get(chosen)[3] == MARK).all() and (bench.get(shares)[3] == MARK).all()


def test_too_many_experts_to_route_are_refused() -> None:
    bench = Bench()
    source, chosen, shares = (bench.empty(name, 1, width) for name, width in (("logits", 8193), ("c", 1), ("s", 1)))
    with pytest.raises(ValueError, match="8193 experts"):
        experts.lower_route(Route(source, chosen, shares), bench.memory())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_give_different_ids_inside(bad: float) -> None:
    logits = np.full((2, N), bad)
    logits[1, 1:] = 0
    bench = Bench()
    source, chosen, shares = bench.buffer("logits", logits), bench.empty("chosen", 2, K), bench.empty("shares", 2, K)
    with np.errstate(invalid="ignore"):
        bench.run(experts.lower_route(Route(source, chosen, shares), bench.memory()), 2)
    for row in bench.get(chosen):
        assert set(row) <= set(range(N)) and len(set(row)) == K


class _Products:
    """x of every column and choice, and the twin of W[chosen] x."""

    def __init__(self, type_name: str, columns: int, own: bool, rows: int = 35) -> None:
        rng, self.type_name = np.random.default_rng(3), type_name
        cols = 24 if type_name in FLOATS else max(64, block_values(type_name))
        raw, values = weights(rng, type_name, N * rows, cols)
        w = values.reshape(N, rows, cols)
        chosen = np.stack([rng.permutation(N)[:K] for _ in range(columns)])
        x = rng.normal(size=(columns, (K if own else 1) * cols)).astype(np.float32)
        seen = twins.int8_blocks(x) if type_name in KINDS else x.astype(np.float64)
        parts = seen.reshape(columns, -1, cols)
        products = [[w[e] @ parts[c, j if own else 0] for j, e in enumerate(ids)] for c, ids in enumerate(chosen)]
        self.want = np.array(products).reshape(columns, -1)
        self.bench = Bench()
        self.weight: Experts = self.bench.matrix("w", type_name, raw.reshape(N, rows, -1), cols)
        self.x, self.chosen = self.bench.buffer("x", x), self.bench.buffer("chosen", chosen)
        self.out = self.bench.empty("out", columns + 1, K * rows)

    def run(
        self, n: int, make: Callable[..., Kernel] | None = None, shape: tuple[int, int] | None = None
    ) -> np.ndarray:
        """[n, K * rows]; make: instead of the kernel for n columns, the one that it makes for blocks of this shape."""
        memory = self.bench.memory()
        (one,) = experts.lower_expert_matmul(ExpertMatMul(self.weight, self.x, self.chosen, self.out), memory)
        if make is not None:
            kernel = make(self.type_name, *(shape or ()))
            one = Launch(lambda n: kernel, lambda n, reach: (2, n * K if make is experts.by_pair else N), one.args)
        before = quantise.lower_quantise(self.x, memory) if self.type_name in KINDS else []
        self.bench.run([*before, one], n, shape, None)
        out = self.bench.get(self.out)
        assert (out[n:] == MARK).all()
        return out[:n].copy()


@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0", "Q4_K", "F32", "BF16"])
def test_products_follow_the_route(type_name: str) -> None:
    """Shared and own inputs, few pairs and many, a last group in part; the same bits however many columns there are."""
    for own in (False, True):
        case = _Products(type_name, 3, own)
        few, many = case.run(1), case.run(3)
        close(few, case.want[:1])
        close(many, case.want)
        assert np.array_equal(few, many[:1])


def test_few_pairs_and_many_take_the_kernels_meant_for_them() -> None:
    case = _Products("Q4_0", 3, False)
    (one,) = experts.lower_expert_matmul(
        ExpertMatMul(case.weight, case.x, case.chosen, case.out), case.bench.memory()
    )  # fmt: skip
    assert one.pick(1) is experts.by_pair("Q4_0") and one.grid(1, 1) == (2, K)
    assert one.pick(2) is experts.by_expert("Q4_0") and one.grid(2, 1) == (2, N)


@pytest.mark.parametrize("type_name", ["F16", "Q4_0"])
@pytest.mark.parametrize("make", [experts.by_pair, experts.by_expert])
def test_every_shape_of_a_block_gives_the_same_bits(type_name: str, make: Callable[..., Kernel]) -> None:
    one, several = (_Products(type_name, 2, True).run(2, make, shape) for shape in ((1, 1), (4, 2)))
    assert np.array_equal(one, several)


def test_pairs_are_looked_up_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_CHUNK", 4)
    case = _Products("Q8_0", 3, False)
    close(case.run(3, experts.by_expert.__wrapped__), case.want)


@pytest.mark.parametrize("bad", [-3.0, 5.0, 1e9])
def test_ids_outside_read_the_nearest_expert(bad: float) -> None:
    case, near = _Products("Q8_0", 2, False), _Products("Q8_0", 2, False)
    for other, value in ((case, bad), (near, float(np.clip(bad, 0, N - 1)))):
        other.bench.parts["scratch"][2 * list(other.bench.buffers).index(other.chosen)][:K] = value
    assert np.array_equal(case.run(1), near.run(1)) and np.array_equal(case.run(2), near.run(2))


def test_parts_of_floats_that_are_not_aligned_are_refused() -> None:
    bench = Bench()
    weight = bench.matrix("w", "F32", np.zeros((2, 3, 4 * 6), np.uint8), 6)
    x, chosen, out = bench.empty("x", 1, 12), bench.empty("chosen", 1, 2), bench.empty("out", 1, 6)
    with pytest.raises(ValueError, match="not aligned"):
        experts.lower_expert_matmul(ExpertMatMul(weight, x, chosen, out), bench.memory())


@pytest.mark.parametrize("width", [32, 41])
def test_mix_adds_the_shares_in_order(width: int) -> None:
    rng = np.random.default_rng(5)
    x, shares, base = (rng.normal(size=(4, w)).astype(np.float32) for w in (K * width, K, width))
    bench = Bench()
    out = bench.buffer("out", base)
    op = Mix(bench.buffer("x", x), bench.buffer("shares", shares), out)
    bench.run(experts.lower_mix(op, bench.memory()), 3, (4, 1), (2, 2))
    want = base.astype(np.float64) + (x.astype(np.float64).reshape(4, K, width) * shares[..., None]).sum(1)
    got = bench.get(out)
    close(got[:3], want[:3], 1e-6)
    assert np.array_equal(got[3], base[3])
