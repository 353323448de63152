"""Rows of logits that stay on their die: samplers get what they ask for, never a whole row.

`Rows` belongs to a state.  Behind a forward it finds the best candidates and the masses of every row and has them
copied to the host, which serves the usual sampler without another trip to the die; a wider or flatter choice costs a
few more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from pantheon.accel.cuda import row_kernels as kernels
from pantheon.accel.cuda import row_layout as layout
from pantheon.accel.cuda.context import Array, Device
from pantheon.accel.cuda.faults import named
from pantheon.accel.cuda.kernel import Kernel
from pantheon.accel.cuda.machine import SIMULATED, THREADS
from pantheon.accel.cuda.row_layout import KEEP, MASS_CHUNK, PATCHES, PROBES
from pantheon.accel.executor import Changes, Reached

#: the simulator sorts small chunks: a step of the network is a microsecond of Python there
CHUNK, MORE = (256, KEEP) if SIMULATED else (layout.CHUNK, layout.KEEP_MORE)
#: no candidate has a lower or a higher logit
LEAST, MOST = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)
#: above every key
_TOP_KEY = 2**63 - 1
#: keys from here up are those of candidates
_CANDIDATE = (int(np.float32(LEAST).view(np.int32)) ^ 0x7FFFFFFF) << 32  # LEAST is negative
#: the quotient of a difference stays finite; colder than this, only ties with the best are left anyway
_COLDEST = 1e-30

Keys = NDArray[np.int64]


class Rows:
    """The rows of one state, and the room to sample from them.  Used by the holder of the turn."""

    def __init__(self, device: Device, logits: Array, n_rows: int, n_vocab: int) -> None:
        """logits: float32 [n_rows * n_vocab].  Raises MemoryError when the die has no room."""
        self.device, self.logits, self.n_vocab, self.n_tokens = device, logits, n_vocab, n_vocab
        #: the row behind those of the state is the edited one
        self.edit = n_rows
        jobs, self._chunks = n_rows + 1, layout.chunks(n_vocab)
        self._n_keys = layout.key_count(n_vocab, CHUNK, KEEP)
        self._keys = device.array(jobs * self._n_keys + layout.key_count(n_vocab, CHUNK, MORE), np.int64)
        self._best = device.array(jobs * KEEP + layout.KEEP_MORE, np.int64)
        n_sums = (jobs + PROBES) * self._chunks
        self._sums, self._counts = device.array(n_sums, np.float64), device.array(n_sums, np.int32)
        self._bounds = device.array(2 * (jobs + PROBES), np.float32)
        self.edited = device.array(n_vocab, np.float32)
        self._words = device.array(4 * PATCHES + -(-n_vocab // 32), np.int32)
        #: of every row, what the host knows of it
        self.best: Keys = device.pinned(jobs * KEEP, np.int64).reshape(jobs, KEEP)
        self.sums: NDArray[np.float64] = device.pinned(jobs * self._chunks, np.float64).reshape(jobs, -1)
        self._told_counts = device.pinned(PROBES * self._chunks, np.int32).reshape(PROBES, -1)
        self._told_sums = device.pinned(PROBES * self._chunks, np.float64).reshape(PROBES, -1)
        everything = np.tile(np.asarray([LEAST, MOST], np.float32), jobs)
        device.write(self._bounds, 0, everything)
        device.synchronize()

    def compile(self) -> None:
        """Compile what samplers may launch."""
        with self.device.active():
            for kernel in kernels.kernels():
                kernel.compiled()

    def prefetch(self, m: int, n_tokens: int) -> None:
        """Put on the stream what most samplers want of the first m rows, of whose ids n_tokens are tokens."""
        self.n_tokens = min(n_tokens, self.n_vocab)
        self._survey(self.logits, 0, m)

    def take(self, m: int) -> list[DeviceRow]:
        """The first m rows, when the stream has got there."""
        return [DeviceRow(self, self.logits, i * self.n_vocab, i) for i in range(m)]

    def _survey(self, logits: Array, first: int, m: int) -> None:
        """The best keys and the sums of m rows of an array, as rows from `first` on, and their copies to the host."""
        self._select(logits, 0, m, _TOP_KEY, KEEP, first * self._n_keys, first * KEEP)
        self._add_up(logits, (0, self.n_vocab, first * KEEP, KEEP, 0, first * self._chunks), m, 1.0)
        self.device.read_into(self.best[first : first + m].reshape(-1), self._best, first * KEEP)
        self.device.read_into(self.sums[first : first + m].reshape(-1), self._sums, first * self._chunks)

    def _select(self, logits: Array, at: int, m: int, below: int, keep: int, keys_at: int, best_at: int) -> None:
        """The `keep` best of m rows that are below a key, in order, to `_best`."""
        steps = layout.levels(self.n_tokens, CHUNK, keep)
        source, stride, n = at, self.n_vocab, self.n_tokens
        for i, blocks in enumerate(steps):
            out, out_at, out_stride = self._keys, keys_at, self._n_keys
            if i == len(steps) - 1:
                out, out_at, out_stride = self._best, best_at, keep
            numbers = [np.int64(v) for v in (source, stride, n, below, out_at, out_stride)]
            kernel = kernels.select(i == 0, CHUNK, keep)
            self.device.launch(kernel, (blocks, m), logits, self._keys, out, *numbers)
            source, stride, n, keys_at = keys_at, self._n_keys, blocks * keep, keys_at + blocks * keep

    def more(self, logits: Array, at: int, below: int) -> Keys:
        """The next best keys of one row: waits."""
        jobs = self.edit + 1
        with self._named():
            self._select(logits, at, 1, below, MORE, jobs * self._n_keys, jobs * KEEP)
            return self.device.read(self._best, jobs * KEEP, MORE)

    def read(self, logits: Array, at: int, n: int) -> NDArray[np.float32]:
        """A few logits: waits."""
        with self._named():
            return self.device.read(logits, at, n)

    def _named(self) -> AbstractContextManager[None]:
        """Around a trip to the die: its faults name it."""
        return named((self.device.index,))

    def _add_up(self, logits: Array, places: tuple[int, ...], jobs: int, temperature: float) -> None:
        """Launch `masses`; places: what that calls at, stride, best_at, best_stride, bounds_at and sums_at."""
        at, stride, *others = (np.int64(v) for v in places)
        self.device.launch(
            kernels.masses(), (self._chunks, jobs), logits, self._best, self._bounds, self._counts, self._sums,
            at, stride, np.int64(self.n_tokens), *others, np.float32(max(temperature, _COLDEST)),
        )  # fmt: skip

    def measure(
        self, logits: Array, at: int, job: int, bounds: Sequence[tuple[float, float]], temperature: float
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """How many logits of a row lie within each of at most PROBES bounds, and their masses, [bounds][chunks], valid
        until the next call: waits."""
        rows, n = self.edit + 1, len(bounds)
        values = np.clip(np.asarray(bounds, np.float32).reshape(-1), LEAST, MOST)
        counts, sums, sums_at = self._told_counts[:n], self._told_sums[:n], rows * self._chunks
        with self._named():
            self.device.write(self._bounds, 2 * rows, values)
            self._add_up(logits, (at, 0, job * KEEP, 0, 2 * rows, sums_at), n, temperature)
            self.device.read_into(counts.reshape(-1), self._counts, sums_at)
            self.device.read_into(sums.reshape(-1), self._sums, sums_at)
            self.device.synchronize()
        return counts, sums

    def change(self, logits: Array, at: int, changes: Changes | None, allowed: NDArray[np.int32] | None) -> None:
        """Leave a row with changes in `edited`, surveyed like the rows of a forward: waits."""
        # what is written stays as it is until the stream has got there
        bits, bits_at = _bits(allowed, self.n_tokens), -1 if allowed is None else 4 * PATCHES
        parts = _patches(changes, self.n_tokens)
        with self._named():
            self.device.write(self._words, 4 * PATCHES, bits)
            self._launch_edit(kernels.masked(), logits, at, self.n_tokens, bits_at)
            for part in parts:
                self.device.write(self._words, 0, part)
                self._launch_edit(kernels.patched(), logits, at, len(part) // 4, bits_at)
            self._survey(self.edited, self.edit, 1)
            self.device.synchronize()

    def _launch_edit(self, kernel: Kernel, logits: Array, at: int, n: int, bits_at: int) -> None:
        grid = (1 if SIMULATED else -(-n // THREADS), 1)
        numbers = [np.int64(v) for v in (at, n, bits_at)]
        self.device.launch(kernel, grid, logits, self._words, self.edited, *numbers)


class DeviceRow:
    """One row of `Rows`; see `accel.executor.Row` for the contract."""

    def __init__(self, rows: Rows, logits: Array, at: int, job: int) -> None:
        self._rows, self._logits, self._at, self._job = rows, logits, at, job
        self.n_vocab = rows.n_vocab
        self._keys = _candidates(rows.best[job])
        self._found = _decoded(self._keys)
        self._whole = len(self._keys) < KEEP

    @property
    def total(self) -> float:
        """The sum of all masses at temperature 1."""
        return float(self._rows.sums[self._job].sum())

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids and logits of the k best candidates, in order."""
        while len(self._keys) < k and not self._whole:
            more = _candidates(self._rows.more(self._logits, self._at, int(self._keys[-1])))
            self._whole = len(more) < MORE
            self._keys = np.concatenate([self._keys, more])
            self._found = _decoded(self._keys)
        ids, values = self._found
        return ids[:k], values[:k]

    def value(self, token: int) -> float:
        """One logit; from the host where it is among the best."""
        ids, values = self._found
        places = (ids == token).nonzero()[0]
        if len(places):
            return float(values[places[0]])
        if token >= self._rows.n_tokens:
            return -math.inf
        return float(self._rows.read(self._logits, self._at + token, 1)[0])

    def mass(self, low: float, temperature: float) -> tuple[int, float]:
        """How many candidates have a logit from `low` up, and their masses."""
        counts, sums = self._measure([(low, math.inf)], temperature)
        return int(counts[0]), float(sums[0])

    def reach(self, wanted: float, temperature: float, *, beyond: bool = False) -> Reached:
        """How far down the masses must be summed for `wanted` of them, or for more."""
        if beyond:
            return self._search(lambda _, sums: sums > wanted, temperature)
        return self._search(lambda _, sums: sums >= wanted, temperature)

    def reach_count(self, n: int) -> Reached:
        """How far down the n best candidates go."""
        return self._search(lambda counts, _: counts >= n, 1.0)

    def _search(self, enough: Callable[..., NDArray[np.bool_]], temperature: float) -> Reached:
        """The highest logit down to which there is enough; the lowest float when there never is.  Cuts the floats in
        between into PROBES + 1 parts at a time."""
        low, high = _order_of(LEAST), _order_of(float(self._found[1][0])) + 1
        while high - low > 1:
            n = min(PROBES, high - low - 1)
            probes = [low + (high - low) * i // (n + 1) for i in range(1, n + 1)]
            hits = int(enough(*self._measure([(_logit_of(p), math.inf) for p in probes], temperature)).sum())
            low, high = [low, *probes, high][hits : hits + 2]
        logit = _logit_of(low)
        counts, sums = self._measure([(_logit_of(low + 1), math.inf), (logit, logit)], temperature)
        return Reached(logit, int(counts[0]), float(sums[0]), int(counts[1]), float(sums[1]))

    def _measure(
        self, bounds: Sequence[tuple[float, float]], temperature: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        counts, sums = self._rows.measure(self._logits, self._at, self._job, bounds, temperature)
        return counts.sum(axis=1, dtype=np.int64), sums.sum(axis=1)

    def pick(self, target: float, low: float, high: float, temperature: float) -> int:
        """The id at which the masses between two logits, summed in order of id, pass `target`: reads one chunk."""
        counts, sums = self._rows.measure(self._logits, self._at, self._job, [(low, high)], temperature)
        reached = sums[0].cumsum()
        chunk = min(int(reached.searchsorted(target, side="right")), int(counts[0].nonzero()[0][-1]))
        first = chunk * MASS_CHUNK
        n = min(MASS_CHUNK, self._rows.n_tokens - first)
        values = self._rows.read(self._logits, self._at + first, n)
        ids = ((values >= max(low, LEAST)) & (values <= high)).nonzero()[0]
        masses = np.exp((values[ids].astype(np.float64) - float(self._found[1][0])) / max(temperature, _COLDEST))
        before = float(reached[chunk - 1]) if chunk else 0.0
        place = int(masses.cumsum().searchsorted(target - before, side="right"))
        return first + int(ids[min(place, len(ids) - 1)])

    def edited(self, changes: Changes | None, allowed: NDArray[np.int32] | None) -> DeviceRow:
        """The row with changes and without what is not allowed."""
        self._rows.change(self._logits, self._at, changes, allowed)
        return DeviceRow(self._rows, self._rows.edited, 0, self._rows.edit)


def _bits(allowed: NDArray[np.int32] | None, n: int) -> NDArray[np.int32]:
    """A bit for each of n ids; empty where every id may come."""
    bits = np.zeros(0 if allowed is None else -(-n // 32), np.int32)
    if allowed is not None:
        bits[: len(allowed)] = allowed[: len(bits)]
    return bits


def _patches(changes: Changes | None, n: int) -> list[NDArray[np.int32]]:
    """Changes of ids below n as words, at most PATCHES of them at a time: their ids, biases, by, minus."""
    if changes is None:
        return []
    words = np.stack([changes.ids.astype(np.int32), *(part.view(np.int32) for part in changes[1:])])
    words = words[:, changes.ids < n]
    return [words[:, first : first + PATCHES].flatten() for first in range(0, words.shape[1], PATCHES)]


def _candidates(keys: Keys) -> Keys:
    """A copy of those keys that are of candidates; keys are in order."""
    return keys[: int((keys >= _CANDIDATE).sum())].copy()


def _decoded(keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    ordered = keys >> 32
    bits = np.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).astype(np.int32)
    return 0x7FFFFFFF - (keys & 0xFFFFFFFF), bits.view(np.float32)


def _order_of(logit: float) -> int:
    """The integer that a key has for a logit."""
    bits = int(np.float32(logit).view(np.int32))
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


def _logit_of(order: int) -> float:
    """The logit that a key's integer stands for."""
    return float(np.int32(order if order >= 0 else order ^ 0x7FFFFFFF).view(np.float32))
