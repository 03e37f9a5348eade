"""What each recovery of a run took, part by part: from the last step before an attempt's end to the next one after it.

    detection     the coordinator knows that the attempt is over
    stop          its workers and carriers are gone
    assignment    the workers of the next attempt are started: nodes, what they hold in memory, the record of `begin`
    init          all ranks are ready, and may begin: imports, devices, the world, data, what is restored was opened
    state         it is restored, or made anew, on every rank
    executable    the step is compiled, or loaded, and was tried
    first step    a step is completed

Each ends with a record (`AttemptReached`, `AttemptEnded`, `TrainerStarted`, `StepDone`) and begins where the one before
it ended, so the parts are the whole. Where a record is missing, what lies between its neighbours is "unexplained".
An attempt that completes no step ends its row with the last that it reached, and the next row begins there: the rows of
several attempts in vain add up to the time without steps.

In: a journal's entries in their order.      Out: rows. No file and no clock.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from packtrain.core.errors import EXIT_CONFIG, EXIT_DONE
from packtrain.core.journal import METRICS_NS, Entry
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    AttemptReached,
    OrderGiven,
    RunFinished,
    StepDone,
    TrainerStarted,
)
from packtrain.core.units import NS

PARTS = ("detection", "stop", "assignment", "init", "state", "executable", "first step")
UNEXPLAINED = "unexplained"
BEGINNING = ("began", "started", "go", "state", "executable")
"""What an attempt reaches before its first step, in order."""
SHOWN = 8


@dataclass(frozen=True)
class Recovery:
    """From attempt `attempt` to the one after it."""

    attempt: int
    next: int
    cause: str
    step: int
    """The last completed before it; -1: not known."""
    seconds: dict[str, float]
    """Part -> seconds; what is not there is not known, or did not come to pass."""
    stepped: bool
    """A step was completed; otherwise the row ends with the last that was reached before one."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass
class _Attempt:
    number: int
    points: dict[str, int] = field(default_factory=dict)
    """What was reached -> when, for all ranks together: the last of them."""
    step: int = -1
    written_ns: int | None = None
    """Its last step, as the journal has it."""
    heard_ns: int | None = None
    """The same, as an agent heard of it."""
    reason: str = ""
    exit_code: int = 0
    asked: bool = False
    finished: bool = False
    """The run was over with it."""

    def reached(self, point: str, ns: int) -> None:
        self.points[point] = max(ns, self.points.get(point, ns))

    def stepped(self, step: int, ns: int) -> None:
        self.points.setdefault("first", ns)
        self.step, self.written_ns = step, max(ns, self.written_ns or ns)

    @property
    def last_step_ns(self) -> int | None:
        """A killed worker takes the steps of its last second with it. Beyond that its journal is nearer than what was
        heard, which may have been long under way."""
        if self.heard_ns is None or self.written_ns is None:
            return self.written_ns or self.heard_ns
        return min(max(self.written_ns, self.heard_ns), self.written_ns + METRICS_NS)

    @property
    def last_reached_ns(self) -> int | None:
        return max((self.points[point] for point in BEGINNING if point in self.points), default=None)

    @property
    def goes_on(self) -> bool:
        """It ended, and another attempt is to heal that. By hand, and in older journals, a person starts the next."""
        if "ended" not in self.points or self.finished:
            return False
        return "noticed" in self.points or not (self.asked or self.exit_code in (EXIT_DONE, EXIT_CONFIG))


def recoveries(entries: Sequence[Entry]) -> list[Recovery]:
    """Those of a run, in their order."""
    attempts = _attempts(entries)
    blind = not any("first" in one.points or "go" in one.points for one in attempts)
    rows = [_row(one, after, blind) for one, after in itertools.pairwise(attempts) if one.goes_on]
    return [row for row in rows if row is not None]


def _row(one: _Attempt, after: _Attempt, blind: bool) -> Recovery | None:
    """`blind`: a program that tells no steps to anybody; its time is counted from when its end was known."""
    began_ns = one.last_step_ns
    if began_ns is None:
        began_ns = one.points.get("noticed") if blind else one.last_reached_ns
    end_ns = after.points.get("first", after.last_reached_ns)
    if began_ns is None or end_ns is None:
        return None
    begun = after.points
    if after.last_reached_ns == begun["began"] and "first" not in begun:
        begun = {"started": end_ns}  # its assignment is as far as it came
    points = [
        one.points.get("noticed"), one.points.get("ended"),
        *(begun.get(point) for point in ("started", "go", "state", "executable", "first")),
    ]
    return Recovery(
        attempt=one.number, next=after.number, cause=one.reason, step=one.step, stepped="first" in after.points,
        seconds=_parts(began_ns, max(began_ns, end_ns), points),
    )


