"""Pieces that architecture files share: checked weights, a GQA attention block, a gated FFN, the output head."""

from __future__ import annotations

from typing import Literal

from pantheon.models.config import Config, Shapes, tensor_shape
from pantheon.plan.buffers import Buffer, Experts, Matrix, Vector
from pantheon.plan.builder import Plan, PlanBuilder
from pantheon.plan.ops import Attend, Embed, ExpertMatMul, Gate, MatMul, Mix, RmsNorm, Rope, Route, StoreKV
from pantheon.plan.state_spec import KVSpec, RecurrentSpec, StateSpec


class Weights:
    """Makes Matrix and Vector references, checking each against the file's shapes as it goes."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor."""
        return name in self.shapes

    def matrix(self, name: str, rows: int, cols: int, *, first_row: int = 0, of_rows: int = 0) -> Matrix:
        """Rows of a matrix; `of_rows` is the height of a fused tensor (default: the matrix is the whole tensor)."""
        tensor_shape(self.shapes, name, (of_rows or rows, cols))
        return Matrix(name, rows, cols, first_row)

    def experts(self, name: str, n: int, rows: int, cols: int, *, first_row: int = 0, of_rows: int = 0) -> Experts:
        """Rows of each of n matrices in one tensor; `of_rows` is the height of a fused one."""
        tensor_shape(self.shapes, name, (n, of_rows or rows, cols))
        return Experts(name, rows, cols, first_row, n)

    def vector(self, name: str, size: int) -> Vector:
        """A vector that must be there."""
        tensor_shape(self.shapes, name, (size,))
        return Vector(name, size)

    def bias(self, name: str, size: int, *, first: int = 0, of: int = 0) -> Vector | None:
        """An optional bias, or a part of a fused one."""
        if not self.has(name):
            return None
        tensor_shape(self.shapes, name, (of or size,))
        return Vector(name, size, first)


class Mixture:
    """The buffers of a mixture of experts, and its block: the k likeliest of n gated FFNs of width n_ff."""

    def __init__(self, net: Decoder, n: int, k: int, n_ff: int) -> None:
        self.net, self.n, self.n_ff = net, n, n_ff
        build, width = net.build, net.cfg.n_embd
        self.logits = build.buffer("router", n)
        self.chosen, self.shares = build.buffer("chosen", k), build.buffer("shares", k)
        self.gate, self.up = build.buffer("expert_gate", k * n_ff), build.buffer("expert_up", k * n_ff)
        self.down = build.buffer("expert_down", k * width)

    def ffn(self, at: str, act: Literal["silu", "gelu"] = "silu") -> None:
        """x += the shared out sum of the experts that the normed input is routed to."""
        net, n, n_ff, width = self.net, self.n, self.n_ff, self.net.cfg.n_embd
        build, weights, fused = net.build, net.weights, f"{at}.ffn_gate_up_exps.weight"
        net.project(f"{at}.ffn_gate_inp", net.normed, self.logits, add=False)
        build.add(Route(self.logits, self.chosen, self.shares))
        for first, name, out in ((0, "gate", self.gate), (n_ff, "up", self.up)):
            if weights.has(fused):
                weight = weights.experts(fused, n, n_ff, width, first_row=first, of_rows=2 * n_ff)
            else:
                weight = weights.experts(f"{at}.ffn_{name}_exps.weight", n, n_ff, width)
            build.add(ExpertMatMul(weight, net.normed, self.chosen, out))
        build.add(Gate(self.gate, self.up, self.gate, act))
        down = weights.experts(f"{at}.ffn_down_exps.weight", n, width, n_ff)
        build.add(ExpertMatMul(down, self.gate, self.chosen, self.down), Mix(self.down, self.shares, net.x))


