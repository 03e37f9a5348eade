"""Faults on a run that lives on its own, one after the other, for as long as asked: those of `packtrain break`, and a
few that come from outside."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from packtrain.checkpoint import slots
from packtrain.core.errors import PacktrainError
from packtrain.core.journal import Journal
from packtrain.core.records import FaultInjected
from packtrain.core.units import NS
from packtrain.supervise.console import ask
from packtrain.supervise.faults import KINDS
from tests.soak.lived import Lived

LOOK_S = 0.1
ENDS = "exit-78"
"""The one that ends a run, and rightly so."""


class Outside(NamedTuple):
    """`signum` to a part of the run; after `seconds` SIGCONT, where that is above 0."""

    part: str
    signum: int
    seconds: float = 0.0


OUTSIDE = {
    "terminate": Outside("worker", signal.SIGTERM), "stop-carrier": Outside("carrier", signal.SIGSTOP),
    "stop-agent": Outside("agent", signal.SIGSTOP, 5.0), "stop-agent-long": Outside("agent", signal.SIGSTOP, 15.0),
    "stop-coordinator": Outside("coordinator", signal.SIGSTOP, 8.0),
    "lose-machine": Outside("agent", signal.SIGKILL),
}
ALL = (*(name for name in KINDS if name != ENDS), *OUTSIDE)
SHORT = {"slow": 10.0, "disk-full": 10.0, "disk-read-only": 10.0, "disk-stall": 15.0, "cut": 15.0, "flap": 8.0}
"""Seconds of what lasts: so that it is over before the next but one."""


class Storm:
    """Strikes a run. `seed` chooses the order of the kinds and whom they hit."""

    def __init__(self, run: Lived, seed: int, kinds: Sequence[str] = ALL) -> None:
        self._run, self._random, self._kinds = run, random.Random(seed), tuple(kinds)
        self._deck: list[str] = []
        self._asleep: list[tuple[int, psutil.Process]] = []
        """(when it is woken, which)"""
        self.struck: list[str] = []
        """Kinds that hit something, in order."""

    def rage(self, seconds: float, every_s: float) -> None:
        """A fault every so many seconds, every kind once before any comes again; ends early with the run. What is
        asleep at the end is woken."""
        platform = self._run.platform
        next_ns, end_ns = platform.boot_ns(), platform.boot_ns() + round(seconds * NS)
        while (now := platform.boot_ns()) < end_ns and self._run.watcher.poll() is None:
            self._wake(now)
            if now >= next_ns and self._strike():
                next_ns = now + round(every_s * NS)
            platform.sleep(LOOK_S)
        self._wake(1 << 62)

    def _wake(self, now: int) -> None:
        for one in [one for one in self._asleep if one[0] <= now]:
            self._asleep.remove(one)
            with suppress(psutil.Error):
                one[1].send_signal(signal.SIGCONT)

    def _strike(self) -> bool:
        """Whether something was there to be hit. What needs a moment that is not now (a rank that runs, a save that is
        there) waits at the bottom of the deck."""
        self._deck = self._deck or self._random.sample(self._kinds, len(self._kinds))
        kind = self._deck.pop()
        with suppress(PacktrainError, psutil.Error, OSError):
            if self._outside(kind, OUTSIDE[kind]) if kind in OUTSIDE else self._break(kind):
                self.struck.append(kind)
                return True
        self._deck.insert(0, kind)
        return False

    def _victim(self) -> tuple[int, str, int]:
        """(attempt, node, rank) of a rank that runs; rank -1: none does."""
        status = ask(self._run.platform, self._run.live.coordinator, "status")
        ranks = [(rank, node["node"]) for node in status["nodes"] for rank in node["ranks"]]
        rank, node = self._random.choice(ranks) if ranks else (-1, "")
        return int(status["attempt"]), node, rank

    def _break(self, kind: str) -> bool:
        _, node, rank = self._victim()
        home, by_rank = self._run.live.coordinator, KINDS[kind].by in ("signal", "worker")
        whom = {"rank": rank} if by_rank else {} if kind == "kill-coordinator" else {"node": node}
        ask(self._run.platform, home, "break", fault=kind, by="storm", seconds=SHORT.get(kind, 0.0), **whom)
        return True

    def _outside(self, name: str, kind: Outside) -> bool:
        attempt, node, rank = self._victim()
        victim = writing(self._log(kind.part, attempt, node, rank)) if rank >= 0 else None
        if victim is None:
            return False
        ours, worker = kind.part == "coordinator", kind.part == "worker"
        self._note(FaultInjected(
            fault=name, attempt=attempt, node="" if ours else node, rank=rank if worker else -1, seconds=kind.seconds,
            factor=0.0, by="storm",
        ))
        victim.send_signal(kind.signum)
        if name == "lose-machine":
            self._forget(node)
        if kind.seconds:
            self._asleep.append((self._run.platform.boot_ns() + round(kind.seconds * NS), victim))
        return True

    def _log(self, part: str, attempt: int, node: str, rank: int) -> str:
        logs, base = f"{self._run.run}/logs/{attempt:04d}", self._run.live.base
        return {
            "worker": f"{logs}/{rank}.log", "carrier": f"{logs}/carrier-{node}.log", "agent": f"{base}/{node}/log",
            "coordinator": f"{base}/c/log",
        }[part]

    def _forget(self, node: str) -> None:
        """What was in the memory of a machine goes with it."""
        for folder in (slots.memory_folder(str(self._run.run), node), slots.peer_folder(str(self._run.run), node)):
            shutil.rmtree(folder, ignore_errors=True)

    def _note(self, record: FaultInjected) -> None:
        journal = Journal(self._run.platform, str(self._run.run / "journal"), role="faults")
        journal.write(record, durable=True)
        journal.close()


def writing(log: str) -> psutil.Process | None:
    """Whose standard output a log is: a standby that became a worker keeps its name, so names do not tell."""
    for process in psutil.process_iter():
        with suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/fd/1") == log:
                return process
    return None
