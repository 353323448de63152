"""Weight types that have no kernels of their own are carried as Q8_0: converted when they are packed.

8.5 bits a weight in memory whatever the file has, and a rounding of at most 1/254 of a block's largest value: far below
what these types (3.5 bits and less, or MXFP4) have lost already.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cpu.file_blocks import FILE_BLOCK
from pantheon.formats import quant
from pantheon.formats.quantize import quantize

CARRIER = "Q8_0"
#: values that are float32 at a time
_PART = 1 << 22


def is_carried(type_name: str) -> bool:
    """Whether a type is run as another one."""
    return type_name not in FILE_BLOCK and quant.can_dequantize(type_name)


def run_as(type_name: str) -> str:
    """The type whose kernels run a tensor of this type."""
    return CARRIER if is_carried(type_name) else type_name


def block(type_name: str) -> tuple[int, int]:
    """(values, bytes) of a block in the file; (0, 0) for a type that can not be run."""
    if not is_carried(type_name):
        return FILE_BLOCK.get(type_name, (0, 0))
    kind = quant.by_name(type_name)
    return kind.block_values, kind.block_bytes


def parts(rows: NDArray[np.uint8], type_name: str, cols: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(first row, Q8_0 blocks of the rows from there on) of uint8 [n_rows, row bytes], some rows at a time.

    Each part but the last has a whole number of groups of 32 rows.
    """
    step = max(1, _PART // cols // 32) * 32
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        values = quant.dequantize(type_name, part, len(part) * cols).reshape(-1, cols)
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale stays damaged, as with every other type
            yield first, quantize(CARRIER, values)
