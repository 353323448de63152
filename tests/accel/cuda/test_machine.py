"""The simulator's twins of inline PTX do what the instructions do, and each side has the other's names."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pantheon.accel.cuda import machine, tiles

#: on a device they are instructions of kernels, which Python can not call
twins = pytest.mark.skipif(not machine.SIMULATED, reason="twins that only the simulator has")


def _functions(body: list[ast.stmt]) -> dict[str, list[str]]:
    return {
        node.name: [a.arg for a in node.args.args if a.arg != "typing_ctx"]
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.name.startswith("asm")
    }


@pytest.mark.parametrize("module", [machine, tiles])
def test_both_sides_have_the_same_functions(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    (choice,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "SIMULATED"]
    simulated, device = _functions(choice.body), _functions(choice.orelse)
    assert {name: len(args) for name, args in simulated.items()} == {name: len(args) for name, args in device.items()}
    assert len(simulated) > 5


@twins
def test_halves_and_bits() -> None:
    for x in (0.0, -1.5, 6e-8, 65504.0, 1 / 3):
        bits = int(np.float16(x).view(np.uint16))
        assert machine.half_to_float(bits | 0x12340000) == np.float32(np.float16(x))
        assert machine.float_to_half(np.float32(x)) == bits
    assert machine.float_to_half(np.float32(2049.0)) == int(np.float16(2048).view(np.uint16))
    assert machine.as_float(0x3FC00000) == 1.5 and machine.as_word(np.float32(-2)) == -(2**30)


@twins
def test_dp4a_takes_signed_bytes() -> None:
    assert machine.dp4a(np.int32(0x7F80FF01), np.int32(0x7F80FF02), 5) == 5 + 127 * 127 + 128 * 128 + 1 + 2


@twins
def test_bytes_are_picked_from_both_words() -> None:
    a, b = np.int32(0x33221100), np.int32(0x77665544)
    assert machine.prmt(a, b, 0x7520) == 0x77552200


@twins
def test_integers_and_fused_products_are_rounded_once() -> None:
    assert [machine.to_int(np.float32(x)) for x in (0.5, 1.5, -2.5, -2.51)] == [0, 2, -2, -3]
    a = np.float32(1 + 2**-12)
    assert machine.fma(a, a, np.float32(-1 - 2**-11)) == np.float32(2**-24) != a * a - np.float32(1 + 2**-11)


def _lanes(call: Any) -> list[Any]:
    """What each lane of a warp of the simulator gets from call(lane)."""
    found: list[Any] = [None] * 32

    class Lane(threading.Thread):
        def __init__(self, lane: int) -> None:
            super().__init__()
            self.threadIdx = type("Place", (), {"x": lane, "y": 0})

        def run(self) -> None:
            found[self.threadIdx.x] = call(self.threadIdx.x)

    lanes = [Lane(i) for i in range(32)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    return found


@twins
@pytest.mark.parametrize("depth", [16, 32])
def test_tensor_cores_multiply_tiles(depth: int) -> None:
    rng = np.random.default_rng(depth)
    a, b = (rng.integers(-128, 128, (n, depth), dtype=np.int8) for n in (16, 8))
    rows, columns = a.view(np.int32), b.view(np.int32)
    quads = range(depth // 16)

    def call(lane: int) -> Any:
        g, t = divmod(lane, 4)
        left = tuple(rows[g + 8 * side, t + 4 * q] for q in quads for side in (0, 1))
        return machine.mma(left, tuple(columns[g, t + 4 * q] for q in quads), 1000 * t, -7)

    want = a.astype(np.int64) @ b.T.astype(np.int64)
    for lane, got in enumerate(_lanes(call)):
        g, t = divmod(lane, 4)
        even, odd = want[[g, g + 8]][:, [2 * t, 2 * t + 1]].T
        assert list(got) == [even[0] + 1000 * t, odd[0] - 7, even[1] + 1000 * t, odd[1] - 7]


@twins
def test_tiles_keep_to_their_columns() -> None:
    x = np.arange(40, dtype=np.float32)
    acc = tiles.gather(tiles.zeros(3), x, 2, 10)
    assert list(acc) == [2, 12, 22]
    two = tiles.add_floats(acc, (np.float32(2), np.float32(1)), x, 0, 10)
    assert list(two) == [2 + 0 + 1, 12 + 20 + 11, 22 + 40 + 21]
    words = np.array([0x01FF0102, 0x7F000000], np.int32)
    blocks = np.array([0x01010101, 0x02000000, 0, 0x01000002, 0x01000000, 9], np.int32)
    ints = tiles.dots(tiles.zeros(2), tuple(words), blocks, 0, 3)
    assert list(ints) == [1 - 1 + 1 + 2 + 127 * 2, 1 + 2 * 2 + 127]
    assert list(tiles.unbiased(ints, np.array([3, 1], np.int32), 2)) == [ints[0] - 12, ints[1] - 4]
    scales = np.array([0.5, 2], np.float32)
    assert list(tiles.add_scaled(acc[:2], np.float32(2), ints, scales)) == [2 + 257, 12 + 132 * 4]
    assert list(tiles.add_shifted(acc[:2], np.float32(-1), ints, scales)) == [2 - 128.5, 12 - 264]
    tiles.store(x, 1, 20, scales)
    assert x[1] == 0.5 and x[21] == 2 and x[2] == 2
