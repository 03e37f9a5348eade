"""Real runs of one node for tests: start one, follow what is said, signal whoever watches, look at what it left."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import psutil

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.journal import read_folder
from packtrain.core.platform import LocalPlatform
from packtrain.supervise import local

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
T = TypeVar("T")


class Driven:
    """A run whose watcher is a process of its own."""

    def __init__(self, folder: pathlib.Path, toy: dict[str, Any], *flags: str, **options: Any) -> None:
        self.folder = folder
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TOY": json.dumps(toy), **dict.fromkeys(flags, "1")}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "drive.py"), str(folder), json.dumps(options)], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )

    def until(self, start: str) -> str:
        """The next line that begins like this."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise AssertionError(f"ended before {start!r}: {self.process.stderr and self.process.stderr.read()}")

    def until_step(self, step: int) -> None:
        """That one or a later one is done."""
        while int(self.until("step").split()[1]) < step:
            continue

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> tuple[int, str]:
        """Exit code and stderr; afterwards nothing of the run may be alive."""
        _, errors = self.process.communicate()
        assert not leftovers(self.folder)
        return self.process.returncode, errors


@contextmanager
def driven(folder: pathlib.Path, toy: dict[str, Any], *flags: str, **options: Any) -> Iterator[Driven]:
    """What is left of it is killed: a run does not end with whoever watches it."""
    run = Driven(folder, toy, *flags, **options)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()
        for left in processes(folder):
            with suppress(psutil.Error):
                left.kill()


def drive(folder: pathlib.Path, toy: dict[str, Any], *flags: str, **options: Any) -> tuple[int, str]:
    """Start one and wait for its end."""
    with driven(folder, toy, *flags, **options) as run:
        return run.end()


def processes(folder: pathlib.Path) -> list[psutil.Process]:
    """Every process that was started for this run, by its environment or command line."""
    live = local.find(LocalPlatform(), str(folder))
    wanted, found = {str(folder), f"{live.base}/job.json" if live is not None else str(folder)}, []
    for process in psutil.process_iter():
        try:
            told = {*process.cmdline(), process.environ().get("PACKTRAIN_RUN", "")}
        except psutil.Error:
            continue
        if wanted & told:
            found.append(process)
    return found


def leftovers(folder: pathlib.Path) -> list[psutil.Process]:
    """Those still there; the kernel may need a moment for those it is killing."""
    alive: list[psutil.Process] = psutil.wait_procs(processes(folder), timeout=5)[1]
    return alive


def kill(folder: pathlib.Path, word: str, signum: int = signal.SIGKILL) -> psutil.Process:
    """Signal the process of this run whose command line has `word` as a part, and return it."""
    victims = [p for p in processes(folder) if any(word in part for part in p.cmdline())]
    assert len(victims) == 1, victims
    victims[0].send_signal(signum)
    return victims[0]


def records(folder: pathlib.Path, kind: type[T]) -> list[T]:
    reading = read_folder(LocalPlatform(), str(folder / "journal"))
    assert not [damage for damage in reading.damage if damage.alarming]
    return [entry.record for entry in reading.entries if isinstance(entry.record, kind)]


def log(folder: pathlib.Path) -> CommitLog:
    return CommitLog(LocalPlatform(), str(folder / "commits"))


def restore_point(folder: pathlib.Path) -> Commit:
    point = log(folder).restore_point()
    assert point is not None
    return point


def saved_state(folder: pathlib.Path) -> tuple[int, int]:
    """(step, value) of the last published checkpoint, read with every byte verified."""
    state = open_checkpoint(LocalPlatform(), str(folder), restore_point(folder)).read("state")
    return int(state[0]), int(state[1])


def expected(steps: int) -> tuple[int, int]:
    """The state after so many steps without any interruption."""
    from tests.supervise.toy_worker import advance

    state = np.zeros(2, np.int64)
    for _ in range(steps):
        state = advance(state)
    return int(state[0]), int(state[1])
