"""What died of a run on this machine is started again while nobody watches: the coordinator by an agent that misses
it, an agent by the coordinator. Whoever lives brings back the others. Where a run has several machines a scheduler does
this; nothing else knows of it.

Starting twice is harmless: one coordinator holds the run and one agent its home, another one ends at once. There are no
storms: one agent at a time sees to the coordinator, and the pauses between tries grow (`Tries`). What has ended stays
ended: nobody starts the coordinator of a run that is over, nor the agent of a node that was told to leave.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from packtrain.core.errors import EXIT_AGAIN, RunUnusable
from packtrain.core.platform import Lock, Platform
from packtrain.core.records import AgentStarted
from packtrain.core.units import NS
from packtrain.supervise.local import Keeper, Live, agents_alive, find, finish_of
from packtrain.supervise.papers import Do

LOOK_NS = NS
SILENT_NS = 6 * NS
"""A coordinator says something to each agent every two seconds; so long without a word, and it is missed."""
UNWATCHED_NS = 3 * NS
"""Between two looks: time in which this process was stopped, and heard nobody for that reason."""
PAUSE_S_MAX = 60
LIVED_NS = 5 * NS
"""What lived so long after it was started dies for another reason than its start: imports and sockets are behind it."""
TRIES_MAX = 1000
"""In a row: about 16 hours."""
LIVE = "live"
"""Kind of the errand."""
TRIES, REVIVER = "tries", "reviver"
"""In the coordinator's home: how often it was started, for people; the lock of the agent that does it."""


@dataclass
class Tries:
    """When to start again what died: at once, then after pauses of 1, 2, 4 .. 60 s. Pure."""

    count: int = 0
    """In a row."""
    last_ns: int = 0

    @property
    def given_up(self) -> bool:
        return self.count >= TRIES_MAX

    def due(self, ns: int) -> bool:
        pause_s = min(1 << min(self.count - 1, 16), PAUSE_S_MAX) if self.count else 0
        return not self.given_up and ns - self.last_ns >= pause_s * NS

    def tried(self, ns: int) -> None:
        self.count, self.last_ns = self.count + 1, ns

    def lives(self, ns: int) -> None:
        """It was seen alive."""
        if ns - self.last_ns >= LIVED_NS:
            self.count = 0


class Tried(msgspec.Struct, frozen=True):
    """What an agent tells of a coordinator that it started again; a `count` of 0: it was heard since."""

    by: str
    """Node."""
    count: int
    given_up: bool


def tried(platform: Platform, live: Live) -> Tried | None:
    """None: nobody had to start its coordinator."""
    try:
        return msgspec.json.decode(platform.read(f"{live.coordinator}/{TRIES}", 0, 4096), type=Tried)
    except (OSError, msgspec.DecodeError):
        return None


class CoordinatorHere:
    """The coordinator of this machine, as the agent of `node` looks after it. Of several agents one does."""

    def __init__(self, platform: Platform, keeper: Keeper, node: str) -> None:
        self._platform, self._keeper, self._node = platform, keeper, node
        self._tries = Tries()
        self._lock: Lock | None = None
        self._looked_ns = self._since_ns = platform.boot_ns()
        """`_since_ns`: from when on silence counts."""

    def look(self, ns: int, heard_ns: int) -> None:
        """Start it if it is gone. `heard_ns`: when it last said something; nanoseconds since boot."""
        if ns - self._looked_ns < LOOK_NS:
            return
        if ns - self._looked_ns > UNWATCHED_NS:
            self._since_ns = ns
        self._looked_ns = ns
        if ns - max(heard_ns, self._since_ns) < SILENT_NS:
            self._heard(ns)
        elif self._may_be_started() and self._tries.due(ns) and self._is_mine():
            self._start(ns)

    def _heard(self, ns: int) -> None:
        self._tries.lives(ns)
        if self._lock is not None:
            self._tell(Tried(self._node, 0, False))
            self._lock.release()
            self._lock = None

    def _may_be_started(self) -> bool:
        """Not while one that was started here lives, which may wait for a disk; not where it would end as before."""
        started, finish = self._keeper.started.get("c"), finish_of(self._platform, self._keeper.live)
        again = finish is None or (not finish.term and finish.exit_code == EXIT_AGAIN)
        return again and (started is None or started.poll() is not None)

    def _is_mine(self) -> bool:
        """Whether no other agent sees to it. One that dies leaves it to the others."""
        if self._lock is None:
            with suppress(OSError):
                self._lock = self._platform.lock(f"{self._keeper.live.coordinator}/{REVIVER}", self._node)
        return self._lock is not None

    def _start(self, ns: int) -> None:
        self._tries.tried(ns)
        self._tell(Tried(self._node, self._tries.count, self._tries.given_up))
        with suppress(OSError):
            self._keeper.coordinator(f"the agent of {self._node}, try {self._tries.count}")

    def _tell(self, said: Tried) -> None:
        with suppress(OSError):
            path = f"{self._keeper.live.coordinator}/{TRIES}"
            self._platform.write_replacing(path, msgspec.json.encode(said), durable=False)


class AgentsHere:
    """The agents of this machine, as the coordinator whose `home` this is looks after them."""

    def __init__(self, platform: Platform, run_folder: str, home: str, env: Mapping[str, str]) -> None:
        self._platform, self._run_folder, self._home, self._env = platform, run_folder, home, env
        self._keeper: Keeper | None = None
        self._tries: dict[str, Tries] = {}
        self._looked_ns = 0
        self._unwritten = False
        """Agents were started, and the run's folder does not say so yet."""

    @property
    def live(self) -> Live | None:
        """None: this is not where the run lives, or its agents were never started."""
        if self._keeper is None:
            live = find(self._platform, self._run_folder)
            if live is not None and live.coordinator == self._home:
                self._keeper = Keeper(self._platform, live, self._env)
        return self._keeper.live if self._keeper is not None else None

    def look(self, ns: int, away: Collection[str]) -> list[AgentStarted]:
        """Start those that died, but for nodes that are to stay `away`; what was done, for the journal."""
        if ns - self._looked_ns < LOOK_NS:
            return []
        self._looked_ns, live = ns, self.live
        if live is None:
            return []
        alive = agents_alive(self._platform, live)
        for name in alive:
            self._of(name).lives(ns)
        dead = [name for name in live.agents if name not in alive and name not in away]
        return [self._start(name, ns) for name in dead if self._of(name).due(ns)]

    def write(self, do: Do) -> None:
        """Who they are now, into the run's folder: whoever looks for them finds them there."""
        if self._unwritten and self._keeper is not None and do(LIVE, self._keeper.write, self._written):
            self._unwritten = False

    def _written(self, result: Exception | None) -> None:
        """What the disk refuses is written with the next that is started."""
        if isinstance(result, Exception) and not isinstance(result, RunUnusable):
            raise result

    def given_up(self) -> list[str]:
        """Nodes whose agents are not started any more."""
        return [name for name, tries in self._tries.items() if tries.given_up]

    def tries(self, node: str) -> int:
        """How often its agent was started again, in a row."""
        return self._of(node).count

    def _of(self, name: str) -> Tries:
        return self._tries.setdefault(name, Tries())

    def _start(self, name: str, ns: int) -> AgentStarted:
        assert self._keeper is not None
        self._of(name).tried(ns)
        with suppress(OSError):
            self._keeper.agents([name])
            self._unwritten = True
        return AgentStarted(node=name, tries=self._of(name).count, given_up=self._of(name).given_up)
