"""Other instruction sets than this machine's, in processes of their own: the same twins must hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_AVX2 = "+avx2,+avx,+sse4.2,+sse4.1,+ssse3"
_AVX512 = "+avx512f,+avx512bw,+avx512vl,+avx512dq,+fma,+f16c," + _AVX2


def _run(cpu: str, features: str, code: str) -> str:
    env = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=110
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


_TWINS = """
from tests.accel.cpu import test_attention, test_matmul
from pantheon.plan.state_spec import KVType
for kind in {kinds}:
    test_matmul.test_product_of_every_type_matches_the_twin(kind)
    test_matmul.test_embedding_gives_the_values_of_the_file(kind)
test_attention.test_attention(2, 1, 24, 0, KVType.F16)
test_attention.test_attention(3, 1, 24, 0, KVType.Q8_0)
"""


@pytest.mark.parametrize(
    ("cpu", "features", "kinds"),
    [("x86-64", "", ["IQ4_NL"]), ("haswell", _AVX2, ["Q6_K"])],
    ids=["portable", "avx2-without-fma-and-f16c"],
)
def test_twins_hold_on_lesser_cpus(cpu: str, features: str, kinds: list[str]) -> None:
    """Also the half conversions by bit arithmetic, which CPUs without F16C need."""
    _run(cpu, features, _TWINS.format(kinds=kinds))


_ASSEMBLY = """
import numba
from pantheon.accel.cpu import cache
made = []
def kernel(function):
    made.append(numba.cfunc(cache.OP_SIGNATURE, **cache.OPTIONS)(function))
    return made[-1].address
cache.kernel = kernel
from pantheon.accel.cpu import families, matmul
widths = families.tile_widths()
for kind in ("Q8_0",):
    matmul.kernel(kind, widths[-1])
    print(kind, widths[-1], made[-1]._library.get_asm_str().count("vpdpbusd"))
"""


@pytest.mark.parametrize(
    ("cpu", "features", "width", "dots"),
    [("znver4", "+avx512vnni," + _AVX512, 8, 64), ("alderlake", "+avxvnni,+fma,+f16c," + _AVX2, 4, 64)],
    ids=["avx512", "avx-vnni"],
)
def test_vnni_is_used_where_it_is(cpu: str, features: str, width: int, dots: int) -> None:
    """Compiled only: 8 quads times the columns, twice where a vector is split in halves."""
    out = _run(cpu, features, _ASSEMBLY)
    assert out == f"Q8_0 {width} {dots}\n"
