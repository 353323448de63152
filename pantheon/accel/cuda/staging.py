"""Raw tensors to a die: rows go through two pinned buffers, and the die packs what has arrived while more is copied.

The host unpacks nothing but what is carried as another type, and holds no more than the two buffers; the caller holds
upload_lock, so that they exist once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cpu import carried
from pantheon.accel.cpu.pack import check, row_bytes
from pantheon.accel.cuda.context import Array, Device
from pantheon.accel.cuda.layouts import ROWS
from pantheon.accel.cuda.lowering import Packed
from pantheon.accel.cuda.pack import pack, pack_grid
from pantheon.accel.executor import RawTensor
from pantheon.plan.buffers import Matrix

U8 = NDArray[np.uint8]
#: bytes of one buffer; a group of rows that is larger gets a larger one
BUFFER_BYTES = 16 << 20


class Uploader:
    """Packs matrices into a die's weights.  One thread; `close` waits and frees the buffers."""

    def __init__(self, device: Device, weights: Array) -> None:
        self._device, self._weights = device, weights
        self._host: list[U8] = []
        self._raw: list[Array] = []
        self._sent = [device.event(), device.event()]
        self._turn = 0

    def upload(self, raw: RawTensor, m: Matrix, packed: Packed) -> None:
        """Send the rows that m names.  Raises ModelFileError unless they lie inside the tensor."""
        check(raw, m)
        n = row_bytes(raw)
        tensor = raw.data.reshape(packed.experts, -1)
        for e in range(packed.experts):
            rows = tensor[e, m.first_row * n : (m.first_row + m.rows) * n].reshape(m.rows, n)
            at = packed.quants_at + e * packed.quant_words, packed.scales_at + e * packed.scale_words
            for first, part in _parts(rows, raw.type_name, packed.type_name, m.cols):
                self._send(part, packed, at, first)

    def _send(self, rows: U8, packed: Packed, at: tuple[int, int], first: int) -> None:
        """Rows from row `first` on, a multiple of 32: copied to a pinned buffer, over the link, packed."""
        self._room(rows.nbytes)
        host, raw, event = self._host[self._turn], self._raw[self._turn], self._sent[self._turn]
        event.wait()  # the die still reads what was put there the time before last
        np.copyto(host[: rows.size], rows.reshape(-1))
        self._device.write(raw, 0, host[: rows.size])
        counts = [np.int32(n) for n in (packed.cols, first, len(rows), rows.shape[1])]
        grid = pack_grid(packed.type_name, len(rows), packed.cols)
        self._device.launch(
            pack(packed.type_name), grid, raw, self._weights, np.int64(at[0]), np.int64(at[1]), *counts
        )  # fmt: skip
        self._device.mark(event)
        self._turn ^= 1

    def _room(self, nbytes: int) -> None:
        """Buffers of at least so many bytes."""
        if self._host and len(self._host[0]) >= nbytes:
            return
        self._device.synchronize()
        size = max(nbytes, BUFFER_BYTES)
        self._host = [self._device.pinned(size, np.uint8) for _ in range(2)]
        self._raw = [self._device.array(size, np.uint8) for _ in range(2)]

    def close(self) -> None:
        """Wait for the die and let go of the buffers; idempotent."""
        self._device.synchronize()
        self._host, self._raw = [], []
        self._device.give_back()


def _parts(rows: U8, type_name: str, run_as: str, cols: int) -> Iterator[tuple[int, U8]]:
    """(first row, rows as the die packs them), at most a buffer at a time, in whole groups but for the last."""
    if run_as != type_name:
        for first, blocks in carried.parts(rows, type_name, cols):
            yield first, blocks.reshape(-1, cols // 32 * 34)
        return
    step = max(1, BUFFER_BYTES // rows.shape[1] // ROWS) * ROWS
    for first in range(0, len(rows), step):
        yield first, rows[first : first + step]
