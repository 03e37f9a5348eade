"""What befell a run, one incident each: what broke, when that was noticed, when training went on, and by what remedy.

A fold over the journal: `Incidents.take` is given each entry once. Faults that somebody injected say when they struck;
of all others only the first word about them is known. Ends that were asked for are no incidents. Where several faults
that can end an attempt struck the same one, its end is what came of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from packtrain.core.errors import EXIT_DONE, CarrierLost, StoppedOnRequest
from packtrain.core.journal import Entry
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    CoordinatorBegan,
    ErrorSeen,
    FaultInjected,
    FaultMissed,
    GuardVerdict,
    NodeBack,
    NodeLost,
    NodeSuspected,
    OrderGiven,
    RunFinished,
    SaveDone,
    StacksTaken,
    StepDone,
    TrainerStarted,
    WorldChosen,
)
from packtrain.core.units import NS, duration_text
from packtrain.monitor.drains import begun_from

CARRIER, COORDINATOR, STEP, DISK, LATER, WORLD = "carrier", "coordinator", "step", "disk", "later", "world"
PARTS = {
    "kill-carrier": CARRIER, "kill-coordinator": COORDINATOR, "nan": STEP, "disk-full": DISK, "disk-read-only": DISK,
    "disk-stall": DISK, "corrupt": LATER, "delete": LATER, "slow": LATER, "flap": LATER,
}
"""What a fault breaks; what is not here breaks an attempt. LATER: nothing by itself."""
FAULTS = {
    "kill": "a worker is killed", "stop": "a worker is frozen", "segfault": "a worker crashes",
    "hang": "a worker hangs", "slow": "a worker is slow", "oom": "a worker runs out of memory",
    "nan": "a step is not finite", "disk-full": "a carrier's disk is full",
    "disk-read-only": "a carrier's disk is read-only", "disk-stall": "a carrier's disk hangs",
    "corrupt": "a checkpoint is damaged", "delete": "a checkpoint is deleted", "cut": "a node is cut off",
    "flap": "a node's link flaps", "kill-agent": "a node is lost", "kill-carrier": "a carrier is killed",
    "kill-coordinator": "the coordinator is killed",
}
"""In words; others are told by their names."""
SIGNS = (StacksTaken, NodeLost, NodeBack, NodeSuspected)
"""Records that say that something is wrong, before an attempt has ended of it."""
LOSSES = ("kill-agent", "cut")
"""Faults that take a node away."""
TOLD_ENDS = ("stop", "drain")
"""Orders after which the end of an attempt is no accident."""
SHOWN = 40


@dataclass
class Incident:
    """One. A moment that is not known, or has not come, is None."""

    what: str
    part: str = WORLD
    struck: Entry | None = None
    found: Entry | None = None
    """The first word of it."""
    healed: Entry | None = None
    """Training went on, saves were published again, or another coordinator led."""
    during: int = 0
    """The attempt that ran when it was first told of."""
    attempt: int = 0
    """Which one ended of it; 0: none."""
    remedy: str = ""
    missed: bool = False
    """It was not done after all; `remedy` says why."""
    stopped: bool = False
    """The run was stopped before it was healed, as `remedy` says."""

    @property
    def is_open(self) -> bool:
        """Whether it may still be healed."""
        return self.healed is None and not self.missed and not self.stopped

    @property
    def found_s(self) -> float | None:
        """From the fault to the first word of it."""
        return _seconds(self.struck, self.found)

    @property
    def healed_s(self) -> float | None:
        """From the fault, or from the first word of it, to the end of the trouble."""
        return _seconds(self.struck or self.found, self.healed)


def _seconds(start: Entry | None, end: Entry | None) -> float | None:
    """None where one of them is missing or clocks of two boots would have to be compared."""
    if start is None or end is None or start.boot != end.boot:
        return None
    return max(0, end.ns - start.ns) / NS


class Incidents:
    """The fold. `all` is in the order in which they were first told of."""

    def __init__(self) -> None:
        self.all: list[Incident] = []
        self._attempt = 0
        self._told_to_end = False
        """The attempt that runs was asked to end."""
        self._led = False
        """A coordinator has led, and no run has ended since."""
        self._writers: dict[str, int] = {}
        """Journal of a trainer -> its attempt."""
        self._nodes: list[str] = []
        self._from = ""
        self._lost: dict[str, Entry] = {}
        """Nodes of the world that runs, told to be lost."""

    def take(self, entry: Entry) -> None:
        record = entry.record
        match record:
            case FaultInjected():
                self._open(Incident(told(record), PARTS.get(record.fault, WORLD), struck=entry))
            case FaultMissed():
                self._missed(record)
            case CoordinatorBegan():
                self._led_by(entry, record)
            case RunFinished():
                self._led = False
                self._finished(entry, record)
            case OrderGiven() if record.word in TOLD_ENDS:
                self._told_to_end = True
            case ErrorSeen() if record.name == CarrierLost.name and record.severity == "warning":
                self._find(entry, CARRIER, record.what)
            case GuardVerdict():
                self._judged(entry, record)
            case AttemptBegan() | WorldChosen():
                self._began(record)
            case AttemptEnded():
                self._ended(entry, record)
            case TrainerStarted():
                self._writers[entry.writer] = record.attempt
            case StepDone():
                self._stepped(entry)
            case SaveDone():
                self._saved(entry, record)
            case _ if isinstance(record, SIGNS):
                self._notice(entry)

    def _open(self, incident: Incident) -> Incident:
        incident.during = self._attempt
        self.all.append(incident)
        return incident

    def _missed(self, record: FaultMissed) -> None:
        """What it was meant for; it was noted before it was tried."""
        whom = (record.fault, record.node, record.rank)
        for one in self.all:
            if one.found is None and not one.missed and _whom(one) == whom:
                one.missed, one.remedy = True, f"it was not done: {record.why}"

    def _unhealed(self, part: str) -> list[Incident]:
        return [one for one in self.all if one.part == part and one.is_open]

    def _find(self, entry: Entry, part: str, what: str) -> list[Incident]:
        """The first word about those of a part that are open; where there are none, about a new one."""
        found = self._unhealed(part) or [self._open(Incident(what, part))]
        for one in found:
            one.found = one.found or entry
        return found

    def _notice(self, entry: Entry) -> None:
        """A sign that may come to nothing begins no incident."""
        if isinstance(entry.record, NodeLost) and entry.record.node in self._nodes:
            self._lost[entry.record.node] = entry
        for one in self._unhealed(WORLD):
            one.found = one.found or entry

    def _judged(self, entry: Entry, record: GuardVerdict) -> None:
        for one in self._unhealed(STEP):
            one.found = one.healed = entry
            one.remedy = f"step {record.step} was run again: {record.rerun}, {record.policy}"

    def _led_by(self, entry: Entry, record: CoordinatorBegan) -> None:
        if self._led:
            for one in self._find(entry, COORDINATOR, "the coordinator was lost"):
                one.healed, one.remedy = entry, f"another one leads, term {record.term}; no worker was touched"
        self._led = True

    def _began(self, record: AttemptBegan | WorldChosen) -> None:
        if isinstance(record, WorldChosen):
            self._nodes = record.nodes
            return
        self._attempt, self._told_to_end, self._nodes, self._lost = record.attempt, False, [], {}
        self._from = begun_from(record)

    def _ended(self, entry: Entry, record: AttemptEnded) -> None:
        if record.exit_code == EXIT_DONE:
            self._goes_on(entry, record.attempt)  # of a program that tells no steps its end is the first word
        if self._told_to_end or record.exit_code == EXIT_DONE:
            return
        open_ = [one for one in self._unhealed(WORLD) if one.during == record.attempt]
        for one in open_ or [self._open(Incident(record.reason))]:
            one.found = one.found or entry
            one.attempt = record.attempt

    def _finished(self, entry: Entry, record: RunFinished) -> None:
        """Where a person stopped the run, what was not healed by then never will be."""
        if record.error.get("name") != StoppedOnRequest.name:
            return
        for node, lost in self._lost.items() if not self._unhealed(WORLD) else ():
            self._open(Incident(f"node {node} was lost", found=lost))
        for one in self._unhealed(WORLD):
            if one.found is not None or not (self._lasts_ns(one) and self._is_over(one, entry)):
                one.stopped, one.remedy = True, self._stopped_before(one)

    def _stopped_before(self, one: Incident) -> str:
        if 0 < one.attempt < self._attempt:
            return f"{self._another(self._attempt)}; the run was stopped before a step of it was seen"
        return f"the run was stopped before {'the node was replaced' if self._is_loss(one) else 'it went on'}"

    def _is_loss(self, one: Incident) -> bool:
        fault = one.struck.record if one.struck is not None else None
        return fault.fault in LOSSES if isinstance(fault, FaultInjected) else bool(self._lost)

    def _stepped(self, entry: Entry) -> None:
        self._goes_on(entry, self._writers.get(entry.writer, self._attempt))

    def _goes_on(self, entry: Entry, attempt: int) -> None:
        for one in self._unhealed(WORLD):
            if 0 < one.attempt < attempt:
                one.healed = entry
                one.remedy = self._another(attempt)

    def _another(self, attempt: int) -> str:
        nodes = f" on {', '.join(self._nodes)}" if self._nodes else ""
        return f"attempt {attempt}{nodes}, {self._from}"

    def _saved(self, entry: Entry, record: SaveDone) -> None:
        for one in self._unhealed(DISK):
            one.found = one.found or (None if record.commit else entry)
            if record.commit and self._is_over(one, entry):
                one.healed, one.remedy = entry, f"step {record.step} was saved; no worker was touched"
        for one in self._unhealed(CARRIER) if record.commit else ():
            if one.found is not None and entry.ns > one.found.ns:
                one.healed, one.remedy = entry, f"another carrier: step {record.step} was saved; no worker was touched"

    def _is_over(self, one: Incident, entry: Entry) -> bool:
        """Whether what lasts so long is over."""
        return one.struck is not None and entry.ns > one.struck.ns + self._lasts_ns(one)

    def _lasts_ns(self, one: Incident) -> int:
        fault = one.struck.record if one.struck is not None else None
        return round(fault.seconds * NS) if isinstance(fault, FaultInjected) else 0


def _whom(one: Incident) -> tuple[str, str, int] | None:
    fault = one.struck.record if one.struck is not None else None
    return (fault.fault, fault.node, fault.rank) if isinstance(fault, FaultInjected) else None


def told(fault: FaultInjected) -> str:
    """As in `a worker is killed, rank 1 on n1`."""
    rank = f"rank {fault.rank}" if fault.rank >= 0 else ""
    where = " on ".join(part for part in (rank, fault.node) if part)
    lasts = f"for {fault.seconds:g} s" if fault.seconds else ""
    times = f"{fault.factor:.3g} times as long" if fault.factor else ""
    return ", ".join(part for part in (FAULTS.get(fault.fault, fault.fault), where, lasts, times) if part)


def fold(entries: Iterable[Entry]) -> list[Incident]:
    found = Incidents()
    for entry in entries:
        found.take(entry)
    return found.all


def lines(incidents: Sequence[Incident]) -> Iterator[str]:
    """For a report: the last ones, one or two lines each."""
    if not incidents:
        return
    yield "incidents: from the fault, where it is known, to the first word of it and to the end of the trouble"
    for one in incidents[-SHOWN:]:
        yield f"  {one.what}"
        yield f"    {', '.join(sentence(one))}"
    if len(incidents) > SHOWN:
        yield f"  and {len(incidents) - SHOWN} earlier"


def sentence(one: Incident) -> Iterator[str]:
    """What is known of its course, in order."""
    if one.found_s is not None:
        yield f"found after {duration_text(one.found_s)}"
    elif one.found is None and one.is_open:
        yield "nothing came of it"
    if one.healed_s is not None:
        yield f"healed after {duration_text(one.healed_s)}"
    elif one.found is not None and not one.stopped:
        yield "healed" if one.healed is not None else "not healed"
    if one.remedy:
        yield one.remedy
