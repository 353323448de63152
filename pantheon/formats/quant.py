"""The weight types of GGUF: their numbers, names and block sizes, and the door to the NumPy dequantisers.

A quantised row is a sequence of blocks; a block of `block_bytes` holds `block_values` values.  Numbers and sizes are
those of ggml (`ggml.h`, `ggml-common.h`).  Must not know files, tensors or executors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pantheon.errors import PantheonError
from pantheon.formats import dequant_basic, dequant_iq, dequant_k


@dataclass(frozen=True, slots=True)
class QuantType:
    """One weight type: ggml number, ggml name, values and bytes of a block."""

    id: int
    name: str
    block_values: int
    block_bytes: int


_TABLE = (
    QuantType(0, "F32", 1, 4),
    QuantType(1, "F16", 1, 2),
    QuantType(2, "Q4_0", 32, 18),
    QuantType(3, "Q4_1", 32, 20),
    QuantType(6, "Q5_0", 32, 22),
    QuantType(7, "Q5_1", 32, 24),
    QuantType(8, "Q8_0", 32, 34),
    QuantType(9, "Q8_1", 32, 36),
    QuantType(10, "Q2_K", 256, 84),
    QuantType(11, "Q3_K", 256, 110),
    QuantType(12, "Q4_K", 256, 144),
    QuantType(13, "Q5_K", 256, 176),
    QuantType(14, "Q6_K", 256, 210),
    QuantType(15, "Q8_K", 256, 292),
    QuantType(16, "IQ2_XXS", 256, 66),
    QuantType(17, "IQ2_XS", 256, 74),
    QuantType(18, "IQ3_XXS", 256, 98),
    QuantType(19, "IQ1_S", 256, 50),
    QuantType(20, "IQ4_NL", 32, 18),
    QuantType(21, "IQ3_S", 256, 110),
    QuantType(22, "IQ2_S", 256, 82),
    QuantType(23, "IQ4_XS", 256, 136),
    QuantType(24, "I8", 1, 1),
    QuantType(25, "I16", 1, 2),
    QuantType(26, "I32", 1, 4),
    QuantType(27, "I64", 1, 8),
    QuantType(28, "F64", 1, 8),
    QuantType(29, "IQ1_M", 256, 56),
    QuantType(30, "BF16", 1, 2),
    QuantType(34, "TQ1_0", 256, 54),
    QuantType(35, "TQ2_0", 256, 66),
    QuantType(39, "MXFP4", 32, 17),
    QuantType(40, "NVFP4", 64, 36),
    QuantType(41, "Q1_0", 128, 18),
    QuantType(42, "Q2_0", 64, 18),
)

#: numbers that ggml gave up; files with them must be made anew
REMOVED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

_BY_ID = {t.id: t for t in _TABLE}
_BY_NAME = {t.name: t for t in _TABLE}

#: uint8 [n_blocks, block_bytes] -> float32 [n_blocks, block_values]
Dequantizer = Callable[[NDArray[np.uint8]], NDArray[np.float32]]

_DEQUANTIZERS: dict[str, Dequantizer] = {
    **dequant_basic.DEQUANTIZERS,
    **dequant_k.DEQUANTIZERS,
    **dequant_iq.DEQUANTIZERS,
}


class UnsupportedType(PantheonError):
    """A weight type that is unknown, removed, or has no dequantiser here; the message names it."""

    status = 422
    type = "invalid_request_error"
    code = "unsupported_weight_type"


def all_types() -> tuple[QuantType, ...]:
    """Every weight type known by name and size, in the order of their numbers."""
    return _TABLE


def by_id(number: int) -> QuantType:
    """The type with this ggml number.  Raises UnsupportedType for unknown and removed numbers."""
    found = _BY_ID.get(number)
    if found is not None:
        return found
    if number in REMOVED:
        raise UnsupportedType(f"weight type {number} ({REMOVED[number]}) was removed from the format")
    raise UnsupportedType(f"weight type {number} is not known")


def by_name(name: str) -> QuantType:
    """The type with this ggml name (`Q4_K`).  Raises UnsupportedType."""
    found = _BY_NAME.get(name)
    if found is None:
        raise UnsupportedType(f"weight type {name!r} is not known")
    return found


def can_dequantize(type_name: str) -> bool:
    """Whether `dequantize` takes this type."""
    return type_name in _DEQUANTIZERS


def row_bytes(type: QuantType, n: int) -> int:
    """Bytes of a row of n values.  Raises ValueError when n is not a whole number of blocks."""
    blocks, rest = divmod(n, type.block_values)
    if n < 0 or rest:
        raise ValueError(f"a row of {n} values is not a whole number of {type.name} blocks of {type.block_values}")
    return blocks * type.block_bytes


def dequantize(type_name: str, raw: NDArray[np.uint8], n_values: int) -> NDArray[np.float32]:
    """The values of consecutive blocks as float32 [n_values], bit for bit as ggml's `dequantize_row_*`.

    `raw` is uint8 of any shape, read in C order, and holds exactly n_values.  The work space is a small multiple of the
    result: convert a large tensor in groups of rows.  Raises UnsupportedType for a type without a dequantiser,
    ValueError when the sizes do not fit.
    """
    kind = by_name(type_name)
    work = _DEQUANTIZERS.get(type_name)
    if work is None:
        known = ", ".join(t.name for t in _TABLE if t.name in _DEQUANTIZERS)
        raise UnsupportedType(f"weight type {type_name} can not be dequantised (those that can: {known})")
    expected = row_bytes(kind, n_values)
    if raw.dtype != np.uint8 or raw.size != expected:
        raise ValueError(f"{n_values} {type_name} values are {expected} bytes, got {raw.size} of {raw.dtype}")
    if not n_values:
        return np.empty(0, np.float32)
    blocks = np.ascontiguousarray(raw).reshape(-1, kind.block_bytes)
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged scale gives inf or nan, as in ggml
        return work(blocks).reshape(n_values)
