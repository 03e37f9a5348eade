"""All that the policy of a run knows, and the records that change it: `evolve` applies one, and concludes nothing.

A log of decisions holds what changed, not how it was concluded, so that a coordinator of a later version replays it to
the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from packtrain.supervise.events import AnyEvent, Begun, BringBack, Done, FromNode, OwnAction, Setup, WrapUp
from packtrain.supervise.messages import Action, Did

K = TypeVar("K")
V = TypeVar("V")
Awaited = TypeVar("Awaited", BringBack, WrapUp)

WAITING = "waiting"
"""For nodes, for what they hold in memory, or for a pause to be over."""
BEGINNING = "beginning"
"""`Begin` was asked for."""
BRINGING = "bringing"
"""What it restores is brought back from a mirror first, where it is away."""
LAUNCHING = "launching"
"""Workers start, restore and say that they are ready."""
RUNNING = "running"
ENDING = "ending"
"""Workers are being killed, or have ended."""
WRAPPING = "wrapping"
"""The workers are gone; retention and mirrors are finished."""
CLOSING = "closing"
"""Carriers finish the saves they took."""
LEAVING = "leaving"
"""The run is over: agents leave."""
FINISHED = "finished"


class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class Trouble(Struct):
    """Why we ended an attempt.

    `kind`: silent, stalled, idle, lost, agent, launch, hardware, late, differs, grace, apart, asked.
    """

    kind: str
    reason: str
    node: str = ""
    """To blame for it; empty: nobody."""
    since_ns: int = 0


class Run(Struct):
    """What there is once. Limits of time are `ns` of the watched clock; 0: none is set."""

    setup: Setup = Setup()
    term: int = 0
    stage: str = WAITING
    since_ns: int = 0
    """When this stage began."""
    next_id: int = 1
    """Of the next action."""
    attempt: int = 0
    """The last one begun."""
    begin: int = 0
    began_ns: int = 0
    world: int = 0
    """Nodes of this attempt."""
    first: bool = True
    """No attempt has begun under this log."""
    begin_ns: int = 0
    """The next attempt may not begin before."""
    reason: str = "the run was asked for"
    """Why the next attempt begins."""
    back: int = 0
    memory: bool = True
    refused: int = 0
    """Attempts in a row that could not begin."""
    best_step: int = 0
    """Highest completed step known before this attempt; goes back with a rollback."""
    attempt_step: int = -1
    step_s: float = 0.0
    """Of a step of this run, lately; 0: not known."""
    highest_step: int = 0
    """Highest completed step ever known."""
    fruitless: int = 0
    """Attempts in a row that completed no new step and ended by themselves."""
    disturbed: int = 0
    """The same, ended by a node that was lost."""
    mistaken: int = 0
    """Nodes that were lost and came back with the agent they had, since an attempt got further."""
    damaged: int = 0
    unreadable: int = 0
    rollbacks: int = 0
    differed: int = 0
    """Attempts in a row whose ranks did not agree on where to begin."""
    launch: Launchable | None = None
    order: int = 0
    """The last one given in this attempt; GO is 1."""
    order_ns: int = 0
    """When. Ranks see the last word only, so two must not come at once where the first still counts."""
    hold_step: int = 0
    """Until which step of this attempt saves are held; 0: they are not."""
    purpose: str = ""
    """Why workers were told to save and stop: stop, drain, replace, grow; empty: they were not."""
    stopping: str = ""
    """Who asked the run to stop."""
    paused: bool = False
    kill_at_ns: int = 0
    trouble: Trouble | None = None
    noticed: bool = False
    """That this attempt is over is in the journal."""
    ended: int = 0
    """Ranks of this attempt that have ended."""
    ended_ns: int = 0
    """When the first of them did."""
    stacks_ns: int = 0
    """Until when stacks are waited for."""
    grow_ns: int = 0
    """Since when nodes for a larger world are there."""
    blamed: str = ""
    blamed_in_row: int = 0
    shared_ns: int = 0
    """Until when a shared cause holds."""
    cordons_ns: tuple[int, ...] = ()
    """When nodes were cordoned that no person asked for, of the last 24 h that were watched."""
    cordons: tuple[float, ...] = ()
    """The same by the wall clock: read where an older version wrote it, and counted as of the next coordinator."""
    leaves: dict[str, float] = {}
    """Node -> wall-clock date from which on it is not there."""
    lemons: dict[str, int] = {}
    """Host -> how often it was blamed, in all runs of this person."""
    published: int = -1
    """Step of the last save heard of; -1: none."""
    restored: int = -1
    """What the last attempt began from."""
    replays: tuple[Replay, ...] = ()
    """The last ones ordered."""
    exit_code: int = 0
    error: dict[str, str] = {}


class Replay(Struct):
    """An order to compute steps again elsewhere, as in `ReplayOrdered`."""

    attempt: int
    first: int
    last: int
    nodes: tuple[str, ...]
    on: tuple[str, ...] = ()
    halves: tuple[tuple[str, ...], ...] = ()
    result: str = "pending"


class Launchable(Struct):
    """What `Launch` needs of the attempt that has begun."""

    restore: str = ""
    memory: bool = False
    memory_from: dict[str, dict[str, str]] = {}
    """By node."""
    master: str = ""
    failures: int = 0
    node_minutes: int = 0
    spec: int = 0


class Node(Struct):
    agent: str = ""
    boot_id: str = ""
    host: str = ""
    procs: int = 1
    seq: int = 0
    """Edges of this agent that are in the log."""
    here: bool = True
    silent_ns: int = 0
    """Since when it is silent; 0: it is not."""
    back_ns: int = 0
    """Since when it is here."""
    slot: int = -1
    """Place in the world: the first has rank 0. Kept from attempt to attempt where it can be."""
    attempt: int = 0
    """Whose workers it may still run."""
    cordoned: str = ""
    """By whom, or why."""
    draining: str = ""
    """The same; until another agent runs there, or a person takes it back."""
    aside: int = 0
    """Replaced after this attempt: the last to be chosen, until a later attempt on it gets further; 0: it is not."""
    blames: int = 0
    suspect: str = ""
    """Why it may compute wrong numbers: the last to be chosen, until a person takes it back (uncordon)."""
    symptom: str = ""
    """The last thing that went wrong on it, in one word."""
    symptom_ns: int = 0
    carrier: str = ""
    """host:port of its carrier."""
    held: str | None = None
    """What it holds in memory, as it told before the attempt that is to begin (held.py): JSON. None: it has not told.
    """


class Rank(Struct):
    node: str
    facts: dict[str, str] | None = None
    """What it said when it was ready."""
    status: int | None = None
    """None: it has not ended."""
    step: int = -1
    error: dict[str, str] = {}
    tail: str = ""
    order: int = 0
    """1 for the first rank that ended, 2 for the next ..."""
    killed: bool = False
    """We asked for its end before it was told."""
    trouble: str = ""
    """silent, stalled, idle."""
    stack: str | None = None


class State(Struct):
    ns: int = 0
    """Of the last event: where the watched clock goes on."""
    run: Run = Run()
    nodes: dict[str, Node] = {}
    ranks: dict[int, Rank] = {}
    """Of the attempt that runs."""
    pending: dict[int, Issued] = {}
    """Actions that were issued and are not done."""


# --- records of the log ------------------------------------------------------------------------------


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="r"):
    pass


class Consumed(Record, tag="consumed"):
    """An event, as it was heard."""

    event: AnyEvent


class Decided(Record, tag="decided"):
    """What was concluded, in words."""

    what: str


class Changed(Record, tag="changed"):
    """What is known now; what is not named stays."""

    run: Run | UnsetType = UNSET
    nodes: dict[str, Node] = {}
    ranks: dict[int, Rank] = {}
    anew: bool = False
    """`ranks` are all there are."""
    dropped: tuple[int, ...] = ()
    """Actions that need not be done any more."""


class Issued(Record, tag="issued"):
    """An action with its id. `node` empty: of the coordinator itself."""

    id: int
    ns: int
    node: str = ""
    action: Action | None = None
    own: OwnAction | None = None


AnyRecord = Consumed | Decided | Changed | Issued

ANSWERED = ("begin", "bring_back", "wrap_up")
"""Own actions that stay to be done until an event says that they are; the others are said once."""


def evolve(state: State, *records: AnyRecord) -> State:
    """The state after these records, one after the other. Pure, and all that a replay does."""
    known = Known(state)
    for record in records:
        known.take(record)
    return known.state()


def is_owed(issued: Issued) -> bool:
    """Whether it stays to be done until an event says that it is."""
    return issued.own is None or type(issued.own).__struct_config__.tag in ANSWERED


def change(struct: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(struct, **fields)


def _done_id(event: AnyEvent) -> int:
    match event:
        case Begun() | Done():
            return event.id
        case FromNode(event=Did() as did):
            return did.id
    return 0


class Known:
    """A state while it changes. Of nodes, ranks and actions there may be tens of thousands: each of the three is copied
    when it changes for the first time, and then changed in place. Nothing else ever sees those copies before `state`.
    """

    def __init__(self, state: State) -> None:
        self.ns, self.run = state.ns, state.run
        self.nodes, self.ranks, self.pending = state.nodes, state.ranks, state.pending
        self._copied: set[str] = set()

    def state(self) -> State:
        """What has come of it; further changes are made to further copies."""
        self._copied.clear()
        return State(ns=self.ns, run=self.run, nodes=self.nodes, ranks=self.ranks, pending=self.pending)

    def set_node(self, name: str, node: Node) -> None:
        self._copy("nodes")
        self.nodes[name] = node

    def set_rank(self, number: int, rank: Rank) -> None:
        self._copy("ranks")
        self.ranks[number] = rank

    def set_ranks(self, ranks: dict[int, Rank]) -> None:
        """These are all."""
        self.ranks = ranks
        self._copied.discard("ranks")

    def drop(self, id: int) -> None:
        """An action that need not be done any more."""
        self._copy("pending")
        self.pending.pop(id, None)

    def _copy(self, what: str) -> None:
        if what not in self._copied:
            self._copied.add(what)
            setattr(self, what, dict(getattr(self, what)))

    def take(self, record: AnyRecord) -> None:
        match record:
            case Consumed():
                self.consume(record.event)
            case Changed():
                self._change(record)
            case Issued():
                self.run = change(self.run, next_id=record.id + 1)
                if is_owed(record):
                    self._copy("pending")
                    self.pending[record.id] = record

    def consume(self, event: AnyEvent) -> Issued | None:
        """An edge is never consumed again, and what was done is pending no longer: then it is returned."""
        self.ns = max(self.ns, event.ns)
        if isinstance(event, FromNode):
            self.set_node(event.node, change(self.nodes[event.node], seq=event.seq))
        done = self.pending.get(_done_id(event))
        if done is None or done.node != getattr(event, "node", ""):
            return None
        self.drop(done.id)
        return done

    def _change(self, record: Changed) -> None:
        self.run = self.run if record.run is UNSET else record.run
        if record.anew:
            self.set_ranks(record.ranks)
        for name, node in record.nodes.items():
            self.set_node(name, node)
        for number, rank in record.ranks.items() if not record.anew else ():
            self.set_rank(number, rank)
        for id in record.dropped:
            self.drop(id)


# --- a turn: what events lead to ---------------------------------------------------------------------


class Turn:
    """Collects what events change, so that rules read from top to bottom. Lives inside one call of `decide`."""

    def __init__(self, state: State) -> None:
        self.ns = state.ns
        self._once: dict[Callable[[Turn], None], None] = {}
        """In order."""
        self._known = Known(state)
        self._run = state.run
        """Before this turn. What follows: as a replay of the events alone would leave it."""
        self._nodes: dict[str, Node | None] = {}
        """Those that changed."""
        self._ranks: dict[int, Rank | None] = {}
        self._anew = False
        self._dropped: list[int] = []
        self._said: list[AnyRecord] = []
        self._issued: dict[int, Issued] = {}
        self._ids = 0
        """How many were given out, those of actions included that were dropped in this turn."""
        self._open: dict[str, list[int]] | None = None
        """Node -> ids of its actions, of before this turn and of it. This and the next: made when first asked for."""
        self._ranks_on: dict[str, list[int]] | None = None

    @property
    def run(self) -> Run:
        return self._known.run

    @property
    def nodes(self) -> dict[str, Node]:
        return self._known.nodes

    @property
    def ranks(self) -> dict[int, Rank]:
        return self._known.ranks

    @property
    def pending(self) -> list[Issued]:
        """Issued before this turn or by it, and not done."""
        return [*self._known.pending.values(), *self._issued.values()]

    def undone(self, kind: type[Awaited]) -> Awaited | None:
        """The coordinator's own action of this kind for the attempt that runs, as long as it is not done."""
        owed = [one.own for one in self.pending if isinstance(one.own, kind)]
        return next((own for own in owed if own.attempt == self.run.attempt), None)

    def is_pending(self, id: int) -> bool:
        """Whether it was issued before this turn, and is not done."""
        return id in self._known.pending

    def consume(self, event: AnyEvent) -> Issued | None:
        """The next event; the action that is done by it, if one is."""
        self.ns = event.ns
        if isinstance(event, FromNode) and event.node in self._nodes:
            before = self._nodes[event.node]
            assert before is not None, "edges of a node come after its Joined is in the log"
            self._nodes[event.node] = change(before, seq=event.seq)
        return self._known.consume(event)

    def once(self, look: Callable[[Turn], None]) -> None:
        """Have a look at all nodes or actions when all events of this turn are heard. However many of them ask for it
        it is done once: at each of thousands it would cost the square of their number."""
        self._once[look] = None

    def look_once(self) -> None:
        looks, self._once = self._once, {}
        for look in looks:
            look(self)

    def set(self, **fields: Any) -> None:
        self._known.run = change(self.run, **fields)

    def enter(self, stage: str) -> None:
        self.set(stage=stage, since_ns=self.ns)

    def node(self, name: str, **fields: Any) -> None:
        self._nodes.setdefault(name, self.nodes.get(name))
        self._known.set_node(name, change(self.nodes.get(name, Node()), **fields))

    def rank(self, number: int, **fields: Any) -> None:
        self._ranks.setdefault(number, self.ranks[number])
        self._known.set_rank(number, change(self.ranks[number], **fields))

    def new_ranks(self, ranks: dict[int, Rank]) -> None:
        self._known.set_ranks(ranks)
        self._anew, self._ranks_on = True, None

    def ranks_on(self, name: str) -> list[int]:
        """Numbers of the ranks of this attempt that are on a node."""
        if self._ranks_on is None:
            self._ranks_on = _by_node((number, rank.node) for number, rank in self.ranks.items())
        return self._ranks_on.get(name, [])

    def drop(self, name: str) -> None:
        """What was issued for a node, by this turn too, and is not done never will be. Of the coordinator itself
        (empty) that is what it would wait for; what is said once is said."""
        if self._open is None:
            self._open = _by_node((one.id, one.node) for one in self.pending if is_owed(one))
        for id in self._open.pop(name, ()):
            if self._issued.pop(id, None) is None and self.is_pending(id):
                self._dropped.append(id)
                self._known.drop(id)

    def say(self, what: str) -> None:
        self._said.append(Decided(what=what))

    def do(self, node: str, action: Action) -> None:
        self._issue(node=node, action=action)

    def own(self, own: OwnAction) -> None:
        self._issue(own=own)

    def _issue(self, **what: Any) -> None:
        issued = Issued(id=self.run.next_id + self._ids, ns=self.ns, **what)
        self._ids += 1
        self._issued[issued.id] = issued
        if self._open is not None and is_owed(issued):
            self._open.setdefault(issued.node, []).append(issued.id)

    def records(self) -> list[AnyRecord]:
        """What changed and what was issued, in the order in which `evolve` takes them."""
        changed = Changed(
            run=UNSET if self.run == self._run else self.run,
            nodes=_patch(self._nodes, self.nodes),
            ranks=self.ranks if self._anew else _patch(self._ranks, self.ranks), anew=self._anew,
            dropped=tuple(self._dropped),
        )
        return [*self._said, *([] if changed == Changed() else [changed]), *self._issued.values()]


def _by_node(pairs: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, name in pairs:
        found.setdefault(name, []).append(number)
    return found


def _patch(before: dict[K, V | None], after: dict[K, V]) -> dict[K, V]:
    return {key: after[key] for key, value in before.items() if value != after[key]}
