"""A plan as rows of int64: phases, and ops with kernel addresses and operands.

Ops that treat each column on its own and follow each other share one phase; matrix products that read the same
buffer share one phase and one quantised copy of it.  Every shape is checked here, before a kernel sees it.
Imports no Numba: kernels are named by keys and resolved by `kernels`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cpu import expert_table, kv
from pantheon.accel.cpu import fields as at
from pantheon.accel.cpu.arena import round_up
from pantheon.accel.cpu.layouts import BLOCK, FLOATS, MAX_COLUMNS
from pantheon.accel.cpu.pack import Packed
from pantheon.plan.buffers import Buffer, Matrix, Vector
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
from pantheon.plan.state_spec import KVType, RecurrentSpec

#: a kernel by name: ("matmul", type, width), ("embed", type), ("attend" | "store", KV format), ("pointwise", name), …
Key = tuple[str | int | bool, ...]
_SPLITTABLE = {"quantise", "silu", "gelu", "sigmoid", "squash", "cap", "add", "copy"}
_COMBINE: Key = ("combine",)


@dataclass
class Row:
    """One op: its kernels by tile width and its operands {field: value}."""

    keys: list[Key]
    values: dict[int, int]

    @property
    def blocks(self) -> int | None:
        """Blocks of 32 that its work may be cut at."""
        if self.keys[0] == _COMBINE:
            return self.values[at.O_Y]
        name = self.keys[0][1] if self.keys[0][0] == "pointwise" else None
        return self.values[at.O_N] if name in _SPLITTABLE else None


@dataclass
class Phase:
    """Ops that run without waiting for each other, on body or head columns."""

    kind: int
    head: bool
    rows: list[Row] = field(default_factory=list)
    groups: int = 0
    heads: int = 0
    split: int = 0

    def describe(self) -> str:
        """Its kernels by name, for profiles: `matmul Q4_1 960x576`."""
        if self.kind in (at.MATMUL, at.EXPERTS):
            types = "+".join(dict.fromkeys(str(row.keys[0][1]) for row in self.rows))
            rows = sum(row.values[at.O_D] for row in self.rows)
            cols = self.rows[0].values[at.O_N] * (1 if types in FLOATS else BLOCK)
            return f"matmul {types} {rows}x{cols}"
        return " ".join(str(row.keys[0][1 if row.keys[0][0] == "pointwise" else 0]) for row in self.rows)


@dataclass(frozen=True)
class Memory:
    """Where everything lies: addresses by object.  `strides` in bytes; `ropes` are (cos, sin)."""

    matrices: dict[Matrix, Packed]
    vectors: dict[Vector, int]
    buffers: tuple[int, ...]
    strides: tuple[int, ...]
    staging: int
    ropes: tuple[tuple[int, int], ...]
    #: of a mixture of experts: the table, and what is spread by it as int8 blocks and as floats
    experts: tuple[int, int, int]


def bits(value: float) -> int:
    """A float32 as the low half of an int64 field."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def stride(width: int) -> int:
    """Bytes from one column of a buffer to the next."""
    return 4 * round_up(width, 32)


