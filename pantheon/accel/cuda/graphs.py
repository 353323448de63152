"""CUDA graphs of steps: some hundred launches of a step, each 20 µs of Python, become one call of the driver.

A step is captured the second time it is run: the first compiles and loads what it needs, which a capture must not, and
a last chunk of an odd width may never come again.  A graph belongs to a state, whose addresses are in it, and goes when
its buffers do.  Source: CUDA driver API, "Graph Management" and "Stream Management".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from pantheon import log
from pantheon.accel.cuda.context import Device
from pantheon.accel.cuda.faults import DeviceFault
from pantheon.accel.cuda.machine import SIMULATED

_log = log.logger("cuda")
#: graphs of one state on one die, and steps that are remembered to have run; those unused for longest go first
MOST, MOST_SEEN = 32, 256


class Graphs:
    """The graphs of one state on one die.  Used by the holder of the turn."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: dict[Hashable, None] = {}
        self._ready: dict[Hashable, Any] = {}
        self._off = SIMULATED

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Put `launch`'s kernels on the stream; key: all that they depend on but for what lies in arrays."""
        graph = self._ready.pop(key, None)
        if graph is None and key in self._seen and not self._off:
            graph = self._capture(key, launch)
        if graph is not None:
            self._ready[key] = graph
            with self._device.active():
                graph.launch(self._device.stream)
            return
        self._seen.pop(key, None)
        self._seen[key] = None
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        launch()

    def _capture(self, key: Hashable, launch: Callable[[], None]) -> Any:
        """The graph of these launches, or None where the driver refuses: then every step is launched as it is."""
        try:
            with self._device.active():
                graph = _Graph(self._device.stream, launch)
        except Exception as fault:
            self._off = True
            _log.warning("no CUDA graphs %s", log.fields(die=self._device.index, reason=str(fault)))
            return None
        while len(self._ready) >= MOST:
            self._ready.pop(next(iter(self._ready))).close()
        return graph

    def close(self) -> None:
        """Let go of every graph; idempotent."""
        for graph in self._ready.values():
            graph.close()
        self._ready.clear()


class _Graph:
    """One captured and instantiated graph."""

    def __init__(self, stream: Any, launch: Callable[[], None]) -> None:
        from cuda.bindings import driver

        self._driver, handle = driver, driver.CUstream(int(stream.handle))
        # of this thread only: a load beside it may allocate
        self._call(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        try:
            launch()
        finally:
            graph = self._call(driver.cuStreamEndCapture(handle))
        try:
            self._exec = self._call(driver.cuGraphInstantiate(graph, 0))
            self.close = weakref.finalize(self, driver.cuGraphExecDestroy, self._exec)
        finally:
            self._call(driver.cuGraphDestroy(graph))

    def launch(self, stream: Any) -> None:
        self._call(self._driver.cuGraphLaunch(self._exec, self._driver.CUstream(int(stream.handle))))

    def _call(self, answer: tuple[Any, ...]) -> Any:
        """What a call of the driver returned.  Raises DeviceFault when that was one."""
        if answer[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceFault(f"the CUDA driver answers {answer[0].name}")
        return answer[1] if len(answer) > 1 else None
