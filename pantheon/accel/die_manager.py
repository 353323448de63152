"""The die manager: which die is whose, how much each may hold, and where a model goes.

The die is the atomic unit: at most one model on each [M242].  A model is charged for its weights, scratch and one full
conversation when it is bound; what its cache of conversations takes beyond that is noted as it changes.  Must not know
models, files or HTTP: needs come in as bytes, owners as names.  Spec: M058, M143, M186, M240, X32.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pantheon.accel.cpu.cores import usable_cores
from pantheon.accel.die import SIMULATOR, VISIBLE, Die, DieInfo, cuda_missing, discover, nvml_fault, simulator
from pantheon.errors import BadRequest, PantheonError

#: bytes of each die for given budgets, in order; None when no way of dividing them fits
Need = Callable[[Sequence[int]], Sequence[int] | None]


class Taken(NamedTuple):
    """Dies that were bound, the budget that each had then, and what it was charged."""

    dies: tuple[int, ...]
    budgets: tuple[int, ...]
    charges: tuple[int, ...]


@dataclass
class _Place:
    """A die and what is on it; all but `die` is guarded by the manager's lock.  `settled`: what it was charged is
    there, so that the device no longer counts it as free."""

    die: Die
    model: str | None = None
    charged: int = 0
    cache: int = 0
    free: int | None = None
    settled: bool = False

    @property
    def budget(self) -> int:
        """Bytes for models: what the die had at boot less the reserve, or less if others use it now [X32]."""
        boot = max(0, self.die.total_bytes - self.die.reserve_bytes)
        if self.free is None:
            return boot
        own = self.charged + self.cache if self.settled else 0
        return max(0, min(boot, self.free + own - self.die.reserve_bytes))


class DieManager:
    """Budgets and bindings of every die of this process.  No call waits for anything."""

    def __init__(self, dies: Iterable[Die] = ()) -> None:
        #: guards every _Place
        self._lock = threading.Lock()
        self._places = [_Place(die) for die in dies]
        self.refresh()

    @classmethod
    def discover(cls, executor: str = "auto") -> DieManager:
        """The dies of this machine that an executor may use: "auto", "cpu", or "cuda", which takes CUDA dies only.

        Raises SettingError for a bad PN_VIRTUAL_DIES or PN_DIE_RESERVE_BYTES, and BadRequest when there is no CUDA die
        for "cuda".
        """
        found = cls(discover(executor))
        if executor == "cuda" and found.executor() != "cuda":
            raise BadRequest(f"--executor cuda: {found._no_cuda()}", param="executor", code="die_not_supported")
        return found

    def __len__(self) -> int:
        return len(self._places)

    @property
    def usable(self) -> bool:
        """Whether there is a die that a model can be placed on."""
        return any(not place.die.fault for place in self._places)

    def executor(self, dies: Sequence[int] | None = None) -> str:
        """What runs a model on these dies, () being the CPU, or on those that would be chosen: "cuda" or "cpu"."""
        asked = self._places if dies is None else [self._places[i] for i in dies if 0 <= i < len(self._places)]
        return "cuda" if any(place.die.kind == "cuda" and not place.die.fault for place in asked) else "cpu"

    def _no_cuda(self) -> str:
        """Why there is no CUDA die to use."""
        if self._places and self._places[0].die.kind == "virtual" and not simulator():
            return f"PN_VIRTUAL_DIES are parts of the CPU; {SIMULATOR}=1 makes them simulated CUDA dies"
        missing = next((place.die.fault for place in self._places), "") or cuda_missing()
        return missing or f"there is no CUDA device ({_no_device()})"

    # ---- placing ------------------------------------------------------------------------------------------------

    def check(self, dies: Sequence[int]) -> None:
        """Raise BadRequest unless these are different dies that exist and can run models."""
        if len(set(dies)) < len(dies):
            raise BadRequest(f"dies: a die is named twice in {list(dies)}", param="dies")
        for index in dies:
            if not 0 <= index < len(self._places):
                raise BadRequest(self._missing(index), param="dies", code="no_such_die")
            die = self._places[index].die
            if die.fault:
                raise BadRequest(
                    f"dies: die {index} is a CUDA device ({die.name}) that no model can use: {die.fault}; leave dies "
                    "out to load on the CPU",
                    param="dies", code="die_not_supported",
                )  # fmt: skip

    def _missing(self, index: int) -> str:
        if not self._places:
            why = _no_device()
            return f"dies: there is no die {index}: this machine has none ({why}); leave dies out to use the CPU"
        last = len(self._places) - 1
        return f"dies: there is no die {index}: they are numbered from 0 to {last} ({_among()})"

    def pick(
        self, need: int | Sequence[int] | Need, dies: Sequence[int] | None = None, owner: str | None = None
    ) -> tuple[int, ...]:
        """Where a model of that size goes; binds nothing.

        need: bytes of each die in order, one number for a single die, or a function of the dies' budgets.  dies: the
        ones asked for, free or the owner's; None lets the manager choose the fewest free dies that fit, the tightest
        fit first.

        Raises PantheonError: 400 no such die, 409 a die is taken, 507 it does not fit; then with the bytes.
        """
        with self._lock:
            return self._pick_locked(need, dies, owner)

    def take(self, owner: str, need: int | Sequence[int] | Need, dies: Sequence[int] | None = None) -> Taken:
        """Pick and bind in one, so that no other load can come between."""
        with self._lock:
            found = self._pick_locked(need, dies, owner)
            budgets = tuple(self._places[i].budget for i in found)
            charges = tuple(_needs(need, budgets) or ())
            self._bind_locked(found, owner, charges)
            return Taken(found, budgets, charges)

    def _pick_locked(
        self, need: int | Sequence[int] | Need, dies: Sequence[int] | None, owner: str | None
    ) -> tuple[int, ...]:
        if dies is not None:
            self.check(dies)
            self._need_free_locked(dies, owner)
            budgets = [self._places[i].budget for i in dies]
            if not _fits(_needs(need, budgets), budgets):
                raise self._too_big(need, list(dies))
            return tuple(dies)
        free = [i for i, p in enumerate(self._places) if not p.die.fault and p.model is None]
        if not free:
            raise PantheonError(
                f"all {len(self._places)} dies are taken; unload a model first", status=507, code="no_free_die",
                type="invalid_request_error",
            )  # fmt: skip
        found = self._choose(need, free)
        if found is None:
            raise self._too_big(need, free)
        return found

    def _choose(self, need: int | Sequence[int] | Need, free: list[int]) -> tuple[int, ...] | None:
        roomy = sorted(free, key=lambda i: (-self._places[i].budget, i))
        # one die: the smallest that is enough, so that the large ones stay for what needs them
        for i in sorted(free, key=lambda i: (self._places[i].budget, i)):
            if _fits(_needs(need, [self._places[i].budget]), [self._places[i].budget]):
                return (i,)
        for count in range(2, len(free) + 1):
            group = sorted(roomy[:count])
            budgets = [self._places[i].budget for i in group]
            if _fits(_needs(need, budgets), budgets):
                return tuple(group)
        return None

    def _need_free_locked(self, dies: Sequence[int], owner: str | None = None) -> None:
        for i in dies:
            model = self._places[i].model
            if model is not None and model != owner:
                raise PantheonError(
                    f"dies: die {i} holds the model {model!r}; at most one model is placed on a die",
                    status=409, type="invalid_request_error", code="die_taken", param="dies",
                )  # fmt: skip

    def _too_big(self, need: int | Sequence[int] | Need, dies: Sequence[int]) -> PantheonError:
        budgets = [self._places[i].budget for i in dies]
        whole = _needs(need, [sum(budgets) + (1 << 60)]) if callable(need) else _needs(need, budgets)
        need_bytes, have_bytes = sum(whole or ()), sum(budgets)
        named = ", ".join(map(str, dies))
        where = f"die {named}" if len(dies) == 1 else f"dies {named}"
        return PantheonError(
            f"the model needs {_gib(need_bytes)}, and {where} can hold {_gib(have_bytes)}: ask for a shorter ctx, or "
            "for other dies",
            status=507, type="invalid_request_error", code="die_full", param="dies",
            need_bytes=need_bytes, have_bytes=have_bytes,
            reserve_bytes=sum(self._places[i].die.reserve_bytes for i in dies),
        )  # fmt: skip

    # ---- binding ------------------------------------------------------------------------------------------------

    def bind(self, dies: Sequence[int], owner: str, bytes_per_die: Sequence[int]) -> None:
        """Charge a model to its dies; it may hold them already (`hold`, or an earlier bind, which this replaces).

        Raises PantheonError: 400 no such die, 409 another's, 507 too big; then nothing has changed.
        """
        if len(dies) != len(bytes_per_die):
            raise ValueError("one number of bytes for each die")
        with self._lock:
            self.check(dies)
            self._need_free_locked(dies, owner)
            if not _fits(bytes_per_die, [self._places[i].budget for i in dies]):
                raise self._too_big(bytes_per_die, dies)
            self._bind_locked(dies, owner, bytes_per_die)

    def _bind_locked(self, dies: Sequence[int], owner: str, charges: Sequence[int]) -> None:
        for i, charge in zip(dies, charges, strict=True):
            place = self._places[i]
            place.model, place.charged, place.settled = owner, charge, False

    def settle(self, dies: Sequence[int], owner: str, bytes_per_die: Sequence[int]) -> None:
        """The owner's model is loaded and takes these bytes of its dies, which the devices no longer count as free."""
        with self._lock:
            for i, charge in zip(dies, bytes_per_die, strict=True):
                if self._places[i].model == owner:
                    self._places[i].charged, self._places[i].settled = charge, True

    def hold(self, dies: Sequence[int], owner: str) -> None:
        """Take dies for a model that will be bound later.  Raises as bind does."""
        self.bind(dies, owner, [0] * len(dies))

    def note_cache(self, dies: Sequence[int], owner: str, nbytes: int) -> None:
        """What a bound model's warm conversations take beyond its charge, shared out evenly."""
        with self._lock:
            for i in dies:
                if self._places[i].model == owner:
                    self._places[i].cache = nbytes // len(dies)

    def unbind(self, dies: Sequence[int], owner: str) -> None:
        """Free the dies that are the owner's; others stay as they are, and those that do not exist are nobody's."""
        with self._lock:
            for i, place in enumerate(self._places):
                if i in dies and place.model == owner:
                    place.model, place.charged, place.cache, place.settled = None, 0, 0, False

    # ---- looking ------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Ask every device for its free bytes [X32]; called at each poll of the memory watcher.  Raises nothing."""
        found = [place.die.free_now() for place in self._places]
        with self._lock:
            for place, free in zip(self._places, found, strict=True):
                place.free = free

    def snapshot(self) -> tuple[DieInfo, ...]:
        """Every die now."""
        with self._lock:
            return tuple(_info(i, place) for i, place in enumerate(self._places))

    def threads(self, dies: Sequence[int], asked: int | None = None) -> int | None:
        """Compute threads of a model on these dies: a virtual die is its share of the cores.  `asked` wins, and None
        means that there is no such share."""
        if asked is not None or not dies:
            return asked
        return max(1, usable_cores() * len(dies) // len(self._places))

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself."""
        with self._lock:
            for i, place in enumerate(self._places):
                assert place.charged >= 0 and place.cache >= 0, f"die {i}: {place}"
                assert place.model is not None or (place.charged, place.cache) == (0, 0), (
                    f"die {i} is charged for nobody"
                )
                boot = place.die.total_bytes - place.die.reserve_bytes
                assert place.charged <= max(0, boot), f"die {i} is overcommitted: {place}"


def _info(index: int, place: _Place) -> DieInfo:
    die = place.die
    free = max(0, die.total_bytes - place.charged - place.cache) if place.free is None else place.free
    return DieInfo(
        index=index, kind=die.kind, name=die.name, uuid=die.uuid, total_bytes=die.total_bytes, free_bytes=free,
        budget_bytes=place.budget, charged_bytes=place.charged, cache_bytes=place.cache, model=place.model,
        usable=not die.fault,
    )  # fmt: skip


def _among() -> str:
    visible = os.environ.get(VISIBLE)
    return f"{VISIBLE} is unset" if visible is None else f"{VISIBLE} is {visible!r}"


def _no_device() -> str:
    fault = nvml_fault()
    return f"{_among()}; NVML: {fault}" if fault else _among()


def _needs(need: Any, budgets: Sequence[int]) -> Sequence[int] | None:
    if callable(need):
        found: Sequence[int] | None = need(budgets)
        return found
    return [need] if isinstance(need, int) else need


def _fits(needs: Sequence[int] | None, budgets: Sequence[int]) -> bool:
    return needs is not None and len(needs) == len(budgets) and all(n <= b for n, b in zip(needs, budgets, strict=True))


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 28 else f"{nbytes / (1 << 20):.1f} MiB"
