"""An agent's ear for its kernel: lines of its log that say that hardware fails, told to the coordinator."""

from __future__ import annotations

from collections.abc import Callable

from packtrain.core.kernel_log import KernelLog
from packtrain.core.platform import Platform
from packtrain.core.units import NS
from packtrain.monitor.kernel import Signs, killed
from packtrain.supervise.messages import AgentEvent, HardwareSeen

LOOK_NS = NS
KILLED_MAX = 64
"""Of these lines the last ones are kept."""
TOLD_AT_ONCE_MAX = 16
"""Findings of one look that are told; a machine that says more has been heard."""


class KernelEar:
    """Where the log may not be read nothing is heard, and nothing else changes. `tell`: takes what is found."""

    def __init__(self, platform: Platform, tell: Callable[[AgentEvent], None]) -> None:
        self._platform, self._tell = platform, tell
        self._signs = Signs()
        self._look_ns = 0
        self._killed: dict[int, str] = {}
        """Process -> the line in which the kernel said that it killed it for want of memory."""
        self._log: KernelLog | None = None
        try:
            self._log = platform.kernel_log()
        except OSError as error:
            print(f"the kernel's log cannot be read, so failing hardware is not noticed by it: {error}", flush=True)

    def look(self, ns: int) -> None:
        """Once a second; nothing here waits."""
        if self._log is None or ns < self._look_ns:
            return
        self._look_ns = ns + LOOK_NS
        self._hear(ns)

    def killed(self, pid: int) -> str:
        """What it said when it killed this process for want of memory; empty: it did not. In a container the kernel
        knows a process by another number, and this stays empty."""
        self._hear(self._platform.boot_ns())
        return self._killed.pop(pid, "")

    def _hear(self, ns: int) -> None:
        try:
            lines = self._log.read() if self._log is not None else []
        except OSError as error:
            print(f"the kernel's log cannot be read any more: {error}", flush=True)
            return self.close()
        deaths = [*self._killed.items(), *(death for line in lines if (death := killed(line)) is not None)]
        self._killed = dict(deaths[-KILLED_MAX:])
        found = [finding for line in lines if (finding := self._signs.seen(ns / NS, line)) is not None]
        for one in found[:TOLD_AT_ONCE_MAX]:
            self._tell(HardwareSeen(verdict=one.verdict, what=one.what, where=one.where, text=one.text))

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()
