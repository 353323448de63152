"""Both executors agree on every family in odd sizes, in one shot, in chunks and side by side (M224, M225).

The goldens fix what is right; these fix that sizes which the goldens do not have change nothing: widths that are no
multiple of 16 or 32, one KV head, windows, scaled ropes, fused experts, arrays of layers, blocks that draft ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pantheon.accel.cpu.executor import CpuExecutor
from pantheon.accel.executor import Columns
from pantheon.accel.reference import ReferenceExecutor
from pantheon.models.architectures import make_plan
from pantheon.plan.state_spec import KVType
from tests.models.random_models import Shapes, Source, decoder, hybrid

YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}
MOE = {"expert_count": 7, "expert_used_count": 3}


def longrope(arch: str, **keys: Any) -> tuple[dict[str, Any], Shapes]:
    """phi3 whose context is beyond the original one."""
    values, shapes = decoder(arch, rope__scaling__original_context_length=100, rope__scaling__attn_factor=1.2, **keys)
    return values, shapes | {f"rope_factors_{which}.weight": (6,) for which in ("short", "long")}


def drafting(arch: str, **keys: Any) -> tuple[dict[str, Any], Shapes]:
    """qwen35 with a block that is skipped."""
    values, shapes = hybrid(arch, layers=5, nextn_predict_layers=1, **keys)
    kept = {name: shape for name, shape in shapes.items() if not name.startswith("blk.4.")}
    return values, kept | {"blk.4.nextn.eh_proj.weight": (40, 80)}


CASES = {
    "llama": decoder("llama"),
    "llama, one KV head, untied": decoder("llama", kv=1, heads=5, dim=8),
    "llama, linear rope": decoder("llama", rope__scaling__type="linear", rope__scaling__factor=4.0),
    "llama, yarn": decoder("llama", **YARN),
    "mixtral": decoder("llama", **MOE),
    "mixtral, fused, all experts": decoder("llama", expert_count=3, expert_used_count=3, fused=True),
    "qwen2": decoder("qwen2", heads=3, kv=3, dim=10),
    "qwen2, yarn": decoder("qwen2", **YARN),
    "qwen3": decoder("qwen3", dim=24),
    "qwen3moe": decoder("qwen3moe", expert_feed_forward_length=52, **MOE),
    "phi3, partial rope": decoder("phi3", rope__dimension_count=10),
    "phi3, longrope": longrope("phi3", rope__dimension_count=12),
    "gemma3": decoder("gemma3", attention__sliding_window=9, attention__sliding_window_pattern=2, layers=4),
    "gemma3, capped": decoder("gemma3", final_logit_softcapping=2.0, rope__scaling__factor=8.0),
    "qwen35": hybrid("qwen35", rope__dimension_count=10),
    "qwen35, one key head": hybrid("qwen35", key_heads=1, value_heads=3, inner=32, kv=2),
    "qwen35, array of layers": hybrid("qwen35", attention__recurrent_layers=[False, True, True, False]),
    "qwen35, drafting": drafting("qwen35"),
    "qwen35moe, fused": hybrid("qwen35moe", fused=True),
}


@pytest.mark.parametrize("what", list(CASES))
def test_both_executors_agree(what: str) -> None:
    metadata, shapes = CASES[what]
    plan, source = make_plan(metadata, shapes), Source(shapes, len(what))
    ids = np.random.default_rng(len(what)).integers(0, plan.n_vocab, 40).tolist()
    want = ReferenceExecutor().load(plan, source, n_ctx=128, kv_type=KVType.F32)
    rows = want.forward(want.new_state(1, 128), Columns.of_slot(ids, 0, wanted="all"))
    runner = CpuExecutor(2).load(plan, source, n_ctx=128, kv_type=KVType.F32)
    try:
        for chunk in (40, 7, 1):
            state, parts = runner.new_state(2, 128), []
            for first in range(0, 40, chunk):
                # another conversation rides along
                part = ids[first : first + chunk]
                mine = Columns.of_slot(part, first, slot=1, wanted="all")
                both = [
                    np.concatenate(pair).astype(np.int32)
                    for pair in (
                        (mine.tokens[::-1], mine.tokens), (np.zeros_like(mine.slots), mine.slots),
                        (mine.positions, mine.positions),
                    )
                ]  # fmt: skip
                wanted = np.arange(len(part), 2 * len(part), dtype=np.int32)
                parts.append(np.array(runner.forward(state, Columns(*both, wanted))))
            got = np.concatenate(parts)
            assert np.abs(got - rows).max() <= 2e-3 * max(1.0, float(np.abs(rows).max())), chunk
            if chunk == 40:
                whole = got
            assert np.array_equal(got, whole), f"chunks of {chunk} differ"
    finally:
        runner.close()
