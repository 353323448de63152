"""Packing and the op table refuse what does not fit before a kernel sees it; weights are given back as they go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pantheon.accel.cpu import carried, kernels, layouts, pack, sizes
from pantheon.accel.cpu.arena import Arena
from pantheon.accel.cpu.executor import CpuExecutor
from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.accel.cpu.pack import Packer, packed_bytes
from pantheon.accel.executor import RawTensor
from pantheon.errors import ModelFileError
from pantheon.formats import quant
from pantheon.formats.quantize import quantize
from pantheon.plan.buffers import Buffer, Matrix, Vector
from pantheon.plan.ops import Add, Attend, Embed, Gate, MatMul, RmsNorm, Rope, StoreKV
from pantheon.plan.rope import RopeSpec
from pantheon.plan.state_spec import KVSpec, KVType
from tests.accel.cpu.harness import Bench
from tests.accel.cpu.pack_twin import packed
from tests.accel.cpu.test_invariance import small_model


def test_packed_weights_take_about_the_room_of_the_file() -> None:
    """At most 6 % more (K types store sub-scales as bytes)."""
    for name, kind in layouts.KINDS.items():
        values, nbytes = FILE_BLOCK[name]
        in_file = 1024 * 1024 // values * nbytes
        assert in_file <= sum(kind.packed_bytes(1024, 1024)) < 1.27 * in_file, name
    assert sum(packed_bytes("Q4_K", 1024, 1024)) < 1.06 * 1024 * 1024 // 256 * 144
    assert sum(packed_bytes("Q4_1", 1024, 1024)) == 1024 * 1024 // 32 * 20


def _raw(rng: np.random.Generator, type_name: str, rows: int, cols: int) -> RawTensor:
    """Any bytes: packing moves bits and reads no number."""
    values, nbytes = FILE_BLOCK[type_name]
    data = rng.integers(0, 256, rows * (cols // values) * nbytes, dtype=np.uint8)
    return RawTensor("weight", type_name, (rows, cols), data)


@pytest.mark.parametrize("type_name", list(FILE_BLOCK))
def test_packing_kernels_agree_with_their_twin(type_name: str) -> None:
    """Byte for byte: whole and partial groups, rows from the middle of a tensor, any number of threads."""
    kernels.prepare([("pack", type_name)])
    rng = np.random.default_rng(len(type_name))
    cols = 3 * max(FILE_BLOCK[type_name][0], 43 if type_name in layouts.FLOATS else 32)
    for rows, first, count, threads in ((16, 0, 16, 1), (71, 0, 71, 3), (71, 5, 33, 2), (3, 2, 1, 1)):
        raw = _raw(rng, type_name, rows, cols)
        row = raw.data.size // rows
        want = packed(type_name, raw.data.reshape(rows, row)[first : first + count], cols)
        arena = Arena(sum(map(len, want)) + 256)
        packer = Packer(threads)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pack, "_PIECE_BYTES", 2 * row)
                got = packer.pack(raw, Matrix("weight", count, cols, first), arena)
        finally:
            packer.close()
        assert (got.type_name, got.rows, got.cols, got.nbytes) == (type_name, count, cols, sum(map(len, want)))
        for address, plane in zip((got.quants, got.scales), want, strict=True):
            start = address - arena.address
            assert np.array_equal(arena._bytes[start : start + len(plane)], plane), (type_name, rows, first)


CARRIED = [kind.name for kind in quant.all_types() if carried.is_carried(kind.name)]


@pytest.mark.parametrize("type_name", CARRIED)
def test_a_carried_type_is_packed_as_its_carrier(type_name: str) -> None:
    """The same bytes as packing the dequantised rows as Q8_0, however they are cut; predicted as such (M223)."""
    kernels.prepare([("pack", carried.CARRIER)])
    values, nbytes = carried.block(type_name)
    rows, first, count, cols = 71, 5, 50, 2 * values
    rng = np.random.default_rng(values)
    # bytes of which a scale is a number, and neither huge nor next to nothing
    low, high = (0x70, 0x90) if type_name == "MXFP4" else (0, 0x40)
    data = rng.integers(low, high, rows * 2 * nbytes, dtype=np.uint8)
    floats = quant.dequantize(type_name, data, rows * cols).reshape(rows, cols)[first : first + count]
    assert np.isfinite(floats).all() and np.abs(floats).max() > 0
    want = packed(carried.CARRIER, quantize(carried.CARRIER, floats).reshape(count, -1), cols)
    for part_rows, threads in ((16, 1), (32, 2), (1000, 2)):
        arena, packer = Arena(sum(map(len, want)) + 256), Packer(threads)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(carried, "_PART", part_rows * cols)
                patch.setattr(pack, "_PIECE_BYTES", 3 * 34 * cols // 32)
                raw = RawTensor("weight", type_name, (rows, cols), data)
                got = packer.pack(raw, Matrix("weight", count, cols, first), arena)
        finally:
            packer.close()
        assert got.type_name == carried.CARRIER and got.nbytes == sum(packed_bytes(carried.CARRIER, count, cols))
        for address, plane in zip((got.quants, got.scales), want, strict=True):
            start = address - arena.address
            assert np.array_equal(arena._bytes[start : start + len(plane)], plane), (type_name, part_rows)


@pytest.mark.parametrize("kv_type", list(KVType))
def test_m192_predicted_bytes_are_what_a_load_takes(kv_type: KVType) -> None:
    for types, n_ctx, n_slots, threads in ((("Q4_1", "F32"), 100, 3, 1), (("Q6_K", "Q8_0"), 512, 1, 3)):
        plan, source = small_model(types)
        die = CpuExecutor(threads)
        names = {name: raw.type_name for name, raw in source.tensors.items()}
        wanted = die.predict(plan, names, n_ctx=n_ctx, n_slots=n_slots, kv_type=kv_type)
        with_runner = die.load(plan, source, n_ctx=n_ctx, kv_type=kv_type)
        got = {**with_runner.memory(), "kv": with_runner.new_state(n_slots, n_ctx).nbytes()}
        with_runner.close()
        assert got == wanted


def test_logits_have_room_for_few_columns_only() -> None:
    """The buffers of the head are as long as the most wanted columns, those of the body as the most columns."""
    plan, _ = small_model(("Q4_1",))
    rows = sizes.buffer_rows(plan)
    assert rows[plan.logits] == rows[plan.head_in] == sizes.MAX_WANTED
    assert rows[plan.hidden] == sizes.MAX_COLUMNS


def test_every_tensor_is_released_once_after_its_last_use() -> None:
    plan, source = small_model(("Q4_1", "F32"))
    seen: list[tuple[str, int, int]] = []
    runner = CpuExecutor(1).load(
        plan, source, n_ctx=64, kv_type=KVType.F16, progress=lambda *event: seen.append(event)
    )  # fmt: skip
    names = [m.tensor for m in plan.matrices()]
    assert source.released == names
    compiled = [e for e in seen if e[0] == "kernels"]
    assert seen[: len(compiled)] == compiled and compiled[-1][1] == compiled[-1][2] > 0
    seen = seen[len(compiled) :]
    assert [e[0] for e in seen] == ["weights"] * len(names)
    assert seen[-1][1] == seen[-1][2] and [e[1] for e in seen] == sorted(e[1] for e in seen)
    runner.warm_up(lambda *event: pytest.fail(f"{event}: everything was there before the weights"))
    assert runner.memory()["weights"] > 0
    runner.close()


def _load(bench: Bench) -> None:
    CpuExecutor(1).load(bench.plan(), bench.source, n_ctx=64, kv_type=KVType.F32).close()


@pytest.mark.parametrize(
    ("type_name", "shape", "nbytes", "wanted"),
    [
        ("Q4_0", (16, 64), 16 * 36 - 1, (16, 64)),
        ("Q4_0", (16, 64), 16 * 36, (17, 64)),
        ("Q4_0", (16, 64), 16 * 36, (16, 32)),
        ("Q4_0", (16, 48), 16 * 27, (16, 48)),
        ("Q4_K", (16, 128), 16 * 72, (16, 128)),
        ("NVFP4", (16, 256), 16 * 144, (16, 256)),
        ("F32", (32,), 128, (2, 16)),
    ],
)
def test_tensors_of_another_shape_or_type_are_refused(
    type_name: str, shape: tuple[int, ...], nbytes: int, wanted: tuple[int, int]
) -> None:
    bench = Bench()
    x, out = bench.input("x", np.zeros((1, wanted[1]))), bench.build.buffer("out", wanted[0])
    bench.source.add("weight", type_name, shape, np.zeros(nbytes, np.uint8))
    bench.ops = [MatMul(Matrix("weight", *wanted), x, out)]
    with pytest.raises(ModelFileError, match="tensor weight"):
        _load(bench)


def test_a_short_norm_weight_is_refused() -> None:
    bench = Bench()
    x = bench.input("x", np.zeros((1, 32)))
    bench.source.floats("norm", np.ones(31))
    bench.ops = [RmsNorm(x, Vector("norm", 32), x, 1e-5)]
    with pytest.raises(ModelFileError, match="tensor norm"):
        _load(bench)


_KV = (KVSpec(2, 16, 16),)
_BAD: dict[str, Callable[[Bench, Buffer, Buffer], object]] = {
    "norm": lambda b, x, y: RmsNorm(x, b.vector("n", np.ones(16)), y, 1e-5),
    "gate": lambda b, x, y: Gate(x, y, x),
    "add": lambda b, x, y: Add(x, y, y),
    "rope heads": lambda b, x, y: Rope(x, 3, 16, b.build.rope(RopeSpec(16, 1e4, "norm"))),
    "rope dims": lambda b, x, y: Rope(x, 2, 16, b.build.rope(RopeSpec(18, 1e4, "norm"))),
    "rope table": lambda b, x, y: Rope(x, 2, 16, 4),
    "kv width": lambda b, x, y: StoreKV(x, y, 0),
    "kv layer": lambda b, x, y: StoreKV(x, x, 1),
    "attend heads": lambda b, x, y: Attend(x, x, 0, 2, 0, 16, 1.0),
    "attend groups": lambda b, x, y: Attend(y, y, 0, 3, 2, 16, 1.0),
    "attend kv heads": lambda b, x, y: Attend(x, x, 0, 2, 1, 16, 1.0),
    "attend width": lambda b, x, y: Attend(x, y, 0, 2, 2, 16, 1.0),
    "product cols": lambda b, x, y: MatMul(b.matrix("w", "F32", (8, 16), np.zeros((8, 16))), x, y),
    "product rows": lambda b, x, y: MatMul(b.matrix("w", "F32", (8, 32), np.zeros((8, 32), "f4")), x, y, out_first=41),
    "table": lambda b, x, y: Embed(b.matrix("w", "F32", (8, 32), np.zeros((8, 32), "f4")), x),
}


@pytest.mark.parametrize("what", list(_BAD))
def test_plans_that_contradict_themselves_are_refused(what: str) -> None:
    """x is 32 wide, y is 48 wide."""
    bench = Bench(_KV)
    x, y = bench.input("x", np.zeros((1, 32))), bench.input("y", np.zeros((1, 48)))
    bench.ops = [_BAD[what](bench, x, y)]  # type: ignore[list-item]
    with pytest.raises((ValueError, ModelFileError)):
        _load(bench)


def test_columnwise_ops_share_a_phase_and_products_of_one_input_too() -> None:
    plan, source = small_model(("Q4_1",))
    runner = CpuExecutor(1).load(plan, source, n_ctx=64, kv_type=KVType.F16)
    names = [[row.keys[0][-1 if row.keys[0][0] == "pointwise" else 0] for row in p.rows] for p in runner._phases]
    runner.close()
    block = [
        ["matmul"] * 3, ["norm", "norm", "store"], ["attend"], ["combine", "quantise"], ["matmul"],
        ["rms_norm", "quantise"], ["matmul"] * 2, ["silu", "quantise"], ["matmul"],
    ]  # fmt: skip
    assert names[0] == ["embed", "rms_norm", "quantise"]
    assert names[1:10] == block
    assert names[-2:] == [["gather", "rms_norm", "quantise"], ["matmul"]]
    assert [p.split for p in runner._phases[5:10]] == [0, 0, 0, 1, 0], "only block-wise ops are cut in parts"
