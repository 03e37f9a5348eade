"""The homes a run's saves may go to, and which of them hang.

The home of a run's saves is its folder, then those it may fall back to (`where.fall_back_home`). What is written in one
is written by a thread of its own, which is left behind when it does not come back in time. A home with such a thread is
passed over while there are others; so is one that is quarantined, because threads of an earlier carrier hang there,
until it answers a probe. Where all hang they are tried all the same, with few threads: one in a home in quarantine.
"""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from packtrain.core.platform import Platform
from packtrain.core.units import NS

HUNG_MAX = 4
"""Threads left behind in one home before nothing more is tried there; in quarantine it is one."""
LEAVE_S = 0.25
"""After its time is over a thread has so long to say what held it, before it is left behind."""
LOOK_S = 0.05
"""How often whoever waits for a thread looks at the clock."""
PROBE_S = 10.0
"""From one probe of a home in quarantine to the next."""
PROBE_BYTES = 1 << 20
T = TypeVar("T")


class Hangs(Exception):
    """A thread was left behind in a home."""


class Hung(NamedTuple):
    """A home in which threads of this process hang."""

    path: str
    threads: int
    since_ns: int
    """When the time of the first of them was over, boot time."""


class Homes:
    """Of one carrier. `paths`: in order of preference, the run folder first. Used by several threads."""

    def __init__(self, platform: Platform, paths: Sequence[str], quarantine: Sequence[str] = ()) -> None:
        self.paths = tuple(paths)
        self._platform = platform
        self._lock = threading.Lock()
        self._quarantine = [path for path in paths if path in quarantine]
        self._left: dict[str, list[int]] = {path: [] for path in paths}
        """Home -> when the time of each thread left behind there was over."""

    @property
    def quarantine(self) -> tuple[str, ...]:
        """Those that have not answered yet."""
        with self._lock:
            return tuple(self._quarantine)

    def hung(self) -> list[Hung]:
        with self._lock:
            return [Hung(path, len(left), min(left)) for path, left in self._left.items() if left]

    def usable(self) -> list[str]:
        """Those to try now, in order; where every one hangs, those that may be tried all the same."""
        with self._lock:
            well = [path for path in self.paths if not self._left[path] and path not in self._quarantine]
            return well or [path for path in self.paths if len(self._left[path]) < self._threads_max(path)]

    def _threads_max(self, path: str) -> int:
        return 1 if path in self._quarantine else HUNG_MAX

    def within(self, path: str, work: Callable[[], T], end_ns: int, late: Callable[[T], None]) -> T:
        """What `work` returns or raises. Raises Hangs when it has not ended a moment after `end_ns`.

        Its thread is left behind then; `late` is given there what it returns after all.
        """
        task = _Task(work, late, lambda: self._is_back(path, end_ns))
        with self._platform.crew(1) as crew:
            crew.start(task.run)
        leave_ns = end_ns + round(LEAVE_S * NS)
        while not task.ended.wait(LOOK_S):
            if self._platform.boot_ns() >= leave_ns and task.leave(lambda: self._is_left(path, end_ns)):
                raise Hangs
        return task.result()

    def _is_left(self, path: str, since_ns: int) -> None:
        with self._lock:
            self._left[path].append(since_ns)

    def _is_back(self, path: str, since_ns: int) -> None:
        with self._lock:
            self._left[path].remove(since_ns)

    # --- quarantine ---

    def watch(self) -> None:
        """Probe each home in quarantine until it answers, in a thread of its own that may hang there."""
        for path in self.quarantine:
            threading.Thread(target=self._watch, args=(path,), name="probe", daemon=True).start()

    def _watch(self, path: str) -> None:
        while not self.probe(path):
            self._platform.sleep(PROBE_S)

    def probe(self, path: str) -> bool:
        """Write there what a save would; whether it answered, and is out of quarantine."""
        try:
            self._write_there(path)
        except OSError:
            return False
        with self._lock:
            self._quarantine.remove(path)
        return True

    def _write_there(self, path: str) -> None:
        """Beside its checkpoints; where there are none yet, in the folder they would be made in."""
        folders = (f"{path}/checkpoints", path, posixpath.dirname(path))
        folder = next((one for one in folders if self._platform.is_dir(one)), path)
        name = f"{folder}/.probe-{self._platform.token()}"
        try:
            self._platform.write_new(name, bytes(PROBE_BYTES))
        finally:
            with suppress(OSError):
                self._platform.unlink(name)


class _Task(Generic[T]):
    """Work in a thread of its own, whose end and whose being left exclude each other."""

    def __init__(self, work: Callable[[], T], late: Callable[[T], None], back: Callable[[], None]) -> None:
        self.ended = threading.Event()
        self._work, self._late, self._back = work, late, back
        self._lock = threading.Lock()
        self._is_left = False
        self._results: list[T] = []
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._results.append(self._work())
        except Exception as error:
            self._error = error
        with self._lock:
            self.ended.set()
        if self._is_left:
            self._come_back()

    def _come_back(self) -> None:
        try:
            for result in self._results:
                self._late(result)
        finally:
            self._back()

    def leave(self, then: Callable[[], None]) -> bool:
        """Not to be waited for any more; `then` is called before it can come back. False: it has ended."""
        with self._lock:
            self._is_left = not self.ended.is_set()
            if self._is_left:
                then()
            return self._is_left

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]
