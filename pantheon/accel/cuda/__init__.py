"""CUDA dies: plans as launches of Numba kernels on a stream.  docs/architecture/cuda.md tells how it fits together.

Only `executor` and what it imports lazily may be imported where numba-cuda is not installed.
"""
