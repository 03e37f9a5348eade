"""The coordinator of a run: `python -P -m packtrain.supervise.coordinator --job FILE --home FOLDER`.

Holds the run, leads it under a term, hears agents, asks them for what the policy decides, answers persons. What to do
is decided in policy.py, at the desk (desk.py); this file only carries it out. Killing it touches no worker: the next
one goes on from the log in its home.

In:   messages of agents, requests on `<home>/operator`, the run's journal.
Out:  actions for agents, records in the commit log and the journal, `<home>/address`, `<home>/finish` at the end.
      Exit codes: 0 done · 70 no progress · 75 stopped on request, or the world got in the way · 78 configuration.
Fails: RunHeld, RunMoved, TooFewFiles, CommitsUnfit, CommitUnknown, DecisionsDamaged, RunUnusable, TermLost, and what
       `finish` names.
"""

from __future__ import annotations

import argparse
import copy
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.judged import Judging
from packtrain.checkpoint.reader import survey
from packtrain.checkpoint.retention import plan
from packtrain.core.errors import EXIT_DONE, CommitUnknown, PacktrainError, RunHeld, RunUnusable, TermLost
from packtrain.core.holder import hold
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    CoordinatorBegan,
    ErrorSeen,
    FaultInjected,
    NodeSuspected,
    OrderGiven,
    PhaseTotals,
    Record,
    RetentionDone,
    RunCreated,
    RunFinished,
    SaveDone,
)
from packtrain.core.units import NS
from packtrain.core.wire import json_object
from packtrain.monitor.fold import Facts
from packtrain.supervise import faults, local
from packtrain.supervise.asked import refusal
from packtrain.supervise.beginning import Beginnings
from packtrain.supervise.console import FINISH
from packtrain.supervise.decisions import Decisions
from packtrain.supervise.desk import Desk
from packtrain.supervise.detect import WatchedClock
from packtrain.supervise.doubt import doubt_of
from packtrain.supervise.events import (
    Asked,
    Begin,
    Begun,
    BreakAsked,
    BringBack,
    CarrierWanted,
    Die,
    Done,
    Doubted,
    Finish,
    Opened,
    OwnAction,
    Published,
    Setup,
    WrapUp,
    Write,
)
from packtrain.supervise.hosts import BLAME, Blames, Hosts
from packtrain.supervise.job import Job, read_job
from packtrain.supervise.keys import Address, write_address
from packtrain.supervise.link import AT_ONCE_MAX, Arrived, Listener, Read
from packtrain.supervise.log_homes import Lead, Moves, place_of, places_of
from packtrain.supervise.log_homes import moved as log_moved
from packtrain.supervise.messages import FromCoordinator, Pulse
from packtrain.supervise.mirrors import shortfall
from packtrain.supervise.operator import Operator, refused
from packtrain.supervise.papers import Papers
from packtrain.supervise.revive import LIVE, AgentsHere
from packtrain.supervise.state import FINISHED, LEAVING
from packtrain.supervise.status import status
from packtrain.supervise.waits import Waits

LOOK_S = 0.1
"""A look at everything comes this often, and when a message says more than that a node lives."""
LEAD_NS = 2 * NS
"""How often it is asked whether another coordinator leads."""
WATCHED_NS = 10 * NS
"""Whoever watches the run asks each second, and puts away what it leaves; after so long without, nobody does."""
GATHER_S = 0.02
"""Pulses, and messages by the dozen, are gathered for so long and then taken at once: to wake up for each of 12,500 a
second would cost more than to hear it."""
MANY = 64
CROWD = 1000
"""Of so many nodes each look finds something that is news, and costs a glance at all of them: looks are spaced then."""
READS_MAX = 32
"""What has arrived is read to its end before anything is concluded, in so many pieces at most: nobody is silent whose
words lie unread, because this coordinator was held up."""
OPEN_S, FAULT_S, LAST_S = 30.0, 2.0, 10.0
"""How long the journal's disk is waited for: when all begins, before a fault that must be in it, and at the end."""
EVERYWHERE = ("0.0.0.0", "*")
"""Hosts that mean every address of a machine."""
ANSWER_BYTES_MAX = 1 << 20
T = TypeVar("T", Asked, BreakAsked)


class Link(Protocol):
    """The coordinator's end of the link: `link.Listener`, or one of a test."""

    address: Address

    def wait(self, timeout_s: float, also: Iterable[Any] = ()) -> None: ...

    def receive(self) -> Read: ...

    def send(self, peer: bytes, message: FromCoordinator) -> bool: ...

    def close(self) -> None: ...


