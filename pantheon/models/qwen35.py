"""qwen35 and qwen35moe: Qwen3.5.  x += Mixer(RMS x); x += FFN(RMS x).

Most blocks mix by a gated delta rule over a short convolution, whose state does not grow; every fourth by attention
whose heads are gated.  The FFN is gated, or a mixture of experts with one that all tokens share.  Blocks at the end
that draft several tokens ahead (MTP) are skipped.  Yang et al. 2024; ARCH.md §4.8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pantheon.models.config import (
    Config,
    Metadata,
    ModelConfigError,
    Shapes,
    expert_counts,
    rope_spec,
    still_pairs,
    tensor_shape,
)
from pantheon.models.layers import Decoder, Mixture, Weights
from pantheon.plan.buffers import Buffer, Vector
from pantheon.plan.builder import Plan, PlanBuilder
from pantheon.plan.ops import Conv, DeltaGates, DeltaRule, Gate, Mix, Pick, RmsNorm, Sigmoid
from pantheon.plan.state_spec import RecurrentSpec


def plan(meta: Metadata, shapes: Shapes) -> Plan:
    """The plan of a qwen35 or qwen35moe file; raises ModelConfigError naming the key or tensor at fault."""
    cfg = _config(meta, shapes)
    build, weights = PlanBuilder(), Weights(shapes)
    net = Decoder(build, weights, cfg)
    linear, attention = _Linear(net, _Sizes.read(meta)), _Attention(net)
    ffn = _Experts(net, meta) if meta.arch == "qwen35moe" else None
    table = build.rope(rope_spec(meta, cfg, shapes, pairing="neox", still=still_pairs(meta, cfg.n_rot)))
    recurrent = _recurrent_layers(meta, cfg.n_layer)

    net.embed()
    for layer in range(cfg.n_layer):
        at, before = f"blk.{layer}", sum(recurrent[:layer])
        net.norm(net.x, f"{at}.attn_norm.weight", net.normed)
        if recurrent[layer]:
            linear.mix(at, before)
        else:
            attention.mix(at, layer - before, table)
        net.norm(net.x, f"{at}.post_attention_norm.weight", net.normed)
        if ffn is not None:
            ffn.add(at)
        else:
            net.gated_ffn(at, "silu")
            net.project(f"{at}.ffn_down", net.gate, net.x, add=True)
    logits = net.output_head()
    return net.finish(meta.arch, logits, (linear.spec,) * sum(recurrent))


def _config(meta: Metadata, shapes: Shapes) -> Config:
    """The common keys; drafting blocks do not count, and a mixture needs no feed_forward_length."""
    cfg = Config.read(meta, shapes, n_ff=32 if meta.arch == "qwen35moe" else None)
    if cfg.v_dim != cfg.head_dim:
        key = f"{meta.arch}.attention.value_length"
        raise ModelConfigError(f"metadata key {key} is {cfg.v_dim}, but keys are {cfg.head_dim} wide", param=key)
    drafting = meta.integer("nextn_predict_layers", 0, low=0, high=cfg.n_layer - 1)
    return replace(cfg, n_layer=cfg.n_layer - drafting)


def _recurrent_layers(meta: Metadata, n_layer: int) -> tuple[bool, ...]:
    key = "attention.recurrent_layers"
    if f"{meta.arch}.{key}" in meta.values:
        return meta.layer_flags(key, n_layer, 4, meta.integer("block_count"))
    return meta.layer_flags("full_attention_interval", n_layer, 4)


@dataclass(frozen=True)
class _Sizes:
    """Of a linear block: taps of the convolution, key heads, value heads, the width of both."""

    taps: int
    key_heads: int
    value_heads: int
    dim: int

    @staticmethod
    def read(meta: Metadata) -> _Sizes:
        taps, dim = meta.integer("ssm.conv_kernel", low=2, high=64), meta.integer("ssm.state_size", high=4096)
        key_heads, value_heads = meta.integer("ssm.group_count"), meta.integer("ssm.time_step_rank")
        inner = meta.integer("ssm.inner_size")
        if inner != value_heads * dim or value_heads % key_heads:
            raise ModelConfigError(
                f"{meta.arch}.ssm.inner_size {inner} is not {value_heads} heads of {dim}, shared by {key_heads}",
                param=f"{meta.arch}.ssm.inner_size",
            )
        return _Sizes(taps, key_heads, value_heads, dim)


class _Linear:
    """A gated delta rule: x += out(RMS(rule) * silu(z))."""

    def __init__(self, net: Decoder, sizes: _Sizes) -> None:
        self.net, self.sizes = net, sizes
        build, inner = net.build, sizes.value_heads * sizes.dim
        self.channels = 2 * sizes.key_heads * sizes.dim + inner
        self.spec = RecurrentSpec(self.channels, sizes.taps, sizes.value_heads, sizes.dim, sizes.dim)
        self.inputs, self.qkv = build.buffer("conv_in", self.channels), build.buffer("delta_qkv", self.channels)
        self.z, self.rule = build.buffer("delta_z", inner), build.buffer("delta_out", inner)
        self.beta, self.decay = (build.buffer(name, sizes.value_heads) for name in ("beta", "decay"))

    def mix(self, at: str, layer: int) -> None:
        """Add the block's output; `layer` counts recurrent layers."""
        net, sizes, heads = self.net, self.sizes, self.sizes.value_heads
        weights, build = net.weights, net.build
        for name, out in (("attn_qkv", self.inputs), ("attn_gate", self.z), ("ssm_beta", self.beta)):
            net.project(f"{at}.{name}", net.normed, out, add=False)
        net.project(f"{at}.ssm_alpha", net.normed, self.decay, add=False)
        build.add(
            Conv(self.inputs, self._taps(f"{at}.ssm_conv1d.weight"), self.qkv, layer),
            DeltaGates(
                self.qkv, self.beta, self.decay, weights.vector(f"{at}.ssm_a", heads),
                weights.vector(f"{at}.ssm_dt.bias", heads), sizes.key_heads, sizes.dim, net.cfg.eps,
            ),
            DeltaRule(self.qkv, self.beta, self.decay, self.rule, layer, sizes.key_heads),
            RmsNorm(self.rule, weights.vector(f"{at}.ssm_norm.weight", sizes.dim), self.rule, net.cfg.eps, heads),
            Gate(self.z, self.rule, self.rule, "silu"),
        )  # fmt: skip
        net.project(f"{at}.ssm_out", self.rule, net.x, add=True)

    def _taps(self, name: str) -> tuple[Vector, ...]:
        tensor_shape(self.net.weights.shapes, name, (self.channels, self.sizes.taps))
        return tuple(Vector(name, self.channels, j, self.sizes.taps) for j in range(self.sizes.taps))


