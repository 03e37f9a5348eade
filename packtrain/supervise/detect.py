"""Who is silent, who is slow, how far a world is: from messages that come each second and are written down nowhere.

Pure: times are handed in, of the watched clock. Only what changes becomes an event of the policy.
"""

from __future__ import annotations

import heapq
import statistics

from packtrain.core.units import NS
from packtrain.supervise.delivery import PULSE_NS
from packtrain.supervise.events import Back, Progress, Silent, Slow

UNWATCHED_NS = 2 * NS
"""What lies between two looks beyond this counts for nothing: we were stopped, not the others."""
EARLY_S = 0.1
"""Silence is concluded so much before its limit: it is to be known by then, and a look comes each tenth of a second."""
OURS_FACTOR = 2
"""Where most nodes fall silent at once it is rather our own link: they get so much more time."""
NOBODY_PART, NOBODY_NS = 0.5, 3 * PULSE_NS // 2
"""So, too, where nobody at all was heard for this part of the limit, and for longer than lies between two pulses of one
node that may be the last; and until the limit has passed since somebody was again: each node speaks once a second at a
moment of its own, so each look finds a few of them late, or back."""
SLOW_PART = 0.7
"""A node with less than this of the median speed is slow. Source: issue 5, a straggler at 70%."""
SLOW_NS = 30 * NS
"""It must have been so for this long."""
PROGRESS_NS = 5 * NS
"""How often the policy hears how far a world is, at most."""
PACE_NS = NS
"""How often step times are compared."""


class WatchedClock:
    """Nanoseconds in which somebody looked, over all coordinators of a run: it begins where the log of the last one
    ended, and a look after a long gap adds `UNWATCHED_NS` only."""

    def __init__(self, ns: int, boot_ns: int) -> None:
        self.ns, self._looked_ns = ns, boot_ns

    def look(self, boot_ns: int) -> int:
        self.ns += max(0, min(boot_ns - self._looked_ns, UNWATCHED_NS))
        self._looked_ns = boot_ns
        return self.ns


class Silence:
    """Which nodes are heard. `silent_s`: how long one may say nothing.

    A node that is heard costs a timestamp. All of them wait in a queue, ordered by when they may be late at the
    earliest, and a look touches those alone whose time has come.
    """

    def __init__(self, silent_s: float) -> None:
        self._limit_ns = round(silent_s * NS)
        self._heard: dict[str, int] = {}
        self._queue: list[tuple[int, str]] = []
        """(when to look at it, node), a heap."""
        self._queued: set[str] = set()
        self._late: dict[str, None] = {}
        """Beyond the limit and not told: most are, so it may be us. In order."""
        self._silent: set[str] = set()
        self._awaited: set[str] = set()
        self._came_ns = 0
        """When the last of those that were awaited was heard."""
        self._last_ns = 0
        """When anybody was."""
        self._ours_ns = -self._limit_ns
        """When somebody was heard after nobody had been for long."""

    def allow(self, silent_s: float) -> None:
        """From now on so long."""
        self._limit_ns = round(silent_s * NS)

    def heard(self, node: str, ns: int) -> list[Back]:
        if self._heard and self._nobody(ns):
            self._ours_ns = ns
        self._heard[node] = self._last_ns = ns
        if node in self._awaited:
            self._awaited.discard(node)
            self._came_ns = ns
        if node in self._queued:
            return []
        was_silent = node in self._silent
        self._silent.discard(node)
        self._late.pop(node, None)
        self._wait(node, ns + self._limit_ns)
        return [Back(ns=ns, node=node)] if was_silent else []

    def expect(self, node: str, ns: int) -> None:
        """It ought to speak from now on. Thousands that come back at once take turns at our door, so as long as one
        after the other is heard the rest are not late."""
        self._awaited.add(node)
        self._heard[node] = self._came_ns = self._last_ns = ns
        self._wait(node, ns + self._limit_ns)

    def silent(self, node: str, ns: int) -> None:
        """It was when this began."""
        self._heard[node] = ns
        self._silent.add(node)

    def look(self, ns: int) -> list[Silent]:
        """Those that fell silent since the last look."""
        while self._queue and self._queue[0][0] <= ns:
            self._due(heapq.heappop(self._queue)[1], ns)
        over = [node for node in self._late if ns - self._since(node) >= self._limit_ns]
        heard = len(self._heard) - len(self._silent)
        ours = self._nobody(ns) or ns - self._ours_ns < self._limit_ns
        if heard >= 2 and (ours or heard < 2 * len(over)):
            over = [node for node in over if ns - self._since(node) >= OURS_FACTOR * self._limit_ns]
        for node in over:
            del self._late[node]
        self._silent.update(over)
        return [Silent(ns=ns, node=node, seconds=(ns - self._since(node)) / NS) for node in over]

    def _nobody(self, ns: int) -> bool:
        return ns - self._last_ns >= max(NOBODY_PART * self._limit_ns, NOBODY_NS)

    def _due(self, node: str, ns: int) -> None:
        """Its time in the queue has come: it was heard since, or it is late."""
        late_ns = self._since(node) + self._limit_ns
        if late_ns > ns:
            heapq.heappush(self._queue, (late_ns, node))
        else:
            self._queued.discard(node)
            self._late[node] = None

    def _since(self, node: str) -> int:
        return max(self._heard[node], self._came_ns) if node in self._awaited else self._heard[node]

    def _wait(self, node: str, ns: int) -> None:
        self._queued.add(node)
        heapq.heappush(self._queue, (ns, node))


