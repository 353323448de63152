"""llama: Llama 1-3, Mistral, SmolLM2, Mixtral.  x += Attn(RMS x); x += down(silu(gate RMS x) * up RMS x).

GQA, NORM rope pairing (the GGUF converter permuted the q and k rows), tied or separate head, optional biases.
With experts (Mixtral) the FFN is the shared out sum of the k likeliest of them.  Mistral's sliding window is not
applied for this architecture, as in llama.cpp.  Touvron et al. 2023, Jiang et al. 2024; ARCH.md §4.1, §4.2.
"""

from __future__ import annotations

from pantheon.models.config import Config, Metadata, ModelConfigError, Shapes, expert_counts, rope_spec
from pantheon.models.layers import Decoder, Mixture, Weights
from pantheon.plan.builder import Plan, PlanBuilder


def plan(meta: Metadata, shapes: Shapes) -> Plan:
    """The plan of a llama file; raises ModelConfigError naming the key or tensor at fault."""
    cfg = Config.read(meta, shapes)
    if cfg.n_rot != cfg.head_dim:
        raise ModelConfigError(
            f"llama.rope.dimension_count is {cfg.n_rot}, but heads are {cfg.head_dim} wide",
            param="llama.rope.dimension_count",
        )
    build, weights = PlanBuilder(), Weights(shapes)
    net = Decoder(build, weights, cfg)
    table = build.rope(rope_spec(meta, cfg, shapes, pairing="norm"))
    n_experts, k = expert_counts(meta)
    mixture = Mixture(net, n_experts, k, cfg.n_ff) if n_experts else None

    net.embed()
    for layer in range(cfg.n_layer):
        at = f"blk.{layer}"
        net.norm(net.x, f"{at}.attn_norm.weight", net.normed)
        net.project_qkv(at)
        net.attend(layer, table)
        net.project(f"{at}.attn_output", net.heads, net.x, add=True)
        net.norm(net.x, f"{at}.ffn_norm.weight", net.normed)
        if mixture is not None:
            mixture.ffn(at)
        else:
            net.gated_ffn(at, "silu")
            net.project(f"{at}.ffn_down", net.gate, net.x, add=True)
    logits = net.output_head()
    return net.finish("llama", logits)
