"""What a load leaves in memory: no copy of the file, and nothing once the model is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.make_tiny_gguf import LlamaShape, write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]

_LOADS = """
import gc, sys
import numpy as np
from pantheon.accel.executor import Columns
from pantheon.engine.load import load_model

def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["VmRSS"].split()[0]) * 1024

def use():
    with load_model(sys.argv[1], ctx=256, threads=2) as model:
        state = model.new_state(1)
        model.forward(state, Columns.of_slot(list(range(200)), 0))
        return resident(), sum(model.memory()[part] for part in ("weights", "scratch", "tables"))

use(); gc.collect()  # modules, kernels, allocators
before = resident()
for _ in range(2):
    inside, taken = use()
    gc.collect()
    print(before, inside, resident(), taken)
print({"numba", "llvmlite"} & set(sys.modules))
"""


def test_closing_gives_the_memory_back_and_loading_keeps_no_second_copy(tmp_path: Path) -> None:
    """Resident bytes: within 10 % of before after close; inside, no more than what the runner says and some KV."""
    shape = LlamaShape(layers=4, width=512, heads=8, kv_heads=8, ff=2048, type_name="Q8_0")
    path = write_tiny_llama(tmp_path / "m.gguf", shape)
    done = subprocess.run(
        [sys.executable, "-c", _LOADS, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    *rounds, modules = done.stdout.splitlines()
    assert modules == "set()", "a process that runs a model needs no Numba"
    for line in rounds:
        before, inside, after, taken = map(int, line.split())
        weights = path.stat().st_size
        assert taken > weights and inside - before > 0.9 * weights, line
        assert inside - before < taken + 0.5 * weights, line
        assert after < 1.1 * before, line
