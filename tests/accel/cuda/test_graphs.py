"""Graphs of decode steps on a driver that keeps books (M218: they go when the buffers do)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pantheon.accel.cuda import graphs
from pantheon.accel.cuda.faults import named
from pantheon.accel.cuda.graphs import MOST, MOST_SEEN, Graphs
from pantheon.errors import Unavailable


class Driver(ModuleType):
    """What graphs.py calls of cuda.bindings.driver; `refuses` names the call that fails."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="ok"))
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
        self.CUstream = int
        self.refuses = ""
        self.capturing = False
        self.made = 0
        self.replayed: list[int] = []
        self.destroyed: list[int] = []

    def _answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        if name == self.refuses:
            return (SimpleNamespace(name="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"), *[None] * len(values))
        return (self.CUresult.CUDA_SUCCESS, *values)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> Any:
        self.capturing = self.refuses != "begin"
        return self._answer("begin")

    def cuStreamEndCapture(self, stream: int) -> Any:
        self.capturing = False
        return self._answer("end", "graph")

    def cuGraphInstantiate(self, graph: str, flags: int) -> Any:
        self.made += 1
        return self._answer("instantiate", self.made)

    def cuGraphDestroy(self, graph: str) -> Any:
        return self._answer("destroy")

    def cuGraphLaunch(self, made: int, stream: int) -> Any:
        self.replayed.append(made)
        return self._answer("launch")

    def cuGraphExecDestroy(self, made: int) -> Any:
        self.destroyed.append(made)
        return self._answer("forget")


@pytest.fixture
def driver(monkeypatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(graphs, "SIMULATED", False)
    bindings = ModuleType("cuda.bindings")
    bindings.driver = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return made


def stepper(driver: Driver) -> tuple[Graphs, list[bool], Callable[[], None]]:
    """Graphs of a device, and a launch that notes whether it was captured."""
    stream = SimpleNamespace(handle=7)
    device: Any = SimpleNamespace(index=0, stream=stream, active=nullcontext)
    ran: list[bool] = []
    return Graphs(device), ran, lambda: ran.append(driver.capturing)


def test_a_step_runs_is_captured_and_is_replayed(driver) -> None:
    steps, ran, launch = stepper(driver)
    for _ in range(4):
        steps.run(("forward", 1), launch)
    assert ran == [False, True] and driver.replayed == [1, 1, 1]
    steps.run(("forward", 2), launch)
    assert ran == [False, True, False]


@pytest.mark.parametrize("call", ["begin", "end", "instantiate"])
def test_what_the_driver_refuses_is_launched_as_it_is(driver, call) -> None:
    steps, ran, launch = stepper(driver)
    driver.refuses = call
    for _ in range(4):
        steps.run("step", launch)
    assert ran.count(False) >= 3 and driver.replayed == [] and not driver.capturing


def test_a_launch_that_fails_in_a_capture_ends_it(driver) -> None:
    steps, ran, launch = stepper(driver)
    steps.run("step", launch)

    def broken() -> None:
        launch()
        if driver.capturing:
            raise RuntimeError("not allowed while capturing")

    steps.run("step", broken)
    assert not driver.capturing and ran == [False, True, False]


def test_what_is_unused_for_longest_goes_first_and_all_go_with_the_state(driver) -> None:
    steps, ran, launch = stepper(driver)
    for key in range(MOST + 3):
        steps.run(key, launch)
        steps.run(key, launch)
        steps.run(0, launch)
    assert driver.destroyed == [2, 3, 4]
    known = len(ran)
    for key in range(MOST_SEEN):
        steps.run(("once", key), launch)
    steps.run(1, launch)  # its graph is gone, and nothing tells that it ever ran
    assert ran[known:] == [False] * (MOST_SEEN + 1)
    steps.close()
    assert sorted(driver.destroyed) == list(range(1, MOST + 4))


def test_a_graph_that_the_device_does_not_run_is_its_fault(driver) -> None:
    steps, _, launch = stepper(driver)
    steps.run("step", launch)
    driver.refuses = "launch"
    with pytest.raises(Unavailable, match="die 3: the device failed.*CAPTURE_UNSUPPORTED"), named([3]):
        steps.run("step", launch)


def test_graphs_that_nobody_closes_go_with_their_owner(driver) -> None:
    steps, _, launch = stepper(driver)
    steps.run("step", launch)
    steps.run("step", launch)
    del steps
    assert driver.destroyed == [1]
