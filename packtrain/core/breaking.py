"""What a process suffers on purpose, where the run allows it: an order file that its agent replaces, looked at once a
step. For tests of what follows; without the file nothing ever happens.

Standard library only, for any program beside contract.py:

    faults = Faults(place.faults)
    ...each step:  faults.step()

The order is a checked line (wire.py). Ids only grow; each is begun once, by the process that finds it while it is new.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from .wire import INT64_MAX, checked_line, checked_object, is_count

FAULT_BYTES_MAX = 4096
NAN, SLOW, HANG, OOM = "nan", "slow", "hang", "oom"
EXITS = {"exit-1": 1, "exit-75": 75, "exit-78": 78}
DISK_FULL, DISK_READ_ONLY, DISK_STALL = "disk-full", "disk-read-only", "disk-stall"
TOO_MUCH_BYTES = 1 << 62
"""More than any machine has, and less than Python itself refuses to count."""


class Fault(NamedTuple):
    """`until_ns`: boot time at which what lasts is over; 0: it lasts no time, or for good."""

    id: int
    fault: str
    until_ns: int = 0
    factor: float = 1.0


NO_FAULT = Fault(0, "")


def fault_bytes(fault: Fault) -> bytes:
    """What the file holds."""
    return checked_line(fault._asdict())


def parse_fault(data: bytes) -> Fault | None:
    """The order in a file, or None when anything about it is damaged."""
    fields = checked_object(data, FAULT_BYTES_MAX)
    if fields is None:
        return None
    numbers = is_count(fields.get("id"), INT64_MAX) and is_count(fields.get("until_ns"), INT64_MAX)
    factor, name = fields.get("factor"), fields.get("fault")
    if not numbers or type(factor) is not float or not isinstance(name, str):
        return None
    return Fault(fields["id"], name, fields["until_ns"], factor)


class OrderFile:
    """The order file at `path`: a stat for each look, a read only when it has changed. No path: there is none."""

    def __init__(self, path: str | None) -> None:
        self._path = path or ""
        self._seen: tuple[int, int, int] | None = None
        self._fault = NO_FAULT

    def now(self) -> Fault:
        """The one with the highest id so far. Absent, damaged or older content changes nothing."""
        if self._path:
            with suppress(OSError):
                found = os.stat(self._path)
                key = (found.st_ino, found.st_mtime_ns, found.st_size)
                if key != self._seen:
                    with open(self._path, "rb") as file:
                        self._take(parse_fault(file.read(FAULT_BYTES_MAX + 1)))
                    self._seen = key
        return self._fault

    def _take(self, fault: Fault | None) -> None:
        if fault is not None and fault.id > self._fault.id:
            self._fault = fault


class Faults:
    """Of one process: call `step` once a step, in the thread that steps. `path`: as `Place.faults`."""

    def __init__(
        self, path: str | None, *, clock: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._order, self._clock, self._sleep = OrderFile(path), clock, sleep
        self._begun = 0
        self._left_ns = clock()
        """When the last call returned."""

    def step(self) -> str:
        """Suffer what is ordered: a crash or a hang does not return; `slow` takes its time. The name of what only the
        program itself can do (nan), once; empty otherwise."""
        fault = self._order.now()
        fresh, self._begun = fault.id > self._begun, fault.id
        if fault.fault == SLOW and self._clock() < fault.until_ns:
            self._sleep((fault.factor - 1) * (self._clock() - self._left_ns) / 1e9)
        elif fresh:
            _begin(fault.fault)
        self._left_ns = self._clock()
        return fault.fault if fresh and fault.fault == NAN else ""


def _begin(name: str) -> None:
    if name in (HANG, OOM, *EXITS):
        print(f"broken on purpose: {name}", file=sys.stderr, flush=True)
    if name == HANG:
        _hang()
    if name == OOM:
        bytearray(TOO_MUCH_BYTES)  # raises MemoryError, as an allocation does where there is no more
    if name in EXITS:
        sys.stdout.flush()
        os._exit(EXITS[name])


def _hang() -> NoReturn:
    """Holds the interpreter lock for good: no other thread of this process runs Python again, and none sends a beat."""
    libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock while it is called
    while True:
        libc.sleep(1 << 20)
