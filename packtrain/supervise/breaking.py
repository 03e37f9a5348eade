"""What an agent breaks of its own node when it is told to (faults.py): signals, order files for those who take part,
its own link, a checkpoint. Where the job does not allow faults it does nothing, whoever asks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.breaking import Fault, fault_bytes
from packtrain.core.errors import PacktrainError
from packtrain.core.platform import Platform
from packtrain.core.units import NS
from packtrain.supervise.attempt import Attempt
from packtrain.supervise.errands import Errands
from packtrain.supervise.faults import AGENT, CARRIER, CHECKPOINT, DISK, KINDS, LINK, SIGNAL
from packtrain.supervise.job import Job
from packtrain.supervise.messages import Break
from packtrain.supervise.place import Place
from packtrain.supervise.processes import Processes

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}
CHECKPOINT_S = 30.0
TAKEN_AWAY = "taken-away"
"""Folder of the run into which checkpoints go that are deleted on purpose: nothing finds them there, but a person."""


class Breaker:
    """Of one agent."""

    def __init__(self, job: Job, place: Place, platform: Platform, processes: Processes, errands: Errands) -> None:
        self._job, self._place = job, place
        self._platform, self._processes, self._errands = platform, processes, errands
        self._cut_ns, self._whole_ns = 0, 0
        """From when and until when the link is cut."""
        self._flaps = False

    def cut(self, ns: int) -> bool:
        """Whether nothing passes between this agent and its coordinator."""
        if ns >= self._whole_ns:
            return False
        return not self._flaps or (ns - self._cut_ns) // NS % 2 == 0

    def begin(self, ns: int, id: int, what: Break, attempt: Attempt | None, told: Callable[[str], None]) -> None:
        """Do it. `told`: takes why it could not be done, or nothing; never called where that is the agent's end."""
        kind = KINDS.get(what.fault)
        if kind is None or not self._job.supervise.allow_faults:
            return told("this node does not allow that" if kind else f"no such fault here: {what.fault}")
        if kind.by == CHECKPOINT:
            return self._checkpoint(ns, what.fault, told)
        if kind.by == AGENT:
            return self._processes.kill(os.getpid())
        order = Fault(id, what.fault, ns + round(what.seconds * NS) if what.seconds else 0, what.factor)
        told(self._at_once(ns, kind.by, order, what.rank, attempt))

    def _at_once(self, ns: int, by: str, order: Fault, rank: int, attempt: Attempt | None) -> str:
        """Why not; empty: it is done."""
        if by == LINK:
            self._cut_ns, self._whole_ns, self._flaps = ns, order.until_ns, order.fault == "flap"
            return ""
        if by == DISK:
            return self._write(self._place.disk_faults, order)
        if attempt is None:
            return "that attempt does not run here"
        if by == CARRIER:
            return attempt.kill_carrier()
        if by == SIGNAL:
            return attempt.signal(rank, SIGNALS[order.fault])
        return self._write(self._place.faults(rank), order) if attempt.runs(rank) else f"rank {rank} does not run here"

    def _write(self, path: str, order: Fault) -> str:
        try:
            self._platform.write_replacing(path, fault_bytes(order), durable=False)
        except OSError as error:
            return f"{path}: {error.strerror}"
        return ""

    def _checkpoint(self, ns: int, fault: str, told: Callable[[str], None]) -> None:
        call = corrupt if fault == "corrupt" else take_away

        def over(why: str | Exception | None) -> None:
            told(why if isinstance(why, str) else f"{why or f'not within {CHECKPOINT_S:g} s'}")

        self._errands.start(ns, CHECKPOINT_S, lambda: _tried(call, self._platform, self._job.run_folder), over)


def _tried(call: Callable[[Platform, str], str], platform: Platform, run_folder: str) -> str:
    """Why not; empty: it is done."""
    try:
        return call(platform, run_folder)
    except (OSError, PacktrainError) as error:
        return f"{error}"


def corrupt(platform: Platform, run_folder: str) -> str:
    """Turn the last bit in the middle byte of the first part of the newest checkpoint. Why not; empty: it is done."""
    point = CommitLog(platform, f"{run_folder}/commits").restore_point()
    if point is None:
        return "there is no checkpoint yet"
    checkpoint = open_checkpoint(platform, run_folder, point)
    path = f"{checkpoint.folder}/{checkpoint.tables[0].file}"
    middle = platform.size(path) // 2
    (byte,) = platform.read(path, middle, 1)
    with platform.reopen(path) as file:
        file.write_at(middle, bytes([byte ^ 1]))
        file.fsync()
    return ""


def take_away(platform: Platform, run_folder: str) -> str:
    """Move the folder of the newest checkpoint to where nobody looks for it. Why not; empty: it is done."""
    point = CommitLog(platform, f"{run_folder}/commits").restore_point()
    if point is None:
        return "there is no checkpoint yet"
    folder = open_checkpoint(platform, run_folder, point).folder
    platform.mkdir(f"{run_folder}/{TAKEN_AWAY}")
    platform.replace(folder, f"{run_folder}/{TAKEN_AWAY}/{os.path.basename(folder)}")
    return ""
