"""llama as a plan: what metadata and shapes become, and how each fault is named (M224, M227)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pantheon.models.architectures import make_plan, supported
from pantheon.models.config import ModelConfigError
from pantheon.plan.ops import MatMul, Rope
from pantheon.plan.state_spec import KVType

D, FF, HEADS, KV, HEAD_DIM, VOCAB = 32, 48, 4, 2, 8, 60


def metadata(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "llama.embedding_length": D,
        "llama.block_count": 2,
        "llama.feed_forward_length": FF,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    values.update({f"llama.{k.replace('__', '.')}": v for k, v in changes.items()})
    return values


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, D), "output_norm.weight": (D,)}
    for layer in range(2):
        at = f"blk.{layer}."
        found |= {
            at + "attn_norm.weight": (D,),
            at + "attn_q.weight": (HEADS * HEAD_DIM, D),
            at + "attn_k.weight": (KV * HEAD_DIM, D),
            at + "attn_v.weight": (KV * HEAD_DIM, D),
            at + "attn_output.weight": (D, HEADS * HEAD_DIM),
            at + "ffn_norm.weight": (D,),
            at + "ffn_gate.weight": (FF, D),
            at + "ffn_up.weight": (FF, D),
            at + "ffn_down.weight": (D, FF),
        }
    return found


def matmuls(plan: Any) -> list[MatMul]:
    return [op for op in plan.ops() if isinstance(op, MatMul)]


def test_tied_embedding_is_the_head() -> None:
    plan = make_plan(metadata(), shapes())
    assert matmuls(plan)[-1].weight.tensor == "token_embd.weight"
    assert plan.logits.width == plan.n_vocab == VOCAB


def test_separate_head_is_used_when_present() -> None:
    plan = make_plan(metadata(), shapes() | {"output.weight": (VOCAB, D)})
    assert matmuls(plan)[-1].weight.tensor == "output.weight"


def test_optional_biases_are_honoured() -> None:
    extra: dict[str, tuple[int, ...]] = {
        "blk.0.attn_q.bias": (HEADS * HEAD_DIM,), "blk.1.ffn_down.bias": (D,), "blk.0.attn_output.bias": (D,)
    }  # fmt: skip
    plan = make_plan(metadata(), shapes() | extra)
    assert {op.bias.tensor for op in matmuls(plan) if op.bias} == set(extra)


def test_fused_qkv_becomes_three_row_ranges() -> None:
    found = shapes()
    for layer in range(2):
        for name in "qkv":
            del found[f"blk.{layer}.attn_{name}.weight"]
        found[f"blk.{layer}.attn_qkv.weight"] = ((HEADS + 2 * KV) * HEAD_DIM, D)
    plan = make_plan(metadata(), found)
    first = [(op.weight.first_row, op.weight.rows) for op in matmuls(plan)[:3]]
    assert first == [(0, 32), (32, 16), (48, 16)]


def test_rope_scaling_variants_reach_the_table() -> None:
    linear = make_plan(metadata(rope__scaling__type="linear", rope__scaling__factor=4.0), shapes()).ropes[0]
    assert linear.freq_scale == 0.25 and linear.yarn is None
    yarn = make_plan(
        metadata(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=32),
        shapes(),
    ).ropes[0]  # fmt: skip
    assert yarn.yarn is not None and yarn.freq_scale == 0.25
    llama3 = make_plan(metadata(), shapes() | {"rope_freqs.weight": (HEAD_DIM // 2,)}).ropes[0]
    assert llama3.factors == "rope_freqs.weight"
    plain = make_plan(metadata(rope__scaling__type="none", rope__scaling__factor=4.0), shapes()).ropes[0]
    assert plain.freq_scale == 1.0 and plain.pairing == "norm" and plain.base == 10000.0


def test_state_costs_what_its_rows_cost() -> None:
    plan = make_plan(metadata(), shapes())
    assert plan.state.bytes_per_token(KVType.F32) == 2 * KV * 2 * HEAD_DIM * 4
    assert plan.state.slot_bytes(KVType.F16, 10) == 2 * KV * 2 * HEAD_DIM * 2 * 10


def test_one_table_for_all_layers() -> None:
    plan = make_plan(metadata(), shapes())
    assert len(plan.ropes) == 1 and {op.table for op in plan.ops() if isinstance(op, Rope)} == {0}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"embedding_length": None}, "llama.embedding_length"),
        ({"block_count": 0}, "llama.block_count"),
        ({"block_count": "2"}, "llama.block_count"),
        ({"block_count": True}, "llama.block_count"),
        ({"attention__head_count": [4, 3]}, "llama.attention.head_count"),
        ({"attention__head_count_kv": 3}, "share 3 KV heads"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"rope__scaling__type": "dynamic"}, "rope.scaling.type"),
        ({"rope__dimension_count": 6}, "llama.rope.dimension_count"),
        ({"rope__dimension_count": 10}, "llama.rope.dimension_count"),
        ({"rope__freq_base": -1.0}, "rope.freq_base"),
        ({"embedding_length": 64}, "token_embd.weight"),
        ({"expert_count": 8}, "expert_used_count"),
        ({"block_count": 3}, "blk.2.attn_norm.weight"),
        ({"feed_forward_length": 64}, "blk.0.ffn_gate.weight"),
    ],
)
def test_each_fault_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelConfigError, match=key.replace(".", r"\.")) as refused:
        make_plan(metadata(**changes), shapes())
    assert refused.value.status == 422


@pytest.mark.parametrize("name", sorted(set(shapes()) - {"token_embd.weight"}))
def test_missing_and_misshapen_tensors_are_named(name: str) -> None:
    found = shapes()
    shape = found.pop(name)
    with pytest.raises(ModelConfigError, match=f"tensor {name} is missing"):
        make_plan(metadata(), found)
    with pytest.raises(ModelConfigError, match=f"tensor {name} has shape"):
        make_plan(metadata(), found | {name: (shape[0] + 1, *shape[1:])})


def test_unknown_architecture_is_named_with_what_is_supported() -> None:
    """M227, B40e."""
    with pytest.raises(ModelConfigError, match=r"nosucharch.*llama") as refused:
        make_plan({"general.architecture": "nosucharch"}, {})
    assert refused.value.code == "unknown_architecture"
    assert "llama" in supported()
    with pytest.raises(ModelConfigError, match=r"general\.architecture is missing"):
        make_plan({}, {})


@pytest.mark.parametrize("items", [[""], ["a", "a"], [[], []], [[]], [True, True], [2.0, 2.0], [], [2, 3]])
def test_an_array_of_anything_is_refused_or_read(items: list[Any]) -> None:
    """Per-layer arrays: only whole numbers that all agree count as one."""
    with pytest.raises(ModelConfigError, match=r"llama\.block_count should be one whole number"):
        make_plan(metadata(block_count=items), shapes())


@pytest.mark.parametrize("items", [[FF, FF], np.full(2000, FF, np.uint32)])
def test_an_array_of_one_number_is_that_number(items: Any) -> None:
    assert make_plan(metadata(feed_forward_length=items), shapes()).n_vocab == VOCAB


@pytest.mark.parametrize("base", [1.0, 0.5])
def test_yarn_needs_a_base_above_one(base: float) -> None:
    changes = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": base}
    with pytest.raises(ModelConfigError, match="YaRN"):
        make_plan(metadata(**changes), shapes())
