"""Nothing lost, nothing done twice, one obeyed: both ends of what agents and coordinator say, over any link. Pure.

    agent: AgentSide                                       coordinator: NodeSide, one for each incarnation of an agent
    edge 1, 2, 3 ... repeated until acknowledged     ->    taken in order; acknowledged once they are in the log
    an id begins once; `Did` is an edge              <-    action with its id, repeated until its `Did` was taken
    Hello until a Welcome that is not outdated       ->    Welcome: the edges that are in the log already
    a lower term is answered with Outdated           <-    every message carries the term and the incarnation

Links may lose, repeat and reorder as they like. Time is handed in, nanoseconds since boot. Memory is bounded: at most
`WINDOW` edges are under way, and what waits behind them is merged: of a rank's phases, for instance, the last one is
kept. Ends and outcomes are never merged; there are no more of them than ranks and actions.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from dataclasses import dataclass, field

import msgspec

from packtrain.core.units import NS
from packtrain.supervise.messages import (
    Acknowledge,
    Action,
    AgentEvent,
    CarrierEnded,
    CarrierHomeBack,
    Did,
    Do,
    Edge,
    FromAgent,
    FromCoordinator,
    HardwareSeen,
    Hello,
    NodeLeaves,
    Outdated,
    Pulse,
    RankEnded,
    RankHeard,
    RankSilent,
    RankStalled,
    Unkillable,
    Welcome,
)

WINDOW = 64
"""Edges under way at once."""
WAITING_MAX = 4096
REPEAT_NS, REPEAT_NS_MAX = NS, 8 * NS
"""The first repetition, and the longest pause between two."""
HELLO_NS = NS
PULSE_NS = NS
ALIVE_NS = 2 * NS
"""A coordinator is silent towards an agent for no longer."""
LOST_NS, LOST_NS_MAX = 6 * NS, 12 * NS
"""An agent that has heard nothing for so long looks for its coordinator anew; where that led to nothing it waits up to
twice as long, because thousands that call again at once keep each other from being answered."""
LOST_SPREAD = 0.5
"""Part of that by which agents differ, so that they do not call at once."""
OUTCOMES_MAX = 1024
KEPT = (RankEnded, Did, NodeLeaves)
"""What no lack of room may drop."""

Key = tuple[object, ...]


def _what(event: AgentEvent) -> object:
    """What tells events of one kind and attempt apart that are of no rank."""
    match event:
        case CarrierEnded():
            return event.given_up
        case CarrierHomeBack():
            return event.path
        case Unkillable():
            return event.pid
        case HardwareSeen():
            return event.verdict, event.what, event.where
    return None


def _key(event: AgentEvent) -> Key:
    """Of two waiting edges with one key the later says all."""
    if isinstance(event, Did):
        return (Did, event.id)
    kind = "health" if isinstance(event, RankSilent | RankStalled | RankHeard) else type(event)
    return (kind, getattr(event, "attempt", 0), getattr(event, "rank", -1), _what(event))


@dataclass
class Pace:
    """When to say something again: after a pause that doubles."""

    at_ns: int = 0
    pause_ns: int = REPEAT_NS

    def said(self, ns: int) -> None:
        self.at_ns, self.pause_ns = ns + self.pause_ns, min(2 * self.pause_ns, REPEAT_NS_MAX)

    def anew(self, ns: int) -> None:
        self.at_ns, self.pause_ns = ns, REPEAT_NS


class Outbox:
    """The edges of one incarnation, until the coordinator has them in its log."""

    def __init__(self, node: str, agent: str) -> None:
        self._node, self._agent = node, agent
        self._sent: deque[tuple[int, int, AgentEvent]] = deque()
        """(number, time, event) under way, in order."""
        self._waiting: dict[Key, tuple[int, AgentEvent]] = {}
        """Not numbered yet, in order."""
        self._last = 0
        self._pace = Pace()
        self.merged = 0
        self.dropped = 0
        """For want of room."""

    def put(self, ns: int, event: AgentEvent) -> None:
        self.merged += self._waiting.pop(_key(event), None) is not None
        self._waiting[_key(event)] = (ns, event)
        if len(self._waiting) > WAITING_MAX:
            self._make_room()

    def _make_room(self) -> None:
        victim = next((key for key, (_, event) in self._waiting.items() if not isinstance(event, KEPT)), None)
        if victim is not None:
            del self._waiting[victim]
            self.dropped += 1

    def holds(self, event: Did) -> bool:
        """Whether this outcome has yet to be acknowledged."""
        return _key(event) in self._waiting or any(_key(sent) == _key(event) for _, _, sent in self._sent)

    def acknowledge(self, ns: int, seq: int) -> None:
        """All up to `seq` are in the coordinator's log."""
        before = len(self._sent)
        while self._sent and self._sent[0][0] <= seq:
            self._sent.popleft()
        if len(self._sent) < before:
            self._pace.anew(ns + REPEAT_NS)

    def repeat(self, ns: int) -> None:
        """What is under way may be lost: say it again now."""
        self._pace.anew(ns)

    def due(self, ns: int) -> list[Edge]:
        """What to send now: what was never sent, and all that is under way when the pause is over."""
        new = self._number()
        if self._sent and len(new) == len(self._sent):
            self._pace.anew(ns)
        repeat = bool(self._sent) and ns >= self._pace.at_ns
        if repeat:
            self._pace.said(ns)
        since = self._sent[0][0] if self._sent else 1
        return [
            Edge(node=self._node, agent=self._agent, seq=seq, ns=when, event=event, since=since)
            for seq, when, event in (self._sent if repeat else new)
        ]

    def _number(self) -> list[tuple[int, int, AgentEvent]]:
        new = []
        while self._waiting and len(self._sent) < WINDOW:
            when, event = self._waiting.pop(next(iter(self._waiting)))
            self._last += 1
            new.append((self._last, when, event))
            self._sent.append(new[-1])
        return new


