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


def _run(cpu: str, features: str, code: str, seconds: float = 110) -> str:
    env = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


_TWINS = """
import ctypes
import numpy as np
from numba import int64, void
from pantheon.accel.cpu import cache, vec
from pantheon.plan.state_spec import KVType
from tests.accel.cpu import test_attention, test_matmul

if {attention}:
    test_attention.test_attention(2, 1, 24, 0, KVType.F16)
    test_attention.test_attention(3, 1, 24, 0, KVType.Q8_0)
else:
    test_matmul.test_product_of_every_type_matches_the_twin({kind!r})
    test_matmul.test_embedding_gives_the_values_of_the_file({kind!r})

    @cache.compiled(void(int64, int64, int64))
    def widen(source, to, n):
        for i in range(0, n, 16):
            vec.store_f32(to + 4 * i, vec.load_f16(source + 2 * i))

    @cache.compiled(void(int64, int64, int64))
    def narrow(source, to, n):
        for i in range(0, n, 16):
            vec.store_f16(to + 2 * i, vec.load_f32(source + 4 * i))

    def call(address, source, to):
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(address)(source.ctypes.data, to.ctypes.data, len(source))
        return to

    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    floats = call(widen, halves, np.empty(1 << 16, np.float32))
    assert np.array_equal(floats, halves.astype(np.float32), equal_nan=True)
    # every half, what lies between two of them, what rounds to even, and what is too large or too small
    between = floats[np.isfinite(floats)]
    tie = np.concatenate([between * np.float32(1 + 2.0**-11), between * np.float32(1 + 2.0**-12), between * 1.0003])
    given = np.concatenate([floats, tie.astype("f4"), np.float32([65519, 65520, 1e30, 2.0**-25, 2.0**-24, 1e-30])])
    given = np.concatenate([given, np.zeros(-len(given) % 16, np.float32)])
    with np.errstate(over="ignore"):
        want = given.astype(np.float16)
    assert np.array_equal(call(narrow, given, np.empty(len(given), np.float16)), want, equal_nan=True)
"""


@pytest.mark.parametrize("attention", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["halves", "attention"])
@pytest.mark.parametrize(
    ("cpu", "features", "kind"),
    [("x86-64", "", "IQ4_NL"), ("haswell", _AVX2, "Q6_K")],
    ids=["portable", "avx2-without-fma-and-f16c"],
)
def test_twins_hold_on_lesser_cpus(cpu: str, features: str, kind: str, attention: bool) -> None:
    """Products, and the half conversions by bit arithmetic, which CPUs without F16C need; attention takes long."""
    _run(cpu, features, _TWINS.format(kind=kind, attention=attention), seconds=600 if attention else 110)


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


_EMULATED = """
import numpy as np
from llvmlite import ir
from pantheon.accel.cpu import dots, kernels, matmul
from tests.accel.cpu import test_matmul
from tests.accel.cpu.harness import Bench, evaluate
from pantheon.plan.ops import MatMul

real_llvm, real_features, calls = dots.llvm, dots.features, []

def emulated(b, name, ret, args, **kw):
    if not name.startswith("llvm.x86.avx512.vpdpbusd"):
        return real_llvm(b, name, ret, args, **kw)
    calls.append(name)
    acc, unsigned, signed = args
    i32 = ret.element
    for t in range(4):
        shift = lambda n: ir.Constant(ret, [i32(n)] * ret.count)
        u = b.and_(b.lshr(unsigned, shift(8 * t)), shift(255))
        s = b.ashr(b.shl(signed, shift(24 - 8 * t)), shift(24))
        acc = b.add(acc, b.mul(u, s))
    return acc

# products are compiled here, each time; the rest comes from the cache
real_known, real_prepare = kernels._known, kernels.prepare
kernels._known = lambda key: key in kernels._addresses or (key[0] != "matmul" and real_known(key))
kernels.prepare = lambda keys, *args, **kw: real_prepare([key for key in keys if key[0] != "matmul"], *args, **kw)
kernels.tile_widths = lambda: (1, 2)

def product(kind):
    matmul.kernel.cache_clear()
    for key in [key for key in kernels._addresses if key[0] == "matmul"]:
        del kernels._addresses[key]
    rng = np.random.default_rng(7)
    raw, _ = test_matmul._weights(rng, kind, 32, 256)
    x = rng.normal(size=(3, 256))
    bench = Bench()
    source, out = bench.input("x", x), bench.build.buffer("out", 32)
    bench.ops = [MatMul(bench.matrix("w", kind, (32, 256), raw), source, out)]
    return [evaluate(bench, out, n) for n in (1, 3)]

wide, narrow = ({"avx512vnni", "avx512f"}, "512"), ({"avxvnni"}, "256")
for kind, ways in {"Q8_0": [wide, narrow], "Q6_K": [wide]}.items():
    dots.llvm, dots.features = real_llvm, real_features
    plain = product(kind)
    assert not calls
    for extra, width in ways:
        dots.llvm, dots.features = emulated, lambda ctx: real_features(ctx) | extra
        assert all(np.array_equal(p, v) for p, v in zip(plain, product(kind))), kind
        assert set(calls) == {"llvm.x86.avx512.vpdpbusd." + width}, set(calls)
        calls.clear()
"""


