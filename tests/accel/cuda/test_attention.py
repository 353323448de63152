"""Attention and KV store in the simulator against NumPy: formats, windows, grouped heads, spans, stale rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pantheon.accel.cuda import attention, kv_store
from pantheon.accel.cuda.attention_shape import Shape
from pantheon.accel.cuda.kv import (
    BLOCK,
    DIMS,
    SPAN,
    KVLayout,
    partial_floats,
    row_scales,
    row_words,
    spans,
    split_columns,
)
from pantheon.accel.cuda.lowering import COUNT, MAX_COLUMNS, At, Launch, Memory, Room
from pantheon.accel.reference import round_q4_0, round_q8_0
from pantheon.plan.builder import PlanBuilder
from pantheon.plan.ops import Attend, StoreKV
from pantheon.plan.state_spec import KVSpec, KVType, StateSpec
from tests.accel.cpu import twins

F32 = NDArray[np.float32]
#: floats from column to column beyond the row
GAP = 3


class Case:
    """Random q, k, v of some columns; layer 0 is stored but not read, so that where layer 1 lies matters."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, n: int, kv_type: KVType, window: int = 0, n_ctx: int = 0,
        slots: int = 1,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(heads * 100 + dim)
        self.q, self.k, self.v = (rng.normal(size=(n, h, dim)).astype(np.float32) for h in (heads, kv_heads, kv_heads))
        self.kv_heads, self.dim, self.window, self.kv_type = kv_heads, dim, window, kv_type
        build, n_ctx = PlanBuilder(), n_ctx or n
        names = [("q", heads), ("k", kv_heads), ("v", kv_heads), ("out", heads)]
        q, k, v, out = (build.buffer(name, h * dim) for name, h in names)
        self.stores = [StoreKV(v, k, 0), StoreKV(k, v, 1)]
        self.attend = Attend(q, out, 1, heads, kv_heads, dim, dim**-0.5, window)
        build.add(*self.stores, self.attend)
        build.begin_head(out)
        plan = build.finish("test", 1, n_ctx, out, StateSpec((KVSpec(kv_heads, dim, dim, window),) * 2))
        self.layout, self.places, end = KVLayout.of(plan, kv_type, n_ctx), {}, 0
        for b in (q, k, v, out):
            self.places[b] = At(end, b.width + GAP)
            end += MAX_COLUMNS * (b.width + GAP)
        self.memory = Memory(plan, 0, n_ctx, {}, {}, self.places, (), Room(0, 0, 0), end, self.layout, (), 0)
        self.floats = end + partial_floats(plan, n_ctx)
        self.kv = np.full(slots * self.layout.slot_words, -1, np.int32)  # stale rows of NaNs
        self.kv_scales = np.full(slots * self.layout.slot_scales, 0xFFFF, np.uint16)

    def want(self) -> F32:
        """[n, heads * dim] of one conversation."""
        stored = [twins.cached(x, self.kv_type).astype(np.float64) for x in (self.k, self.v)]
        out = twins.attention(self.q.astype(np.float64), *stored, self.kv_heads, self.dim**-0.5, self.window)
        return out.reshape(len(out), -1).astype(np.float32)

    def forward(
        self, rows: Any, positions: Any, slots: Any = 0, grid: tuple[int, int] = (1, 1), threads: int = 1, ops: Any = ()
    ) -> F32:
        """Rows of q, k, v at these positions of these slots, in one forward: out of each."""
        n, scratch = len(rows), np.full(self.floats, np.nan, np.float32)
        columns = np.zeros(4 * MAX_COLUMNS, np.int32)
        for (at, stride), values in zip(self.places.values(), (self.q, self.k, self.v), strict=False):
            for c, row in enumerate(rows):
                scratch[at + c * stride :][: values[0].size] = values[row].reshape(-1)
        columns[MAX_COLUMNS : MAX_COLUMNS + n] = slots
        columns[2 * MAX_COLUMNS : 2 * MAX_COLUMNS + n] = positions
        arrays = {"scratch": scratch, "kv": self.kv, "kv_scales": self.kv_scales, "columns": columns}
        for op in ops or (*self.stores, self.attend):
            lower: Any = kv_store.lower_store_kv if isinstance(op, StoreKV) else attention.lower_attend
            for one in lower(op, self.memory, threads):
                if all(one.grid(n, max(positions) + 1)):
                    launch(one, n, arrays, grid, threads)
        at, stride = self.places[self.attend.out]
        out = scratch[at : at + n * stride].reshape(n, stride)
        assert np.isnan(out[:, self.attend.out.width :]).all()
        return out[:, : self.attend.out.width]

    def stored(self) -> tuple[F32, F32]:
        """K and V of layer 1 of slot 0, [positions][kv_heads][dim], read back by the layout's own words."""
        layout, found = self.layout, []
        per, words, scales = DIMS[self.kv_type], row_words(self.kv_type, self.dim), row_scales(self.kv_type, self.dim)
        at, n_blocks = layout.layers[1], layout.slot_words // layout.block_words
        blocks = self.kv[: layout.slot_words].reshape(n_blocks, -1)[:, at.words_at :]
        blocks = blocks[:, : self.kv_heads * at.head_words].reshape(n_blocks, self.kv_heads, 2, -1)
        halves = self.kv_scales[: layout.slot_scales].reshape(n_blocks, -1)[:, at.scales_at :]
        halves = halves[:, : self.kv_heads * at.head_scales].reshape(n_blocks, self.kv_heads, 2, -1)
        for side, order in ((0, (0, 3, 1, 2)), (1, (0, 2, 1, 3))):
            shape = (words, BLOCK) if side == 0 else (BLOCK, words)
            part = blocks[:, :, side].reshape(n_blocks, self.kv_heads, *shape).transpose(order)
            rows = values(np.ascontiguousarray(part).reshape(-1, self.kv_heads, words), per)[..., : self.dim]
            if scales:
                shape = (scales, BLOCK) if side == 0 else (BLOCK, scales)
                part = halves[:, :, side].reshape(n_blocks, self.kv_heads, *shape).transpose(order)
                part = np.ascontiguousarray(part).view(np.float16).reshape(-1, self.kv_heads, scales)
                rows = rows * np.repeat(part.astype(np.float32), 32, axis=-1)[..., : self.dim]
            found.append(rows)
        return found[0], found[1]


