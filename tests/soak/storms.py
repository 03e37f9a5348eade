"""Faults on a run that lives on its own, one after the other, for as long as asked: signals, and a damaged save."""

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
from packtrain.checkpoint.commits import CommitLog

from packtrain.core.errors import CoordinatorGone
from packtrain.core.journal import Journal
from packtrain.core.records import FaultInjected
from packtrain.core.units import NS
from packtrain.supervise.console import ask
from tests.soak.lived import Lived

LOOK_S = 0.1


class Kind(NamedTuple):
    """`signum` to a part of the run; after `seconds` SIGCONT, where that is above 0."""

    part: str
    signum: int
    seconds: float = 0.0


KINDS = {
    "kill": Kind("worker", signal.SIGKILL), "segfault": Kind("worker", signal.SIGSEGV),
    "terminate": Kind("worker", signal.SIGTERM), "stop": Kind("worker", signal.SIGSTOP),
    "pause": Kind("worker", signal.SIGSTOP, 4.0),
    "kill-carrier": Kind("carrier", signal.SIGKILL), "stop-carrier": Kind("carrier", signal.SIGSTOP),
    "kill-agent": Kind("agent", signal.SIGKILL), "pause-agent": Kind("agent", signal.SIGSTOP, 5.0),
    "stop-agent": Kind("agent", signal.SIGSTOP, 15.0),
    "kill-coordinator": Kind("coordinator", signal.SIGKILL),
    "pause-coordinator": Kind("coordinator", signal.SIGSTOP, 8.0),
    "lose-machine": Kind("agent", signal.SIGKILL),
}
"""What a signal can do; `corrupt` damages the newest save as well."""
CORRUPT = "corrupt"


class Storm:
    """Strikes a run. `seed` chooses the order of the kinds and whom they hit."""

    def __init__(self, run: Lived, seed: int, kinds: Sequence[str] = (*KINDS, CORRUPT)) -> None:
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
        """Whether something was there to be hit; the same kind is tried again where nothing was."""
        self._deck = self._deck or self._random.sample(self._kinds, len(self._kinds))
        kind = self._deck[-1]
        with suppress(CoordinatorGone, psutil.Error, OSError):
            if self._corrupt() if kind == CORRUPT else self._signal(kind, KINDS[kind]):
                self.struck.append(self._deck.pop())
                return True
        return False

    def _signal(self, name: str, kind: Kind) -> bool:
        status = ask(self._run.platform, self._run.live.coordinator, "status")
        ranks = [(rank, node["node"]) for node in status["nodes"] for rank in node["ranks"]]
        if not ranks:
            return False
        rank, node = self._random.choice(ranks)
        victim = writing(self._log(kind.part, int(status["attempt"]), node, rank))
        if victim is None:
            return False
        self._note(FaultInjected(
            fault=name, node="" if kind.part == "coordinator" else node, rank=rank if kind.part == "worker" else -1,
            seconds=kind.seconds,
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

    def _corrupt(self) -> bool:
        """Turn a byte in the middle of the newest save."""
        point = CommitLog(self._run.platform, str(self._run.run / "commits")).restore_point()
        images = sorted((self._run.run / "checkpoints" / point.folder).glob("*.safetensors")) if point else []
        if not images:
            return False
        self._note(FaultInjected(fault=CORRUPT))
        with open(images[0], "r+b") as file:
            file.seek(os.path.getsize(images[0]) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x10]))
        return True

    def _note(self, record: FaultInjected) -> None:
        journal = Journal(self._run.platform, str(self._run.run / "journal"), role="faults")
        journal.write(record, durable=True)
        journal.close()