def test_vnni_gives_the_numbers_of_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that is generated for VNNI, run on any CPU: only vpdpbusd itself is spelled out in plain operations.
    Signed weights, and biased ones with two scales a block, bit for bit as AVX2 multiplies them."""
    monkeypatch.setenv("NUMBA_OPT", "1")
    _run("haswell", "+fma,+f16c," + _AVX2, _EMULATED)


_ARM = """
import platform
platform.machine = lambda: "aarch64"
import llvmlite.binding as llvm
from pantheon.accel.cpu import cache, experts, families, kv, recurrent, sync
from pantheon.accel.cpu.pointwise import _MAKERS

# this machine's code generator runs as well and has no such word: one of its own stands in until the text is there
HINT, PAUSE = ("@llvm.aarch64.hint(i32 %s)", "@llvm.x86.sse2.pause()")
real = sync.llvm
def stand_in(b, name, ret, args):
    return real(b, "llvm.x86.sse2.pause", ret, []) if name == "llvm.aarch64.hint" else real(b, name, ret, args)
sync.llvm = stand_in
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
keys = [("matmul", t, 2) for t in ("Q8_0", "Q6_K", "IQ4_NL", "F16", "BF16", "F32")]
keys += [("embed", t) for t in ("Q3_K", "IQ4_NL", "F16")] + [("pack", t) for t in ("Q6_K", "F16")]
keys += [("pointwise", name) for name in _MAKERS] + [("experts", name) for name in experts._MAKERS]
keys += [("recurrent", name) for name in recurrent._MAKERS]
keys += [("combine",), ("team",), ("read",), ("draw",)]
keys += [(name, fmt) for name in ("attend", "store") for fmt in range(len(kv.FORMATS))]
assert {key[0] for key in keys} == set(families.MAKERS)
if FEW:
    keys = [("team",), ("draw",), ("matmul", "IQ4_NL", 2), ("pointwise", "quantise"), ("store", 2)]
machines = [
    target.create_target_machine(cpu=cpu, opt=1, reloc="pic", codemodel="default")
    for cpu in ("cortex-a72", "neoverse-n1")
]
for key in keys:
    text = cache._made[families.address(key)]._library.get_llvm_str()
    text = text.replace("declare void " + PAUSE, "declare void " + HINT % "immarg").replace(PAUSE, HINT % 1)
    assert "llvm.x86" not in text and " asm " not in text, key
    lines = [x for x in text.splitlines() if not x.startswith(("target triple", "target datalayout"))]
    for machine in machines:
        module = llvm.parse_assembly(chr(10).join(lines))
        module.triple, module.data_layout = target.triple, str(machine.target_data)
        module.verify()
        code = machine.emit_assembly(module)
        assert "ldr" in code, key
        if key == ("team",):
            assert "yield" in code and "#98" in code and "syscall" in code, "pause, and the futex of this machine"
print(len(keys))
"""


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all"])
def test_kernels_compile_for_aarch64(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled only, through LLVM: the portable path holds nothing of x86, and its way to sleep is Arm's.  Attention
    alone takes as long as the rest, so that all kernels are a slow test."""
    monkeypatch.setenv("NUMBA_OPT", "1")
    assert int(_run("x86-64", "", f"FEW = {few}\n{_ARM}", seconds=110 if few else 600)) == (5 if few else 30)
