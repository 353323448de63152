"""For every test: a hung one dies, seams are disarmed, leaked threads are a failure.

Compiled kernels are kept where a user's are (`PN_KERNEL_CACHE`, else ~/.cache/pantheon), so that only the first run
on a machine pays for them.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import hypothesis
import pytest

from pantheon import seams
from tests.fakes import FakeClock

#: pytest-timeout raises in the test's own thread; a test stuck in compiled code does not notice, so the process ends
HARD_KILL_AFTER_S = 60
_stderr: TextIO | None = None

# the suite tries the same examples every time; `make test-slow` looks for new ones
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.register_profile("random", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, which pytest's capturing hides, for the stacks of a killed run."""
    global _stderr
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        _stderr = os.fdopen(os.dup(2), "w")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Print every thread's stack and end the run when a test outlives its timeout by a minute."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker and marker.args else item.config.getini("timeout") or 120)
    faulthandler.dump_traceback_later(limit + HARD_KILL_AFTER_S, exit=True, file=_stderr or 2)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _seams_disarmed() -> Iterator[None]:
    yield
    seams.arm("")


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    """Fail when a test leaves a non-daemon thread behind: it would keep the process from ending."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    for thread in threading.enumerate():
        if thread not in before and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
    leaked = [t.name for t in threading.enumerate() if t not in before and not t.daemon]
    assert not leaked, f"threads left behind: {', '.join(leaked)}"


@pytest.fixture
def fake_clock() -> FakeClock:
    """A clock that stands still until the test advances it."""
    return FakeClock()
