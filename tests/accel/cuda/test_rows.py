"""Rows on a die against an array of the same logits: what a sampler is told, and how."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numba import cuda
from numpy.typing import NDArray

from pantheon.accel.cuda import row_kernels as kernels
from pantheon.accel.cuda import row_layout as layout
from pantheon.accel.cuda import rows as rows_module
from pantheon.accel.cuda.context import Device
from pantheon.accel.cuda.rows import DeviceRow, Rows
from pantheon.accel.executor import Changes
from pantheon.engine.sampler import Sampler, SamplingParams
from pantheon.errors import PantheonError
from tests.engine.array_row import ArrayRow

N, TOKENS = 401, 390


def logits_of(seed: int, n: int = 3, scale: float = 3.0) -> NDArray[np.float32]:
    """Rows with ties, zeros of both signs and some ids that can not come."""
    rng = np.random.default_rng(seed)
    found = (np.round(rng.standard_normal((n, N)) * scale * 16) / 16).astype(np.float32)
    found[:, rng.random(N) < 0.1] = -np.inf
    found[:, 5:9] = [0.0, -0.0, 0.0, -0.0]
    found[:, TOKENS:] = 99.0  # no tokens
    return found


def on_die(logits: NDArray[np.float32], n_tokens: int = TOKENS) -> list[DeviceRow]:
    """The rows of a forward."""
    device = Device()
    array = device.array(logits.size, np.float32)
    device.write(array, 0, logits.reshape(-1))
    rows = Rows(device, array, len(logits), logits.shape[1])
    rows.prefetch(len(logits), n_tokens)
    return rows.take(len(logits))


def twin_of(logits: NDArray[np.float32], n_tokens: int = TOKENS) -> ArrayRow:
    """The same row on the host."""
    mine = logits.copy()
    mine[n_tokens:] = -np.inf
    return ArrayRow(mine)


def same(a: tuple[Any, Any], b: tuple[Any, Any]) -> None:
    assert a[0].tolist() == b[0].tolist()
    assert a[1].tolist() == b[1].tolist()


def test_the_best_and_the_sum_of_all() -> None:
    """In order, the lowest id first among equals; what is no token or -inf is no candidate, however many are asked for.
    """
    logits = logits_of(1)
    for row, host in zip(on_die(logits), logits, strict=True):
        twin = twin_of(host)
        same(row.top(1), twin.top(1))
        same(row.top(128), twin.top(128))
        same(row.top(300), twin.top(300))
        same(row.top(N), twin.top(N))
        assert row.total == pytest.approx(twin.total, rel=1e-6)
        for token in (0, 5, int(host.argmin()), int(row.top(1)[0][0])):
            assert row.value(token) == twin.value(token)
        assert row.value(N - 1) == -math.inf


def test_a_vocabulary_of_several_chunks_on_any_device() -> None:
    """Narrowed down in more than one launch, and asked for more than one of them keeps."""
    logits = np.random.default_rng(12).integers(-300, 300, (1, 5000)).astype(np.float32) / 64
    row, twin = on_die(logits, 4990)[0], twin_of(logits[0], 4990)
    same(row.top(300), twin.top(300))
    assert row.total == pytest.approx(twin.total, rel=1e-6)
    assert row.mass(1.0, 1.0)[0] == twin.mass(1.0, 1.0)[0]


def test_sums_down_to_a_logit_and_the_logit_of_a_sum() -> None:
    logits = logits_of(2, 1)
    row, twin = on_die(logits)[0], twin_of(logits[0])
    for low in (-math.inf, -1.0, 2.5, 50.0):
        (n, mass), (wanted_n, wanted) = row.mass(low, 0.7), twin.mass(low, 0.7)
        assert n == wanted_n and mass == pytest.approx(wanted, rel=1e-5)
    for share in (0.0, 0.3, 0.999):
        mine, theirs = (r.reach(share * r.mass(-math.inf, 3.0)[1], 3.0, beyond=True) for r in (row, twin))
        assert mine[:2] == theirs[:2] and mine.ties == theirs.ties
        assert [mine.above, mine.tie_mass] == pytest.approx([theirs.above, theirs.tie_mass], rel=1e-5)
    assert row.reach_count(333)[:2] == twin.reach_count(333)[:2]
    assert row.reach_count(N).logit == twin.reach_count(N).logit == rows_module.LEAST


def test_one_chunk_tells_which_id_a_sum_in_order_of_id_passes_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks, of which the right one is read, and nothing else of the row."""
    logits = np.zeros((1, 1500), np.float32)
    logits[0, ::3] = 1.0
    row, twin = on_die(logits, 1490)[0], twin_of(logits[0], 1490)
    read: list[int] = []
    real = Device.read

    def reading(self: Device, array: Any, at: int, n: int) -> NDArray[Any]:
        read.append(n if array.dtype == np.float32 else 0)
        return real(self, array, at, n)

    monkeypatch.setattr(Device, "read", reading)
    everything = twin.mass(-math.inf, 2.0)[1]
    for share in (0.0, 0.31, 0.68, 0.7, 0.9999, 2.0):
        assert row.pick(share * everything, -math.inf, math.inf, 2.0) == twin.pick(
            share * everything, -math.inf, math.inf, 2.0
        )
    assert row.pick(400.5, 1.0, 1.0, 1.0) == 1200
    assert max(read) <= layout.MASS_CHUNK


