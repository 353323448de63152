"""Compiled kernels are found again by another process; there is no device here, so its part is played."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

_IDENTITIES = """
import hashlib
from pantheon.accel.cuda import kernel_store, pointwise, products
made = [*pointwise.kernels(), *products.kernels(), products.matmul("Q4_K", 2, 16, 8), products.matmul("Q4_K", 2, 32, 4)]
found = [kernel_store.identity(kernel) for kernel in made]
print(len(found), len(set(found)), hashlib.sha256("".join(found).encode()).hexdigest())
"""
#: compiles a kernel with the real compiler and keeps it, or loads what was kept
_KEEP = """
import sys
from types import SimpleNamespace
from numba.cuda import compiler, dispatcher
from pantheon.accel.cuda import kernel_store, pointwise

kernel = pointwise.gather()
device = SimpleNamespace(compute_capability=(8, 0))
kernel_store.cuda = SimpleNamespace(current_context=lambda: SimpleNamespace(device=device))
dispatcher._Kernel = SimpleNamespace(_rebuild=lambda **states: states)
context = SimpleNamespace(refresh=lambda: None)
store = kernel_store._Store(kernel)
found = store.load_overload(kernel.types, context)
if found is None:
    options = dict.fromkeys(("debug", "opt", "abi_info")) | {"launch_bounds": kernel.bounds}
    options |= dict.fromkeys(("lineinfo", "device", "fastmath", "forceinline", "lto"), False)
    library, _ = compiler._compile_pyfunc_with_fixup(kernel.body, kernel.types, cc=(8, 0), abi="numba", **options)
    library.get_asm_strs(cc=(8, 0))
    store.save_overload(kernel.types, SimpleNamespace(_reduce_states=lambda: {"library": library}))
    print("compiled", ".target sm_80" in library.get_asm_strs(cc=(8, 0))[0])
else:
    print("loaded", ".target sm_80" in found["library"].get_asm_strs(cc=(8, 0))[0])
device.compute_capability = (9, 0)
print(store.load_overload(kernel.types, context))
"""


def python(code: str, **env: str) -> str:
    """What a process without the simulator prints."""
    clean = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"} | env
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kernel_is_the_same_in_every_process_and_no_two_are_alike() -> None:
    """Not even those that differ only in a constant of their body."""
    first, second = (python(_IDENTITIES, PYTHONHASHSEED=seed).split() for seed in ("1", "2"))
    assert first == second and first[0] == first[1]


def test_what_one_process_compiled_the_next_one_loads_for_the_same_kind_of_device(tmp_path: Path) -> None:
    runs = [python(_KEEP, PN_KERNEL_CACHE=str(tmp_path)) for _ in range(2)]
    assert runs == ["compiled True\nNone\n", "loaded True\nNone\n"]
