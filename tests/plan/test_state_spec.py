"""plan/state_spec: what a conversation costs."""

from __future__ import annotations

import pytest

from pantheon.plan.state_spec import KVSpec, KVType, StateSpec

#: SmolLM2 135M: 30 layers, 3 KV heads of 64
SMOLLM2 = StateSpec((KVSpec(3, 64, 64),) * 30)


@pytest.mark.parametrize(("kv_type", "per_value"), [(KVType.F16, 2), (KVType.F32, 4), (KVType.Q8_0, 34 / 32)])
def test_bytes_per_token_and_slot(kv_type: KVType, per_value: int) -> None:
    assert kv_type.row_bytes(64) == 64 * per_value
    assert SMOLLM2.bytes_per_token(kv_type) == 30 * 3 * 128 * per_value
    assert SMOLLM2.slot_bytes(kv_type, 2048) == 30 * 3 * 128 * per_value * 2048


def test_layers_may_differ_and_k_and_v_too() -> None:
    mixed = StateSpec((KVSpec(2, 8, 4), KVSpec(1, 16, 16, window=32)))
    assert mixed.bytes_per_token(KVType.F16) == 2 * (2 * (8 + 4) + 1 * (16 + 16))


def test_a_state_without_kv_costs_nothing_here() -> None:
    assert StateSpec(()).slot_bytes(KVType.F16, 4096) == 0


def test_types_are_found_by_the_name_a_flag_uses() -> None:
    assert [KVType("f16"), KVType("f32"), KVType("q8_0")] == [KVType.F16, KVType.F32, KVType.Q8_0]


def test_q8_0_rows_have_a_scale_for_every_32_dims_begun() -> None:
    assert [KVType.Q8_0.row_bytes(dim) for dim in (32, 33, 80)] == [34, 37, 86]
