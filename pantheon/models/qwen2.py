"""qwen2: Qwen2 and Qwen2.5, dense.  x += Attn(RMS x); x += down(silu(gate RMS x) * up RMS x).

llama with biases on q, k and v, NEOX rope pairing, an optional output bias.  Yang et al. 2024; ARCH.md §4.3.
"""

from __future__ import annotations

from pantheon.models.config import Config, Metadata, Shapes, rope_spec
from pantheon.models.layers import Decoder, Weights
from pantheon.plan.builder import Plan, PlanBuilder


def plan(meta: Metadata, shapes: Shapes) -> Plan:
    """The plan of a qwen2 file; raises ModelConfigError naming the key or tensor at fault."""
    cfg = Config.read(meta, shapes)
    build, weights = PlanBuilder(), Weights(shapes)
    net = Decoder(build, weights, cfg)
    table = build.rope(rope_spec(meta, cfg, shapes, pairing="neox"))

    net.embed()
    for layer in range(cfg.n_layer):
        at = f"blk.{layer}"
        net.norm(net.x, f"{at}.attn_norm.weight", net.normed)
        net.project_qkv(at)
        net.attend(layer, table)
        net.project(f"{at}.attn_output", net.heads, net.x, add=True)
        net.norm(net.x, f"{at}.ffn_norm.weight", net.normed)
        net.gated_ffn(at, "silu")
        net.project(f"{at}.ffn_down", net.gate, net.x, add=True)
    logits = net.output_head()
    return net.finish("qwen2", logits)
