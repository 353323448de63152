"""What a device is asked for, by a process without the simulator; there is no device here, so its part is played."""

from __future__ import annotations

from tests.accel.cuda.test_kernel_store import python

#: a `Device` whose driver calls are noted with the device that is current for them; Numba's lists of what to free
_PLAYED = """
import logging
from types import SimpleNamespace
from numba.cuda.cudadrv import driver
from pantheon.accel.cuda import context

driver._logger = logging.getLogger("driver")  # what starting the driver would set
current, calls = [], []

class Gpu:
    def __enter__(self): current.append(3)
    def __exit__(self, *fault): current.pop()

def noted(name, answer=None):
    def call(*args):
        calls.append((name, *args, *current))
        return answer
    call.__name__ = name
    return call

pending = [driver._PendingDeallocs(1 << 30), driver._PendingDeallocs()]
numba = SimpleNamespace(memory_manager=SimpleNamespace(deallocations=pending[0]), deallocations=pending[1])
context.cuda = SimpleNamespace(gpus={3: Gpu()}, current_context=lambda: numba)
device = object.__new__(context.Device)
device.index, device.stream = 3, SimpleNamespace(synchronize=noted("wait"))
"""


def test_memory_is_given_back_when_it_is_asked_for_and_while_the_device_is_current() -> None:
    """Never in whatever thread drops an array: no device is current there, and the driver refuses."""
    found = python(
        _PLAYED
        + """
for i in range(100):
    pending[0].add_item(noted("free"), i, 1 << 34)
pending[1].add_item(noted("destroy"), 100)
print(calls)
device.give_back()
print(calls[0], calls[1], calls[100], calls[101], len(calls), [len(part) for part in pending])
"""
    )
    assert found.splitlines() == [
        "[]", "('wait', 3) ('free', 0, 3) ('free', 99, 3) ('destroy', 100, 3) 102 [0, 0]",
    ]  # fmt: skip


def test_marks_are_looked_at_while_their_device_is_current() -> None:
    found = python(
        _PLAYED
        + """
mark = context.Event(device, SimpleNamespace(query=noted("query", False), synchronize=noted("wait")))
print(mark.done, mark.wait(), calls)
"""
    )
    assert found == "False None [('query', 3), ('wait', 3)]\n"


def test_a_device_that_is_lost_takes_nothing_else_with_it() -> None:
    found = python(
        _PLAYED
        + """
def lost(): raise driver.CudaAPIError(719, "CUDA_ERROR_LAUNCH_FAILED")
device.stream.synchronize = lost
print(device.give_back(), current)
"""
    )
    assert found == "None []\n"
