"""What `pantheon bench` holds decoding on a die against: bytes of a step, and how fast the die copies."""

from __future__ import annotations

import pytest

from pantheon.accel.cpu import carried
from pantheon.accel.cuda.bandwidth import copy_rates
from pantheon.accel.cuda.context import Device
from pantheon.accel.cuda.layouts import packed_words
from pantheon.accel.cuda.parts import cut
from pantheon.accel.cuda.place import place
from pantheon.engine.load import plan_of
from pantheon.formats.gguf import open_gguf
from pantheon.plan.buffers import Experts
from pantheon.plan.ops import Embed
from pantheon.plan.state_spec import KVType
from tests.golden_data import model_path


def test_a_rate_for_each_repetition() -> None:
    rates = copy_rates(Device(), 1 << 16, repeats=3)
    assert len(rates) == 3 and min(rates) > 0


@pytest.mark.parametrize("stem", ["tiny-llama.Q4_0", "tiny-mixtral.Q4_0"])
def test_a_step_reads_every_matrix_once_and_of_the_experts_those_that_it_uses(stem: str) -> None:
    with open_gguf(model_path(stem)) as file:
        plan = plan_of(file)
        types = {m: carried.run_as(file.tensors[m.tensor].type.name) for m in plan.matrices()}
    expected = 0
    looked_up = {op.table for op in plan.ops() if isinstance(op, Embed)}
    used = {value for op in plan.ops() if not isinstance(op, Embed) for value in vars(op).values()}
    for m in plan.matrices():
        if m in looked_up and m not in used:
            continue
        words = sum(packed_words(types[m], m.rows, m.cols))
        chosen = {op.chosen.width for op in plan.ops() if getattr(op, "weight", None) == m and isinstance(m, Experts)}
        expected += 4 * words * (chosen.pop() if chosen else 1)
    whole = [place(part, types, 64, KVType.F16).step_bytes for part in cut(plan, ())]
    halves = [place(part, types, 64, KVType.F16).step_bytes for part in cut(plan, (len(plan.body) // 2,))]
    assert whole == [expected] and sum(halves) == expected