class _BeginAgain(Exception):
    """The log has moved: another coordinator goes on from it, in this process."""

    def __init__(self, lead: Lead, words: list[Asked]) -> None:
        super().__init__(lead)
        self.lead, self.words = lead, words


class Coordinator:
    """One, from its term to its end. Raises what the module says under "Fails".

    `agents`: those of this machine, to be started again; None: they live elsewhere. `host`: how agents reach this
    machine, where that is not what `link` says. `by`: who started it, for the journal. `moved`: the term that was taken
    when the log went to another place.
    """

    def __init__(
        self, job: Job, platform: Platform, home: str, link: Link, agents: AgentsHere | None = None, host: str = "",
        by: str = "", moved: Lead | None = None,
    ) -> None:
        self._job, self._platform, self._home, self._link = job, platform, home, link
        self._log = CommitLog(platform, f"{job.run_folder}/commits")
        self._log.probe()
        places = places_of(job, home)
        place = moved.place if moved is not None else place_of(self._log, places)
        self._decisions = Decisions(platform, place)
        state = self._decisions.replay()
        self._lead = moved or Lead(place, self._log.take_term(platform.node(), place).term)
        self._term = self._lead.term
        self._moved = moved
        self._moves = Moves(platform, self._log, self._decisions, places, self._lead)
        self._clock = WatchedClock(state.ns, platform.boot_ns())
        self._desk = Desk(state, self._term, self._decisions, self._clock.ns)
        self._beginnings = Beginnings(platform, job, self._log, self._term)
        self._papers, self._hosts = Papers(platform, job.run_folder), Hosts(platform, job.run_folder)
        self._waits = Waits(platform, job, CommitLog(platform, f"{job.run_folder}/commits"), self._papers.do)
        self._blames = Blames(self._hosts, self._papers)
        self._judging = Judging(platform, job.run_folder, job.checkpoint)
        self._past = Facts()
        """What is known of attempts, nothing else: how often they failed."""
        self._published = -1
        self._plan_due = False
        self._peers: dict[str, bytes] = {}
        self._look_ns = self._lead_ns = 0
        """When the next look at everything is due; when it is next asked who leads."""
        self._watched_ns = platform.boot_ns() - (WATCHED_NS if by else 0)  # whoever gave the command may not ask yet
        self._agents, self._host, self._by = agents, host, by
        self._operator = Operator(platform, home, self.answer)
        self._finish: Finish | None = None

    def run(self) -> Finish:
        """Until the run is over. Raises TermLost where another coordinator leads."""
        self._open()
        while self._finish is None:
            self._link.wait(LOOK_S, self._operator.sockets())
            if self._look():
                self._platform.sleep(GATHER_S)
        self._say_goodbye(self._finish)
        return self._finish

    def _open(self) -> None:
        at = self._link.address
        reached = reached_at(at.address, self._host)
        write_address(self._platform, self._home, msgspec.structs.replace(at, address=reached, term=self._term))
        if self._log.last() is None:
            self._papers.write(RunCreated(run=self._job.name, spec=self._job.spec, version=self._job.version))
        nodes, spares, procs = self._job.nodes, self._job.spares, self._job.procs
        self._papers.write(CoordinatorBegan(
            term=self._term, log=self._lead.place, by=self._by, nodes=nodes, spares=spares, procs=procs
        ))
        if self._moved is not None:
            self._warn(log_moved(self._moved))
        self._papers.look()
        self._papers.flush(OPEN_S)
        self._remember(self._papers.past())
        point, last = self._log.restore_point(), self._log.last()
        self._desk.happened(Opened(
            ns=self._clock.ns, term=self._term, setup=setup_of(self._job), best_step=point.step if point else 0,
            attempt=last.attempt if last else 0, blames=self._hosts.blames(),
        ))

    # --- a look at everything ---

    def _look(self) -> bool:
        """Whether what comes next can be gathered for a moment. The clock first: time nobody watched must not be held
        against what is about to be heard."""
        ns = self._clock.look(self._platform.boot_ns())
        arrived = self._hear(ns)
        news = any(not isinstance(one.message, Pulse) for one in arrived)
        self._operator.look()
        if news or ns >= self._look_ns:
            self._look_ns = ns + round(LOOK_S * NS)
            self._look_at_all(ns)
        return len(arrived) >= MANY or len(self._peers) >= CROWD or (bool(arrived) and not news)

    def _hear(self, ns: int) -> list[Arrived]:
        heard = list[Arrived]()
        for _ in range(READS_MAX):
            arrived, taken = self._link.receive()
            for peer, node, message in arrived:
                self._peers[node] = peer
                self._desk.hear(ns, message)
            heard += arrived
            if taken < AT_ONCE_MAX:
                break
        return heard

    def _look_at_all(self, ns: int) -> None:
        self._follow_journal(ns)
        for id in self._waits.look(ns):
            self._desk.happened(Done(ns=ns, id=id))
        self._desk.look(ns, self._platform.wall_s())
        if self._desk.outdated:
            raise _outdated(self._term, "told by an agent")
        self._require_lead(ns)
        self._look_at_agents(ns)
        for issued in self._desk.own():
            assert issued.own is not None
            self._do(issued.id, issued.own)
        self._retained(self._desk.answers())
        for node, message in self._desk.due(ns):
            if node in self._peers:
                self._link.send(self._peers[node], message)
        lead = self._moves.look(ns, self._desk.trouble, self._desk.state)
        if lead is not None:
            raise _BeginAgain(lead, self._desk.words)

    def _require_lead(self, ns: int) -> None:
        """Agents that obey another coordinator do not speak to this one any more, so it looks for itself."""
        if ns < self._lead_ns:
            return
        self._lead_ns = ns + LEAD_NS
        self._papers.do("lead", CommitLog(self._platform, f"{self._job.run_folder}/commits").term, self._termed)
        with suppress(OSError):
            if self._platform.exists(self._home):
                return
            raise RunUnusable(
                "the coordinator's home was deleted: the run stops", where=self._home, fix="give the same command again"
            )

    def _termed(self, term: int | Exception) -> None:
        if isinstance(term, Exception) and not isinstance(term, CommitUnknown):
            raise term
        if isinstance(term, int) and term > self._term:
            raise _outdated(self._term, f"{self._job.run_folder}/commits")

    def _look_at_agents(self, ns: int) -> None:
        """A run that ends gets no new ones, nor a node that somebody drained."""
        run, nodes = self._desk.state.run, self._desk.state.nodes
        if self._agents is None:
            return
        if not run.stopping and run.stage not in (LEAVING, FINISHED):
            away = {name for name, node in nodes.items() if node.draining}
            for started in self._agents.look(ns, away):
                self._papers.write(started)
        self._agents.write(self._papers.do)

    @property
    def watched(self) -> bool:
        """Whether somebody stays with the run."""
        return self._platform.boot_ns() - self._watched_ns < WATCHED_NS

    def _follow_journal(self, ns: int) -> None:
        entries = self._papers.look()
        self._remember([*self._papers.past(), *entries])
        for entry in entries:
            self._waits.noted(entry.record)
            record: Any = entry.record
            if reason := doubt_of(record):
                self._desk.happened(Doubted(ns=ns, step=record.step, reason=reason, attempt=record.attempt))
            if isinstance(record, SaveDone) and record.commit:
                self._plan_due = True
                if record.step > self._published:
                    self._published = record.step
                    self._desk.happened(Published(ns=ns, step=record.step))
        if self._plan_due and self._papers.do("plan", self._plan, self._planned):
            self._plan_due = False

    def _remember(self, entries: Iterable[Any]) -> None:
        for entry in entries:
            if isinstance(entry.record, AttemptBegan | AttemptEnded | OrderGiven | PhaseTotals):
                self._past.take(entry)

    # --- retention ---

    def _plan(self) -> dict[str, Any]:
        """What the carrier that publishes is to be asked for; empty: nothing. Plans here, deletes nowhere."""
        folder, config = self._job.run_folder, self._job.checkpoint
        actions = plan(survey(self._platform, folder, self._judging.look), config)
        id = CommitLog(self._platform, f"{folder}/commits").head()
        return {"op": "retain", "id": id, "actions": actions, "grace_s": config.grace_s} if actions else {}

    def _planned(self, request: dict[str, Any] | Exception) -> None:
        if isinstance(request, OSError | PacktrainError):
            return  # the log or the folder cannot be read now; nothing is retired on a guess
        if isinstance(request, Exception):
            raise request
        if request:
            asked = msgspec.json.encode(request).decode()
            self._desk.happened(CarrierWanted(ns=self._clock.ns, request=asked))
            self._desk.settle()  # so that whoever waits for it sees that it was asked for

    def _retained(self, answers: Sequence[str]) -> None:
        """Write down what the carrier did; what it refused is left for the next plan and not news."""
        for answer in answers:
            told = json_object(answer.encode(), ANSWER_BYTES_MAX) or {}
            for item in told.get("done", []):
                if isinstance(item, dict) and item.get("error") is None:
                    self._papers.write(RetentionDone(
                        action=item["action"], folder=item["folder"], reason=item.get("reason", "")
                    ))

    # --- what the coordinator itself does ---

    def _do(self, id: int, own: OwnAction) -> None:
        match own:
            case Begin():
                self._begin(id, own)
            case BringBack():
                self._waits.until_back(id, self._clock.ns)
            case WrapUp():
                self._plan_due = self._plan_due or own.done  # the journal may be behind the last save
                read = self._papers.read_now()  # what its workers said last, while its nodes are known
                self._waits.until_wrapped(id, lambda: read() and self._retired(), own.done, self._clock.ns)
            case Write():
                self._write(own.record)
            case Die():
                self._papers.flush(FAULT_S)
                os.kill(os.getpid(), signal.SIGKILL)
            case Finish():
                self._finish = own

    def _write(self, record: Record) -> None:
        self._papers.write(record)
        if isinstance(record, FaultInjected):
            self._papers.flush(FAULT_S)
        if isinstance(record, NodeSuspected) and record.blamed and record.node in self._desk.state.nodes:
            self._blames.add(self._desk.state.nodes[record.node].host)

    def _retired(self) -> bool:
        """Whether what the last save made superfluous was asked for, and done."""
        return not (self._plan_due or self._papers.busy("plan") or self._desk.carrier_asked)

    def _begin(self, id: int, own: Begin) -> None:
        """Others may happen before it has begun: the policy hears of it as of anything else."""
        state, past = self._desk.state, copy.deepcopy(self._past)
        asked = self._papers.do("begin", lambda: self._beginnings.begin(id, own, state, past), self._begun)
        assert asked, "the policy asks for one attempt at a time"

    def _begun(self, result: tuple[Begun, Commit | None] | Exception) -> None:
        if isinstance(result, Exception):
            raise result
        begun, record = result
        if record is not None:
            self._papers.write(AttemptBegan(
                attempt=record.attempt, commit=record.number, parent=record.parent, restore_step=record.step,
                note=begun.note,
            ))
        self._desk.happened(msgspec.structs.replace(begun, ns=self._clock.ns))

    # --- persons ---

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """To a person's request over the socket `operator`."""
        if request.get("op") == "status":
            self._watched_ns = self._platform.boot_ns() if request.get("watching") else self._watched_ns
            elsewhere = self._lead.place if self._lead.place == self._job.second_log else ""
            return status(self._job, self._term, self._desk, self._waits.text, self._agents, elsewhere)
        if request.get("op") == "break":
            return self._break(request)
        word = _word(request, Asked, "asked", self._clock.ns)
        why = "this is no request" if word is None else refusal(self._desk.state, word)
        if word is None or why:
            return refused(why, self._job.name)
        return self._noted(word, {"ok": True})

    def _break(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        what = _word(request, BreakAsked, "break_asked", self._clock.ns)
        if what is None:
            return refused("this is no request", self._job.name)
        error = faults.refusal(self._desk.state, what)
        if error is not None:
            return {"ok": False, "error": error.as_dict()}
        return self._noted(what, {"ok": True, "said": faults.told(self._desk.state, what)})

    def _noted(self, event: Asked | BreakAsked, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        self._desk.happened(event)
        self._desk.settle()
        if self._desk.trouble is not None:
            return {"ok": True, "said": f"noted, and done as soon as the log can be written: {self._desk.trouble}"}
        return answer

    # --- the end ---

    def _say_goodbye(self, finish: Finish) -> None:
        if finish.exit_code == EXIT_DONE:
            folder, config = self._job.run_folder, self._job.checkpoint
            self._papers.do("shortfall", lambda: shortfall(self._platform, folder, config), self._short)
            self._papers.flush(LAST_S, "shortfall")
        self._papers.write(RunFinished(exit_code=finish.exit_code, reason=finish.reason, error=finish.error))
        self._papers.flush(LAST_S, BLAME, LIVE)
        write_finish(self._platform, self._home, finish, self._term)

    def _short(self, found: list[PacktrainError] | Exception) -> None:
        if isinstance(found, Exception):
            raise found
        for told in found:
            self._warn(told)

    def _warn(self, error: PacktrainError) -> None:
        self._papers.write(
            ErrorSeen(severity="warning", name=error.name, what=error.what, where=error.where, fix=error.fix)
        )

    def hear(self, words: Iterable[Asked]) -> None:
        """What persons said to the coordinator before this one, and nobody has written down."""
        for word in words:
            self._desk.happened(msgspec.structs.replace(word, ns=self._clock.ns))

    def close(self, leads: bool = True) -> None:
        """`leads`: otherwise another coordinator may have taken its place, in its home."""
        self._operator.close(leads)
        self._decisions.close()
        self._papers.close(LAST_S)


def setup_of(job: Job) -> Setup:
    sizes = sorted(int(size) for size in job.worlds if int(size) < job.nodes)
    return Setup(
        nodes=job.nodes, procs=job.procs, worlds=tuple(sizes), plain=job.plain, supervise=job.supervise,
        memory=bool(job.checkpoint.memory_every_steps) and not job.plain,
    )


def _word(request: Mapping[str, Any], kind: type[T], tag: str, ns: int) -> T | None:
    """What a request asks for; None where its fields are not of their kinds."""
    try:
        return msgspec.convert({"by": "operator", **request, "e": tag, "ns": ns}, kind)
    except msgspec.ValidationError:
        return None


def _outdated(term: int, where: str) -> TermLost:
    return TermLost(
        f"another coordinator leads this run, with a higher term than {term}", where=where,
        fix="nothing: this one stops",
    )


def reached_at(address: str, host: str) -> str:
    """tcp://host:port where agents reach what listens at `address`."""
    return f"tcp://{host}:{address.rpartition(':')[2]}" if host else address


def write_finish(platform: Platform, home: str, finish: Finish, term: int = 0) -> None:
    """For those who watch, and agents that could not be told. A disk that refuses has told them by then."""
    said = local.Finish(exit_code=finish.exit_code, reason=finish.reason, error=finish.error or None, term=term)
    with suppress(OSError):
        platform.write_replacing(f"{home}/{FINISH}", msgspec.json.encode(said) + b"\n")


def coordinate(job: Job, platform: Platform, home: str, given: argparse.Namespace) -> Finish:
    """Lead the run to its end. Raises what the module says under "Fails"."""
    lock = hold(platform, job.run_folder, job.name)
    try:
        agents = AgentsHere(platform, job.run_folder, home, os.environ) if given.local else None
        link = Listener(platform, home, given.listen, job.nodes + job.spares)
        try:
            finish, watched = lead(
                lambda moved: Coordinator(job, platform, home, link, agents, given.host, given.by, moved)
            )
        finally:
            link.close()
        live = agents.live if agents is not None else None
        if live is not None and not watched:
            local.clean(platform, live)  # under the lock: a new run may live in the same place
        return finish
    finally:
        lock.release()


def lead(begin: Callable[[Lead | None], Coordinator]) -> tuple[Finish, bool]:
    """How the run ended, and whether somebody stays with it. A log that moves is gone on with by another Coordinator.
    """
    moved, words = None, list[Asked]()
    while True:
        coordinator, leads = begin(moved), True
        coordinator.hear(words)
        try:
            return coordinator.run(), coordinator.watched
        except _BeginAgain as again:
            moved, words = again.lead, again.words
        except TermLost:
            leads = False
            raise
        finally:
            coordinator.close(leads)


def main(arguments: Sequence[str] | None = None, platform: Platform | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m packtrain.supervise.coordinator")
    parser.add_argument("--job", required=True, help="file with the job")
    parser.add_argument("--home", required=True, help="private folder of this coordinator, with its keys")
    parser.add_argument("--listen", default="tcp://127.0.0.1:0", help="where it listens; port 0: any that is free")
    parser.add_argument("--host", default="", help="how agents reach this machine, if not by the host of --listen")
    parser.add_argument("--local", action="store_true", help="agents are of this machine: start those that die again")
    parser.add_argument("--by", default="", help="who started it, for the journal")
    given, platform = parser.parse_args(arguments), platform or LocalPlatform()
    if not given.host and given.listen.removeprefix("tcp://").rpartition(":")[0] in EVERYWHERE:
        parser.error("--listen on every address: say by --host how agents reach this machine")
    try:
        return coordinate(read_job(platform, given.job), platform, given.home, given).exit_code
    except PacktrainError as error:
        print(error.render(), file=sys.stderr, flush=True)
        if not isinstance(error, RunHeld | TermLost):  # then the one that holds the run tells how it ended
            write_finish(platform, given.home, Finish(
                exit_code=error.exit_code, reason=error.what, error=error.as_dict()
            ))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