class Done:
    """Which actions this incarnation has begun, and what came of them. Ids grow, so old outcomes may be forgotten."""

    def __init__(self) -> None:
        self._begun: dict[int, Did | None] = {}
        self._forgotten = 0
        """All ids up to here were begun, or never will be."""

    def begun(self, id: int) -> bool:
        return id <= self._forgotten or id in self._begun

    def begin(self, id: int) -> None:
        self._begun[id] = None
        old = next((one for one, did in self._begun.items() if did is not None), None)
        if len(self._begun) > OUTCOMES_MAX and old is not None:
            del self._begun[old]
            self._forgotten = max(self._forgotten, old)

    def end(self, did: Did) -> None:
        self._begun[did.id] = did

    def outcome(self, id: int) -> Did | None:
        """None: under way, or forgotten."""
        return self._begun.get(id)


class AgentSide:
    """The agent's end. `term`: the highest an earlier incarnation has seen."""

    def __init__(self, node: str, agent: str, term: int = 0) -> None:
        self.term = term
        """The highest seen."""
        self.joined = False
        """Welcomed by a coordinator that has been heard of since."""
        self.heard_ns = 0
        """When a coordinator was last heard; 0: never."""
        self.refused = 0
        """Messages of a lower term, or for another incarnation."""
        self._node, self._agent = node, agent
        self._outbox, self._done = Outbox(node, agent), Done()
        self._hello_ns = self._pulse_ns = self._anew_ns = 0
        self._patience_ns = LOST_NS
        self._spread = 1.0 + LOST_SPREAD * zlib.crc32(agent.encode()) / (1 << 32)
        self._outdated = False

    def happened(self, ns: int, event: AgentEvent) -> None:
        """To be told to the coordinator, whenever there is one."""
        self._outbox.put(ns, event)

    def did(self, ns: int, did: Did) -> None:
        """An action that `arrived` returned is over."""
        self._done.end(did)
        self.happened(ns, did)

    def arrived(self, ns: int, message: FromCoordinator) -> Do | None:
        """An action to begin now, if that is what it is. Each is returned once, and is owed a `did`."""
        if message.agent not in ("", self._agent):
            self.refused += 1
            return None
        if message.term < self.term:
            self.refused += 1
            self._outdated = True
            return None
        self.joined = self.joined and message.term == self.term
        self.term, self.heard_ns, self._patience_ns = message.term, ns, LOST_NS
        match message:
            case Welcome():
                self.joined = True
                self._outbox.acknowledge(ns, message.seq)
                self._outbox.repeat(ns)
            case Acknowledge():
                self._outbox.acknowledge(ns, message.seq)
            case Do():
                return self._asked(ns, message)
        return None

    def _asked(self, ns: int, do: Do) -> Do | None:
        if self._done.begun(do.id):
            did = self._done.outcome(do.id)
            if did is not None and not self._outbox.holds(did):
                self.happened(ns, did)
            return None
        if do.after and not self._done.begun(do.after):
            return None  # it comes again, and what must be begun before it too
        self._done.begin(do.id)
        return do

    def lost(self, ns: int) -> bool:
        """Whether no coordinator was heard of for so long that it has to be looked for: then `anew`."""
        return ns - max(self.heard_ns, self._anew_ns) >= self._patience_ns * self._spread

    def anew(self, ns: int) -> None:
        """The connection is another one, or ought to be: Hello first."""
        if 0 < self._anew_ns < ns and self.heard_ns <= self._anew_ns:
            self._patience_ns = min(2 * self._patience_ns, LOST_NS_MAX)
        self.joined, self._anew_ns, self._hello_ns = False, ns, ns

    def due(self, ns: int, hello: Hello, pulse: Pulse) -> list[FromAgent]:
        """What to send now."""
        messages: list[FromAgent] = [Outdated(node=self._node, term=self.term)] if self._outdated else []
        self._outdated = False
        if not self.joined:
            if ns >= self._hello_ns:
                self._hello_ns = ns + HELLO_NS
                messages.append(msgspec.structs.replace(hello, term=self.term))
            return messages
        messages += self._outbox.due(ns)
        if ns >= self._pulse_ns:
            self._pulse_ns = ns + PULSE_NS
            messages.append(pulse)
        return messages

    def unsent(self, message: FromAgent) -> None:
        """It did not leave: a connection that is being made takes nothing yet. Hello is said at the next look, as all
        else waits for it; what else was due comes again in its own time."""
        if isinstance(message, Hello):
            self._hello_ns = 0


