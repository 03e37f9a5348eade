"""Which nodes somebody drained, and what came of it. A fold over the journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from packtrain.core.journal import Entry
from packtrain.core.records import AttemptBegan, NodeDrained, RunFinished, WorldChosen
from packtrain.core.units import NS, duration_text

SHOWN = 8


@dataclass
class Drain:
    """One node, once."""

    node: str
    by: str
    when: str
    followed: str = ""
    """In words, as `when` is; empty: nothing yet."""

    def words(self) -> str:
        when = f", {self.when}" if self.when else ""
        return f"{self.node} ({self.by}){when}: {self.followed or 'nothing followed yet'}"


def begun_from(record: AttemptBegan) -> str:
    """As in `from step 40 on disk`."""
    where = "in memory" if "from memory" in record.note else "on disk"
    return f"from step {record.restore_step} {where}" if record.restore_step >= 0 else "from the beginning"


class Drains:
    """The fold. `all` is in the order in which they were said."""

    def __init__(self) -> None:
        self.all: list[Drain] = []
        self._began: Entry | None = None
        self._from = ""

    def take(self, entry: Entry) -> None:
        match entry.record:
            case AttemptBegan() as record:
                self._began = entry
                # What a program begins from is its own affair: its attempts restore nothing that is known here.
                self._from = f", {begun_from(record)}" if record.restore_step >= 0 else ""
            case NodeDrained() as record:
                followed = "" if record.in_world else "it had no ranks"
                self.all.append(Drain(record.node, record.by, self._when(entry), followed))
            case WorldChosen() as record:
                where = f"on {', '.join(record.nodes)}{self._from}"
                self._follow(f"attempt {record.attempt} runs {where}", record.nodes)
            case RunFinished() as record:
                self._follow(f"the run ended first ({record.reason})")

    def _when(self, said: Entry) -> str:
        """Empty where clocks of two boots would have to be compared."""
        began = self._began
        if began is None or began.boot != said.boot or not isinstance(began.record, AttemptBegan):
            return ""
        return f"{duration_text((said.ns - began.ns) / NS)} into attempt {began.record.attempt}"

    def _follow(self, words: str, nodes: Sequence[str] = ()) -> None:
        """A world that still has the node was chosen before that was drained."""
        for one in self.all:
            if not one.followed and one.node not in nodes:
                one.followed = words


def fold(entries: Iterable[Entry]) -> list[Drain]:
    found = Drains()
    for entry in entries:
        found.take(entry)
    return found.all


def lines(drains: Sequence[Drain]) -> Iterator[str]:
    """For a report: a line each, the last ones."""
    if not drains:
        return
    yield "nodes that were drained"
    for one in drains[-SHOWN:]:
        yield f"  {one.words()}"
    if len(drains) > SHOWN:
        yield f"  and {len(drains) - SHOWN} earlier"
