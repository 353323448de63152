"""Byte offsets of the int64 fields that the op table, the phases and the context block are made of.

Written by `table` and `executor`, read by `team` and the kernels.  All plain ints, so that kernels compile them in.
"""

from __future__ import annotations

# --- the context block: one forward -----------------------------------------------------------------------------
C_COLUMNS, C_WANTED, C_TOKENS, C_SLOTS, C_POSITIONS, C_WANTS, C_KV, C_SLOT_BYTES, C_BLOCK_BYTES, C_ACT, \
    C_SCRATCH, C_SCRATCH_BYTES, C_THREADS, C_MAX_TILE, C_SPANS, C_SPLIT_COLUMNS, C_PARTIALS, \
    C_RECURRENT = (
    8 * i for i in range(18))  # fmt: skip
CONTEXT_WORDS = 24

# --- a phase of one job: next and done hold epoch << 32 | count, on lines of their own --------------------------
P_NEXT, P_CHUNKS, P_COLUMNS, P_TILE, P_PARTS, P_SPAN, P_DONE = 0, 64, 72, 80, 88, 96, 128
PHASE_BYTES = 192

# --- a row of the program: one phase ----------------------------------------------------------------------------
R_KIND, R_HEAD, R_FIRST_OP, R_OPS, R_SPLIT, R_GROUPS, R_HEADS = (8 * i for i in range(7))
PROGRAM_WORDS = 8
PROGRAM_BYTES = 8 * PROGRAM_WORDS
COLUMNS, MATMUL, ATTEND, EXPERTS = 0, 1, 2, 3  # R_KIND

# --- a row of the op table: kernel addresses by tile width (1, 2, 4, 8 columns), then operands -------------------
O_FN = 0
O_X, O_X_BYTES, O_OUT, O_OUT_BYTES, O_N, O_A, O_B, O_C, O_D, O_E, O_F, O_G, O_H, O_FLAG, O_FIRST_GROUP, O_GROUPS, \
    O_Y, O_Y_BYTES, O_VALUE = (32 + 8 * i for i in range(19))  # fmt: skip
OP_WORDS = 32
OP_BYTES = 8 * OP_WORDS
