"""Bytes that running turns were promised are nobody else's."""

from __future__ import annotations

from pantheon.mem.admission import Verdict, admit_turn
from pantheon.mem.costs import TurnCosts
from pantheon.mem.ledger import Ledger
from pantheon.mem.mem_state import HostState, MemState


def test_what_a_turn_has_taken_counts_from_the_look_that_sees_it() -> None:
    ledger, written = Ledger(), [0]
    promise = ledger.add(1000, 10, lambda: written[0])
    assert ledger.outstanding == 1000
    written[0] = 4
    assert ledger.outstanding == 1000, "the watcher has not looked since"
    ledger.look()
    assert ledger.outstanding == 600
    written[0] = 2
    ledger.look()
    assert ledger.outstanding == 600, "a second answer in the same place takes nothing back"
    written[0] = 25
    ledger.look()
    assert ledger.outstanding == 0
    ledger.settle(promise)
    ledger.settle(promise)
    assert ledger.outstanding == 0


def test_the_end_of_a_turn_frees_nothing_before_the_next_look() -> None:
    """What it wrote stays as a warm conversation, which the numbers at hand do not know yet."""
    ledger = Ledger()
    ended, other = ledger.add(300, 10, lambda: 10), ledger.add(50, 10, lambda: 0)
    ledger.settle(ended)
    assert ledger.outstanding == 350
    ledger.look()
    assert ledger.outstanding == 50
    ledger.settle(other)
    ledger.look()
    assert ledger.outstanding == 0


def test_two_turns_never_count_the_same_bytes() -> None:
    state = MemState(HostState(total_bytes=10_000, available_bytes=2_000, reserve_bytes=1_000), alive=True)
    costs = TurnCosts(kv_bytes_per_token=1)

    def ask(promised: int) -> Verdict:
        return admit_turn(
            costs, state, prompt_tokens=600, max_tokens=1, n_ctx=5_000, promised_bytes=promised
        ).verdict  # fmt: skip

    assert ask(0) is Verdict.ADMIT and ask(399) is Verdict.ADMIT
    assert ask(601) is Verdict.REJECT and ask(5_000) is Verdict.REJECT
