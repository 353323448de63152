"""qwen3moe: Qwen3 with experts.  x += Attn(RMS x); x += sum of the k likeliest experts' FFN(RMS x).

The attention of qwen3; shares of the experts always sum to 1.  Yang et al. 2025; ARCH.md §4.5.
"""

from __future__ import annotations

from pantheon.models.config import Config, Metadata, Shapes, expert_counts, rope_spec
from pantheon.models.layers import Decoder, Mixture, Weights
from pantheon.plan.builder import Plan, PlanBuilder


def plan(meta: Metadata, shapes: Shapes) -> Plan:
    """The plan of a qwen3moe file; raises ModelConfigError naming the key or tensor at fault."""
    cfg = Config.read(meta, shapes, n_ff=32)
    n_experts, k = expert_counts(meta, needed=True)
    width = meta.integer("expert_feed_forward_length", max(1, cfg.n_ff // k))
    build, weights = PlanBuilder(), Weights(shapes)
    net = Decoder(build, weights, cfg)
    mixture = Mixture(net, n_experts, k, width)
    table = build.rope(rope_spec(meta, cfg, shapes, pairing="neox"))

    net.embed()
    for layer in range(cfg.n_layer):
        at = f"blk.{layer}"
        net.norm(net.x, f"{at}.attn_norm.weight", net.normed)
        net.project_qkv(at)
        net.norm_heads(at)
        net.attend(layer, table)
        net.project(f"{at}.attn_output", net.heads, net.x, add=True)
        net.norm(net.x, f"{at}.ffn_norm.weight", net.normed)
        mixture.ffn(at)
    logits = net.output_head()
    return net.finish("qwen3moe", logits)
