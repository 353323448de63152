"""phi3: Phi-3, Phi-3.5, Phi-4 and Phi-4-mini.  x += Attn(RMS x); x += down(silu(gate RMS x) * up RMS x).

q, k and v are rows of one tensor, gate and up of another.  NEOX rope on part of each head, longrope factors by the
configured context.  The sliding window of the file is not applied, as in llama.cpp.  Abdin et al. 2024; ARCH.md §4.6.
"""

from __future__ import annotations

from pantheon.models.config import Config, Metadata, Shapes, rope_spec
from pantheon.models.layers import Decoder, Weights
from pantheon.plan.builder import Plan, PlanBuilder
from pantheon.plan.ops import Gate, MatMul


def plan(meta: Metadata, shapes: Shapes) -> Plan:
    """The plan of a phi3 file; raises ModelConfigError naming the key or tensor at fault."""
    cfg = Config.read(meta, shapes)
    build, weights = PlanBuilder(), Weights(shapes)
    net = Decoder(build, weights, cfg)
    table = build.rope(rope_spec(meta, cfg, shapes, pairing="neox"))

    net.embed()
    for layer in range(cfg.n_layer):
        at = f"blk.{layer}"
        net.norm(net.x, f"{at}.attn_norm.weight", net.normed)
        net.project_qkv(at, fused_only=True)
        net.attend(layer, table)
        net.project(f"{at}.attn_output", net.heads, net.x, add=True)
        net.norm(net.x, f"{at}.ffn_norm.weight", net.normed)
        _gate_up(net, f"{at}.ffn_up.weight")
        net.project(f"{at}.ffn_down", net.gate, net.x, add=True)
    logits = net.output_head()
    return net.finish("phi3", logits)


def _gate_up(net: Decoder, name: str) -> None:
    """gate <- silu(gate) * up, from the rows [gate | up] of one tensor."""
    n_ff, n_embd = net.cfg.n_ff, net.cfg.n_embd
    for first, out in ((0, net.gate), (n_ff, net.up)):
        weight = net.weights.matrix(name, n_ff, n_embd, first_row=first, of_rows=2 * n_ff)
        net.build.add(MatMul(weight, net.normed, out))
    net.build.add(Gate(net.gate, net.up, net.gate, "silu"))
