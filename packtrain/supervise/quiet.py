"""Whether a program that sends no beats still does something: its log grows, or it uses the processor.

`looked` is pure. `usage` reads /proc for all processes at once, by session: each worker leads one of its own, and what
it starts stays in it. A processor that is hardly used is no sign of life: threads that only wait wake up now and then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from packtrain.core.platform import Platform
from packtrain.core.units import NS
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.errands import Errands
from packtrain.supervise.messages import RankIdle
from packtrain.supervise.ranks import unwatched_ns

LOOK_NS = NS
"""How often a program is looked at."""
SIGNS_S = 10.0
"""How long a look may take: logs lie on a disk that may hang."""
BUSY_PART = 0.01
"""Of one core, since the last sign of life: what uses less does nothing."""
BUSY_S = 0.05
"""At least so much: the clock of /proc ticks in hundredths."""
_STATE, _SESSION, _TIMES = 0, 3, slice(11, 15)
"""Fields of /proc/PID/stat behind the name. Source: proc_pid_stat(5)."""


class Usage(NamedTuple):
    """Of a session: processor time so far, that of children which were waited for included; one of it is stopped."""

    cpu_s: float = 0.0
    stopped: bool = False


class Sign(NamedTuple):
    """What was seen of a program at one look."""

    log_bytes: int
    usage: Usage


@dataclass(frozen=True)
class Quiet:
    """What is known of one program. Times are nanoseconds since boot."""

    since_ns: int
    """Its last sign of life, or when it was started."""
    sign: Sign = Sign(0, Usage())
    """At that time."""
    stopped_ns: int = 0
    """Since when a process of it is stopped; 0: none is."""
    told: bool = False


class Idle(NamedTuple):
    """It did nothing for so long; `stopped`: because somebody stopped it."""

    seconds: float
    stopped: bool


def looked(
    quiet: Quiet, sign: Sign, ns: int, *, progress_s: float, stopped_s: float, unwatched_ns: int = 0
) -> tuple[Quiet, Idle | None]:
    """Tell once that it does nothing: for `progress_s`, or for `stopped_s` while stopped (each 0: never).

    `unwatched_ns`: for so long nobody could look, which counts for nothing.
    """
    quiet = replace(
        quiet, since_ns=quiet.since_ns + unwatched_ns, stopped_ns=quiet.stopped_ns and quiet.stopped_ns + unwatched_ns
    )
    if _alive(quiet, sign, ns):
        return Quiet(ns, sign), None
    quiet = replace(quiet, stopped_ns=(quiet.stopped_ns or ns) if sign.usage.stopped else 0)
    if quiet.told:
        return quiet, None
    idle_s = (ns - quiet.since_ns) / NS
    frozen_s = (ns - quiet.stopped_ns) / NS if quiet.stopped_ns else 0.0
    if stopped_s and frozen_s >= stopped_s:
        return replace(quiet, told=True), Idle(frozen_s, stopped=True)
    if progress_s and idle_s >= progress_s:
        return replace(quiet, told=True), Idle(idle_s, stopped=False)
    return quiet, None


def _alive(quiet: Quiet, sign: Sign, ns: int) -> bool:
    """A log that shrank was begun anew, by the program; processor time that shrank is that of a child that left."""
    used_s = sign.usage.cpu_s - quiet.sign.usage.cpu_s
    busy = used_s >= max(BUSY_S, BUSY_PART * (ns - quiet.since_ns) / NS)
    return sign.log_bytes != quiet.sign.log_bytes or busy or used_s < 0


class QuietWatch:
    """Looks at the ranks of a program on one node, for one attempt. Those that send beats are judged by these, but for
    having been stopped.

    `log_of`: rank -> path of its log; `usage`: as below, or one of a test.
    """

    def __init__(
        self, platform: Platform, errands: Errands, config: SuperviseConfig, attempt: int, log_of: Callable[[int], str],
        usage: Callable[[], dict[int, Usage]], tell: Callable[[RankIdle], None],
    ) -> None:
        self._platform, self._errands, self._config, self._usage = platform, errands, config, usage
        self._attempt, self._log_of, self._tell = attempt, log_of, tell
        self._known: dict[int, Quiet] = {}
        self._asked_ns = self._seen_ns = 0
        self._looking = False
        self._beating: frozenset[int] = frozenset()

    def look(self, ns: int, pids: Mapping[int, int], beating: Collection[int]) -> None:
        """`pids`: of those that live, by rank. A look that hangs is not followed by another one."""
        self._beating = frozenset(beating)
        if self._looking or ns - self._asked_ns < LOOK_NS or not pids:
            return
        self._asked_ns = ns
        self._errands.start(ns, SIGNS_S, lambda: self._signs(dict(pids)), self._seen)

    def _signs(self, pids: Mapping[int, int]) -> dict[int, Sign]:
        self._looking = True
        try:
            used = self._usage()
            return {rank: Sign(self._log_bytes(rank), used.get(pid, Usage())) for rank, pid in pids.items()}
        finally:
            self._looking = False

    def _log_bytes(self, rank: int) -> int:
        with suppress(OSError):
            return self._platform.size(self._log_of(rank))
        return 0

    def _seen(self, signs: dict[int, Sign] | Exception | None) -> None:
        """Time since the last answer is counted as far as looks are apart, and not while the disk hung."""
        if not isinstance(signs, dict):
            return
        ns = self._platform.boot_ns()
        gap_ns, self._seen_ns = unwatched_ns(ns, self._seen_ns), ns
        for rank, sign in signs.items():
            quiet = self._known.get(rank, Quiet(ns, sign))
            self._known[rank], idle = looked(
                quiet, sign, ns, progress_s=0.0 if rank in self._beating else self._config.progress_s,
                stopped_s=self._config.stopped_s, unwatched_ns=gap_ns,
            )
            if idle is not None:
                self._tell(RankIdle(attempt=self._attempt, rank=rank, seconds=idle.seconds, stopped=idle.stopped))


def usage() -> dict[int, Usage]:
    """Session -> what its processes used, of all that /proc shows."""
    sessions: dict[int, Usage] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                session, found = parse(file.read())
                known = sessions.get(session, Usage())
                sessions[session] = Usage(known.cpu_s + found.cpu_s, known.stopped or found.stopped)
    return sessions


def parse(stat: bytes) -> tuple[int, Usage]:
    """(session, usage) of one /proc/PID/stat. The name in it may hold anything, so what counts follows its last `)`."""
    fields = stat.rpartition(b")")[2].split()
    ticks = sum(int(field) for field in fields[_TIMES])
    return int(fields[_SESSION]), Usage(ticks / os.sysconf("SC_CLK_TCK"), fields[_STATE] == b"T")
