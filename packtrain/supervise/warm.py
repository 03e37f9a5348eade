"""The agent's end of its standbys (standby.py): keeps as many warm as it runs workers, and hands one out where it can.

A standby that is not ready, or does not take its work at once, is no loss: the worker is started as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from packtrain.core.platform import Platform, Process
from packtrain.core.units import NS
from packtrain.supervise.job import Job
from packtrain.supervise.processes import Processes
from packtrain.supervise.sockets import remove_socket
from packtrain.supervise.standby import TAKEN, Work, argv_of

STANDBY = ("-P", "-m", "packtrain.supervise.standby")
TAKE_S = 0.2
"""How long one may need to answer: it does nothing but wait."""
KILL_S = 0.5
AGAIN_NS, AGAIN_NS_MAX = 10 * NS, 600 * NS
"""Pause before another one, where they end by themselves."""


@dataclass
class _Standby:
    process: Process
    socket: str


class Standbys:
    """Those of one node. `env`: what they start with."""

    def __init__(
        self, job: Job, home: str, env: Mapping[str, str], platform: Platform, processes: Processes
    ) -> None:
        self._job, self._home, self._env, self._platform, self._processes = job, home, env, platform, processes
        self._argv = argv_of(job.worker, sys.executable)
        self._warm: list[_Standby] = []
        self._made = 0
        self._again_ns = 0
        self._pause_ns = AGAIN_NS

    @property
    def pids(self) -> list[int]:
        return [one.process.pid for one in self._warm]

    def look(self, ns: int, quiet: bool) -> None:
        """Bury those that ended; start what is missing while the node is `quiet`: nothing waits for its processor."""
        ended = [one for one in self._warm if one.process.poll() is not None]
        if ended:
            self._warm = [one for one in self._warm if one not in ended]
            self._again_ns, self._pause_ns = ns + self._pause_ns, min(2 * self._pause_ns, AGAIN_NS_MAX)
        missing = self._job.procs - len(self._warm)
        if self._argv is None or not self._job.preload or not quiet or not missing or ns < self._again_ns:
            return
        try:
            self._warm.append(self._start())
        except OSError:
            self._again_ns = ns + self._pause_ns

    def _start(self) -> _Standby:
        self._made += 1
        path = f"{self._home}/standby-{self._made}"
        remove_socket(self._platform, path)
        command = (sys.executable, *STANDBY, "--socket", path, *self._job.preload)
        return _Standby(self._platform.spawn(command, self._env, log_path=f"{self._home}/standby.log"), path)

    def take(self, env: Mapping[str, str], log_path: str) -> Process | None:
        """One that has become the worker; None: start it as ever."""
        if self._argv is None:
            return None
        work = Work(argv=self._argv, env=dict(env), log_path=log_path, cwd=self._job.cwd)
        for one in list(self._warm):
            taken = self._told(one, msgspec.json.encode(work) + b"\n")
            if taken is None:
                continue
            self._warm.remove(one)
            if taken:
                return one.process
            self._kill(one)  # stuck: it may not wake up later with this work
        return None

    def _told(self, one: _Standby, line: bytes) -> bool | None:
        """None: it is not ready."""
        try:
            connection = self._platform.stream_connect(one.socket, TAKE_S)
        except OSError:
            return None
        remove_socket(self._platform, one.socket)
        with connection:
            try:
                connection.settimeout(TAKE_S)
                connection.sendall(line)
                return connection.recv(len(TAKEN)) == TAKEN
            except OSError:
                return False

    def end(self) -> None:
        """SIGKILL to all."""
        for one in self._warm:
            self._kill(one)
        self._warm = []

    def _kill(self, one: _Standby) -> None:
        self._processes.kill_group(one.process)
        one.process.wait(KILL_S)