def test_changes_and_bits() -> None:
    """The arithmetic of the host's sampler, to the bit; an edited row leaves the others as they were."""
    logits = logits_of(3, 2)
    rng = np.random.default_rng(4)
    ids = np.unique(rng.integers(0, N, 60))
    changes = Changes(
        ids, rng.standard_normal(len(ids)).astype(np.float32), rng.choice(np.float32([1, 1.3, 0.7]), len(ids)),
        rng.random(len(ids)).astype(np.float32),
    )  # fmt: skip
    allowed = rng.integers(-(2**31), 2**31, 15, np.int64).astype(np.int32)
    row, twin = on_die(logits)[1], twin_of(logits[1])
    for a, b in ((changes, None), (None, allowed), (changes, allowed), (None, np.zeros(40, np.int32))):
        edited, expected = row.edited(a, b), twin.edited(a, b)
        same(edited.top(N), expected.top(N))
        assert edited.total == pytest.approx(expected.total, rel=1e-6, abs=1e-9) or not len(edited.top(1)[0])
    same(row.top(200), twin.top(200))


def test_more_changes_than_go_to_the_die_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "PATCHES", 7)
    logits = logits_of(5, 1)
    ids = np.arange(3, 40)
    ones = np.ones(len(ids), np.float32)
    changes = Changes(ids, ones * 2, ones, ones / 2)
    same(on_die(logits)[0].edited(changes, None).top(N), twin_of(logits[0]).edited(changes, None).top(N))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_what_is_no_number_comes_first(value: float) -> None:
    logits = logits_of(6, 1)
    logits[0, 300] = value
    found = on_die(logits)[0].top(1)[1]
    assert math.isnan(found[0]) if math.isnan(value) else found[0] == math.inf


def test_a_fault_of_the_device_names_the_die(monkeypatch: pytest.MonkeyPatch) -> None:
    row = on_die(logits_of(1, 1))[0]

    def full(*args: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Device, "launch", full)
    for ask in (lambda: row.top(N), lambda: row.mass(0.0, 1.0), lambda: row.edited(None, None)):
        with pytest.raises(PantheonError, match="die 0: out of memory"):
            ask()
    monkeypatch.setattr(Device, "read", full)
    with pytest.raises(PantheonError, match="die 0: out of memory"):
        row.value(int(np.argmin(logits_of(1, 1)[0])))


