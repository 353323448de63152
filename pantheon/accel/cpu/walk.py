"""What a member of the thread team runs: one function without the GIL that walks the op table with the others.

A program is a list of phases; a phase is a list of ops whose work is cut in chunks.  Threads claim chunks, so a
descheduled thread delays only the chunk that it holds, and a phase is complete when all its chunks are, whoever did
them.  Waiting spins briefly, then sleeps on a futex.  Knows no ops: they are addresses with cache.OP_SIGNATURE.

Why late threads are harmless: a job ends when its phases are complete, not when every member went home.  A member
that was descheduled meanwhile wakes with an old epoch; `begin` has reset every phase to the new epoch BEFORE it
wrote anything else of the new job, so whatever values that member reads, its claims fail.
"""

from __future__ import annotations

import functools

from numba import int32, int64, void

from pantheon.accel.cpu import cache
from pantheon.accel.cpu.control import SLEEPERS, STOP, TIMEOUT
from pantheon.accel.cpu.experts import run_units, units
from pantheon.accel.cpu.fields import (
    ATTEND,
    C_COLUMNS,
    C_MAX_TILE,
    C_POSITIONS,
    C_SPANS,
    C_SPLIT_COLUMNS,
    C_THREADS,
    C_WANTED,
    COLUMNS,
    EXPERTS,
    O_FIRST_GROUP,
    O_FN,
    O_GROUPS,
    OP_BYTES,
    P_CHUNKS,
    P_COLUMNS,
    P_DONE,
    P_NEXT,
    P_PARTS,
    P_SPAN,
    P_TILE,
    PHASE_BYTES,
    PROGRAM_BYTES,
    R_FIRST_OP,
    R_GROUPS,
    R_HEAD,
    R_HEADS,
    R_KIND,
    R_OPS,
    R_SPLIT,
)  # fmt: skip
from pantheon.accel.cpu.kv import QUERIES, SPAN
from pantheon.accel.cpu.sync import (
    atomic_add,
    atomic_cas,
    atomic_load,
    atomic_store,
    futex_wait,
    futex_wake,
    pause,
)  # fmt: skip
from pantheon.accel.cpu.vec import call_op, ld_i32, ld_i64, st_i64

_SPIN = 1500  # pauses between phases: some 30 us on current x86
_SPIN_IDLE = 4000  # between jobs: covers the sampling of a token


@cache.jit
def claim(phase, epoch, chunks):  # type: ignore[no-untyped-def]
    """The next chunk to do; -1: all are taken; -2: this thread came late and the job is over."""
    while True:
        v = atomic_load(phase + P_NEXT)
        if v >> 32 != epoch:
            return -2
        i = v & 0xFFFFFFFF
        if i >= chunks:
            return -1
        if atomic_cas(phase + P_NEXT, v, v + 1):
            return i


@cache.jit
def finish(phase, chunks, control):  # type: ignore[no-untyped-def]
    """Count one chunk as done; the last one wakes whoever sleeps on the phase."""
    done = (atomic_add(phase + P_DONE, 1) + 1) & 0xFFFFFFFF
    if done == chunks and atomic_load(control + SLEEPERS) != 0:
        futex_wake(phase + P_DONE)


@cache.jit
def completed(phase, epoch, chunks, control):  # type: ignore[no-untyped-def]
    """Wait for the whole phase; False when the job is over."""
    n = 0
    while True:
        v = atomic_load(phase + P_DONE)
        if v >> 32 != epoch:
            return False
        if v & 0xFFFFFFFF >= chunks:
            return True
        n += 1
        if n < _SPIN:
            pause()
        else:  # the sleeper counts itself BEFORE it looks again
            atomic_add(control + SLEEPERS, 1)
            if atomic_load(phase + P_DONE) == v:
                futex_wait(phase + P_DONE, int32(v & 0xFFFFFFFF), control + TIMEOUT)
            atomic_add(control + SLEEPERS, -1)


