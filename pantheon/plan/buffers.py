"""Named activation buffers and references to weights.

A buffer is one float32 row of `width` values for each column of a forward; an executor decides where it lives.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Buffer:
    """float32 [n_columns, width]; `index` is its place in `Plan.buffers`."""

    index: int
    name: str
    width: int


@dataclass(frozen=True)
class Matrix:
    """Rows `first_row … first_row + rows` of a 2-D tensor `(out, in)` in the model file; any weight type."""

    tensor: str
    rows: int
    cols: int
    first_row: int = 0


@dataclass(frozen=True)
class Experts(Matrix):
    """As many matrices of one shape in one 3-D tensor (experts, out, in): rows `first_row …` of each of them."""

    experts: int = 1


@dataclass(frozen=True)
class Vector:
    """`size` values from `first` of a tensor (norm weight, bias), every `step`-th one; used as float32."""

    tensor: str
    size: int
    first: int = 0
    step: int = 1