class _Attention:
    """Full attention: queries and their gates lie interleaved, head by head; x += out(heads * sigmoid(gate))."""

    def __init__(self, net: Decoder) -> None:
        self.net = net
        self.both = net.build.buffer("q_and_gate", 2 * net.q.width)
        self.gate: Buffer = net.build.buffer("attn_gate", net.q.width)

    def mix(self, at: str, layer: int, table: int) -> None:
        """Add the block's output; `layer` counts layers of attention."""
        net, dim = self.net, self.net.cfg.head_dim
        net.project(f"{at}.attn_q", net.normed, self.both, add=False)
        net.project(f"{at}.attn_k", net.normed, net.k, add=False)
        net.project(f"{at}.attn_v", net.normed, net.v, add=False)
        net.build.add(Pick(self.both, net.q, 0, dim, 2 * dim), Pick(self.both, self.gate, dim, dim, 2 * dim))
        net.norm_heads(at)
        net.attend(layer, table)
        net.build.add(Gate(self.gate, net.heads, net.heads, "sigmoid"))
        net.project(f"{at}.attn_output", net.heads, net.x, add=True)


class _Experts:
    """Routed experts, and one that every token has, times the sigmoid of a product of its own."""

    def __init__(self, net: Decoder, meta: Metadata) -> None:
        n, k = expert_counts(meta, needed=True)
        width = meta.integer("expert_feed_forward_length", max(1, net.cfg.n_ff // k))
        shared = meta.integer("expert_shared_feed_forward_length", net.cfg.n_ff)
        self.net, self.mixture = net, Mixture(net, n, k, width)
        build = net.build
        self.gate, self.up = build.buffer("shared_gate", shared), build.buffer("shared_up", shared)
        self.down, self.share = build.buffer("shared_down", net.cfg.n_embd), build.buffer("share", 1)

    def add(self, at: str) -> None:
        """Both are fed with the normed input."""
        net = self.net
        self.mixture.ffn(at)
        net.project(f"{at}.ffn_gate_shexp", net.normed, self.gate, add=False)
        net.project(f"{at}.ffn_up_shexp", net.normed, self.up, add=False)
        net.project_one(f"{at}.ffn_gate_inp_shexp.weight", net.normed, self.share)
        net.build.add(Gate(self.gate, self.up, self.gate, "silu"), Sigmoid(self.share))
        net.project(f"{at}.ffn_down_shexp", self.gate, self.down, add=False)
        net.build.add(Mix(self.down, self.share, net.x))