@cache.jit
def run_chunk(row, ops, ctx, thread, chunk, phase):  # type: ignore[no-untyped-def]
    """One chunk of a phase: columns (or parts of them), row groups of matrices, or pieces of attention."""
    first = ops + ld_i64(row + R_FIRST_OP) * OP_BYTES
    n = ld_i64(row + R_OPS)
    kind = ld_i64(row + R_KIND)
    if kind == COLUMNS:
        parts = ld_i64(phase + P_PARTS)
        for i in range(n):
            op = first + i * OP_BYTES
            call_op(ld_i64(op + O_FN), op, ctx, thread, chunk // parts, chunk % parts, phase)
    elif kind == ATTEND:
        call_op(ld_i64(first + O_FN), first, ctx, thread, chunk, 0, phase)
    elif kind == EXPERTS:
        chunks = ld_i64(phase + P_CHUNKS)
        for i in range(n):
            op = first + i * OP_BYTES
            work = units(op)
            run_units(op, ctx, thread, work * chunk // chunks, work * (chunk + 1) // chunks)
    else:
        groups, chunks = ld_i64(row + R_GROUPS), ld_i64(phase + P_CHUNKS)
        g0, g1 = groups * chunk // chunks, groups * (chunk + 1) // chunks
        tile = ld_i64(phase + P_TILE)
        for i in range(n):
            op = first + i * OP_BYTES
            base = ld_i64(op + O_FIRST_GROUP)
            lo, hi = max(g0, base), min(g1, base + ld_i64(op + O_GROUPS))
            if lo < hi:
                call_op(ld_i64(op + O_FN + 8 * tile), op, ctx, thread, lo - base, hi - base, phase)


@cache.jit
def walk(epoch, control, rows, n_phases, phases, ops, ctx, thread):  # type: ignore[no-untyped-def]
    """Take part in a job; returns early when it was over before this thread got to it."""
    for i in range(n_phases):
        phase = phases + i * PHASE_BYTES
        row = rows + i * PROGRAM_BYTES
        chunks = atomic_load(phase + P_CHUNKS)
        while True:
            c = claim(phase, epoch, chunks)
            if c < 0:
                break
            run_chunk(row, ops, ctx, thread, c, phase)
            finish(phase, chunks, control)
        if c == -2 or not completed(phase, epoch, chunks, control):
            return


@cache.jit
def cut(row, phase, ctx):  # type: ignore[no-untyped-def]
    """Decide how a phase is cut for this job.  The cut never changes a number, only who computes it."""
    threads = ld_i64(ctx + C_THREADS)
    columns = ld_i64(ctx + (C_WANTED if ld_i64(row + R_HEAD) else C_COLUMNS))
    tile = 0
    while (1 << tile) < columns and tile < ld_i64(ctx + C_MAX_TILE):
        tile += 1
    kind, parts, span, chunks = ld_i64(row + R_KIND), 1, 1, 0
    if columns > 0:
        if kind == COLUMNS:
            if ld_i64(row + R_SPLIT) and columns < 2 * threads:
                parts = threads
            chunks = columns * parts
        elif kind == ATTEND:
            heads, group, spans = ld_i64(row + R_HEADS), ld_i64(row + R_SPLIT), ld_i64(ctx + C_SPANS)
            parts = (group + QUERIES - 1) // QUERIES
            if not spans:
                span = max(1, min(QUERIES * parts // group, columns * heads // (4 * threads)))
            chunks = (columns + span - 1) // span * heads * parts * max(1, spans)
        elif kind == EXPERTS:  # what there is to do is known when the columns have been routed
            chunks = 4 * threads if threads > 1 else 1
        else:
            chunks = min(ld_i64(row + R_GROUPS), 4 * threads if threads > 1 else 1)
    st_i64(phase + P_COLUMNS, columns)
    st_i64(phase + P_TILE, tile)
    st_i64(phase + P_PARTS, parts)
    st_i64(phase + P_SPAN, span)
    atomic_store(phase + P_CHUNKS, chunks)


@cache.jit
def count_spans(ctx):  # type: ignore[no-untyped-def]
    """Spans of positions that attention is cut in for this job; 0: one thread, many columns or a short context."""
    columns, most = ld_i64(ctx + C_COLUMNS), int64(0)
    if ld_i64(ctx + C_THREADS) < 2 or columns > ld_i64(ctx + C_SPLIT_COLUMNS):
        return int64(0)
    for column in range(columns):
        most = max(most, ld_i32(ld_i64(ctx + C_POSITIONS) + 4 * column))
    return most // SPAN + 1 if most >= SPAN else int64(0)


@cache.jit
def begin(control, rows, n_phases, phases, ctx):  # type: ignore[no-untyped-def]
    """Publish a job; returns its epoch."""
    epoch = (atomic_load(control) + 1) & 0x7FFFFFFF
    for i in range(n_phases):  # done before next: nobody can claim in between
        atomic_store(phases + PHASE_BYTES * i + P_DONE, epoch << 32)
        atomic_store(phases + PHASE_BYTES * i + P_NEXT, epoch << 32)
    st_i64(ctx + C_SPANS, count_spans(ctx))
    for i in range(n_phases):
        cut(rows + PROGRAM_BYTES * i, phases + PHASE_BYTES * i, ctx)
    atomic_store(control, epoch)
    if atomic_add(control + SLEEPERS, 0) != 0:  # an add of 0 as a load behind a full fence
        futex_wake(control)
    return epoch


@cache.jit
def next_job(control, last):  # type: ignore[no-untyped-def]
    """Wait for another epoch than `last` and return it; -1 once the team is dismissed."""
    n = 0
    while True:
        v = atomic_load(control)
        if atomic_load(control + STOP) != 0:
            return -1
        if v != last:
            return v
        n += 1
        if n < _SPIN_IDLE:
            pause()
        else:
            atomic_add(control + SLEEPERS, 1)
            if atomic_load(control) == last and atomic_load(control + STOP) == 0:
                futex_wait(control, int32(last), control + TIMEOUT)
            atomic_add(control + SLEEPERS, -1)


@cache.jit
def take_part(control, rows, n_phases, phases, ops, ctx, thread):  # type: ignore[no-untyped-def]
    """Thread 0 runs one job and returns when it is complete; the others stay until the team is dismissed."""
    epoch = int64(0)
    while True:
        epoch = begin(control, rows, n_phases, phases, ctx) if thread == 0 else next_job(control, epoch)
        if epoch < 0:
            return
        walk(epoch, control, rows, n_phases, phases, ops, ctx, thread)
        if thread == 0:
            return


@functools.cache
def kernel() -> int:
    """The address of `take_part`."""

    @cache.compiled(void(*(int64,) * 7))
    def member(control, rows, n_phases, phases, ops, ctx, thread):  # type: ignore[no-untyped-def]
        take_part(control, rows, n_phases, phases, ops, ctx, thread)

    return member