class Decoder:
    """The activation buffers of the common decoder and the blocks that work on them; `x` is the residual stream."""

    def __init__(self, build: PlanBuilder, weights: Weights, cfg: Config) -> None:
        self.build, self.weights, self.cfg = build, weights, cfg
        self.x = build.buffer("x", cfg.n_embd)
        self.normed = build.buffer("normed", cfg.n_embd)
        self.q = build.buffer("q", cfg.n_head * cfg.head_dim)
        self.k = build.buffer("k", cfg.n_kv * cfg.head_dim)
        self.v = build.buffer("v", cfg.n_kv * cfg.v_dim)
        self.heads = build.buffer("heads", cfg.n_head * cfg.v_dim)
        self.gate = build.buffer("gate", cfg.n_ff)
        self.up = build.buffer("up", cfg.n_ff)

    def embed(self, scale: float = 1.0) -> None:
        """x = the token's row of the table."""
        cfg = self.cfg
        self.build.add(Embed(self.weights.matrix("token_embd.weight", cfg.n_vocab, cfg.n_embd), self.x, scale))

    def norm(self, x: Buffer, name: str, out: Buffer) -> None:
        """out = RMS(x; name)."""
        self.build.add(RmsNorm(x, self.weights.vector(name, x.width), out, self.cfg.eps))

    def project_qkv(self, at: str, *, fused_only: bool = False) -> None:
        """q, k, v from the normed input: three tensors, or one fused `attn_qkv` with rows [q | k | v]."""
        widths = (self.q.width, self.k.width, self.v.width)
        fused, total, first = f"{at}.attn_qkv", sum(widths), 0
        for name, out in zip("qkv", (self.q, self.k, self.v), strict=True):
            if fused_only or self.weights.has(f"{fused}.weight"):
                weight = self.weights.matrix(
                    f"{fused}.weight", out.width, self.cfg.n_embd, first_row=first, of_rows=total
                )
                bias = self.weights.bias(f"{fused}.bias", out.width, first=first, of=total)
            else:
                weight = self.weights.matrix(f"{at}.attn_{name}.weight", out.width, self.cfg.n_embd)
                bias = self.weights.bias(f"{at}.attn_{name}.bias", out.width)
            self.build.add(MatMul(weight, self.normed, out, bias))
            first += out.width

    def norm_heads(self, at: str) -> None:
        """Norm q and k, each head on its own, before they are rotated."""
        cfg = self.cfg
        for name, x, heads in (("q", self.q, cfg.n_head), ("k", self.k, cfg.n_kv)):
            weight = self.weights.vector(f"{at}.attn_{name}_norm.weight", cfg.head_dim)
            self.build.add(RmsNorm(x, weight, x, cfg.eps, heads))

    def attend(self, layer: int, table: int, *, window: int = 0, scale: float | None = None) -> None:
        """Rotate q and k, store k and v, attend: `heads` holds the concatenated heads."""
        cfg = self.cfg
        self.build.add(
            Rope(self.q, cfg.n_head, cfg.head_dim, table),
            Rope(self.k, cfg.n_kv, cfg.head_dim, table),
            StoreKV(self.k, self.v, layer),
            Attend(
                self.q, self.heads, layer, cfg.n_head, cfg.n_kv, cfg.head_dim, scale or cfg.head_dim**-0.5, window
            ),
        )  # fmt: skip

    def project(self, at: str, x: Buffer, out: Buffer, *, add: bool) -> None:
        """out = W x + bias, or out += … when `add`."""
        weight = self.weights.matrix(f"{at}.weight", out.width, x.width)
        self.build.add(MatMul(weight, x, out, self.weights.bias(f"{at}.bias", out.width), add))

    def project_one(self, name: str, x: Buffer, out: Buffer) -> None:
        """out, one wide = w . x, of a weight that is a vector in the file."""
        tensor_shape(self.weights.shapes, name, (x.width,))
        self.build.add(MatMul(Matrix(name, 1, x.width), x, out))

    def gated_ffn(self, at: str, act: Literal["silu", "gelu"]) -> None:
        """gate <- act(gate(normed)) * up(normed); the caller projects `gate` down."""
        self.project(f"{at}.ffn_gate", self.normed, self.gate, add=False)
        self.project(f"{at}.ffn_up", self.normed, self.up, add=False)
        self.build.add(Gate(self.gate, self.up, self.gate, act))

    def output_head(self) -> Buffer:
        """Final norm and logits, tied to the embedding when the file has no output.weight; returns the logits."""
        cfg = self.cfg
        head_in = self.build.begin_head(self.x)
        self.norm(head_in, "output_norm.weight", head_in)
        logits = self.build.buffer("logits", cfg.n_vocab)
        name = "output.weight" if self.weights.has("output.weight") else "token_embd.weight"
        weight = self.weights.matrix(name, cfg.n_vocab, cfg.n_embd)
        self.build.add(MatMul(weight, head_in, logits, self.weights.bias("output.bias", cfg.n_vocab)))
        return logits

    def finish(self, arch: str, logits: Buffer, recurrent: tuple[RecurrentSpec, ...] = ()) -> Plan:
        """The plan; every layer that is not recurrent has KV rows."""
        cfg = self.cfg
        kv = (KVSpec(cfg.n_kv, cfg.head_dim, cfg.v_dim),) * (cfg.n_layer - len(recurrent))
        return self.build.finish(arch, cfg.n_vocab, cfg.n_ctx_train, logits, StateSpec(kv, recurrent))
