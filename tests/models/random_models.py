"""Random float models of every family in odd sizes: metadata and shapes as a file has them, values drawn.

Knows no files: `Source` serves the tensors to an executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pantheon.accel.executor import RawTensor

Shapes = dict[str, tuple[int, ...]]


class Source:
    """WeightSource of small random values; norms near 1, decays below 0."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.values = {name: self._draw(rng, name, shape) for name, shape in shapes.items()}

    @staticmethod
    def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = rng.normal(size=shape) / np.sqrt(shape[-1])
        if "norm" in name:
            values = 1 + 0.1 * rng.normal(size=shape)
        elif name.endswith("ssm_a"):
            values = -rng.uniform(0.1, 1, shape)
        elif "rope_f" in name:
            values = rng.uniform(1, 4, shape)
        elif "gate_inp" in name:
            values = rng.normal(size=shape)
        return values.astype(np.float32)

    def tensor(self, name: str) -> RawTensor:
        values = self.values[name]
        return RawTensor(name, "F32", values.shape, values.reshape(-1).view(np.uint8))

    def release(self, name: str) -> None:
        """Nothing is mapped."""


def decoder(
    arch: str, *, width: int = 40, ff: int = 52, heads: int = 4, kv: int = 2, dim: int = 14, layers: int = 3,
    vocab: int = 50, **keys: Any,
) -> tuple[dict[str, Any], Shapes]:  # fmt: skip
    """A model with attention in every layer.  keys: metadata, with `__` for a dot."""
    q, k = heads * dim, kv * dim
    block: Shapes = {"attn_norm": (width,), "ffn_norm": (width,), "attn_output": (width, q)}
    if arch == "phi3":
        block |= {"attn_qkv": (q + 2 * k, width), "ffn_up": (2 * ff, width), "ffn_down": (width, ff)}
    else:
        block |= {"attn_q": (q, width), "attn_k": (k, width), "attn_v": (k, width)}
        if arch in ("qwen3", "qwen3moe", "gemma3"):
            block |= {"attn_q_norm": (dim,), "attn_k_norm": (dim,)}
        if arch == "gemma3":
            block |= {"post_attention_norm": (width,), "post_ffw_norm": (width,)}
        experts = keys.get("expert_count")
        block |= mixture(experts, width, ff, keys.pop("fused", False)) if experts else gated(width, ff)
    shapes: Shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(layers) for name, shape in block.items()}
    if arch == "qwen2":
        for name, size in (("q", q), ("k", k), ("v", k)):
            shapes |= {f"blk.{i}.attn_{name}.bias": (size,) for i in range(layers)}
    common = {"feed_forward_length": ff, "attention.head_count": heads, "attention.head_count_kv": kv}
    return metadata(arch, width, layers, dim, common | keys), shapes


def hybrid(
    arch: str, *, width: int = 40, ff: int = 52, heads: int = 4, kv: int = 1, dim: int = 20, layers: int = 4,
    vocab: int = 50, key_heads: int = 2, value_heads: int = 6, inner: int = 16, **keys: Any,
) -> tuple[dict[str, Any], Shapes]:  # fmt: skip
    """A qwen35 model."""
    q, k, values, channels = heads * dim, kv * dim, value_heads * inner, (2 * key_heads + value_heads) * inner
    attend = {
        "attn_q.weight": (2 * q, width), "attn_k.weight": (k, width), "attn_v.weight": (k, width),
        "attn_output.weight": (width, q), "attn_q_norm.weight": (dim,), "attn_k_norm.weight": (dim,),
    }  # fmt: skip
    linear = {
        "attn_qkv.weight": (channels, width), "attn_gate.weight": (values, width), "ssm_a": (value_heads,),
        "ssm_beta.weight": (value_heads, width), "ssm_alpha.weight": (value_heads, width),
        "ssm_conv1d.weight": (channels, 4), "ssm_dt.bias": (value_heads,), "ssm_norm.weight": (inner,),
        "ssm_out.weight": (width, values),
    }  # fmt: skip
    fused, flags = keys.pop("fused", False), keys.get("attention__recurrent_layers")
    ffn: Shapes = gated(width, ff)
    if arch == "qwen35moe":
        keys |= {"expert_count": 5, "expert_used_count": 2, "expert_shared_feed_forward_length": ff}
        keys["expert_feed_forward_length"] = ff
        ffn = mixture(5, width, ff, fused) | {"ffn_gate_shexp": (ff, width), "ffn_up_shexp": (ff, width)}
        ffn |= {"ffn_down_shexp": (width, ff), "ffn_gate_inp_shexp": (width,)}
    shapes: Shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    for i in range(layers):
        recurrent = flags[i] if flags else (i + 1) % 4 != 0
        norms = {"attn_norm.weight": (width,), "post_attention_norm.weight": (width,)}
        block = {**norms, **(linear if recurrent else attend)}
        block |= {f"{name}.weight": shape for name, shape in ffn.items()}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    ssm = {
        "ssm.conv_kernel": 4, "ssm.state_size": inner, "ssm.group_count": key_heads, "ssm.inner_size": values,
        "ssm.time_step_rank": value_heads, "feed_forward_length": ff, "attention.head_count": heads,
        "attention.head_count_kv": kv,
    }  # fmt: skip
    return metadata(arch, width, layers, dim, ssm | keys), shapes


def gated(width: int, ff: int) -> Shapes:
    """A plain FFN."""
    return {"ffn_gate": (ff, width), "ffn_up": (ff, width), "ffn_down": (width, ff)}


def mixture(n: int, width: int, ff: int, fused: bool) -> Shapes:
    """A mixture of n of them."""
    both: Shapes = {"ffn_gate_exps": (n, ff, width), "ffn_up_exps": (n, ff, width)}
    if fused:
        both = {"ffn_gate_up_exps": (n, 2 * ff, width)}
    return {"ffn_gate_inp": (n, width), "ffn_down_exps": (n, width, ff), **both}


def metadata(arch: str, width: int, layers: int, dim: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    """With the keys that every architecture needs."""
    values = {
        "context_length": 512, "embedding_length": width, "block_count": layers, "attention.key_length": dim,
        "attention.value_length": dim, "attention.layer_norm_rms_epsilon": 1e-6,
    } | dict(keys)  # fmt: skip
    return {"general.architecture": arch} | {f"{arch}.{k.replace('__', '.')}": v for k, v in values.items()}
