"""Where the log of a coordinator goes on when its home cannot be written: in a second place, where one is configured.

    1. the state that the last durable batch led to is written into the other place, as a snapshot, durably;
    2. a new term is taken, and its record in the commit log names that place: link(2) decides, as for everything else;
    3. the coordinator begins again from there, as after a kill.

So there is one log at any moment, the one that the highest term names. Killed before 2, the old one goes on, and what
lies in the other counts for nothing: whoever moves there writes a newer snapshot first. Killed after 2, the other one
goes on. From the moment that 2 is tried nothing is appended to the old one, for a reply may be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from packtrain.checkpoint.commits import CommitLog
from packtrain.core.errors import LogMoved, PacktrainError, TermLost
from packtrain.core.platform import Platform
from packtrain.core.units import NS
from packtrain.supervise.decisions import Decisions
from packtrain.supervise.job import Job
from packtrain.supervise.state import State

DECISIONS = "decisions"
REFUSED_NS = 10 * NS
"""So long a log must have been refused before it goes elsewhere, and so long until that is tried again."""


class Lead(NamedTuple):
    """A term, and the place of the log that its record names."""

    place: str
    term: int


def places_of(job: Job, home: str) -> tuple[str, ...]:
    """The first is the coordinator's own."""
    return (f"{home}/{DECISIONS}", *([job.second_log] if job.second_log else []))


def place_of(log: CommitLog, places: Sequence[str]) -> str:
    """The one where the log goes on. Raises CommitUnknown."""
    last = log.last_term() if len(places) > 1 else None
    return last.place if last is not None and last.place in places else places[0]


class Moves:
    """Of one coordinator under one term, whose log is `decisions`, in `place`."""

    def __init__(
        self, platform: Platform, log: CommitLog, decisions: Decisions, places: Sequence[str], lead: Lead
    ) -> None:
        self._platform, self._log, self._decisions, self._lead = platform, log, decisions, lead
        self._others = [place for place in places if place != lead.place]
        self._since_ns = 0
        """Since when the log is refused; 0: it is not."""

    def look(self, ns: int, trouble: OSError | None, state: State) -> Lead | None:
        """Under which a coordinator is to begin again, once the log has moved. `state`: what it leads to.

        Raises TermLost where another coordinator leads.
        """
        if trouble is None or not self._others:
            self._since_ns = 0
            return None
        self._since_ns = self._since_ns or ns
        if ns - self._since_ns < REFUSED_NS:
            return None
        self._since_ns = ns
        return self._move(self._others[0], state)

    def _move(self, place: str, state: State) -> Lead | None:
        snapshot = Decisions(self._platform, place)
        try:
            snapshot.begin(state)
            self._decisions.shut()
            return Lead(place, self._log.take_term(self._platform.node(), place, after=self._lead.term).term)
        except TermLost:
            return self._taken_before(place)
        except (OSError, PacktrainError):
            return None  # tried again
        finally:
            snapshot.close()

    def _taken_before(self, place: str) -> Lead:
        """By a try whose reply was lost: nobody else knows this place. Raises TermLost."""
        last = self._log.last_term()
        if last is None or last.place != place or last.term != self._lead.term + 1:
            raise TermLost(
                "another coordinator leads this run", where=place, fix="nothing: this one stops",
            )
        return Lead(place, last.term)


def moved(lead: Lead) -> LogMoved:
    """As it is told."""
    return LogMoved(
        "the coordinator's log could not be written where it was, and goes on in another place", where=lead.place,
        fix="mend the disk of the old one; the run goes on meanwhile",
    )
