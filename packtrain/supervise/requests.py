"""Ctrl-C, SIGTERM and a lost terminal as events: counted by a handler, read by the loop, never raised in between."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Requests:
    """Requests to stop that have arrived and were not taken yet."""

    def __init__(self) -> None:
        self._arrived: list[str] = []

    def take(self) -> list[str]:
        """Names of the signals since the last call, oldest first."""
        taken, self._arrived = self._arrived, []
        return taken

    def arrive(self, signum: int, frame: object = None) -> None:
        self._arrived.append(signal.Signals(signum).name)


@contextmanager
def listening() -> Iterator[Requests]:
    """While inside, these signals are requests. Main thread only (signal(2) handlers of Python run there)."""
    requests = Requests()
    heard = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # nohup asked for that
    before = {signum: signal.signal(signum, requests.arrive) for signum in heard}
    try:
        yield requests
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
