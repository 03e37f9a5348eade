"""A few threads that work off tasks which may bring new tasks: the first error ends all of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

Task = Callable[[], None]
LOOK_S = 0.5
"""How often the caller's thread wakes, so that Ctrl-C reaches it."""


class Pool:
    """With one thread everything runs in the caller's, in order: what virtual time needs."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1
        self._threads = threads
        self._tasks: deque[Task] = deque()
        self._busy = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def add_first(self, tasks: Sequence[Task]) -> None:
        """Before those that wait: what was begun is ended before more is begun."""
        with self._changed:
            if self._error is None:
                self._tasks.extendleft(reversed(tasks))
                self._changed.notify_all()

    def run(self, tasks: Sequence[Task]) -> None:
        """Until no task is left; raises the first error, when tasks under way may still be ending.

        The threads are daemons: who leaves by Ctrl-C does not wait for a store that hangs.
        """
        self._tasks.extend(tasks)
        if self._threads == 1:
            while self._tasks:
                self._tasks.popleft()()
            return
        for _ in range(self._threads):
            threading.Thread(target=self._work, name="pool", daemon=True).start()
        try:
            with self._changed:
                while not self._is_over():
                    self._changed.wait(LOOK_S)
        except BaseException as error:
            self._end(error)
            raise
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except BaseException as error:
                self._end(error)
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _next(self) -> Task | None:
        """A task, or None when there will be none any more."""
        with self._changed:
            while not self._tasks and not self._is_over():
                self._changed.wait()
            if not self._tasks:
                return None
            self._busy += 1
            return self._tasks.popleft()

    def _is_over(self) -> bool:
        return self._error is not None or (not self._tasks and not self._busy)

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._tasks.clear()
            self._changed.notify_all()
