"""Attention and KV store in the simulator against NumPy: formats, windows, grouped heads, spans, stale rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pantheon.accel.cuda import attention, kv_store
from pantheon.accel.cuda.kv import KVLayout, partial_floats
from pantheon.accel.cuda.lowering import COUNT, MAX_COLUMNS, At, Launch, Memory, Room
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
        self, rows: Any, positions: Any, slots: Any = None, grid: tuple[int, int] = (1, 1), threads: int = 1
    ) -> F32:
        """Rows of q, k, v at these positions of these slots, in one forward: out of each."""
        n = len(rows)
        scratch, columns = np.full(self.floats, np.nan, np.float32), np.zeros(4 * MAX_COLUMNS, np.int32)
        for (at, stride), values in zip(self.places.values(), (self.q, self.k, self.v), strict=False):
            for c, row in enumerate(rows):
                scratch[at + c * stride :][: values[0].size] = values[row].reshape(-1)
        columns[MAX_COLUMNS : MAX_COLUMNS + n] = 0 if slots is None else slots
        columns[2 * MAX_COLUMNS : 2 * MAX_COLUMNS + n] = positions
        arrays = {"scratch": scratch, "kv": self.kv, "kv_scales": self.kv_scales, "columns": columns}
        reach = max(positions) + 1
        for op in (*self.stores, self.attend):
            lower: Any = kv_store.lower_store_kv if isinstance(op, StoreKV) else attention.lower_attend
            for one in lower(op, self.memory, threads):
                if all(one.grid(n, reach)):
                    launch(one, n, arrays, grid, threads)
        at, stride = self.places[self.attend.out]
        out = scratch[at : at + n * stride].reshape(n, stride)
        assert np.isnan(out[:, self.attend.out.width :]).all()
        return out[:, : self.attend.out.width]


def launch(one: Launch, n: int, arrays: dict[str, Any], grid: tuple[int, int], threads: int) -> None:
    """One launch, on blocks of so many threads."""
    kernel = one.pick(n)
    values = [n if arg == COUNT else arrays[arg] if isinstance(arg, str) else arg for arg in one.args]
    typed = [
        value if isinstance(value, np.ndarray) else np.dtype(str(kind)).type(value)
        for kind, value in zip(kernel.types, values, strict=True)
    ]
    kernel.launch(grid, None, *typed, threads=(threads, 1))


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(6, 2, 32, 0), (2, 2, 16, 0), (4, 1, 10, 0), (2, 1, 80, 0), (4, 2, 24, 5), (3, 3, 8, 1)],
)
def test_attention(heads: int, kv_heads: int, dim: int, window: int, kv_type: KVType) -> None:
    """Equal to the twin, chunked or column by column, bit for bit the same."""
    n = 13
    case = Case(heads, kv_heads, dim, n, kv_type, window)
    whole = case.forward(range(n), range(n))
    np.testing.assert_allclose(whole, case.want(), atol=3e-6)
    single = [case.forward([i], [i])[0] for i in range(n)]
    assert np.array_equal(single, whole)