def values(words: NDArray[np.int32], per: int) -> F32:
    """What words of `per` dims hold."""
    if per <= 2:
        return words.view(np.float32 if per == 1 else np.float16).astype(np.float32)
    bits = 32 // per
    parts = words[..., None] >> (bits * np.arange(per)) & ((1 << bits) - 1)
    return (parts - (1 << (bits - 1))).astype(np.float32).reshape(*words.shape[:-1], -1)


def launch(one: Launch, n: int, arrays: dict[str, Any], grid: tuple[int, int], threads: int) -> None:
    """One launch, on blocks of so many threads."""
    kernel = one.pick(n)
    filled = [n if arg == COUNT else arrays[arg] if isinstance(arg, str) else arg for arg in one.args]
    typed = [
        value if isinstance(value, np.ndarray) else np.dtype(str(kind)).type(value)
        for kind, value in zip(kernel.types, filled, strict=True)
    ]
    kernel.launch(grid, None, *typed, threads=(threads, 1))


@pytest.fixture
def uncut(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether the forwards to come go over all spans in one block, as those of many columns do."""
    usual = attention.split_columns

    def change(on: bool) -> None:
        monkeypatch.setattr(attention, "split_columns", (lambda *args: 0) if on else usual)

    return change


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(6, 2, 32, 0), (2, 2, 16, 0), (3, 1, 10, 0), (2, 1, 80, 0), (8, 2, 24, 5), (3, 3, 8, 1)],
)
def test_attention(heads: int, kv_heads: int, dim: int, window: int, kv_type: KVType, uncut: Any) -> None:
    """Equal to the twin; in one forward, column by column or in tiles of columns, bit for bit the same."""
    n = 9
    case = Case(heads, kv_heads, dim, n, kv_type, window)
    whole = case.forward(range(n), range(n))
    np.testing.assert_allclose(whole, case.want(), atol=3e-6)
    uncut(True)
    case.kv[:] = -1
    tiled = [case.forward(range(i, i + 3), range(i, i + 3)) for i in range(0, n, 3)]
    assert np.array_equal(np.concatenate(tiled), whole)


@pytest.mark.parametrize("kv_type", [KVType.F16, KVType.Q8_0])
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(3, 1, 0), (2, 2, 300)])
def test_contexts_of_many_spans(heads: int, kv_heads: int, window: int, kv_type: KVType, uncut: Any) -> None:
    """A decode step cut by spans over the blocks gives the very numbers of a prefill, which is not."""
    n = 2 * SPAN + 40
    case = Case(heads, kv_heads, 8, n, kv_type, window, 1024)
    for i in range(0, n, 200):
        case.forward(range(n)[i : i + 200], range(n)[i : i + 200], ops=case.stores)
    picked = [SPAN - 1, SPAN, 2 * SPAN - 1, 2 * SPAN, n - 2, n - 1]
    alone = [case.forward([i], [i], ops=[case.attend], grid=(2, 2))[0] for i in picked]
    np.testing.assert_allclose(alone, case.want()[picked], atol=3e-6)
    uncut(True)
    assert np.array_equal(case.forward(picked, picked, ops=[case.attend]), alone)


def test_conversations_share_a_forward_in_any_mix(uncut: Any) -> None:
    """A long one and a short one, column by column and in tiles that hold several slots."""
    case = Case(4, 2, 16, 270, KVType.F16, n_ctx=512, slots=3)
    for i in (0, 200):
        part = range(i, min(270, i + 200))
        case.forward(part, part, 2, ops=case.stores)
    rows, positions, slots = [3, 268, 1, 2, 269], [0, 268, 0, 1, 269], [1, 2, 0, 0, 2]
    together = case.forward(rows, positions, slots)
    uncut(True)
    assert np.array_equal(case.forward(rows, positions, slots), together)
    for c, (row, position, slot) in enumerate(zip(rows, positions, slots, strict=True)):
        assert np.array_equal(case.forward([row], [position], slot)[0], together[c])


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(("kv_type", "dim"), [(KVType.F16, 24), (KVType.Q4_0, 40)])
def test_every_shape_of_a_block_gives_the_same_bits(kv_type: KVType, dim: int, cut: bool, uncut: Any) -> None:
    n = 5
    case = Case(6, 2, dim, n, kv_type)
    uncut(not cut)
    want = case.forward(range(n), range(n))
    for threads, grid in ((7, (2, 1)), (64, (1, 2))):
        case.kv[:] = -1
        assert np.array_equal(case.forward(range(n), range(n), 0, grid if cut else (grid[0], 1), threads), want)


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_nothing_behind_a_column_reaches_it(fault: float, uncut: Any) -> None:
    """A later column of the same tile has a broken row."""
    case = Case(2, 1, 8, 4, KVType.F32)
    uncut(True)
    want = case.forward(range(4), range(4))
    case.k[3], case.v[3] = fault, fault
    with np.errstate(invalid="ignore"):
        got = case.forward(range(4), range(4))
    assert np.array_equal(got[:3], want[:3]) and not np.isfinite(got[3]).any()


@pytest.mark.parametrize("dim", [64, 40])
@pytest.mark.parametrize("kv_type", list(KVType))
def test_the_cache_holds_what_the_oracle_rounds_to(kv_type: KVType, dim: int) -> None:
    """Bit for bit; zeros, ties between magnitudes, and rows in two blocks of memory."""
    case = Case(2, 2, dim, 140, kv_type)
    case.k[1], case.k[2, 0, :4], case.v[139] = 0, (3.5, -3.5, 3.5, 0.5), np.linspace(-1, 1, dim)
    rounded = {KVType.Q8_0: round_q8_0, KVType.Q4_0: round_q4_0}.get(
        kv_type, lambda x: x.astype(np.float16).astype(np.float32) if kv_type is KVType.F16 else x
    )
    case.forward(range(140), range(140), ops=case.stores[1:])
    for got, rows in zip(case.stored(), (case.k, case.v), strict=True):
        assert np.array_equal(got[:140], rounded(rows))


def test_a_prefix_is_copied_in_whole_blocks() -> None:
    """Slot 1 goes on from slot 0's first positions as slot 0 does."""
    case = Case(2, 1, 32, 132, KVType.Q8_0, slots=2)
    case.forward(range(131), range(131), ops=case.stores)
    want = case.forward([131], [131])
    arrays = {"kv": case.kv, "kv_scales": case.kv_scales}
    ranges = case.layout.copy_ranges(0, 1, 131)
    assert [name for name, *_ in ranges] == ["kv", "kv_scales"]
    for name, source, target, n in ranges:
        arrays[name][target : target + n] = arrays[name][source : source + n]
    assert np.array_equal(case.forward([131], [131], 1), want)
    (name, source, target, n), _ = case.layout.copy_ranges(0, 1, 131, 130)
    assert (name, source, n) == ("kv", case.layout.block_words, case.layout.block_words)
    assert target == case.layout.slot_words + case.layout.block_words
    assert case.layout.copy_ranges(0, 1, 128, 128) == ()


@pytest.mark.parametrize(("heads", "n_ctx"), [(32, 4096), (128, 131072), (64, 1 << 20)])
def test_partial_sums_have_a_bound(heads: int, n_ctx: int) -> None:
    columns = split_columns(heads, 128, n_ctx)
    assert 0 <= columns * heads * spans(n_ctx) * 130 <= 16 << 20
    assert columns == 32 or (columns + 1) * heads * spans(n_ctx) * 130 > 16 << 20


@pytest.mark.parametrize("kv_type", list(KVType))
def test_shared_memory_suffices_and_vectors_are_aligned(kv_type: KVType) -> None:
    """48 KiB, which every device has; what the simulator can not see: reads of up to four floats at their own size."""
    for dim in (8, 10, 24, 33, 64, 80, 96, 100, 112, 128, 160, 192, 256):
        for group in (1, 2, 3, 4, 6, 8, 16, 20):
            for tile in attention.tiles(dim, group):
                s = Shape(kv_type, dim, group, tile, 256)
                assert 4 * s.floats <= 48 << 10 and tile % s.queries == 0 and s.items <= 256
                for n, places in ((tile, (s.scores_at, s.stride)), (s.queries, (s.scores_at, s.stride, s.stats_at))):
                    assert all(place % min(4, n) == 0 for place in places)
