"""The op vocabulary.  Each op works on every column of a forward on its own, except those on a state: `StoreKV`,
`Attend`, `Conv` and `DeltaRule`.

Shapes: a buffer named in an op is float32 [n_columns, width].  An op may write the buffer that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pantheon.plan.buffers import Buffer, Experts, Matrix, Vector


@dataclass(frozen=True)
class Embed:
    """out = scale * dequantised row `token` of the table; table is (n_vocab, width)."""

    table: Matrix
    out: Buffer
    scale: float = 1.0


@dataclass(frozen=True)
class RmsNorm:
    """out = x / sqrt(mean(x²) + eps) * weight, over `groups` equal parts of the row (heads), each with its own mean.

    weight.size == width / groups; statistics in float32 or better (Zhang & Sennrich 2019).
    """

    x: Buffer
    weight: Vector
    out: Buffer
    eps: float
    groups: int = 1


@dataclass(frozen=True)
class MatMul:
    """out = W x (+ bias), or out += W x (+ bias) when `add`; W is (rows, cols), x.width == cols, out.width == rows.

    `out_first` shifts the result inside a wider out buffer: out[:, out_first : out_first + rows].
    """

    weight: Matrix
    x: Buffer
    out: Buffer
    bias: Vector | None = None
    add: bool = False
    out_first: int = 0


@dataclass(frozen=True)
class Rope:
    """Rotate the first n_rot dims of every head of x in place, by the column's position (Su et al. 2021).

    `table` indexes `Plan.ropes`; x.width == heads * head_dim.
    """

    x: Buffer
    heads: int
    head_dim: int
    table: int


@dataclass(frozen=True)
class StoreKV:
    """Write k and v of each column to row `position` of its slot in KV layer `layer` (see StateSpec.kv)."""

    k: Buffer
    v: Buffer
    layer: int


@dataclass(frozen=True)
class Attend:
    """Causal attention of each column over rows 0 … position of its slot, after StoreKV of the same layer.

    q and out: heads * head_dim wide; query head h reads KV head h // (heads / kv_heads); softmax(scale * q·k);
    `window` > 0 limits the keys to the last `window` positions, the column's own included.
    """

    q: Buffer
    out: Buffer
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0


@dataclass(frozen=True)
class Gate:
    """out = act(gate) * up, elementwise; sigmoid(x) = 1 / (1 + e^-x), silu(x) = x sigmoid(x), gelu = the tanh form."""

    gate: Buffer
    up: Buffer
    out: Buffer
    act: Literal["silu", "gelu", "sigmoid"] = "silu"


@dataclass(frozen=True)
class Add:
    """out = x + y."""

    x: Buffer
    y: Buffer
    out: Buffer


@dataclass(frozen=True)
class Route:
    """Choose experts: k = chosen.width = shares.width of the logits.width ones, the likeliest first (lower ids first
    among equals).

    `chosen` holds ids; `shares` = softmax(logits) of those chosen, divided by their sum, which counts as 2^-14 at least
    (ARCH.md §4.2).
    """

    logits: Buffer
    chosen: Buffer
    shares: Buffer


@dataclass(frozen=True)
class ExpertMatMul:
    """out[:, j] = W[chosen[:, j]] x: k products, one behind the other in out (k * rows wide).

    x is cols wide and shared, or k * cols wide with a part for each.
    """

    weight: Experts
    x: Buffer
    chosen: Buffer
    out: Buffer


@dataclass(frozen=True)
class Mix:
    """out += sum over j of shares[:, j] * x[:, j], in the order of j; x is k * out.width wide."""

    x: Buffer
    shares: Buffer
    out: Buffer


@dataclass(frozen=True)
class Pick:
    """out[:, h * size + i] = x[:, h * step + first + i]: a part, size wide, of each head, step wide."""

    x: Buffer
    out: Buffer
    first: int
    size: int
    step: int


@dataclass(frozen=True)
class Sigmoid:
    """x = 1 / (1 + e^-x) in place."""

    x: Buffer


@dataclass(frozen=True)
class SoftCap:
    """x = cap tanh(x / cap) in place."""

    x: Buffer
    cap: float


@dataclass(frozen=True)
class Conv:
    """out = silu(sum over j of taps[j] * the input len(taps) - 1 - j positions back), each channel on its own; inputs
    before the first are 0 (ARCH.md §4.8).  Recurrent layer `layer`, before its DeltaRule."""

    x: Buffer
    taps: tuple[Vector, ...]
    out: Buffer
    layer: int


@dataclass(frozen=True)
class DeltaGates:
    """In place: qkv = [q | k | v] with key_heads, key_heads and value heads of `dim`: each head of q and k divided by
    sqrt(sum of squares + eps), q by sqrt(dim) as well; beta = sigmoid(beta); decay = e^(rate * softplus(decay + bias)).
    """

    qkv: Buffer
    beta: Buffer
    decay: Buffer
    rate: Vector
    bias: Vector
    key_heads: int
    dim: int
    eps: float


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule (Yang et al. 2024) of each value head h, with q and k of head h mod key_heads, on its S:

    S = decay S; S += k (beta (v - S^T k))^T; out = S^T q.  The columns of a slot one after the other, in order.
    """

    qkv: Buffer
    beta: Buffer
    decay: Buffer
    out: Buffer
    layer: int
    key_heads: int


Op = (
    Embed | RmsNorm | MatMul | Rope | StoreKV | Attend | Gate | Add | Pick | Sigmoid | SoftCap
    | Route | ExpertMatMul | Mix | Conv | DeltaGates | DeltaRule
)  # fmt: skip
