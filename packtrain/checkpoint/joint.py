"""Saves of several nodes, as the carrier that publishes sees them: who has offered what, and who has written what.

Each carrier reports what its own workers offered it, again and again until it hears how the save ended; each report
gets an order. Nobody says which writers live where: whoever reports an offer has it. When every writer that `begin`
names has been offered by somebody, here or elsewhere, the publishing carrier makes a folder for a try and orders the
others to write their parts into it; each writes files that must not exist, and reports what the manifest says of them.
A try in which somebody failed is over for all: the next one is a new folder, and everybody writes again.

    report  {"op":"part","attempt":3,"begin":NONCE,"node":"n1","boot":ID,"began_ns":..,"round":TOKEN,"step":1200,
             "left_s":250.0,"writers":["r00002","r00003"],"trial":"","entries":[],"obstacle":"","final":false}
             body: the offers themselves as JSON, when they were asked for (order `tell`)
    order   {"do":"tell"}  {"do":"wait","again_s":0.1,"publishing":false}
            {"do":"write","trial":TOKEN,"rank":0,"folder":"step-...","writers":[...],"left_s":240.0}
            {"do":"over","commit":{...}}  {"do":"over","error":{...}}

Reports bear to be repeated, lost and late: each says all there is to say. What keeps a late one harmless is that files
of parts are created and never opened again, and that what is written counts only if it comes from whoever the part was
last asked of, for the try that goes on. Tries have tokens: a folder may bear the name of one that was taken away.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import msgspec

from packtrain.checkpoint.clients import Offer
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import DEADLINE_S_MAX
from packtrain.checkpoint.format import PartEntry
from packtrain.core.units import NS

AGAIN_S_MIN, AGAIN_S_MAX = 0.05, 2.0
AGAIN_S_EACH = 0.001
"""Between reports, for each writer of the run: what asks more often would keep the one who answers busy."""
OVER_MAX = 8
"""Saves whose end is remembered for those that have not heard it."""
OFFERS_BYTES_MAX = 64 << 20
_SHA256 = re.compile("[0-9a-f]{64}")


class Source(NamedTuple):
    """One carrier's save of one step: a carrier that was restarted is another one, and so is a second save of it."""

    boot: str
    began_ns: int
    """When that carrier began, boot time of its node."""
    round: str


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="part"):
    """What a carrier says of a step: what it was offered, and how it went in the try that it was last told of."""

    attempt: int
    begin: str
    node: str
    boot: str
    began_ns: int
    round: str
    step: int
    left_s: float
    writers: tuple[str, ...]
    trial: str = ""
    entries: tuple[PartEntry, ...] = ()
    obstacle: str = ""
    final: bool = False
    """The obstacle would stop any other try, too."""

    @property
    def source(self) -> Source:
        return Source(self.boot, self.began_ns, self.round)

    def makes_sense(self, named: Collection[str]) -> bool:
        """Whether it can be about a save of these writers."""
        times = 0 <= self.step < 1 << 48 and self.left_s <= DEADLINE_S_MAX
        return times and bool(self.writers) and set(self.writers) <= set(named)


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a carrier is told in return."""

    do: Literal["tell", "wait", "write", "over"]
    again_s: float = AGAIN_S_MIN
    publishing: bool = False
    """Too late to give it up: what the log says counts."""
    trial: str = ""
    rank: int = 0
    """Which of its homes: 0 is the run folder."""
    folder: str = ""
    writers: tuple[str, ...] = ()
    left_s: float = 0.0
    commit: Commit | None = None
    error: dict[str, str] | None = None


class Trial(NamedTuple):
    """A try that is under way."""

    token: str
    rank: int
    folder: str
    end_ns: int


@dataclass(frozen=True)
class Joint:
    """What carriers of other nodes have said of one save."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    """Writer -> who was offered its part."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    rounds: frozenset[str] = frozenset()
    """Everybody who is to hear how it ends."""
    trial: Trial | None = None
    entries: Mapping[str, PartEntry] = field(default_factory=dict)
    """Of the try under way."""
    obstacle: str = ""
    final: bool = False


def offered(joint: Joint, report: Report, offers: Collection[Offer]) -> Joint:
    """Carrier and part of each writer that is not another, newer carrier's by now."""
    taken = {
        offer.writer: offer for offer in offers
        if offer.writer in report.writers and _supersedes(report.source, joint.sources.get(offer.writer))
    }
    return replace(
        joint,
        sources={**joint.sources, **dict.fromkeys(taken, report.source)},
        nodes={**joint.nodes, **dict.fromkeys(taken, report.node)},
        sizes={**joint.sizes, **{writer: offer.bytes for writer, offer in taken.items()}},
        rounds=joint.rounds | {report.round},
    )


def _supersedes(new: Source, old: Source | None) -> bool:
    """A carrier that began earlier in the same boot of its machine has been replaced, whatever it still says."""
    return old is None or new.boot != old.boot or new.began_ns >= old.began_ns


def begun(joint: Joint, trial: Trial) -> Joint:
    """A new try: nothing of it is written."""
    return replace(joint, trial=trial, entries={}, obstacle="", final=False)


def heard(joint: Joint, report: Report) -> Joint:
    """How it went, where the report is about the try under way and by those it was asked of."""
    if joint.trial is None or report.trial != joint.trial.token:
        return joint
    own = [writer for writer in report.writers if joint.sources.get(writer) == report.source]
    if report.obstacle and any(writer not in joint.entries for writer in own) and not joint.obstacle:
        return replace(joint, obstacle=f"{report.node}: {report.obstacle}", final=report.final)
    good = {
        entry.writer: entry for entry in report.entries
        if entry.writer in own and _is_sane(entry, joint.sizes[entry.writer])
    }
    return replace(joint, entries={**good, **joint.entries})


def _is_sane(entry: PartEntry, size: int) -> bool:
    sums = _SHA256.fullmatch(entry.sha256) and _SHA256.fullmatch(entry.table_sha256)
    return entry.bytes == size and entry.table_bytes > 0 and bool(sums)


def missing(joint: Joint) -> list[str]:
    """Writers elsewhere whose parts the try under way does not have yet."""
    return sorted(set(joint.sources) - set(joint.entries))


def order(joint: Joint, report: Report, now_ns: int, again_s: float) -> Order:
    """What a carrier is to do about a save that goes on."""
    if any(_asks(joint, report, writer) for writer in report.writers):
        return Order(do="tell")
    own = [writer for writer in missing(joint) if joint.sources[writer] == report.source]
    trial = joint.trial
    if trial is None or not own or joint.obstacle:
        return Order(do="wait", again_s=again_s)
    token, rank, folder, end_ns = trial
    left_s = (end_ns - now_ns) / NS
    return Order(do="write", trial=token, rank=rank, folder=folder, writers=tuple(own), left_s=left_s)


def _asks(joint: Joint, report: Report, writer: str) -> bool:
    """Whether it is not known yet what this carrier was offered by that writer."""
    known = joint.sources.get(writer)
    return known != report.source and _supersedes(report.source, known)


def again_s(writers: int) -> float:
    """How long a carrier waits between reports in a run of so many writers."""
    return min(AGAIN_S_MAX, max(AGAIN_S_MIN, AGAIN_S_EACH * writers))
