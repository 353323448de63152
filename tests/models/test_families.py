"""The other families as plans: what metadata and shapes become, and how faults are named (M224, M225, M227)."""

from __future__ import annotations

from typing import Any

import pytest

from pantheon.models.architectures import make_plan
from pantheon.models.config import ModelConfigError
from pantheon.plan.ops import Attend, DeltaRule, ExpertMatMul, Rope, Route, SoftCap
from pantheon.plan.rope import rope_table
from pantheon.plan.state_spec import KVType

D, FF, HEADS, KV, DIM, VOCAB, LAYERS = 32, 48, 4, 2, 16, 60, 7
EXPERTS, USED = 4, 2


def file(arch: str, **changes: Any) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Metadata and shapes of a small model of an architecture; a change of None takes a key away."""
    values: dict[str, Any] = {
        "context_length": 4096, "embedding_length": D, "block_count": LAYERS, "feed_forward_length": FF,
        "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.key_length": DIM,
        "attention.value_length": DIM, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    if arch in ("qwen3moe", "llama"):
        values |= {"expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": FF}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    keys = {f"{arch}.{key}": value for key, value in values.items() if value is not None}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, D), "output_norm.weight": (D,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in _block(arch).items()}
    return {"general.architecture": arch, **keys}, shapes


def _block(arch: str) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * DIM, KV * DIM
    block: dict[str, tuple[int, ...]] = {"attn_norm": (D,), "ffn_norm": (D,), "attn_output": (D, q)}
    if arch == "phi3":
        return block | {"attn_qkv": (q + 2 * kv, D), "ffn_up": (2 * FF, D), "ffn_down": (D, FF)}
    block |= {"attn_q": (q, D), "attn_k": (kv, D), "attn_v": (kv, D)}
    if arch in ("qwen3", "qwen3moe", "gemma3"):
        block |= {"attn_q_norm": (DIM,), "attn_k_norm": (DIM,)}
    if arch == "gemma3":
        block |= {"post_attention_norm": (D,), "post_ffw_norm": (D,)}
    if arch in ("qwen3moe", "llama"):
        in_out = {"ffn_gate_exps": (EXPERTS, FF, D), "ffn_up_exps": (EXPERTS, FF, D), "ffn_down_exps": (EXPERTS, D, FF)}
        return block | {"ffn_gate_inp": (EXPERTS, D), **in_out}
    return block | {"ffn_gate": (FF, D), "ffn_up": (FF, D), "ffn_down": (D, FF)}


def ops(plan: Any, kind: type) -> list[Any]:
    return [op for op in plan.ops() if isinstance(op, kind)]


def hybrid(arch: str, **changes: Any) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """qwen35 or qwen35moe: 7 blocks, of which the fourth attends."""
    ssm = {
        "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
    }  # fmt: skip
    moe = {"expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": FF}
    more = ssm | (moe | {"expert_shared_feed_forward_length": FF} if arch == "qwen35moe" else {}) | changes
    metadata, shapes = file(arch, **more)
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("blk.")}
    n = metadata[f"{arch}.block_count"]
    for layer in range(n):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (D,), "post_attention_norm.weight": (D,)}
        if (layer + 1) % 4 == 0:
            q, kv = HEADS * DIM, KV * DIM
            block |= {"attn_q.weight": (2 * q, D), "attn_k.weight": (kv, D), "attn_v.weight": (kv, D)}
            block |= {"attn_output.weight": (D, q), "attn_q_norm.weight": (DIM,), "attn_k_norm.weight": (DIM,)}
        else:
            block |= {"attn_qkv.weight": (128, D), "attn_gate.weight": (64, D), "ssm_beta.weight": (4, D)}
            block |= {"ssm_alpha.weight": (4, D), "ssm_conv1d.weight": (128, 4), "ssm_dt.bias": (4,), "ssm_a": (4,)}
            block |= {"ssm_norm.weight": (16,), "ssm_out.weight": (D, 64)}
        if arch == "qwen35moe":
            block |= {"ffn_gate_exps.weight": (EXPERTS, FF, D), "ffn_up_exps.weight": (EXPERTS, FF, D)}
            block |= {"ffn_down_exps.weight": (EXPERTS, D, FF), "ffn_gate_inp.weight": (EXPERTS, D)}
            block |= {f"ffn_{name}_shexp.weight": (FF, D) for name in ("gate", "up")}
            block |= {"ffn_down_shexp.weight": (D, FF), "ffn_gate_inp_shexp.weight": (D,)}
        else:
            block |= {"ffn_gate.weight": (FF, D), "ffn_up.weight": (FF, D), "ffn_down.weight": (D, FF)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return metadata, shapes


ARCHES = ("qwen2", "qwen3", "phi3", "gemma3", "qwen3moe", "llama", "qwen35", "qwen35moe")


@pytest.mark.parametrize("arch", ARCHES)
def test_every_tensor_of_a_block_is_asked_for_by_name(arch: str) -> None:
    """A missing one and one of another shape are each one error that names it."""
    metadata, shapes = hybrid(arch) if arch.startswith("qwen35") else file(arch)
    make_plan(metadata, shapes)
    for name in [name for name in shapes if name.startswith(("blk.3.", "blk.4."))]:
        with pytest.raises(ModelConfigError, match=name):
            make_plan(metadata, {other: shape for other, shape in shapes.items() if other != name})
        wrong = (*shapes[name][:-1], shapes[name][-1] + 1)
        with pytest.raises(ModelConfigError, match=name):
            make_plan(metadata, {**shapes, name: wrong})


def test_gemma3_layers_see_a_window_but_every_sixth() -> None:
    metadata, shapes = file("gemma3", attention__sliding_window=12, rope__freq_base=1e6, rope__freq_base_swa=2e4)
    plan = make_plan(metadata, shapes)
    assert [op.window for op in ops(plan, Attend)] == [12, 12, 12, 12, 12, 0, 12]
    bases = [plan.ropes[op.table].base for op in ops(plan, Rope)][::2]
    assert bases == [2e4, 2e4, 2e4, 2e4, 2e4, 1e6, 2e4]


def test_gemma3_takes_a_period_or_a_flag_for_each_layer() -> None:
    window = {"attention__sliding_window": 12}
    plan = make_plan(*file("gemma3", attention__sliding_window_pattern=2, **window))
    assert [op.window for op in ops(plan, Attend)] == [12, 0, 12, 0, 12, 0, 12]
    flags = [False, True, False, True, False, True, False]
    plan = make_plan(*file("gemma3", attention__sliding_window_pattern=flags, **window))
    assert [op.window for op in ops(plan, Attend)] == [0, 12, 0, 12, 0, 12, 0]
    for wrong in ([True], "six", 0, [0.5] * 7, [True] * 8, [1.0] * 7, [[1]] * 7, []):
        with pytest.raises(ModelConfigError, match="sliding_window_pattern"):
            make_plan(*file("gemma3", attention__sliding_window_pattern=wrong, **window))


def test_gemma3_without_a_window_is_global_everywhere() -> None:
    plan = make_plan(*file("gemma3"))
    assert {op.window for op in ops(plan, Attend)} == {0}
    assert ops(plan, Attend)[0].scale == DIM**-0.5


def test_gemma3_caps_its_logits_when_the_file_says_so() -> None:
    assert ops(make_plan(*file("gemma3")), SoftCap) == []
    plan = make_plan(*file("gemma3", final_logit_softcapping=30.0))
    assert plan.head[-1] == SoftCap(plan.logits, 30.0)
    with pytest.raises(ModelConfigError, match="final_logit_softcapping"):
        make_plan(*file("gemma3", final_logit_softcapping=-1.0))


def test_phi3_takes_longrope_factors_by_the_configured_context() -> None:
    metadata, shapes = file("phi3", rope__scaling__original_context_length=512, rope__scaling__attn_factor=1.2)
    shapes |= {f"rope_factors_{which}.weight": (DIM // 2,) for which in ("short", "long")}
    rope = make_plan(metadata, shapes).ropes[0]
    assert rope.attn_factor == 1.2
    assert rope.factors_at(512) == "rope_factors_short.weight"
    assert rope.factors_at(513) == "rope_factors_long.weight"
    del shapes["rope_factors_short.weight"]
    with pytest.raises(ModelConfigError, match="rope_factors_short"):
        make_plan(metadata, shapes)


@pytest.mark.parametrize("arch", ["qwen3moe", "llama"])
def test_experts_are_routed_to_before_their_products(arch: str) -> None:
    plan = make_plan(*file(arch))
    assert len(ops(plan, Route)) == LAYERS
    assert [op.weight.rows for op in ops(plan, ExpertMatMul)][:3] == [FF, FF, D]
    assert {(op.weight.experts, op.chosen.width) for op in ops(plan, ExpertMatMul)} == {(EXPERTS, USED)}


def test_a_fused_gate_and_up_of_experts() -> None:
    metadata, shapes = file("qwen3moe")
    for layer in range(LAYERS):
        del shapes[f"blk.{layer}.ffn_gate_exps.weight"], shapes[f"blk.{layer}.ffn_up_exps.weight"]
        shapes[f"blk.{layer}.ffn_gate_up_exps.weight"] = (EXPERTS, 2 * FF, D)
    products = ops(make_plan(metadata, shapes), ExpertMatMul)
    assert [(op.weight.tensor, op.weight.first_row) for op in products[:2]] == [
        ("blk.0.ffn_gate_up_exps.weight", 0), ("blk.0.ffn_gate_up_exps.weight", FF),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"expert_used_count": EXPERTS + 1}, "expert_used_count"),
        ({"expert_used_count": 0}, "expert_used_count"),
        ({"expert_used_count": None}, "expert_used_count"),
        ({"expert_count": None}, "expert_count"),
        ({"expert_count": EXPERTS + 1}, "ffn_gate_inp"),
        ({"expert_count": 65536}, "expert_count is 65536"),
        ({"expert_count": 0}, "expert_count is missing or 0"),
    ],
)
def test_counts_of_experts_that_do_not_fit_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        make_plan(*file("qwen3moe", **changes))


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_hybrids_attend_in_every_fourth_block_and_remember_in_the_others(arch: str) -> None:
    plan = make_plan(*hybrid(arch))
    assert (len(plan.state.kv), len(plan.state.recurrent)) == (1, 6)
    assert [op.layer for op in ops(plan, DeltaRule)] == list(range(6))
    assert plan.state.recurrent_bytes == 6 * 4 * (3 * 128 + 4 * 16 * 16)
    assert plan.state.slot_bytes(KVType.F32, 10) == plan.state.recurrent_bytes + 10 * KV * 2 * DIM * 4


def test_an_array_says_which_blocks_are_recurrent() -> None:
    """Over all blocks; those that draft ahead come last and are skipped with whatever they hold."""
    flags = [(layer + 1) % 4 != 0 for layer in range(7)] + [False]
    metadata, shapes = hybrid("qwen35", attention__recurrent_layers=flags, full_attention_interval=2, block_count=8)
    metadata |= {"qwen35.nextn_predict_layers": 1}
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("blk.7.")}
    plan = make_plan(metadata, shapes | {"blk.7.nextn.eh_proj.weight": (D, 2 * D)})
    assert (len(plan.state.kv), len(plan.state.recurrent)) == (1, 6)


@pytest.mark.parametrize(
    ("arch", "changes", "named"),
    [
        ("qwen35", {"ssm__inner_size": 48}, "ssm.inner_size"),
        ("qwen35", {"ssm__group_count": 3}, "ssm.inner_size"),
        ("qwen35", {"ssm__conv_kernel": 1}, "ssm.conv_kernel"),
        ("qwen35", {"ssm__state_size": None}, "ssm.state_size"),
        ("qwen35", {"nextn_predict_layers": 7}, "nextn_predict_layers"),
        ("qwen35", {"attention__recurrent_layers": [True]}, "recurrent_layers"),
        ("qwen35", {"attention__recurrent_layers": [True] * 9}, "recurrent_layers"),
        ("qwen35", {"attention__recurrent_layers": ["a"] * 7}, "recurrent_layers"),
        ("qwen35", {"attention__recurrent_layers": True}, "recurrent_layers"),
        ("qwen35", {"full_attention_interval": 0}, "full_attention_interval"),
        ("qwen35", {"ssm__state_size": 0}, "ssm.state_size"),
        ("qwen35", {"ssm__group_count": 0}, "ssm.group_count"),
        ("qwen35", {"ssm__time_step_rank": 1 << 40}, "ssm.time_step_rank"),
        ("qwen35", {"attention__value_length": 2 * DIM}, "attention.value_length"),
        ("qwen35", {"attention__head_count_kv": [0, 0, 0, KV, 0, 0, 0]}, "head_count_kv"),
        ("qwen35", {"rope__dimension_sections": [0, 0, 0, 0]}, "dimension_sections"),
        ("qwen35", {"rope__dimension_sections": 8}, "dimension_sections"),
        ("qwen35moe", {"feed_forward_length": None, "expert_shared_feed_forward_length": None}, "ffn_gate_shexp"),
        ("qwen35moe", {"expert_count": None}, "expert_count"),
    ],
)
def test_hybrid_metadata_that_does_not_fit_is_named(arch: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        make_plan(*hybrid(arch, **changes))


@pytest.mark.parametrize(
    ("arch", "changes", "named"),
    [
        ("gemma3", {"rope__freq_base_swa": 0.0}, "rope.freq_base_swa"),
        ("gemma3", {"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ("qwen3", {"rope__freq_base": -1e4}, "rope.freq_base"),
        ("qwen2", {"rope__scaling__factor": -2.0}, "rope.scaling.factor"),
        ("qwen2", {"attention__layer_norm_rms_epsilon": -1e-6}, "layer_norm_rms_epsilon"),
        ("qwen2", {"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ("phi3", {"attention__head_count": [4, 4, 4, 4, 4, 4, 2]}, "attention.head_count"),
        ("phi3", {"attention__head_count": []}, "attention.head_count"),
        ("phi3", {"feed_forward_length": None}, "feed_forward_length"),
    ],
)
def test_numbers_out_of_range_are_named(arch: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        make_plan(*file(arch, **changes))


def test_a_mixture_needs_no_plain_width() -> None:
    assert make_plan(*file("qwen3moe", feed_forward_length=None))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("blk.3.attn_sinks.weight", "with this metadata"),
        ("blk.0.ffn_gate_shexp.weight", "with this metadata"),
        ("blk.7.attn_norm.weight", "block_count is 7"),
    ],
)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3moe", "gemma3"])
def test_a_tensor_of_a_block_that_would_be_left_out_is_refused_by_name(arch: str, name: str, why: str) -> None:
    metadata, shapes = file(arch)
    with pytest.raises(ModelConfigError, match=f"{name} is no part of a {arch} model: .*{why}"):
        make_plan(metadata, shapes | {name: (D,)})


def test_dims_of_1_in_front_do_not_count() -> None:
    """llama.cpp's quantiser drops them; converters have written the shared expert's gate with one."""
    metadata, shapes = hybrid("qwen35moe")
    make_plan(metadata, shapes | {f"blk.{i}.ffn_gate_inp_shexp.weight": (1, D) for i in range(LAYERS)})
    with pytest.raises(ModelConfigError, match="ffn_gate_inp_shexp"):
        make_plan(metadata, shapes | {"blk.0.ffn_gate_inp_shexp.weight": (2, D)})


def test_pairs_that_no_section_covers_stand_still() -> None:
    """ARCH.md §3: the fourth stream is 0 for text."""
    assert make_plan(*hybrid("qwen35", rope__dimension_sections=[3, 3, 2, 0])).ropes[0].still == ()
    [rope] = make_plan(*hybrid("qwen35", rope__dimension_sections=[2, 2, 1, 3])).ropes
    assert rope.still == (5, 6, 7)
    cos, sin = rope_table(rope, 5)
    assert not sin[:, 5:].any() and (cos[:, 5:] == 1).all() and sin[1:, :5].all()