def _need(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(f"plan: {what}")


class Builder:
    """Appends ops; `phases` is the program."""

    def __init__(self, plan: Plan, memory: Memory, kv_type: KVType, widths: tuple[int, ...]) -> None:
        self.plan, self.memory, self.widths = plan, memory, widths
        self.fmt = kv.FORMATS[kv_type]
        self.phases: list[Phase] = []
        self._head = self._apart = False
        self._routed: tuple[Buffer, int] | None = None
        self._layers, _ = kv.layers(plan, kv_type)
        self._run(plan.body)
        self._head = True
        _need(plan.head_in.width == plan.hidden.width, "head_in is not as wide as hidden")
        gather = self._moved(plan.hidden, plan.head_in) | {at.O_N: stride(plan.hidden.width) // 128}
        self._column("gather", gather)
        self._run(plan.head)

    def _run(self, ops: tuple[Op, ...]) -> None:
        i = 0
        while i < len(ops):
            op = ops[i]
            if isinstance(op, MatMul):
                group = self._same_input(ops, i)
                self._products(group)
                i += len(group)
            elif isinstance(op, ExpertMatMul):
                several = self._same_experts(ops, i)
                self._expert_products(several)
                i += len(several)
            else:
                kind = type(op).__name__
                _need(not self._head or isinstance(op, RmsNorm | Gate | Add | SoftCap), f"{kind} in the head")
                handler: Callable[[Op], None] = getattr(self, "_" + kind.lower())
                handler(op)
                i += 1

    # --- pieces -------------------------------------------------------------------------------------------------
    def _moved(self, x: Buffer, out: Buffer, y: Buffer | None = None) -> dict[int, int]:
        m = self.memory
        values = {at.O_X: m.buffers[x.index], at.O_X_BYTES: m.strides[x.index]}
        values |= {at.O_OUT: m.buffers[out.index], at.O_OUT_BYTES: m.strides[out.index]}
        if y is not None:
            values |= {at.O_Y: m.buffers[y.index], at.O_Y_BYTES: m.strides[y.index]}
        return values

    def _append(self, key: Key, values: dict[int, int], *, apart: bool = False) -> None:
        """apart: what was done to all columns before must be complete."""
        last = self.phases[-1] if self.phases else None
        if last is None or last.kind != at.COLUMNS or last.head != self._head or apart:
            last = Phase(at.COLUMNS, self._head)
            self.phases.append(last)
        last.rows.append(Row([key], values))
        blocks = {row.blocks for row in last.rows}
        last.split = int(len(blocks) == 1 and None not in blocks)

    def _column(self, name: str, values: dict[int, int]) -> None:
        self._append(("pointwise", name), values)

    # --- ops ----------------------------------------------------------------------------------------------------
    def _embed(self, op: Embed) -> None:
        w = self.memory.matrices[op.table]
        _need(w.cols == op.out.width and w.rows >= self.plan.n_vocab, "embedding table of another shape")
        values = self._moved(op.out, op.out) | {at.O_A: w.quants, at.O_B: w.scales, at.O_VALUE: bits(op.scale)}
        self._append(("embed", w.type_name), values | {at.O_N: w.cols // 32 if w.quantised else w.cols})

    def _rmsnorm(self, op: RmsNorm) -> None:
        size = op.weight.size
        _need(op.groups > 0 and op.x.width == op.out.width == size * op.groups, f"norm of {op.x.name}: widths differ")
        values = {at.O_A: self.memory.vectors[op.weight], at.O_B: op.groups, at.O_N: size, at.O_VALUE: bits(op.eps)}
        self._column("rms_norm", self._moved(op.x, op.out) | values)

    def _gate(self, op: Gate) -> None:
        _need(op.gate.width == op.up.width == op.out.width, f"gate {op.gate.name}: widths differ")
        self._column(op.act, self._moved(op.gate, op.out, op.up) | {at.O_N: stride(op.out.width) // 128})

    def _add(self, op: Add) -> None:
        _need(op.x.width == op.y.width == op.out.width, f"add {op.x.name}: widths differ")
        self._column("add", self._moved(op.x, op.out, op.y) | {at.O_N: stride(op.out.width) // 128})

    def _rope(self, op: Rope) -> None:
        _need(0 <= op.table < len(self.plan.ropes), "no such rope table")
        spec = self.plan.ropes[op.table]
        _need(op.heads > 0 and op.x.width == op.heads * op.head_dim, f"rope of {op.x.name}: widths differ")
        _need(spec.n_rot % 2 == 0 and 0 < spec.n_rot <= op.head_dim, "rope of more dims than a head has")
        cos, sin = self.memory.ropes[op.table]
        values = {at.O_N: op.heads, at.O_A: op.head_dim, at.O_B: spec.n_rot // 2, at.O_Y: cos, at.O_C: sin}
        self._column(spec.pairing, self._moved(op.x, op.x) | values)

    def _kv(self, layer: int, dim: int, kv_heads: int) -> dict[int, int]:
        _need(0 <= layer < len(self.plan.state.kv), "no such KV layer")
        spec = self.plan.state.kv[layer]
        _need(spec.k_dim == dim and spec.kv_heads == kv_heads > 0, f"KV layer {layer}: shapes differ")
        k = kv.key_bytes(self.fmt, dim)
        head = {at.O_B: k + kv.value_bytes(self.fmt, dim), at.O_F: k}
        return {at.O_N: dim, at.O_D: kv_heads, at.O_A: self._layers[layer]} | head

    def _storekv(self, op: StoreKV) -> None:
        _need(0 <= op.layer < len(self.plan.state.kv), "no such KV layer")
        spec = self.plan.state.kv[op.layer]
        both = f"keys {spec.k_dim} wide and values {spec.v_dim} wide (attention.key_length and value_length)"
        _need(spec.k_dim == spec.v_dim, both)
        _need(op.k.width == op.v.width == spec.kv_heads * spec.k_dim, f"KV layer {op.layer}: widths differ")
        values = self._moved(op.k, op.k, op.v) | self._kv(op.layer, spec.k_dim, spec.kv_heads)
        self._append(("store", self.fmt), values)

    def _attend(self, op: Attend) -> None:
        _need(op.kv_heads > 0 and op.heads > 0 and op.heads % op.kv_heads == 0, "heads do not share KV heads evenly")
        _need(op.q.width == op.out.width == op.heads * op.head_dim and op.window >= 0, "attention: widths differ")
        group = op.heads // op.kv_heads
        values = self._moved(op.q, op.out) | self._kv(op.layer, op.head_dim, op.kv_heads)
        values |= {at.O_C: group, at.O_E: op.window, at.O_VALUE: bits(op.scale)}
        row = Row([("attend", self.fmt)], values)
        self.phases.append(Phase(at.ATTEND, self._head, [row], heads=op.kv_heads, split=group))
        # shares a phase with what follows: what was cut by positions becomes results
        self._append(_COMBINE, values | {at.O_Y: -(-op.out.width // 32)})

    def _pick(self, op: Pick) -> None:
        heads = op.x.width // op.step if op.step > 0 else 0
        _need(heads > 0 and op.x.width == heads * op.step, f"{op.x.name}: not heads of {op.step}")
        _need(op.out.width == heads * op.size, f"{op.out.name}: not heads of {op.size}")
        _need(op.first >= 0 and 0 < op.size and op.first + op.size <= op.step, f"{op.x.name}: a part beyond its heads")
        values = {at.O_N: heads, at.O_A: op.size, at.O_B: op.step, at.O_C: op.first}
        self._column("pick", self._moved(op.x, op.out) | values)

    def _sigmoid(self, op: Sigmoid) -> None:
        self._column("squash", self._moved(op.x, op.x) | {at.O_N: stride(op.x.width) // 128})

    def _softcap(self, op: SoftCap) -> None:
        _need(op.cap > 0, "a cap that is not above 0")
        self._column("cap", self._moved(op.x, op.x) | {at.O_N: stride(op.x.width) // 128, at.O_VALUE: bits(op.cap)})

    # --- recurrent layers ---------------------------------------------------------------------------------------
    def _past(self, layer: int) -> RecurrentSpec:
        _need(0 <= layer < len(self.plan.state.recurrent), "no such recurrent layer")
        return self.plan.state.recurrent[layer]

    def _all_columns(self, key: Key, values: dict[int, int], groups: int) -> None:
        """Work that is cut by groups, each over all columns in order: as a product is."""
        row = Row([key] * len(self.widths), values | {at.O_FIRST_GROUP: 0, at.O_GROUPS: groups})
        self.phases.append(Phase(at.MATMUL, self._head, [row], groups))

    def _conv(self, op: Conv) -> None:
        spec, taps = self._past(op.layer), [self.memory.vectors[tap] for tap in op.taps]
        _need(op.x.width == op.out.width == spec.channels and op.out is not op.x, f"convolution of {op.x.name}: widths")
        _need(len(taps) == spec.taps > 1, f"convolution of {op.x.name}: {len(taps)} taps (ssm.conv_kernel)")
        _need(spec.channels % 16 == 0, f"convolution of {spec.channels} channels (ssm.state_size), no multiple of 16")
        _need(all(tap.size == spec.channels for tap in op.taps), f"convolution of {op.x.name}: taps of another size")
        apart = taps[1] - taps[0]
        _need(taps == [taps[0] + j * apart for j in range(len(taps))], "taps that do not lie one behind the other")
        first = sum(other.floats for other in self.plan.state.recurrent[: op.layer])
        values = self._moved(op.x, op.out) | {at.O_N: spec.channels, at.O_D: spec.taps, at.O_E: 4 * first}
        self._all_columns(("recurrent", "conv"), values | {at.O_A: taps[0], at.O_B: apart}, spec.channels // 16)

    def _deltagates(self, op: DeltaGates) -> None:
        m, heads = self.memory, op.beta.width
        _need(op.dim > 0 and op.dim % 16 == 0, f"delta rule: heads {op.dim} wide (ssm.state_size), no multiple of 16")
        _need(op.qkv.width == (2 * op.key_heads + heads) * op.dim, f"{op.qkv.name}: another width")
        _need(heads == op.decay.width == op.rate.size == op.bias.size, "delta rule: gates of another size")
        values = self._moved(op.qkv, op.beta, op.decay) | {at.O_N: op.dim, at.O_B: op.key_heads, at.O_D: heads}
        values |= {at.O_A: m.vectors[op.rate], at.O_C: m.vectors[op.bias], at.O_VALUE: bits(op.eps)}
        self._append(("recurrent", "gates"), values)

    def _deltarule(self, op: DeltaRule) -> None:
        spec, m = self._past(op.layer), self.memory
        dim, wide, heads = spec.key_dim, spec.value_dim, spec.heads
        _need(dim % 4 == 0 and wide % 16 == 0 and op.key_heads > 0, "delta rule: widths of heads")
        _need(op.qkv.width == 2 * op.key_heads * dim + heads * wide, f"{op.qkv.name}: another width")
        _need(op.out.width == heads * wide and op.out is not op.qkv, f"{op.out.name}: another width")
        _need(op.beta.width == op.decay.width == heads, "delta rule: gates of another size")
        first = sum(other.floats for other in self.plan.state.recurrent[: op.layer])
        values = self._moved(op.qkv, op.out, op.decay) | {at.O_N: dim, at.O_D: wide, at.O_B: op.key_heads}
        values |= {at.O_C: m.buffers[op.beta.index], at.O_E: 4 * first, at.O_F: 4 * spec.conv_floats}
        self._all_columns(("recurrent", "rule"), values, heads * wide // 16)

    # --- mixtures of experts ------------------------------------------------------------------------------------
    def _route(self, op: Route) -> None:
        n, k = op.logits.width, op.chosen.width
        _need(0 < k <= n and op.shares.width == k, "a route to more experts than there are")
        values = self._moved(op.logits, op.chosen, op.shares) | {at.O_N: n, at.O_B: k}
        self._append(("experts", "route"), values)
        table = self.memory.experts[0]
        counts, pairs, places = expert_table.offsets(MAX_COLUMNS, n, k)
        values = self._moved(op.chosen, op.chosen) | {at.O_A: table, at.O_N: n, at.O_B: k}
        values |= {at.O_C: pairs, at.O_D: places, at.O_E: counts}
        self._append(("experts", "dispatch"), values, apart=True)
        # what reads the table begins behind it
        self._apart, self._routed = True, (op.chosen, n)

    def _same_experts(self, ops: tuple[Op, ...], first: int) -> list[ExpertMatMul]:
        """The product at `first` and those behind it of the same input and another output."""
        group: list[ExpertMatMul] = []
        for op in ops[first:]:
            if not isinstance(op, ExpertMatMul) or (group and op.x is not group[0].x):
                break
            group.append(op)
        return group

    def _expert_products(self, group: list[ExpertMatMul]) -> None:
        op = group[0]
        n, k, table = op.weight.experts, op.chosen.width, self.memory.experts[0]
        _, pairs, places = expert_table.offsets(MAX_COLUMNS, n, k)
        cols, step = op.weight.cols, 0 if op.x.width == op.weight.cols else 4 * op.weight.cols
        values = {at.O_B: k, at.O_A: table + pairs, at.O_C: step}
        for quantised in sorted({self.memory.matrices[o.weight].quantised for o in group}):
            _need(not quantised or cols % 32 == 0, f"{op.x.name}: not a whole number of blocks")
            to = {at.O_OUT: self.memory.experts[1 if quantised else 2], at.O_OUT_BYTES: stride(cols)}
            to[at.O_N], name = (cols // 32, "spread") if quantised else (cols, "spread_floats")
            self._append(("experts", name), self._moved(op.x, op.x) | values | to, apart=self._apart)
            self._apart = False
        rows = [self._expert_product(o, n, k, table, places) for o in group]
        self.phases.append(Phase(at.EXPERTS, self._head, rows))

    def _expert_product(self, op: ExpertMatMul, n: int, k: int, table: int, places: int) -> Row:
        w, m = self.memory.matrices[op.weight], self.memory
        _need(self._routed == (op.chosen, n) and op.weight.experts == n, f"{op.out.name}: not the last route's experts")
        _need(op.x.width in (w.cols, k * w.cols), f"product into {op.out.name}: {op.x.name} is not {w.cols} wide")
        _need(op.out.width == k * w.rows, f"{op.out.name} is not {k} x {w.rows} wide")
        values = {at.O_OUT: m.buffers[op.out.index], at.O_OUT_BYTES: m.strides[op.out.index]}
        values |= {at.O_X: m.experts[2], at.O_X_BYTES: stride(w.cols), at.O_Y: m.experts[1]}
        values |= {at.O_A: w.quants, at.O_B: w.scales, at.O_E: w.quant_bytes, at.O_F: w.scale_bytes}
        values |= {at.O_N: w.cols // 32 if w.quantised else w.cols, at.O_D: w.rows, at.O_GROUPS: w.groups}
        values |= {at.O_G: table, at.O_H: k, expert_table.PAIR: places}
        return Row([("matmul", w.type_name, width) for width in self.widths], values)

    def _mix(self, op: Mix) -> None:
        k = op.shares.width
        _need(op.x.width == k * op.out.width, f"mix of {op.x.name}: widths differ")
        self._append(("experts", "mix"), self._moved(op.x, op.out, op.shares) | {at.O_N: op.out.width, at.O_B: k})

    # --- products -----------------------------------------------------------------------------------------------
    def _same_input(self, ops: tuple[Op, ...], first: int) -> list[MatMul]:
        """The product at `first` and those behind it that read the same buffer and write apart from each other."""
        group: list[MatMul] = []
        for op in ops[first:]:
            if not isinstance(op, MatMul):
                break
            mine = range(op.out_first, op.out_first + op.weight.rows)
            apart = all(o.out is not op.out or mine.start >= o.out_first + o.weight.rows or mine.stop <= o.out_first
                        for o in group)  # fmt: skip
            if group and not (op.x is group[0].x and op.out is not op.x and group[0].out is not op.x and apart):
                break
            group.append(op)
        return group

    def _products(self, group: list[MatMul]) -> None:
        x = group[0].x
        source = self.memory.buffers[x.index]
        kinds = [self.memory.matrices[op.weight].quantised for op in group]
        if any(kinds):
            _need(x.width % 32 == 0, f"{x.name}: not a whole number of blocks")
            self._column("quantise", self._moved(x, x) | {at.O_N: x.width // 32})
        if not all(kinds) and group[0].out is x:  # floats are read while the result is written
            source = self.memory.staging
            copy = self._moved(x, x) | {at.O_OUT: source, at.O_N: stride(x.width) // 128}
            self._column("copy", copy)
        phase = Phase(at.MATMUL, self._head)
        for op in group:
            phase.rows.append(self._product(op, source, phase.groups))
            phase.groups += self.memory.matrices[op.weight].groups
        self.phases.append(phase)

    def _product(self, op: MatMul, source: int, first_group: int) -> Row:
        w, m = self.memory.matrices[op.weight], self.memory
        _need(op.x.width == w.cols, f"product into {op.out.name}: {op.x.name} is not {w.cols} wide")
        _need(0 <= op.out_first and op.out_first + w.rows <= op.out.width, f"{op.out.name} is too narrow")
        _need(op.bias is None or op.bias.size == w.rows, f"bias of {op.out.name}: another size")
        values = self._moved(op.x, op.out) | {at.O_X: source, at.O_A: w.quants, at.O_B: w.scales, at.O_D: w.rows}
        values[at.O_OUT] += 4 * op.out_first
        values |= {at.O_FIRST_GROUP: first_group, at.O_GROUPS: w.groups, at.O_FLAG: int(op.add)}
        values |= {at.O_N: w.cols // 32 if w.quantised else w.cols}
        values |= {at.O_C: m.vectors[op.bias] if op.bias is not None else 0}
        return Row([("matmul", w.type_name, n) for n in self.widths], values)


def encode(phases: list[Phase], resolve: Callable[[Key], int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(program, ops) as the team reads them: int64 [n_phases, PROGRAM_WORDS] and [n_ops, OP_WORDS]."""
    rows = [row for phase in phases for row in phase.rows]
    program = np.zeros((len(phases), at.PROGRAM_WORDS), np.int64)
    ops = np.zeros((len(rows), at.OP_WORDS), np.int64)
    for i, row in enumerate(rows):
        for j, key in enumerate(row.keys):
            ops[i, at.O_FN // 8 + j] = resolve(key)
        for offset, value in row.values.items():
            ops[i, offset // 8] = value
    first = 0
    for i, p in enumerate(phases):
        program[i, :7] = p.kind, int(p.head), first, len(p.rows), p.split, p.groups, p.heads
        first += len(p.rows)
    return program, ops