def _parts(began_ns: int, end_ns: int, points: Sequence[int | None]) -> dict[str, float]:
    """Part -> seconds. Clocks of two machines may differ: what seems to be out of order took no time."""
    ns, known, at_ns = dict[str, int](), True, began_ns
    for part, point_ns in zip(PARTS, points, strict=True):
        if point_ns is None:
            known = False
            continue
        until_ns = min(max(point_ns, at_ns), end_ns)
        name = part if known else UNEXPLAINED
        ns[name] = ns.get(name, 0) + until_ns - at_ns
        known, at_ns = True, until_ns
    return {name: value / NS for name, value in ns.items()}


# --- from entries to attempts ------------------------------------------------------------------------


def _attempts(entries: Sequence[Entry]) -> list[_Attempt]:
    at, attempts, of_writer = _clock(entries), list[_Attempt](), dict[str, int]()
    for entry in entries:
        record = entry.record
        if isinstance(record, AttemptBegan):
            attempts.append(_Attempt(record.attempt, {"began": at(entry)}))
        elif attempts:
            number = getattr(record, "attempt", None)
            if number is not None:
                of_writer[entry.writer] = number
            found = _find(attempts, of_writer.get(entry.writer, attempts[-1].number) if number is None else number)
            _take(found or attempts[-1], record, at(entry))
    return attempts


def _find(attempts: list[_Attempt], number: int) -> _Attempt | None:
    return next((one for one in reversed(attempts) if one.number == number), None)


def _take(one: _Attempt, record: object, ns: int) -> None:
    match record:
        case AttemptReached(point="noticed"):
            one.reached("noticed", ns)
            if record.since_step_s >= 0:
                one.heard_ns = ns - round(record.since_step_s * NS)
        case AttemptReached():
            one.reached(record.point, ns)
        case TrainerStarted():
            one.reached("executable", ns)
        case StepDone():
            one.stepped(record.step, ns)
        case AttemptEnded():
            one.reached("ended", ns)
            one.reason, one.exit_code = record.reason, record.exit_code
        case OrderGiven(word="stop" | "drain"):
            one.asked = True
        case RunFinished():
            one.finished = True


def _clock(entries: Sequence[Entry]) -> Callable[[Entry], int]:
    """Entry -> nanoseconds of one clock: exact within a boot, by dates between the boots of several machines."""
    dated = dict[str, int]()
    for entry in entries:
        if entry.wall_s is not None:
            dated.setdefault(entry.boot, round(entry.wall_s * NS) - entry.ns)
    first = dated.get(entries[0].boot, 0) if entries else 0
    return lambda entry: entry.ns + dated.get(entry.boot, first) - first


# --- the table ---------------------------------------------------------------------------------------


def lines(rows: Sequence[Recovery]) -> Iterator[str]:
    """A row for each of the last recoveries, and the medians of all that led to a step."""
    if not rows:
        return
    columns = [part for part in (*PARTS, UNEXPLAINED) if any(part in row.seconds for row in rows)]
    yield "recoveries: seconds from the last step before an end to the next one"
    yield _line("attempts", [*columns, "together"], columns, "why")
    for row in rows[-SHOWN:]:
        told = [f"{row.seconds[part]:.2f}" if part in row.seconds else "-" for part in columns]
        cause = row.cause if row.stepped else f"{row.cause}; no step was seen after it"
        yield _line(f"{row.attempt} to {row.next}", [*told, f"{row.total_s:.2f}"], columns, cause)
    if len(rows) > SHOWN:
        yield f"  and {len(rows) - SHOWN} earlier"
    whole = [row for row in rows if row.stepped]
    if len(whole) > 1:
        medians = [f"{statistics.median(row.seconds.get(part, 0.0) for row in whole):.2f}" for part in columns]
        total = f"{statistics.median(row.total_s for row in whole):.2f}"
        yield _line("median", [*medians, total], columns, "")


def _line(first: str, cells: Sequence[str], columns: Sequence[str], last: str) -> str:
    widths = [max(len(column), 6) for column in (*columns, "together")]
    told = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return f"  {first:<10}{told}  {last}".rstrip()
