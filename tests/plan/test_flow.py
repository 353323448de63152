"""What ops read and write, and what a plan carries across a cut: held against runs of the oracle (M226)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pantheon.accel.executor import Columns
from pantheon.accel.reference import ReferenceExecutor
from pantheon.models.architectures import make_plan
from pantheon.plan.buffers import Buffer, Matrix
from pantheon.plan.builder import Plan
from pantheon.plan.flow import live_before, reads, writes
from pantheon.plan.ops import Add, Embed, MatMul, Mix, Rope, Route
from pantheon.plan.state_spec import KVType
from tests.models.random_models import Source, decoder, hybrid

A, B, C = (Buffer(i, name, 8) for i, name in enumerate("abc"))
W = Matrix("w", 8, 8)


@pytest.mark.parametrize(
    ("op", "read", "written"),
    [
        (Add(A, B, C), {A, B}, {C}),
        (Add(A, B, A), {A, B}, {A}),
        (MatMul(W, A, B), {A}, {B}),
        (MatMul(W, A, B, add=True), {A, B}, {B}),
        (MatMul(Matrix("w", 4, 8), A, B, out_first=4), {A, B}, {B}),
        (Rope(A, 1, 8, 0), {A}, {A}),
        (Route(A, B, C), {A}, {B, C}),
        (Mix(A, B, C), {A, B, C}, {C}),
        (Embed(W, A), set(), {A}),
    ],
)
def test_ops_read_and_write(op, read, written) -> None:
    assert set(reads(op)) == read and set(writes(op)) == written


def test_live_buffers_are_those_read_before_they_are_written() -> None:
    ops = [Add(A, B, C), MatMul(W, C, A), Add(A, C, B)]
    assert live_before(ops) == (A, B)
    assert live_before(ops[1:], (B,)) == (C,)
    assert live_before([], (C, A)) == (A, C)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen35moe"])
def test_what_is_not_carried_is_not_missed(arch) -> None:
    """Buffers that are not live at a cut can hold anything there."""
    metadata, shapes = (hybrid if arch.startswith("qwen35") else decoder)(arch)
    plan = make_plan(metadata, shapes)
    columns = Columns.of_slot([3, 1, 4], 0, wanted="all")
    runner = ReferenceExecutor().load(plan, Source(shapes, 1), n_ctx=16, kv_type=KVType.F32)
    wanted = runner.forward(runner.new_state(1, 16), columns)
    for cut in range(1, len(plan.body), 7):
        runner.plan = _spoiled(plan, cut)
        assert np.array_equal(runner.forward(runner.new_state(1, 16), columns), wanted), cut


def _spoiled(plan: Plan, cut: int) -> Plan:
    """The plan with nonsense in every buffer that is not live at the cut."""
    live = live_before(plan.body[cut:], (plan.hidden,))
    table = next(op for op in plan.body if isinstance(op, Embed))
    width = table.out.width
    spoil = [replace(table, out=b, scale=1e6) for b in plan.buffers if b.width == width and b not in live]
    return replace(plan, body=(*plan.body[:cut], *spoil, *plan.body[cut:]))
