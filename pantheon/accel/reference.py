"""The reference executor: a plan in naive NumPy, float32, one op at a time.  The oracle that kernels are tested on.

Weights are dequantised to float32 (slow, four bytes a weight): exact, small, readable; not for serving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.executor import Columns, Progress, WeightSource
from pantheon.accel.hidden import normed
from pantheon.errors import ModelFileError
from pantheon.formats.quant import UnsupportedType, dequantize
from pantheon.plan.buffers import Buffer, Experts, Matrix, Vector
from pantheon.plan.builder import Plan
from pantheon.plan.ops import (
    Add,
    Attend,
    Embed,
    ExpertMatMul,
    Gate,
    MatMul,
    Mix,
    Op,
    RmsNorm,
    Rope,
    Route,
    StoreKV,
)
from pantheon.plan.rope import RopeSpec, rope_table
from pantheon.plan.state_spec import KVType

Array = NDArray[np.float32]


def round_q8_0(rows: Array) -> Array:
    """float32 rows [..., dim] as a Q8_0 cache gives them back: int8 times one F16 scale for every 32 dims."""
    dim = rows.shape[-1]
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -dim % 32)])
    blocks = padded.reshape(*rows.shape[:-1], -1, 32).astype(np.float32)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = (top * np.float32(1 / 127)).astype(np.float16).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    values = np.clip(np.rint(blocks * inverse), -127, 127) * scale
    return values.reshape(padded.shape)[..., :dim].astype(np.float32)


class ReferenceState:
    """KV rows: per layer k and v [n_slots, n_ctx, kv_heads, dim], float32 or float16; Q8_0 as floats, rounded."""

    def __init__(self, plan: Plan, n_slots: int, n_ctx: int, kv_type: KVType) -> None:
        self.n_slots, self.n_ctx = n_slots, n_ctx
        dtype = np.float16 if kv_type is KVType.F16 else np.float32
        self.k = [np.zeros((n_slots, n_ctx, kv.kv_heads, kv.k_dim), dtype) for kv in plan.state.kv]
        self.v = [np.zeros((n_slots, n_ctx, kv.kv_heads, kv.v_dim), dtype) for kv in plan.state.kv]

    def reset(self, slot: int) -> None:
        """Forget a conversation."""
        for rows in self.k + self.v:
            rows[slot] = 0

    def truncate(self, slot: int, n: int) -> None:
        """Keep the first n positions."""
        for rows in self.k + self.v:
            rows[slot, n:] = 0

    def copy_prefix(self, source: int, target: int, n: int, first: int = 0) -> None:
        """Make target begin with source's first n positions, of which it has the first `first` already."""
        for rows in self.k + self.v:
            rows[target, first:n] = rows[source, first:n]

    def nbytes(self) -> int:
        """Bytes of all KV rows."""
        return sum(rows.nbytes for rows in self.k + self.v)


