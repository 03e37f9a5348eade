"""The agent's end of its standbys (standby.py): keeps as many warm as it runs workers, and hands one out where it can.

A standby that is not ready, or does not take its work at once, is no loss: the worker is started as ever.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from packtrain.core.platform import Platform, Process
from packtrain.core.units import NS
from packtrain.supervise import programs, standby
from packtrain.supervise.job import Job
from packtrain.supervise.processes import Processes
from packtrain.supervise.sockets import remove_socket
from packtrain.supervise.standby import TAKEN, Work, argv_of

START = "import sys; sys.path[0] or sys.path.pop(0); import runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
"""Runs a file without its folder, or this one, among those in which modules are found: a name in there may be that of
a module of Python itself."""
PYTHON = re.compile(r"python[0-9.]*")
TAKE_S = 0.2
"""How long one may need to answer: it does nothing but wait."""
KILL_S = 0.5
AGAIN_NS, AGAIN_NS_MAX = 10 * NS, 600 * NS
"""Pause before another one, where they end by themselves."""


def python_of(job: Job) -> str:
    """The interpreter that a standby has to be of; empty: there is none for this command."""
    first = job.worker[0] if job.worker else ""
    if not job.plain or first == sys.executable:
        return first if first == sys.executable else ""
    return shutil.which(first, path=job.env.get("PATH")) or "" if PYTHON.fullmatch(os.path.basename(first)) else ""


def argv_for(job: Job) -> tuple[str, tuple[str, ...] | None]:
    """(that interpreter, what follows it in the command); None: a standby cannot become this."""
    python = python_of(job)
    return python, argv_of((python, *job.worker[1:]), python) if python else None


@dataclass
class _Standby:
    process: Process
    socket: str


class Standbys:
    """Those of one node. `env`: what they start with."""

    def __init__(
        self, job: Job, home: str, env: Mapping[str, str], platform: Platform, processes: Processes
    ) -> None:
        self._job, self._home, self._platform, self._processes = job, home, platform, processes
        self._env = {**env, **programs.threads(job.procs, env)} if job.plain else env
        self._python, self._argv = argv_for(job)
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
        command = (self._python, "-c", START, os.path.abspath(standby.__file__), "--socket", path, *self._job.preload)
        return _Standby(self._platform.spawn(command, self._env, log_path=f"{self._home}/standby.log"), path)

    def take(self, env: Mapping[str, str], log_path: str) -> Process | None:
        """One that has become the worker; None: start it as ever."""
        if self._argv is None:
            return None
        work = Work(list(self._argv), dict(env), log_path, self._job.cwd)
        for one in list(self._warm):
            taken = self._told(one, json.dumps(work._asdict()).encode() + b"\n")
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
