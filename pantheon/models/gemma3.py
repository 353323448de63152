"""gemma3: the text part of Gemma 3.  x += RMS(Attn(RMS x)); x += RMS(down(gelu(gate RMS x) * up RMS x)).

The embedding is scaled by sqrt(width); norms (weights with their +1 in the file) before and after each sub-layer, and
on each head of q and k.  Local layers see a sliding window and rotate by a base of their own; by default every sixth
layer is global.  Gemma Team 2025; ARCH.md §4.7.
"""

from __future__ import annotations

from pantheon.models.config import Config, Metadata, Shapes, rope_spec
from pantheon.models.layers import Decoder, Weights
from pantheon.plan.builder import Plan, PlanBuilder
from pantheon.plan.ops import Add, SoftCap
from pantheon.plan.rope import RopeSpec

#: the 27B: its queries are scaled by the width of the model over its heads
_WIDE_LAYERS = 62


def plan(meta: Metadata, shapes: Shapes) -> Plan:
    """The plan of a gemma3 file; raises ModelConfigError naming the key or tensor at fault."""
    cfg = Config.read(meta, shapes)
    window = meta.integer("attention.sliding_window", 0, low=0, high=1 << 30)
    local = meta.layer_flags("attention.sliding_window_pattern", cfg.n_layer, 6)
    cap = meta.number("final_logit_softcapping", 0.0, low=0.0)
    build, weights = PlanBuilder(), Weights(shapes)
    net = Decoder(build, weights, cfg)
    near = build.rope(RopeSpec(cfg.n_rot, meta.base("rope.freq_base_swa", 10000.0), "neox"))
    far = build.rope(rope_spec(meta, cfg, shapes, pairing="neox"))
    scale = (cfg.n_embd / cfg.n_head if cfg.n_layer == _WIDE_LAYERS else cfg.head_dim) ** -0.5

    net.embed(cfg.n_embd**0.5)
    for layer in range(cfg.n_layer):
        at, near_by = f"blk.{layer}", bool(window) and local[layer]
        net.norm(net.x, f"{at}.attn_norm.weight", net.normed)
        net.project_qkv(at)
        net.norm_heads(at)
        net.attend(layer, near if near_by else far, window=window if near_by else 0, scale=scale)
        net.project(f"{at}.attn_output", net.heads, net.normed, add=False)
        net.norm(net.normed, f"{at}.post_attention_norm.weight", net.normed)
        build.add(Add(net.x, net.normed, net.x))
        net.norm(net.x, f"{at}.ffn_norm.weight", net.normed)
        net.gated_ffn(at, "gelu")
        net.project(f"{at}.ffn_down", net.gate, net.normed, add=False)
        net.norm(net.normed, f"{at}.post_ffw_norm.weight", net.normed)
        build.add(Add(net.x, net.normed, net.x))
    logits = net.output_head()
    if cap:
        build.add(SoftCap(logits, cap))
    return net.finish("gemma3", logits)