def test_a_row_without_candidates() -> None:
    assert not len(on_die(np.full((1, 20), -np.inf, np.float32), 20)[0].top(5)[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0, "repeat_penalty": 1.3, "frequency_penalty": 0.3},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.7},
        {"top_k": 0, "top_p": 0.9, "min_p": 0.0, "temperature": 2.0, "logit_bias": ((3, 1.0),)},
        {"top_k": 200, "min_p": 0.0, "top_logprobs": 4},
    ],
)
def test_a_sampler_chooses_as_over_an_array(options: dict[str, Any]) -> None:
    logits = logits_of(7, 3, 0.4)
    host, there = (Sampler(SamplingParams(seed=2, **options), N) for _ in range(2))
    for sampler in (host, there):
        sampler.prime([1, 2, 3])
    for i, row in enumerate(on_die(logits)):
        mine = logits[i].copy()
        mine[TOKENS:] = -np.inf
        a, b = host.sample(mine), there.sample(row)
        assert (a.token, [t for t, _ in a.top]) == (b.token, [t for t, _ in b.top])
        assert b.logprob == pytest.approx(a.logprob, abs=1e-5)
        host.accept(a.token)
        there.accept(b.token)


# ---- kernels, with several threads a block ----------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 4])
def test_select_sorts_with_any_number_of_threads(lanes: int) -> None:
    logits, n = logits_of(8, 2), 90
    out = np.zeros(2 * 6 * 8, np.int64)
    kernel = kernels.select(True, 16, 8, lanes)
    numbers = [np.int64(v) for v in (0, N, n, 2**63 - 1, 0, 6 * 8)]
    kernel.launch((6, 2), cuda.stream(), logits.reshape(-1), out, out, *numbers)
    for y in range(2):
        for block in range(6):
            part = logits[y, 16 * block : min(16 * block + 16, n)]
            order = np.argsort(-part, kind="stable")[:8]
            ids, values = rows_module._decoded(out[(6 * y + block) * 8 :][: len(order)])
            assert ids.tolist() == (16 * block + order).tolist() and values.tolist() == part[order].tolist()


def test_masses_are_the_same_for_any_number_of_threads() -> None:
    logits = logits_of(9, 1).reshape(-1)
    best = np.asarray([(rows_module._order_of(3.0) << 32) + 1], np.int64)
    bounds = np.asarray([-1, 2, -9, 9], np.float32)
    found = []
    for lanes in (1, 4):
        counts, sums = np.zeros(12, np.int32), np.zeros(12, np.float64)
        numbers = [np.int64(v) for v in (0, 0, TOKENS, 0, 0, 0, 0)]
        kernels.masses(128, 8, lanes).launch(
            (6, 2), cuda.stream(), logits, best, bounds, counts, sums, *numbers, np.float32(0.8)
        )
        found.append((counts.tolist(), sums.tolist()))
    assert found[0] == found[1]
    for y, (low, high) in enumerate(((-1, 2), (-9, 9))):
        part = logits[:TOKENS]
        inside = part[(part >= low) & (part <= high)]
        assert sum(found[0][0][6 * y : 6 * y + 6]) == len(inside)
        assert sum(found[0][1][6 * y : 6 * y + 6]) == pytest.approx(np.exp((inside - 3) / 0.8).sum(), rel=1e-5)


def test_the_room_that_is_predicted_is_the_room_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the chunks of a device."""
    monkeypatch.setattr(rows_module, "CHUNK", layout.CHUNK)
    monkeypatch.setattr(rows_module, "MORE", layout.KEEP_MORE)
    taken = 0
    real = Device.array

    def counting(self: Device, n: int, dtype: Any) -> Any:
        nonlocal taken
        taken += n * np.dtype(dtype).itemsize
        return real(self, n, dtype)

    monkeypatch.setattr(Device, "array", counting)
    device = Device()
    logits = cuda.to_device(np.zeros(1, np.float32))
    for n_rows, n_vocab in ((1, 300), (8, 151_936), (3, 248_320)):
        taken = 0
        Rows(device, logits, n_rows, n_vocab)
        assert taken == layout.row_bytes(n_rows, n_vocab)
