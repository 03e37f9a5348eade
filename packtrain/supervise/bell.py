"""What wakes a loop that waits: a child has ended, a signal has come, a thread is done. It does not say which."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

AT_ONCE_MAX = 4096
"""Rings that are taken together."""


class Bell:
    """Readable once it was rung, until `hush`."""

    def __init__(self) -> None:
        self._ears, self._rope = socket.socketpair()
        self._ears.setblocking(False)
        self._rope.setblocking(False)

    def fileno(self) -> int:
        """For who waits for other things as well."""
        return self._ears.fileno()

    def ring(self) -> None:
        """From any thread. One that was rung too often rings already."""
        with suppress(OSError):
            self._rope.send(b"\0")

    def hush(self) -> None:
        """What has rung so far is about to be looked at."""
        with suppress(BlockingIOError):
            while len(self._ears.recv(AT_ONCE_MAX)) == AT_ONCE_MAX:
                continue

    @contextmanager
    def at_signals(self) -> Iterator[None]:
        """While inside, each child that ends rings it, and each signal that has a handler. Main thread only."""
        child = signal.signal(signal.SIGCHLD, lambda signum, frame: None)  # what has no handler wakes nobody
        before = signal.set_wakeup_fd(self._rope.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGCHLD, child)

    def close(self) -> None:
        self._ears.close()
        self._rope.close()
