"""Products and quantised activations in the simulator, against dequantised weights and the CPU's int8 blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pantheon.accel.cuda import products, quantise, targets
from pantheon.accel.cuda.layouts import FLOATS, KINDS
from pantheon.accel.cuda.lowering import COUNT, At, Launch, Memory, Packed, Room
from pantheon.formats.quant import dequantize
from pantheon.plan.buffers import Buffer, Matrix, Vector
from pantheon.plan.builder import Plan, PlanBuilder
from pantheon.plan.ops import Add, MatMul
from pantheon.plan.state_spec import StateSpec
from tests.accel.cpu import twins
from tests.accel.cuda.packer import packed

ALL = sorted(KINDS) + sorted(FLOATS)
#: columns that every array has room for: the widest tile
COLUMNS = 32
MARK = np.float32(777)


def weights(rng: np.random.Generator, type_name: str, rows: int, cols: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """(uint8 [rows, row bytes], float64 values)."""
    if type_name not in FLOATS:
        raw: NDArray[Any] = twins.random_blocks(rng, type_name, rows, cols)
    else:
        raw = rng.normal(size=(rows, cols)).astype(np.float16 if type_name == "F16" else np.float32)
        if type_name == "BF16":
            raw = (raw.view(np.uint32) >> 16).astype(np.uint16)
    flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    return flat.reshape(rows, -1), dequantize(type_name, flat, rows * cols).reshape(rows, cols).astype(np.float64)


class Die:
    """One product y = W x on NumPy arrays: x at the front of scratch, then y, then the scales of x."""

    def __init__(self, type_name: str, raw: NDArray[Any], x: NDArray[Any], rows: int, out_width: int = 0) -> None:
        cols, build = x.shape[1], PlanBuilder()
        self.x, self.out = build.buffer("x", cols), build.buffer("out", out_width or rows)
        build.begin_head(self.x)
        logits = build.buffer("logits", 1)
        self.plan: Plan = build.finish("test", 1, 1, logits, StateSpec(()))
        self.matrix, self.bias = Matrix("w", rows, cols), Vector("bias", rows)
        quants, scales = packed(type_name, raw, cols)
        per_column, stride = -(-cols // 32), -(-cols // 4) * 4
        x_at, out_at = At(0, stride), At(COLUMNS * stride, self.out.width + 3)
        scales_at = out_at.at + COLUMNS * out_at.stride
        scratch = np.full(scales_at + COLUMNS * per_column, MARK)
        scratch[: COLUMNS * stride].reshape(COLUMNS, stride)[: len(x), :cols] = x
        self.arrays: dict[str, NDArray[Any]] = {
            "weights": np.concatenate([np.zeros(7, np.int32), quants, scales]), "scratch": scratch,
            "blocks": np.zeros(COLUMNS * per_column * 10, np.int32), "vectors": np.arange(rows + 5, dtype=np.float32),
        }  # fmt: skip
        room = Room(0, COLUMNS * per_column * 8, scales_at)
        place = Packed(type_name, rows, cols, 7, 7 + len(quants))
        buffers: dict[Buffer, At] = {self.x: x_at, self.out: out_at}
        self.memory = Memory(
            self.plan, 0, 64, {self.matrix: place}, {self.bias: 5}, buffers, (), room, 0, None, (), 0
        )  # fmt: skip

    def put(self, name: str, type_name: str, raw: NDArray[Any]) -> Matrix:
        """One more matrix for the same input."""
        matrix, at = Matrix(name, len(raw), self.x.width), len(self.arrays["weights"])
        quants, scales = packed(type_name, raw, self.x.width)
        self.arrays["weights"] = np.concatenate([self.arrays["weights"], quants, scales])
        self.memory.matrices[matrix] = Packed(type_name, len(raw), self.x.width, at, at + len(quants))
        return matrix

    def clear(self) -> None:
        """Nothing was written to `out`."""
        at, stride = self.memory.buffers[self.out]
        self.arrays["scratch"][at : at + COLUMNS * stride] = MARK

    def run(self, launches: list[Launch], n: int, shape: tuple[int, int] | None = None) -> NDArray[np.float32]:
        """[n, width] of `out` after the launches; other columns must be as they were."""
        for one in launches:
            kernel = one.pick(n)
            args = [n if arg == COUNT else self.arrays[arg] if isinstance(arg, str) else arg for arg in one.args]
            typed = [
                arg if isinstance(arg, np.ndarray) else np.dtype(str(kind)).type(arg)
                for kind, arg in zip(kernel.types, args, strict=True)
            ]
            kernel.launch(one.grid(n, 1), None, *typed, threads=shape)
        at, stride = self.memory.buffers[self.out]
        rows = self.arrays["scratch"][at : at + COLUMNS * stride].reshape(COLUMNS, stride)
        assert (rows[n:] == MARK).all() and (rows[:, self.out.width :] == MARK).all()
        return rows[:n, : self.out.width].copy()


def product(die: Die, n: int, bias: bool = False, add: bool = False, first: int = 0) -> NDArray[np.float32]:
    """The op as a runner does it."""
    op = MatMul(die.matrix, die.x, die.out, die.bias if bias else None, add, first)
    quantised = die.memory.matrices[die.matrix].type_name in KINDS
    before = quantise.lower_quantise(die.x, die.memory) if quantised else []
    return die.run([*before, *products.lower_matmul(op, die.memory)], n)


def activations(rng: np.random.Generator, n: int, cols: int) -> NDArray[np.float32]:
    """Columns of different sizes; one block is zero."""
    x = rng.normal(size=(n, cols)) * np.exp(rng.normal(size=(n, 1)))
    x[:, 64:96] = 0
    return x.astype(np.float32)


def close(got: NDArray[Any], want: NDArray[Any], tolerance: float = 2e-5) -> None:
    """Within a part of the typical size."""
    assert np.abs(got - want).max() <= tolerance * np.sqrt((want**2).mean())


@pytest.mark.parametrize("type_name", ALL)
def test_product_of_every_type_matches_the_twin(type_name: str) -> None:
    """A last group in part, more segments than units; the numbers of a column are the same in every tile."""
    rng = np.random.default_rng(1)
    rows, cols, results = 40, 256, {}
    raw, w = weights(rng, type_name, rows, cols)
    x = activations(rng, 13, cols)
    seen = twins.int8_blocks(x) if type_name in KINDS else x.astype(np.float64)
    for n in (1, 2, 3, 13):
        results[n] = product(Die(type_name, raw, x, rows), n)
        close(results[n], seen[:n] @ w.T)
    for n, got in results.items():
        assert np.array_equal(got, results[13][:n]), f"a tile for {n} columns differs"


@pytest.mark.parametrize("type_name", ["F16", "Q4_0", "Q6_K"])
def test_every_shape_of_a_block_gives_the_same_bits(type_name: str) -> None:
    rng = np.random.default_rng(2)
    rows, cols, found = 33, 256, []
    raw, _ = weights(rng, type_name, rows, cols)
    x = activations(rng, 3, cols)
    make = products.float_matmul if type_name in FLOATS else products.matmul
    for lanes, warps in ((1, 1), (4, 2), (32, 8)):  # the last is a device's
        die = Die(type_name, raw, x, rows)
        op = MatMul(die.matrix, die.x, die.out)
        (one,) = products.lower_matmul(op, die.memory)
        if type_name in KINDS:
            die.run(quantise.lower_quantise(die.x, die.memory), 3)
        shaped = Launch(lambda n, shape=(lanes, warps): make(type_name, 4, *shape), one.grid, one.args)
        found.append(die.run([shaped], 3))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.parametrize("type_name", ["IQ4_XS", "Q2_K", "Q5_1", "Q6_K"])
def test_tensor_cores_give_the_same_bits(type_name: str) -> None:
    """A warp of the simulator; a last group in part; 19 of the 32 columns of a tile."""
    rng = np.random.default_rng(8)
    rows, cols = (20, 256) if KINDS[type_name].sup > 1 else (40, 96)
    raw, _ = weights(rng, type_name, rows, cols)
    die = Die(type_name, raw, activations(rng, 19, cols), rows)
    want = product(die, 19, bias=True)
    (one,) = products.lower_matmul(MatMul(die.matrix, die.x, die.out, die.bias), die.memory)
    die.clear()
    tensor = Launch(lambda n: products.tensor_matmul(type_name, 1), lambda n, reach: (-(-rows // 32), 1), one.args)
    assert np.array_equal(die.run([tensor], 19), want)


def test_tensor_cores_are_for_many_columns_of_quants_on_dies_that_have_them() -> None:
    rng = np.random.default_rng(9)
    die = Die("Q4_K", weights(rng, "Q4_K", 40, 256)[0], activations(rng, 1, 256), 40)
    op = MatMul(die.matrix, die.x, die.out)
    found = {}
    for sm in (70, 80, 90):
        (one,) = products.lower_matmul(op, dataclasses.replace(die.memory, sm=sm))
        found[sm] = [(one.pick(n).name, one.grid(n, 1)) for n in (1, 2, 3, 8, 15, 16, 33)]
    few = [("matmul Q4_K x1", (2, 1)), ("matmul Q4_K x2", (2, 1)), ("matmul Q4_K x4", (2, 1))]
    few += [("matmul Q4_K x8", (2, 1)), ("matmul Q4_K x8", (2, 2))]
    assert found[70] == [*few, ("matmul Q4_K x8", (2, 2)), ("matmul Q4_K x8", (2, 5))]
    assert found[80] == found[90] == [*few, ("tensor_matmul Q4_K x32", (2, 1)), ("tensor_matmul Q4_K x32", (2, 2))]


@pytest.mark.parametrize("type_name", ["F32", "Q5_1"])
def test_bias_residual_and_offset(type_name: str) -> None:
    rng = np.random.default_rng(3)
    raw, w = weights(rng, type_name, 35, 64)
    x = activations(rng, 5, 64)
    seen = twins.int8_blocks(x) if type_name in KINDS else x.astype(np.float64)
    die = Die(type_name, raw, x, 35, out_width=50)
    got = product(die, 5, bias=True, first=10)
    close(got[:, 10:45], seen @ w.T + np.arange(5, 40))
    assert (got[:, :10] == MARK).all() and (got[:, 45:] == MARK).all()
    twice = product(die, 5, add=True, first=10)
    close(twice[:, 10:45], 2 * (seen @ w.T) + np.arange(5, 40))


def test_three_products_of_one_input_in_one_launch() -> None:
    """Each into its own place, with its own bias and residual; the bits of three launches."""
    rng = np.random.default_rng(7)
    rows, found = (40, 32, 7), []
    raws = [weights(rng, "Q4_1", n, 64)[0] for n in rows]
    x = activations(rng, 3, 64)
    for at_once in (False, True):
        die = Die("Q4_1", raws[0], x, rows[0], out_width=90)
        ops = [MatMul(die.matrix, die.x, die.out, die.bias)]
        for i, first in ((1, 40), (2, 80)):
            ops.append(MatMul(die.put(f"w{i}", "Q4_1", raws[i]), die.x, die.out, None, i == 2, first))
        before = quantise.lower_quantise(die.x, die.memory)
        each = [launch for op in ops for launch in products.lower_matmul(op, die.memory)]
        assert targets.alike(ops, die.memory) == ops
        found.append(die.run([*before, *(products.lower_matmuls(ops, die.memory) if at_once else each)], 3))
    assert np.array_equal(found[0], found[1])
    assert (found[0][:, 72:80] == MARK).all() and (found[0][:, 80:87] != MARK).all()


def test_products_go_together_only_when_they_are_alike() -> None:
    rng = np.random.default_rng(10)
    die = Die("Q8_0", weights(rng, "Q8_0", 32, 64)[0], activations(rng, 1, 64), 32, out_width=64)
    other = die.put("other", "Q4_0", weights(rng, "Q4_0", 32, 64)[0])
    floats = die.put("floats", "F16", weights(rng, "F16", 32, 64)[0])
    op = MatMul(die.matrix, die.x, die.out)
    apart, over = dataclasses.replace(op, out_first=32), dataclasses.replace(op, out_first=31)
    elsewhere = dataclasses.replace(apart, x=die.out)
    assert targets.alike([op, apart, op], die.memory) == [op, apart]
    for second in (over, elsewhere, MatMul(other, die.x, die.out, out_first=32), Add(die.x, die.x, die.out)):
        assert targets.alike([op, second], die.memory) == [op]
    assert targets.alike([MatMul(floats, die.x, die.out), apart], die.memory) == []
    onto_x = MatMul(die.put("square", "Q8_0", weights(rng, "Q8_0", 64, 64)[0]), die.x, die.x)
    assert targets.alike([onto_x, op], die.memory) == [onto_x]


@pytest.mark.parametrize("cols", [1, 30, 45, 71])
@pytest.mark.parametrize("type_name", sorted(FLOATS))
def test_odd_widths_of_float_weights(type_name: str, cols: int) -> None:
    rng = np.random.default_rng(4)
    raw, w = weights(rng, type_name, 34, cols)
    x = rng.normal(size=(9, cols)).astype(np.float32)
    close(product(Die(type_name, raw, x, 34), 9), x.astype(np.float64) @ w.T, 1e-5)


def test_quantised_activations_are_those_of_the_cpu() -> None:
    """Quads, half sums and scales; a block that is zero, one that is all but zero, rows apart from each other."""
    rng = np.random.default_rng(5)
    x = activations(rng, 3, 160)
    x[0, 96:128] = 1e-31
    raw, _ = weights(rng, "Q8_0", 1, 160)
    for threads in (1, 4):
        die = Die("Q8_0", raw, x, 1)
        die.run(quantise.lower_quantise(die.x, die.memory), 3, (threads, 1))
        room = die.memory.room
        q = die.arrays["blocks"][: 3 * 5 * 8].view(np.int8).reshape(3, 5, 32).astype(np.int64)
        d = die.arrays["scratch"][room.scales_at :][: 3 * 5].reshape(3, 5, 1)
        halves = die.arrays["blocks"][room.sums_at :][: 3 * 5 * 2].reshape(3, 5, 2)
        top = np.abs(x.reshape(3, 5, 32)).max(-1, keepdims=True)
        inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 1e-30)
        assert np.array_equal(q, np.rint(x.reshape(3, 5, 32) * inverse))
        assert np.array_equal(d, top * np.float32(1 / 127))
        assert np.array_equal(halves, q.reshape(3, 5, 2, 16).sum(-1))


def test_refusals() -> None:
    rng = np.random.default_rng(6)
    raw, _ = weights(rng, "F32", 48, 48)
    die = Die("F32", raw, activations(rng, 1, 48), 48)
    with pytest.raises(ValueError, match="its own input"):
        products.lower_matmul(MatMul(die.matrix, die.x, die.x), die.memory)
    with pytest.raises(ValueError, match="whole number of blocks"):
        quantise.lower_quantise(die.x, die.memory)