@dataclass
class _Asked:
    do: Do
    pace: Pace = field(default_factory=Pace)


class NodeSide:
    """The coordinator's end towards one incarnation of an agent. `seq`: its edges up to here are in the log."""

    def __init__(self, term: int, agent: str, seq: int = 0) -> None:
        self.agent = agent
        self.gaps = 0
        """Edges that were acknowledged and are not in this log: it has lost its end."""
        self._term = term
        self._taken = self._logged = seq
        self._asked: dict[int, _Asked] = {}
        self._welcome = self._acknowledge = False
        self._said_ns = 0

    def hello(self, ns: int) -> None:
        """It said Hello: on a connection that is new, what was sent before may be lost."""
        self._welcome = True
        for asked in self._asked.values():
            asked.pace.anew(ns)

    def take(self, edge: Edge) -> bool:
        """Whether it is the next one: then it goes into the log, followed by `logged`. Others come again."""
        if edge.since > self._taken + 1:
            self.gaps += edge.since - 1 - self._taken
            self._taken = self._logged = edge.since - 1
        if edge.seq != self._taken + 1:
            self._acknowledge = True
            return False
        self._taken = edge.seq
        return True

    def logged(self) -> None:
        """All that was taken is in the log."""
        self._logged = self._taken
        self._acknowledge = True

    def ask(self, id: int, action: Action) -> None:
        """An action that is in the log; ids grow. Again after a restart, for each whose `Did` is not in the log."""
        after = next(reversed(self._asked), 0)
        self._asked[id] = _Asked(Do(term=self._term, id=id, action=action, agent=self.agent, after=after))

    def did(self, id: int) -> None:
        """Its `Did` was taken."""
        self._asked.pop(id, None)

    def due(self, ns: int) -> list[FromCoordinator]:
        """What to send now."""
        messages: list[FromCoordinator] = []
        if self._welcome:
            messages.append(Welcome(term=self._term, seq=self._logged, agent=self.agent))
        for asked in self._asked.values():
            if ns >= asked.pace.at_ns:
                asked.pace.said(ns)
                messages.append(asked.do)
        if self._acknowledge or (not messages and ns - self._said_ns >= ALIVE_NS):
            messages.append(Acknowledge(term=self._term, seq=self._logged, agent=self.agent))
        self._welcome = self._acknowledge = False
        if messages:
            self._said_ns = ns
        return messages

    @property
    def next_ns(self) -> int:
        """When `due` has something to say next, if nothing happens before."""
        if self._welcome or self._acknowledge:
            return 0
        return min([self._said_ns + ALIVE_NS, *(asked.pace.at_ns for asked in self._asked.values())])


class Agenda:
    """Names by when each is to be looked at next, so that thousands which have nothing to say cost nothing."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._queue: list[tuple[int, str]] = []
        """A heap; what `_at` does not say any more is passed over."""

    def set(self, name: str, at_ns: int) -> None:
        """Instead of what was set before."""
        if self._at.get(name) != at_ns:
            self._at[name] = at_ns
            heapq.heappush(self._queue, (at_ns, name))

    def due(self, ns: int) -> list[str]:
        """Those whose time has come, each once until it is set again."""
        names = []
        while self._queue and self._queue[0][0] <= ns:
            at_ns, name = heapq.heappop(self._queue)
            if self._at.get(name) == at_ns:
                del self._at[name]
                names.append(name)
        return names
