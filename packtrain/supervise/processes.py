"""The processes of one node: all that an agent started, whoever started it in turn, and how it is ended.

Every child carries a mark in its environment from exec on, and so does what it starts: `PACKTRAIN_MARK=<run>/<node>/
<incarnation of the agent>`. What left its group is found by it; what another incarnation left behind is, too.
Children die with their agent (core/shim.py); their own children are left to whoever adopts orphans, which an agent
asks to be itself, and end when the next agent of that node begins.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from packtrain.core.contract import ATTEMPT
from packtrain.core.platform import Platform, Process
from packtrain.core.units import NS
from packtrain.supervise import quiet

MARK = "PACKTRAIN_MARK"
PR_SET_CHILD_SUBREAPER = 36
ENVIRON_BYTES_MAX = 1 << 20
ENDED_S = 10.0
"""How long killed processes are waited for: one that hangs inside a dead file system goes when that comes back."""


class Marked(NamedTuple):
    """A process of a run. `attempt`: of the worker it is or descends from; empty: a carrier, or a standby."""

    pid: int
    mark: str
    attempt: str


class Processes:
    """Of this machine. Another one for tests that run in virtual time."""

    def adopt_orphans(self) -> None:
        """What our descendants leave behind becomes our child (prctl(2)): nothing of theirs leaves our sight."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def bury_orphans(self, ours: Collection[int]) -> None:
        """Take the exit of adopted ones that have ended; `ours` are polled by who started them."""
        for _ in range(256):
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in ours:
                return
            with suppress(ChildProcessError):
                os.waitpid(ended.si_pid, os.WNOHANG)

    def kill_group(self, process: Process) -> None:
        """SIGKILL a child and what stayed in its group: each child leads a session and a group of its own."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def terminate_group(self, process: Process) -> None:
        """SIGTERM to the same."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)

    def group_lives(self, process: Process) -> bool:
        """Whether anything of that group is left."""
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def usage(self) -> dict[int, quiet.Usage]:
        """What each session used of the processor."""
        return quiet.usage()

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)

    def marked(self, run: str, node: str) -> list[Marked]:
        """All of this user that carry the mark of a run and node, zombies left out."""
        return [one for one in _marked() if one.mark.startswith(f"{run}/{node}/")]

    def mark(self, pid: int) -> str:
        """Of one process; empty: it has none, or is another user's."""
        one = _mark(pid)
        return one.mark if one is not None else ""


def _marked() -> Iterator[Marked]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and (one := _mark(int(name))) is not None:
            yield one


def _mark(pid: int) -> Marked | None:
    with suppress(OSError):
        with open(f"/proc/{pid}/environ", "rb") as file:
            env = file.read(ENVIRON_BYTES_MAX).split(b"\0")
        values = dict(one.partition(b"=")[::2] for one in env)
        if (mark := values.get(MARK.encode())) is not None:
            attempt = values.get(ATTEMPT.encode(), b"")
            return Marked(pid, mark.decode(errors="replace"), attempt.decode(errors="replace"))
    return None


def end_leftovers(platform: Platform, processes: Processes, run: str, node: str, mine: str) -> list[int]:
    """SIGKILL what other incarnations of this node's agent left; those that do not go in `ENDED_S`."""
    end_ns = platform.boot_ns() + round(ENDED_S * NS)
    while left := [one.pid for one in processes.marked(run, node) if one.mark != f"{run}/{node}/{mine}"]:
        for pid in left:
            processes.kill(pid)
        if platform.boot_ns() > end_ns:
            break
        platform.sleep(0.02)
    return left
