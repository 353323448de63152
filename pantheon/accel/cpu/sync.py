"""Atomics, pause and futex as Numba intrinsics (Linux)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from pantheon.accel.cpu.control import MACHINE, SYS_FUTEX, WAIT_PRIVATE, WAKE_PRIVATE
from pantheon.accel.cpu.vec import I32, I64, at, llvm, op

_i64 = types.int64


@op(_i64, _i64)
def atomic_load(ctx: Any, b: Any, addr: Any) -> Any:
    return b.load_atomic(at(b, addr, I64), "acquire", 8)


@op(types.void, _i64, _i64)
def atomic_store(ctx: Any, b: Any, addr: Any, v: Any) -> None:
    b.store_atomic(v, at(b, addr, I64), "release", 8)


@op(_i64, _i64, _i64)
def atomic_add(ctx: Any, b: Any, addr: Any, v: Any) -> Any:
    """Returns the old value; a full fence."""
    return b.atomic_rmw("add", at(b, addr, I64), v, "seq_cst")


@op(types.boolean, _i64, _i64, _i64)
def atomic_cas(ctx: Any, b: Any, addr: Any, old: Any, new: Any) -> Any:
    return b.extract_value(b.cmpxchg(at(b, addr, I64), old, new, "acq_rel", "acquire"), 1)


@op(types.void)
def pause(ctx: Any, b: Any) -> None:
    """Tell the core that it spins; nothing where there is no word for it."""
    if MACHINE == "x86_64":
        llvm(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif MACHINE == "aarch64":
        llvm(b, "llvm.aarch64.hint", ir.VoidType(), [I32(1)])  # YIELD


@op(types.void, _i64, types.int32, _i64)
def futex_wait(ctx: Any, b: Any, addr: Any, value: Any, timeout: Any) -> None:
    """Sleep while the int32 at addr is value, at most the timespec at timeout; may return early."""
    zero = I64(0)
    llvm(b, "syscall", I64, [I64(SYS_FUTEX), addr, I64(WAIT_PRIVATE), b.sext(value, I64), timeout, zero, zero])


@op(types.void, _i64)
def futex_wake(ctx: Any, b: Any, addr: Any) -> None:
    """Wake everybody who sleeps on the int32 at addr."""
    zero = I64(0)
    llvm(b, "syscall", I64, [I64(SYS_FUTEX), addr, I64(WAKE_PRIVATE), I64(0x7FFFFFFF), zero, zero, zero])