class Pace:
    """How far the nodes of one attempt are, and how fast."""

    def __init__(self, attempt: int, nodes: int) -> None:
        self.attempt, self._nodes = attempt, nodes
        self.steps: dict[str, int] = {}
        """Node -> the last step that its ranks completed."""
        self.phases: dict[str, str] = {}
        """Node -> what its first rank does, to be shown."""
        self._step_s: dict[str, float] = {}
        self._slow_since: dict[str, int] = {}
        self._told: set[str] = set()
        self._told_step, self._told_ns = -1, 0
        self._compared_ns = -PACE_NS

    def heard(self, node: str, step: int, step_s: float, phase: str = "") -> None:
        self.steps[node], self._step_s[node], self.phases[node] = step, step_s, phase

    def look(self, ns: int) -> list[Progress | Slow]:
        return [*self._progress(ns), *self._slow(ns)]

    def _progress(self, ns: int) -> list[Progress]:
        """Completed by all: told when it is the first, and then seldom."""
        if len(self.steps) < self._nodes or (self._told_step >= 0 and ns - self._told_ns < PROGRESS_NS):
            return []
        step = min(self.steps.values(), default=-1)
        if step <= self._told_step:
            return []
        self._told_step, self._told_ns = step, ns
        known = [step_s for step_s in self._step_s.values() if step_s > 0]
        step_s = statistics.median(known) if known else 0.0
        return [Progress(ns=ns, attempt=self.attempt, step=step, step_s=step_s)]

    def _slow(self, ns: int) -> list[Slow]:
        if ns - self._compared_ns < PACE_NS:
            return []
        self._compared_ns = ns
        known = {node: step_s for node, step_s in self._step_s.items() if step_s > 0}
        if len(known) < 3:
            return []
        median_s = statistics.median(known.values())
        slow = {node for node, step_s in known.items() if step_s * SLOW_PART > median_s}
        self._slow_since = {node: self._slow_since.get(node, ns) for node in slow}
        due = [node for node, since in self._slow_since.items() if ns - since >= SLOW_NS and node not in self._told]
        self._told.update(due)
        return [
            Slow(ns=ns, attempt=self.attempt, node=node, step_s=known[node], median_s=median_s) for node in due
        ]