class ReferenceRunner:
    """Runs one plan; see accel/executor.py for the contract."""

    max_columns = 512

    def __init__(
        self, plan: Plan, source: WeightSource, n_ctx: int, kv_type: KVType, progress: Progress | None
    ) -> None:
        self.plan, self.kv_type, self.n_ctx = plan, kv_type, n_ctx
        self._tensors: dict[str, Array] = {}
        weights: list[Matrix | Vector] = [*plan.matrices(), *plan.vectors()]
        names = list(dict.fromkeys(w.tensor for w in weights))
        factors = [spec.factors_at(n_ctx) for spec in plan.ropes]
        for i, name in enumerate(names + [name for name in factors if name]):
            if progress:
                progress("weights", i, len(names))
            raw = source.tensor(name)
            try:
                flat = dequantize(raw.type_name, raw.data, int(np.prod(raw.shape)))
            except UnsupportedType as fault:
                raise ModelFileError(f"tensor {name}", fault.message) from None
            self._tensors[name] = flat.reshape(raw.shape)
            source.release(name)
        self._ropes = [self._table(spec) for spec in plan.ropes]
        self._run: dict[type, Callable[[Any, _Call], None]] = {
            Embed: self._embed, RmsNorm: self._norm, MatMul: self._matmul, Rope: self._rope,
            StoreKV: self._store_kv, Attend: self._attend, Gate: self._gate, Add: self._add,
            Route: self._route, ExpertMatMul: self._experts, Mix: self._mix,
        }  # fmt: skip

    def _table(self, spec: RopeSpec) -> tuple[Array, Array, str]:
        name = spec.factors_at(self.n_ctx)
        return (*rope_table(spec, self.n_ctx, self._tensors[name] if name else None), spec.pairing)

    def _matrix(self, w: Matrix) -> Array:
        return self._tensors[w.tensor][w.first_row : w.first_row + w.rows]

    def _vector(self, w: Vector) -> Array:
        return self._tensors[w.tensor][w.first : w.first + w.size]

    def new_state(self, n_slots: int, n_ctx: int) -> ReferenceState:
        """Fresh KV rows."""
        return ReferenceState(self.plan, n_slots, n_ctx, self.kv_type)

    def forward(self, state: Any, columns: Columns) -> Array:
        """float32 [n_wanted, n_vocab]."""
        columns.check(self.plan.n_vocab, state.n_slots, min(state.n_ctx, self.n_ctx))
        call = _Call(state, columns, [np.zeros((len(columns.tokens), b.width), np.float32) for b in self.plan.buffers])
        self._ops(self.plan.body, call)
        wanted = columns.wanted
        if not len(wanted):
            return np.zeros((0, self.plan.n_vocab), np.float32)
        hidden = call.rows[self.plan.hidden.index][wanted]
        call.rows = [np.zeros((len(wanted), b.width), np.float32) for b in self.plan.buffers]
        call.rows[self.plan.head_in.index] = hidden
        self._ops(self.plan.head, call)
        return call.rows[self.plan.logits.index]

    def hidden(self, state: Any, columns: Columns) -> Array:
        """float32 [n_wanted, width]: behind the last norm."""
        columns.check(self.plan.n_vocab, state.n_slots, min(state.n_ctx, self.n_ctx))
        call = _Call(state, columns, [np.zeros((len(columns.tokens), b.width), np.float32) for b in self.plan.buffers])
        self._ops(self.plan.body, call)
        norm = self.plan.last_norm
        rows = call.rows[self.plan.hidden.index][columns.wanted]
        return normed(rows, norm, self._vector(norm.weight) if norm is not None else None)

    def _ops(self, ops: tuple[Op, ...], call: _Call) -> None:
        for op in ops:
            self._run[type(op)](op, call)

    def _embed(self, op: Embed, call: _Call) -> None:
        call.put(op.out, self._matrix(op.table)[call.columns.tokens] * np.float32(op.scale))

    def _norm(self, op: RmsNorm, call: _Call) -> None:
        x = call.get(op.x).reshape(-1, op.groups, op.weight.size)
        mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
        scale = (1.0 / np.sqrt(mean + op.eps)).astype(np.float32)
        call.put(op.out, (x * scale * self._vector(op.weight)).reshape(-1, op.out.width))

    def _matmul(self, op: MatMul, call: _Call) -> None:
        y = call.get(op.x) @ self._matrix(op.weight).T
        if op.bias is not None:
            y = y + self._vector(op.bias)
        out = call.get(op.out)[:, op.out_first : op.out_first + op.weight.rows]
        out[:] = out + y if op.add else y

    def _rope(self, op: Rope, call: _Call) -> None:
        cos, sin, pairing = self._ropes[op.table]
        half = cos.shape[1]
        c, s = (t[call.columns.positions][:, None, :] for t in (cos, sin))
        x = call.get(op.x).reshape(-1, op.heads, op.head_dim)
        first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if pairing == "neox":
            first, second = slice(0, half), slice(half, 2 * half)
        a, b = x[..., first].copy(), x[..., second].copy()
        x[..., first] = a * c - b * s
        x[..., second] = a * s + b * c

    def _store_kv(self, op: StoreKV, call: _Call) -> None:
        kv, at = self.plan.state.kv[op.layer], (call.columns.slots, call.columns.positions)
        rows = (call.get(op.k).reshape(-1, kv.kv_heads, kv.k_dim), call.get(op.v).reshape(-1, kv.kv_heads, kv.v_dim))
        if self.kv_type is KVType.Q8_0:
            rows = (round_q8_0(rows[0]), round_q8_0(rows[1]))
        call.state.k[op.layer][at], call.state.v[op.layer][at] = rows

    def _attend(self, op: Attend, call: _Call) -> None:
        """Column by column: the whole score row of a query is in view."""
        group = op.heads // op.kv_heads
        q = call.get(op.q).reshape(-1, op.kv_heads, group, op.head_dim)
        out = call.get(op.out)
        for c, (slot, position) in enumerate(zip(call.columns.slots, call.columns.positions, strict=True)):
            first = max(0, position + 1 - op.window) if op.window else 0
            k = call.state.k[op.layer][slot, first : position + 1].astype(np.float32)
            v = call.state.v[op.layer][slot, first : position + 1].astype(np.float32)
            scores = np.einsum("kgd,pkd->kgp", q[c], k) * np.float32(op.scale)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[c] = np.einsum("kgp,pkd->kgd", weights, v).reshape(-1)

    def _gate(self, op: Gate, call: _Call) -> None:
        g = call.get(op.gate).astype(np.float64)
        if op.act == "silu":
            act = g / (1.0 + np.exp(np.minimum(-g, 700.0)))
        else:
            act = 0.5 * g * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (g + 0.044715 * g**3)))
        call.put(op.out, act.astype(np.float32) * call.get(op.up))

    def _add(self, op: Add, call: _Call) -> None:
        call.put(op.out, call.get(op.x) + call.get(op.y))

    def _route(self, op: Route, call: _Call) -> None:
        logits = call.get(op.logits).astype(np.float64)
        order = np.argsort(-logits, axis=-1, kind="stable")[:, : op.chosen.width]
        odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
        odds /= odds.sum(axis=-1, keepdims=True)
        mine = np.take_along_axis(odds, order, axis=-1)
        call.put(op.chosen, order.astype(np.float32))
        call.put(op.shares, (mine / np.maximum(mine.sum(axis=-1, keepdims=True), 2.0**-14)).astype(np.float32))

    def _experts(self, op: ExpertMatMul, call: _Call) -> None:
        w: Experts = op.weight
        weights = self._tensors[w.tensor][:, w.first_row : w.first_row + w.rows]
        chosen = call.get(op.chosen).astype(int)
        k = chosen.shape[1]
        x = call.get(op.x).reshape(len(chosen), -1, w.cols)
        y = [weights[chosen[:, j]] @ x[:, j if x.shape[1] > 1 else 0, :, None] for j in range(k)]
        call.put(op.out, np.concatenate([part[..., 0] for part in y], axis=1))

    def _mix(self, op: Mix, call: _Call) -> None:
        shares = call.get(op.shares)
        parts = call.get(op.x).reshape(*shares.shape, op.out.width)
        call.put(op.out, call.get(op.out) + (parts * shares[..., None]).sum(axis=1))

    def warm_up(self, progress: Progress | None = None) -> None:
        """Nothing to compile."""

    def memory(self) -> dict[str, int]:
        """Bytes by part."""
        return {
            "weights": sum(t.nbytes for t in self._tensors.values()),
            "scratch": self.max_columns * self.plan.column_bytes(),
            "tables": sum(cos.nbytes + sin.nbytes for cos, sin, _ in self._ropes),
        }

    def close(self) -> None:
        """Drop the weights."""
        self._tensors.clear()


class _Call:
    """The buffers of one forward, float32 [n_columns, width] each."""

    def __init__(self, state: ReferenceState, columns: Columns, rows: list[Array]) -> None:
        self.state, self.columns, self.rows = state, columns, rows

    def get(self, buffer: Buffer) -> Array:
        return self.rows[buffer.index]

    def put(self, buffer: Buffer, value: Array) -> None:
        self.rows[buffer.index] = value


class ReferenceExecutor:
    """Executor protocol for the NumPy oracle."""

    name = "reference"

    def load(
        self, plan: Plan, source: WeightSource, *, n_ctx: int, kv_type: KVType, progress: Progress | None = None
    ) -> ReferenceRunner:
        """Dequantise every weight of the plan to float32."""
        return ReferenceRunner(plan, source, n_ctx, kv_type, progress)
