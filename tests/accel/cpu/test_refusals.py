"""What the cpu executor refuses says which key or tensor of the file is at fault, before anything is packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pantheon.accel.cpu.executor import CpuExecutor
from pantheon.accel.executor import Columns, RawTensor
from pantheon.accel.reference import ReferenceExecutor
from pantheon.errors import ModelFileError
from pantheon.models.architectures import make_plan
from pantheon.plan.state_spec import KVType
from tests.models.random_models import Source, decoder, hybrid


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (hybrid("qwen35", inner=20), "ssm.state_size"),
        (hybrid("qwen35", inner=8), "ssm.state_size"),
        (hybrid("qwen35", key_heads=1, value_heads=1, inner=12), "ssm.state_size"),
    ],
)
def test_sizes_without_kernels_name_their_key(made: Any, named: str) -> None:
    plan, source = make_plan(*made), Source(made[1], 1)
    for act in (CpuExecutor(1).check, lambda *a, **k: CpuExecutor(1).load(*a, n_ctx=16, **k)):
        with pytest.raises(ValueError, match=named):
            act(plan, source, kv_type=KVType.F32)
    oracle = ReferenceExecutor().load(plan, source, n_ctx=16, kv_type=KVType.F32)
    assert np.isfinite(oracle.forward(oracle.new_state(1, 16), Columns.of_slot([1, 2], 0))).all()


def test_keys_and_values_of_different_widths_name_both_keys() -> None:
    metadata, shapes = decoder("qwen2", dim=14)
    metadata["qwen2.attention.value_length"] = 10
    for i in range(3):
        shapes |= {f"blk.{i}.attn_v.weight": (20, 40), f"blk.{i}.attn_v.bias": (20,)}
        shapes[f"blk.{i}.attn_output.weight"] = (40, 40)
    plan, source = make_plan(metadata, shapes), Source(shapes, 1)
    with pytest.raises(ValueError, match="keys 14 wide and values 10 wide .*attention.key_length and value_length"):
        CpuExecutor(1).check(plan, source, kv_type=KVType.F32)
    oracle = ReferenceExecutor().load(plan, source, n_ctx=16, kv_type=KVType.F32)
    assert np.isfinite(oracle.forward(oracle.new_state(1, 16), Columns.of_slot([1, 2], 0))).all()


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.0.ssm_a", "blk.1.ssm_conv1d.weight"])
def test_a_vector_of_a_type_that_it_can_not_have_is_named(name: str) -> None:
    metadata, shapes = hybrid("qwen35", width=64)

    class Odd(Source):
        def tensor(self, wanted: str) -> RawTensor:
            raw = super().tensor(wanted)
            return RawTensor(raw.name, "Q8_0", raw.shape, raw.data) if wanted == name else raw

    with pytest.raises(ModelFileError, match=name):
        CpuExecutor(1).check(make_plan(metadata, shapes), Odd(shapes, 1), kv_type=KVType.F32)


@pytest.mark.parametrize("executor", [CpuExecutor(2), ReferenceExecutor()], ids=lambda e: e.name)
def test_a_lone_expert_may_come_without_its_dim(executor: Any) -> None:
    metadata, shapes = decoder("qwen3moe", expert_count=1, expert_used_count=1, expert_feed_forward_length=52)
    dropped = {name: shape[1:] if shape[0] == 1 else shape for name, shape in shapes.items()}
    rows = []
    for these in (shapes, dropped):
        source = Source(shapes, 1)
        source.values = {name: value.reshape(these[name]) for name, value in source.values.items()}
        runner = executor.load(make_plan(metadata, these), source, n_ctx=16, kv_type=KVType.F32)
        rows.append(np.array(runner.forward(runner.new_state(1, 16), Columns.of_slot([1, 2, 3], 0))))
        runner.close()
    assert np.array_equal(rows[0], rows[1])
