"""Copies of recurrent state by position: what can be taken back to, and what is refused (M129, X12)."""

from __future__ import annotations

import numpy as np
import pytest

from pantheon.accel.checkpoints import MOST, Checkpoints


def read(points: Checkpoints, rows: np.ndarray, slot: int, n: int) -> None:
    """n more positions, each of which adds its number."""
    first = points.stands_at[slot]
    positions = np.arange(first, first + n, dtype=np.int32)
    points.go_on(np.full(n, slot, np.int32), positions)
    rows[slot] += positions.sum()


def test_a_slot_is_taken_back_to_what_was_remembered() -> None:
    rows = np.zeros((2, 3), np.float32)
    points = Checkpoints(rows)
    read(points, rows, 0, 5)
    points.remember(0, 5)
    read(points, rows, 0, 3)
    points.remember(0, 8)
    read(points, rows, 0, 2)
    assert points.positions(0) == [5, 8] and points.positions(1) == []
    points.take_back(0, 10)  # where it stands
    assert rows[0, 0] == 45
    points.take_back(0, 5)
    assert rows[0, 0] == 10 and points.positions(0) == [5], "what lies behind is forgotten"
    with pytest.raises(ValueError, match="not remembered after 8"):
        points.take_back(0, 8)
    points.forget(0)
    assert not rows.any() and points.stands_at[0] == 0 and points.positions(0) == []


def test_the_oldest_copy_goes_first_and_copies_are_copies() -> None:
    rows = np.zeros((1, 2), np.float32)
    points = Checkpoints(rows)
    for _ in range(MOST + 2):
        read(points, rows, 0, 2)
        points.remember(0, points.stands_at[0])
    assert points.positions(0) == [2 * n for n in range(3, MOST + 3)]
    kept = rows[0, 0]
    rows[0] = -1
    points.stands_at[0] += 1
    points.take_back(0, 2 * (MOST + 2))
    assert rows[0, 0] == kept


def test_another_slot_goes_on_from_a_copy() -> None:
    rows = np.zeros((3, 2), np.float32)
    points = Checkpoints(rows)
    read(points, rows, 0, 4)
    points.remember(0, 4)
    read(points, rows, 0, 4)
    points.adopt(0, 1, 4)
    points.adopt(0, 2, 8)  # where it stands
    assert (rows[1] == 6).all() and (rows[2] == 28).all() and points.stands_at == [8, 4, 8]
    points.forget(0)
    points.take_back(1, 4)
    assert (rows[1] == 6).all(), "the copy is the slot's own"
    with pytest.raises(ValueError, match="slot 0"):
        points.adopt(0, 1, 4)


def test_columns_that_do_not_go_on_change_nothing() -> None:
    rows = np.zeros((2, 2), np.float32)
    points = Checkpoints(rows)
    with pytest.raises(ValueError, match="slot 1 stands at 0"):
        points.go_on(np.array([0, 1], np.int32), np.array([0, 3], np.int32))
    assert points.stands_at == [0, 0]
    with pytest.raises(ValueError, match="stands at 0, not at 2"):
        points.remember(0, 2)
