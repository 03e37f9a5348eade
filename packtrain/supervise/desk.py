"""Where a coordinator's decisions are made: messages and events in, messages and actions out, the log in between.

No input or output of its own but the log it was handed, so that the simulator runs it as it is. Nothing leaves before
what led to it is in the log. When the log cannot be written nothing is decided: what happened waits, agents are not
acknowledged and say it again, and the attempt runs on. What is said anew each second is kept once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from packtrain.supervise.delivery import Agenda, NodeSide
from packtrain.supervise.detect import EARLY_S, Pace, Silence
from packtrain.supervise.events import AnyEvent, Asked, Back, Finish, FromNode, Joined, Progress, Silent, Tick
from packtrain.supervise.messages import AskCarrier, Did, Edge, FromAgent, FromCoordinator, Hello, Outdated, Pulse
from packtrain.supervise.policy import decide
from packtrain.supervise.state import FINISHED, RUNNING, AnyRecord, Consumed, Issued, State, evolve


class Log(Protocol):
    """Where decisions are kept."""

    def append(self, records: Sequence[AnyRecord], state: State) -> None:
        """Durable when this returns; OSError: nothing of it counts. `state`: after them."""


HEARD = (Joined, Silent, Back, FromNode)
"""What nodes say, or do not: of these any number is decided together."""


class Desk:
    """Of one coordinator, from its term to its end. `state`: what the log led to."""

    def __init__(self, state: State, term: int, log: Log, ns: int) -> None:
        self.state = state
        self.trouble: OSError | None = None
        """Why the log cannot be written now."""
        self.outdated = False
        """An agent has seen a higher term: another coordinator leads."""
        self._term, self._log, self._ns = term, log, ns
        self._events: dict[object, AnyEvent] = {}
        """What happened and is not decided, in order. Of two with one key the later says all."""
        self._count = 0
        self._own: list[Issued] = []
        self._carriers: set[int] = set()
        """Actions that ask a carrier for something."""
        self._answers: list[str] = []
        self._sides = {name: NodeSide(term, node.agent, node.seq) for name, node in state.nodes.items()}
        self._agenda = Agenda()
        for name in self._sides:
            self._agenda.set(name, 0)
        self._silence = Silence(state.run.setup.supervise.node_silent_s - EARLY_S)
        self._pace = Pace(state.run.attempt, state.run.world)
        for name, node in state.nodes.items():
            if node.here and not node.silent_ns:
                self._silence.expect(name, ns)
            else:
                self._silence.silent(name, ns)
        for issued in state.pending.values():
            self._issue(issued)
        if state.run.stage == FINISHED:
            run = state.run
            finish = Finish(exit_code=run.exit_code, reason=run.reason, error=run.error)
            self._own.append(Issued(id=run.next_id, ns=ns, own=finish))

    # --- in ---

    def happened(self, event: AnyEvent) -> None:
        """Waits until `settle`."""
        self._count += 1
        key = _key(event) or self._count
        self._events.pop(key, None)
        self._events[key] = event

    def hear(self, ns: int, message: FromAgent) -> None:
        match message:
            case Hello():
                self._hello(ns, message)
            case Pulse():
                self._pulse(ns, message)
            case Edge():
                self._edge(ns, message)
            case Outdated():
                self.outdated = self.outdated or message.term > self._term

    def _edge(self, ns: int, edge: Edge) -> None:
        side = self._sides.get(edge.node)
        if side is None or side.agent != edge.agent:
            return
        if side.take(edge):
            self.happened(FromNode(ns=ns, node=edge.node, agent=edge.agent, seq=edge.seq, event=edge.event))
        else:
            self._agenda.set(edge.node, side.next_ns)

    def _hello(self, ns: int, hello: Hello) -> None:
        self.outdated = self.outdated or hello.term > self._term
        side, node = self._sides.get(hello.node), self.state.nodes.get(hello.node)
        if side is not None and side.agent == hello.agent:
            side.hello(ns)
            self._agenda.set(hello.node, side.next_ns)
            self._heard(ns, hello.node)
        if node is None or node.agent != hello.agent or not node.here:
            self.happened(Joined(
                ns=ns, node=hello.node, agent=hello.agent, boot_id=hello.boot_id, host=hello.host, procs=hello.procs,
                attempt=hello.attempt,
            ))

    def _heard(self, ns: int, node: str) -> None:
        for event in self._silence.heard(node, ns):
            self.happened(event)

    def _pulse(self, ns: int, pulse: Pulse) -> None:
        side = self._sides.get(pulse.node)
        if side is None or side.agent != pulse.agent:
            return
        self._heard(ns, pulse.node)
        if pulse.attempt and pulse.attempt == self._pace.attempt:
            self._pace.heard(pulse.node, pulse.step, pulse.step_s, pulse.phase)

    # --- decided ---

    def look(self, ns: int, wall_s: float) -> None:
        """What time brings; then decide all that has happened."""
        self._ns, run = ns, self.state.run
        if self._pace.attempt != run.attempt:
            self._pace = Pace(run.attempt, run.world)
        self._silence.allow(run.setup.supervise.node_silent_s - EARLY_S)
        for silent in self._silence.look(ns):
            self.happened(silent)
        if run.stage == RUNNING:
            for event in self._pace.look(ns):
                self.happened(event)
        self.settle()
        if not self._events:
            self.happened(Tick(ns=ns, wall_s=wall_s))
            self.settle()
            self._events = {key: event for key, event in self._events.items() if not isinstance(event, Tick)}

    def settle(self) -> None:
        """Decide what has happened, in one batch of the log."""
        state, records = self.state, list[AnyRecord]()
        for events in _together(self._events.values()):
            decided = decide(state, *events)
            state = evolve(state, *decided)
            records += decided
        if records:
            try:
                self._log.append(records, state)
            except OSError as error:
                self.trouble = error
                return
        self.trouble, self.state, self._events = None, state, {}
        for record in records:
            self._follow(record)

    def _follow(self, record: AnyRecord) -> None:
        match record:
            case Issued():
                self._issue(record)
            case Consumed(event=Joined() as joined):
                self._welcome(joined)
            case Consumed(event=FromNode() as edge):
                side = self._sides[edge.node]
                side.logged()
                if isinstance(edge.event, Did):
                    side.did(edge.event.id)
                    self._answered(edge.event)
                self._agenda.set(edge.node, side.next_ns)

    def _answered(self, did: Did) -> None:
        if did.id in self._carriers:
            self._carriers.discard(did.id)
            self._answers.append(did.data)

    def _welcome(self, joined: Joined) -> None:
        side = self._sides.get(joined.node)
        if side is None or side.agent != joined.agent:
            side = self._sides[joined.node] = NodeSide(self._term, joined.agent)
        side.hello(joined.ns)
        self._agenda.set(joined.node, side.next_ns)
        self._heard(joined.ns, joined.node)  # its predecessor's silence may be found after its Hello, in the same look

    def _issue(self, issued: Issued) -> None:
        if issued.action is not None:
            side = self._sides[issued.node]
            side.ask(issued.id, issued.action)
            self._agenda.set(issued.node, side.next_ns)
            self._carriers |= {issued.id} if isinstance(issued.action, AskCarrier) else set()
        else:
            self._own.append(issued)

    @property
    def words(self) -> list[Asked]:
        """What persons asked for and is not in the log yet: nobody says it again."""
        return [event for event in self._events.values() if isinstance(event, Asked)]

    # --- out ---

    def due(self, ns: int) -> list[tuple[str, FromCoordinator]]:
        """Messages to send now, each with its node."""
        found = []
        for node in self._agenda.due(ns):
            side = self._sides[node]
            found += [(node, message) for message in side.due(ns)]
            self._agenda.set(node, side.next_ns)
        return found

    def own(self) -> list[Issued]:
        """Actions of the coordinator itself that are to be done now, each once."""
        own, self._own = self._own, []
        return own

    def answers(self) -> list[str]:
        """What carriers said to what they were asked for, each once; empty: they could not be asked."""
        answers, self._answers = self._answers, []
        return answers

    @property
    def carrier_asked(self) -> bool:
        """Whether one has yet to answer, on a node that is there."""
        asked = [one.node for one in self.state.pending.values() if isinstance(one.action, AskCarrier)]
        return any(self.state.nodes[name].here for name in asked)

    @property
    def steps(self) -> dict[str, int]:
        """Node of the attempt that runs -> the last step that its ranks completed; -1: not known."""
        return self._pace.steps if self._pace.attempt == self.state.run.attempt else {}

    @property
    def phase(self) -> str:
        """What rank 0 of that attempt does; empty: not known."""
        now = self._pace.phases if self._pace.attempt == self.state.run.attempt else {}
        return next((now.get(name, "") for name, node in self.state.nodes.items() if node.slot == 0), "")


def _key(event: AnyEvent) -> object:
    """Of what is said again and again while the log refuses, so that it does not pile up; None: of its own."""
    match event:
        case Joined():
            return Joined, event.node, event.agent
        case Progress():
            return Progress, event.attempt
    return None


def _together(events: Iterable[AnyEvent]) -> Iterator[list[AnyEvent]]:
    """In order; what nodes say at once in one piece, everything else by itself."""
    for heard, some in itertools.groupby(events, lambda event: isinstance(event, HEARD)):
        if heard:
            yield list(some)
        else:
            yield from ([event] for event in some)
