"""The cpu executor: plans run by a small team of threads through Numba kernels.

`executor.CpuExecutor` is the way in; nothing here imports Numba before a plan is loaded.  `table` turns a plan into
rows of int64 that name a kernel's address and its operands, `team` walks them, the other files are the kernels.
"""
