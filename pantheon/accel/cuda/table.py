"""The launches of a part, in order: which kernel module serves which op.  Imported only where numba-cuda is.

An input that several quantised products read is quantised once, and again after something has written it; what can be
done in one launch is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pantheon.accel.cuda import attention, embed, experts, pointwise, products, quantise, recurrent
from pantheon.accel.cuda.fused import Fused, fuse, quantised_input
from pantheon.accel.cuda.lowering import Launch, Memory
from pantheon.accel.cuda.targets import alike
from pantheon.plan import ops as o
from pantheon.plan.buffers import Buffer
from pantheon.plan.flow import writes

_LOWER: dict[type, Callable[[Any, Memory], list[Launch]]] = {
    o.Embed: embed.lower_embed, o.RmsNorm: pointwise.lower_rms_norm, o.MatMul: products.lower_matmul,
    o.Rope: pointwise.lower_rope, o.StoreKV: attention.lower_store_kv, o.Attend: attention.lower_attend,
    o.Gate: pointwise.lower_gate, o.Add: pointwise.lower_add, o.Pick: pointwise.lower_pick,
    o.Sigmoid: pointwise.lower_sigmoid, o.SoftCap: pointwise.lower_soft_cap, o.Route: experts.lower_route,
    o.ExpertMatMul: experts.lower_expert_matmul, o.Mix: experts.lower_mix, o.Conv: recurrent.lower_conv,
    o.DeltaGates: recurrent.lower_delta_gates, o.DeltaRule: recurrent.lower_delta_rule,
}  # fmt: skip


def launches(ops: Sequence[o.Op], memory: Memory) -> list[Launch]:
    """Every launch of these ops."""
    found: list[Launch] = []
    quantised: Buffer | None = None
    at = 0
    while at < len(ops):
        op, fused = ops[at], fuse(ops[at:], memory)
        if fused is None:
            x = quantised_input(op, memory)
            if x is not None and x is not quantised:
                found += quantise.lower_quantise(x, memory)
                quantised = x
            fused = _products(ops[at:], memory) or Fused(_LOWER[type(op)](op, memory), 1)
        found += fused.launches
        if any(quantised in writes(done) for done in ops[at : at + fused.ops]):
            quantised = None
        quantised = fused.quantised or quantised
        at += fused.ops
    return found


def _products(ops: Sequence[o.Op], memory: Memory) -> Fused | None:
    """The quantised products at the front that read one input."""
    together = alike(ops, memory)
    return Fused(products.lower_matmuls(together, memory), len(together)) if together else None


def head(memory: Memory) -> list[Launch]:
    """The launches of the head, the gathering of the wanted rows first; their COUNT is that of the wanted columns."""
    return [*pointwise.lower_gather(memory), *launches(memory.plan.head, memory)] if memory.plan.head else []
