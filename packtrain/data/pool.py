"""Worker processes for `data build`: results come in the order of the tasks, and nobody outlives the parent.

Why not the standard pools: their workers hold both ends of the shared queues, so they never notice that their parent
was killed, and an idle one would wait for ever.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from packtrain.core.errors import BuildFailed, PacktrainError
from packtrain.core.shim import die_with_parent

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V")

AHEAD = 4
"""Tasks handed out per worker before the oldest result was taken: bounds what waits in memory."""


def _serve(pipe: Connection, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    while True:
        try:
            function, task = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(task)))
        except (PacktrainError, OSError) as error:
            pipe.send((False, error))
        except Exception:
            pipe.send((False, AssertionError(traceback.format_exc())))


class Pool:
    """`workers` processes; with 1 there are none, and the work is done by the caller. Once `map` raised, only `close`
    is left."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers: dict[Connection, Any] = {}
        for _ in range(workers if workers > 1 else 0):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            self._workers[ours] = process

    def map(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """`function(task)` for each, in order. Raises what the first failing task raised; BuildFailed for a lost
        worker."""
        if not self._workers:
            yield from map(function, tasks)
            return
        todo = enumerate(tasks)
        busy: dict[Connection, int] = {}
        done: dict[int, tuple[bool, Any]] = {}
        for wanted in itertools.count():
            while wanted not in done:
                idle = [pipe for pipe in self._workers if pipe not in busy]
                room = AHEAD * len(self._workers) - len(done) - len(busy)
                for pipe, (number, task) in zip(idle[: max(0, room)], todo):
                    busy[pipe] = number
                    self._exchange(pipe, partial(pipe.send, (function, task)))
                if not busy:
                    return
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    done[busy.pop(ready)] = self._exchange(ready, ready.recv)
            good, result = done.pop(wanted)
            if not good:
                raise result
            yield result

    def _exchange(self, pipe: Connection, talk: Callable[[], V]) -> V:
        try:
            return talk()
        except (EOFError, OSError):
            process = self._workers[pipe]
            process.join()
            raise BuildFailed(
                f"a worker process ended by itself (exit {process.exitcode})", where="data build",
                fix="if it was killed for memory, lower workers; the same command goes on from what is finished",
            ) from None

    def close(self) -> None:
        """End the workers at once; what they had finished is on disk."""
        for pipe, process in self._workers.items():
            pipe.close()
            process.terminate()
        for process in self._workers.values():
            process.join()
        self._workers = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
