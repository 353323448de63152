"""The reference executor: a plan in naive NumPy, float32, one op at a time.  The oracle that kernels are tested on.

Weights are dequantised to float32 (slow, four bytes a weight): exact, small, readable; not for serving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.checkpoints import MOST, Checkpoints
from pantheon.accel.executor import Columns, Progress, WeightSource
from pantheon.accel.hidden import normed
from pantheon.errors import ModelFileError
from pantheon.formats.quant import UnsupportedType, dequantize
from pantheon.plan.buffers import Buffer, Experts, Matrix, Vector
from pantheon.plan.builder import Plan
from pantheon.plan.ops import (
    Add,
    Attend,
    Conv,
    DeltaGates,
    DeltaRule,
    Embed,
    ExpertMatMul,
    Gate,
    MatMul,
    Mix,
    Op,
    Pick,
    RmsNorm,
    Rope,
    Route,
    Sigmoid,
    SoftCap,
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


def round_q4_0(rows: Array) -> Array:
    """float32 rows [..., dim] as a Q4_0 cache gives them back: -8 ... 7 times one F16 scale for every 32 dims."""
    dim = rows.shape[-1]
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -dim % 32)])
    blocks = padded.reshape(*rows.shape[:-1], -1, 32).astype(np.float32)
    top = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)
    scale = (top * np.float32(-0.125)).astype(np.float16).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    values = (np.trunc(blocks * inverse + np.float32(8.5)).clip(0, 15) - 8) * scale
    return values.reshape(padded.shape)[..., :dim].astype(np.float32)


class ReferenceState:
    """KV rows: per layer k and v [n_slots, n_ctx, kv_heads, dim], float32 or float16; Q8_0 and Q4_0 as
    floats, rounded."""

    def __init__(self, plan: Plan, n_slots: int, n_ctx: int, kv_type: KVType) -> None:
        self.n_slots, self.n_ctx = n_slots, n_ctx
        dtype = np.float16 if kv_type is KVType.F16 else np.float32
        self.k = [np.zeros((n_slots, n_ctx, kv.kv_heads, kv.k_dim), dtype) for kv in plan.state.kv]
        self.v = [np.zeros((n_slots, n_ctx, kv.kv_heads, kv.v_dim), dtype) for kv in plan.state.kv]
        self.can_truncate = not plan.state.recurrent
        self.recurrent = np.zeros((n_slots, plan.state.recurrent_bytes // 4), np.float32)
        self._points = Checkpoints(self.recurrent)

    def reset(self, slot: int) -> None:
        """Forget a conversation."""
        for rows in self.k + self.v:
            rows[slot] = 0
        self._points.forget(slot)

    def truncate(self, slot: int, n: int) -> None:
        """Keep the first n positions.  Raises ValueError for a recurrent state that was not remembered there."""
        if not self.can_truncate:
            self._points.take_back(slot, n)
        for rows in self.k + self.v:
            rows[slot, n:] = 0

    def copy_prefix(self, source: int, target: int, n: int, first: int = 0) -> None:
        """Make target begin with source's first n positions, of which it has the first `first` already."""
        if not self.can_truncate:
            self._points.adopt(source, target, n)
        for rows in self.k + self.v:
            rows[target, first:n] = rows[source, first:n]

    def note(self, columns: Columns) -> None:
        """Remember where each slot stands.  Raises ValueError for columns that do not go on there, if they must."""
        if not self.can_truncate:
            self._points.go_on(columns.slots, columns.positions)

    def checkpoint(self, slot: int, n: int) -> None:
        """Remember how a slot stands after n positions."""
        self._points.remember(slot, n)

    def checkpoints(self, slot: int) -> list[int]:
        """Where a slot can be taken back to."""
        return self._points.positions(slot)

    def nbytes(self) -> int:
        """Bytes of all KV rows."""
        return sum(rows.nbytes for rows in self.k + self.v) + (1 + MOST) * self.recurrent.nbytes


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
            Route: self._route, ExpertMatMul: self._experts, Mix: self._mix, Pick: self._pick, Sigmoid: self._sigmoid,
            SoftCap: self._soft_cap, Conv: self._conv, DeltaGates: self._delta_gates, DeltaRule: self._delta_rule,
        }  # fmt: skip

    def _table(self, spec: RopeSpec) -> tuple[Array, Array, str]:
        name = spec.factors_at(self.n_ctx)
        return (*rope_table(spec, self.n_ctx, self._tensors[name] if name else None), spec.pairing)

    def _matrix(self, w: Matrix) -> Array:
        return self._tensors[w.tensor].reshape(-1, w.cols)[w.first_row : w.first_row + w.rows]

    def _vector(self, w: Vector) -> Array:
        return self._tensors[w.tensor].reshape(-1)[w.first :: w.step][: w.size]

    def new_state(self, n_slots: int, n_ctx: int) -> ReferenceState:
        """Fresh KV rows."""
        return ReferenceState(self.plan, n_slots, n_ctx, self.kv_type)

    def forward(self, state: Any, columns: Columns) -> Array:
        """float32 [n_wanted, n_vocab]."""
        call = self._body(state, columns)
        wanted = columns.wanted
        if not len(wanted):
            return np.zeros((0, self.plan.n_vocab), np.float32)
        hidden = call.rows[self.plan.hidden.index][wanted]
        call.rows = [np.zeros((len(wanted), b.width), np.float32) for b in self.plan.buffers]
        call.rows[self.plan.head_in.index] = hidden
        self._ops(self.plan.head, call)
        return call.rows[self.plan.logits.index]

    def _body(self, state: Any, columns: Columns) -> _Call:
        columns.check(self.plan.n_vocab, state.n_slots, min(state.n_ctx, self.n_ctx))
        state.note(columns)
        call = _Call(state, columns, [np.zeros((len(columns.tokens), b.width), np.float32) for b in self.plan.buffers])
        self._ops(self.plan.body, call)
        return call

    def hidden(self, state: Any, columns: Columns) -> Array:
        """float32 [n_wanted, width]: behind the last norm."""
        call = self._body(state, columns)
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
        rounded = {KVType.Q8_0: round_q8_0, KVType.Q4_0: round_q4_0}.get(self.kv_type)
        if rounded is not None:
            rows = (rounded(rows[0]), rounded(rows[1]))
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
        elif op.act == "sigmoid":
            act = 1.0 / (1.0 + np.exp(np.minimum(-g, 700.0)))
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
        weights = self._tensors[w.tensor].reshape(w.experts, -1, w.cols)[:, w.first_row : w.first_row + w.rows]
        chosen = call.get(op.chosen).astype(int)
        k = chosen.shape[1]
        x = call.get(op.x).reshape(len(chosen), -1, w.cols)
        y = [weights[chosen[:, j]] @ x[:, j if x.shape[1] > 1 else 0, :, None] for j in range(k)]
        call.put(op.out, np.concatenate([part[..., 0] for part in y], axis=1))

    def _mix(self, op: Mix, call: _Call) -> None:
        shares = call.get(op.shares)
        parts = call.get(op.x).reshape(*shares.shape, op.out.width)
        call.put(op.out, call.get(op.out) + (parts * shares[..., None]).sum(axis=1))

    def _pick(self, op: Pick, call: _Call) -> None:
        heads = call.get(op.x).reshape(len(call.columns.tokens), -1, op.step)
        call.put(op.out, heads[:, :, op.first : op.first + op.size].reshape(-1, op.out.width).copy())

    def _sigmoid(self, op: Sigmoid, call: _Call) -> None:
        call.put(op.x, _sigmoid(call.get(op.x)))

    def _soft_cap(self, op: SoftCap, call: _Call) -> None:
        call.put(op.x, (op.cap * np.tanh(call.get(op.x).astype(np.float64) / op.cap)).astype(np.float32))

    def _recurrent(self, layer: int, state: ReferenceState, slot: int) -> tuple[Array, Array]:
        """(past inputs [taps - 1, channels], S [heads, key_dim, value_dim]) of a slot: views."""
        specs = self.plan.state.recurrent
        spec, first = specs[layer], sum(other.floats for other in specs[:layer])
        row = state.recurrent[slot, first : first + spec.floats]
        past, matrices = row[: spec.conv_floats], row[spec.conv_floats :]
        return past.reshape(-1, spec.channels), matrices.reshape(spec.heads, spec.key_dim, spec.value_dim)

    def _conv(self, op: Conv, call: _Call) -> None:
        taps, x = np.stack([self._vector(tap) for tap in op.taps]), call.get(op.x)
        out = np.empty_like(call.get(op.out))
        for c, slot in enumerate(call.columns.slots):
            past, _ = self._recurrent(op.layer, call.state, slot)
            window = np.concatenate([past, x[c : c + 1]])
            out[c] = (taps * window).sum(axis=0)
            past[:] = window[1:]
        call.put(op.out, out * _sigmoid(out))

    def _delta_gates(self, op: DeltaGates, call: _Call) -> None:
        qkv, half = call.get(op.qkv), op.key_heads * op.dim
        for first, scale in ((0, op.dim**-0.5), (half, 1.0)):
            heads = qkv[:, first : first + half].reshape(-1, op.key_heads, op.dim)
            length = np.sqrt(np.square(heads, dtype=np.float64).sum(axis=-1, keepdims=True) + op.eps)
            qkv[:, first : first + half] = (heads * (scale / length)).reshape(-1, half)
        call.put(op.beta, _sigmoid(call.get(op.beta)))
        step = np.logaddexp(0.0, call.get(op.decay).astype(np.float64) + self._vector(op.bias))
        call.put(op.decay, np.exp(self._vector(op.rate) * step).astype(np.float32))

    def _delta_rule(self, op: DeltaRule, call: _Call) -> None:
        spec = self.plan.state.recurrent[op.layer]
        beta, decay = call.get(op.beta), call.get(op.decay)
        width = op.key_heads * spec.key_dim
        keys = np.arange(spec.heads) % op.key_heads
        out = call.get(op.out)
        for c, slot in enumerate(call.columns.slots):
            _, s = self._recurrent(op.layer, call.state, slot)
            q, k = (call.get(op.qkv)[c, at : at + width].reshape(-1, spec.key_dim)[keys] for at in (0, width))
            v = call.get(op.qkv)[c, 2 * width :].reshape(spec.heads, spec.value_dim)
            s *= decay[c, :, None, None]
            delta = beta[c, :, None] * (v - np.einsum("hkv,hk->hv", s, k))
            s += k[:, :, None] * delta[:, None, :]
            out[c] = np.einsum("hkv,hk->hv", s, q).reshape(-1)

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


def _sigmoid(x: Array) -> Array:
    return (1.0 / (1.0 + np.exp(np.minimum(-x.astype(np.float64), 700.0)))).astype(np.float32)


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
