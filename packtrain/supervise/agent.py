"""The agent of one node: starts and ends what the coordinator asks for, once; tells what changes; keeps on without it.

    python -P -m packtrain.supervise.agent --job FILE --node NAME --home FOLDER --coordinator FILE

In:   actions of the coordinator (messages.py), beats of the workers, exits.      Out: edges and a pulse, nothing else:
      beats stay here, no bulk passes through, and the run's disk is touched only by threads that may hang (errands.py).
      Exit codes: 0 told to leave, or nobody needs it any more; 75 the node goes away (SIGTERM); 78 unusable.

Its death is the death of all that it started (core/shim.py), so an agent that begins runs nothing; before it says Hello
it ends what another incarnation's children left behind, and waits until their device memory is free. A coordinator that
is gone changes nothing for the workers. Runs in the main thread: signals arrive there, and children die with the thread
that started them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from packtrain.checkpoint import slots
from packtrain.core.contract import NODE, Beat, Ready, Word
from packtrain.core.errors import EXIT_AGAIN, EXIT_DONE, PacktrainError, RunHeld
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.units import NS
from packtrain.supervise.attempt import Attempt, child_env
from packtrain.supervise.bell import Bell
from packtrain.supervise.breaking import Breaker
from packtrain.supervise.delivery import LOST_NS, AgentSide
from packtrain.supervise.device_memory import wait_until_free
from packtrain.supervise.errands import Errands
from packtrain.supervise.job import Job, read_job, run_id
from packtrain.supervise.kernel import KernelEar
from packtrain.supervise.keys import Address, make_keys, read_address
from packtrain.supervise.link import Caller
from packtrain.supervise.local import Keeper, Live, finish_in
from packtrain.supervise.messages import (
    AskCarrier,
    Break,
    Did,
    Do,
    EndAttempt,
    EndWorkers,
    FromAgent,
    FromCoordinator,
    GiveOrder,
    HardwareSeen,
    Hello,
    Launch,
    Leave,
    NodeLeaves,
    Peers,
    Pulse,
    RunDone,
    TakeStacks,
    TellHeld,
)
from packtrain.supervise.node_carrier import nothing_known
from packtrain.supervise.place import Place
from packtrain.supervise.processes import Processes, end_leftovers
from packtrain.supervise.ranks import unwatched_ns
from packtrain.supervise.requests import Requests, listening
from packtrain.supervise.revive import CoordinatorHere
from packtrain.supervise.sockets import BeatSocket, remove_socket
from packtrain.supervise.warm import Standbys

LOOK_S = 0.05
"""A look at everything comes at least this often; a message, a beat, the end of a child or of an errand wakes it
earlier."""
FIND_NS = NS
"""How often it is asked whether another coordinator listens; until the first one is found, at every look."""
ALONE_NS = 600 * NS
"""So long without a coordinator and without workers, and nobody needs this agent."""
LAST_WORDS_S = 3.0
"""How long an agent that was told SIGTERM, and has no workers, waits for the coordinator to say Leave."""
IDLE_NS = 30 * NS
"""So long without an attempt, and the next one is not about to begin."""
ASK_CARRIER_S = 300.0
HELD_S = 5.0
REPLACED_S = 5.0
"""How long an attempt waits for what was killed of an earlier one: that may hang inside a dead file system."""
DRAIN_ID = 1 << 20
"""Added to the id of the last order: above all that a coordinator gives."""


class Link(Protocol):
    """An agent's end of the link: `link.Caller`, or one of a test in virtual time."""

    def call(self, address: Address) -> None: ...

    def send(self, message: FromAgent) -> bool: ...

    def receive(self) -> list[FromCoordinator]: ...

    def wait(self, timeout_s: float, also: Iterable[Any] = ()) -> None: ...


class Ears(Protocol):
    """What hears beats: `BeatSocket`, or one of a test in virtual time."""

    path: str

    def arrived(self) -> list[Beat | Ready]: ...


class Agent:
    """One incarnation. `coordinator`: the file that says where it listens; `address`: instead of that. `here`: what
    starts a coordinator of this machine again; None: it lives elsewhere. `held`: said of its devices as it began.
    `bell`: wakes it; None: in virtual time.
    """

    def __init__(
        self, job: Job, place: Place, platform: Platform, link: Link, ears: Ears, processes: Processes,
        requests: Requests, coordinator: str, address: Address | None = None, here: CoordinatorHere | None = None,
        held: HardwareSeen | None = None, bell: Bell | None = None,
    ) -> None:
        self._job, self._place, self._platform = job, place, platform
        self._link, self._ears, self._processes, self._requests = link, ears, processes, requests
        self._coordinator, self._address, self._here = coordinator, address, here
        self._bell = bell
        self._errands = Errands(platform, bell.ring) if bell is not None else Errands(platform)
        self._breaker = Breaker(job, place, platform, processes, self._errands)
        self._standbys = Standbys(job, place.home, child_env(job, place), platform, processes)
        self._carriers = nothing_known(job, place, platform, processes)
        self.side = AgentSide(place.node, place.incarnation, _read_term(platform, place.home))
        self._term = self.side.term
        if held is not None:
            self.side.happened(platform.boot_ns(), held)
        self._kernel = KernelEar(platform, lambda event: self.side.happened(self._platform.boot_ns(), event))
        self._attempt: Attempt | None = None
        self._replaced: list[Attempt] = []
        """Killed for the sake of a later one, and not gone yet."""
        self._waiting: tuple[int, Launch, int] | None = None
        """(id, what, until when) of a launch that waits for those to be gone."""
        self._looked_ns = self._asked_ns = self._over_ns = 0
        self._busy_ns = platform.boot_ns()
        self._called: Address | None = None
        self._needed_ns = platform.boot_ns()
        """When there last was a coordinator or a worker."""
        self._leaving_ns = 0
        """When a node that goes away is given up; 0: it stays."""
        self.exit_code: int | None = None

    def run(self) -> int:
        """Until it is told to leave, or nobody needs it."""
        try:
            while self.exit_code is None:
                self.turn()
                if self.exit_code is None:
                    self._wait()
            return self.exit_code
        finally:
            self._end_all()

    def _wait(self) -> None:
        self._link.wait(LOOK_S, (self._ears,) if self._bell is None else (self._ears, self._bell))
        if self._bell is not None:
            self._bell.hush()

    def turn(self) -> None:
        """Look at everything once, and say what is to be said. Waits for nothing."""
        ns = self._platform.boot_ns()
        gap_ns = unwatched_ns(ns, self._looked_ns)
        self._looked_ns = ns
        self._find_coordinator(ns)
        for message in self._link.receive():
            do = None if self._breaker.cut(ns) else self.side.arrived(ns, message)
            if do is not None:
                self._obey(ns, do)
        self._hear(ns)
        self._errands.look(ns)
        self._kernel.look(ns)
        self._look_at_attempts(ns, gap_ns)
        self._standbys.look(ns, self._quiet(ns))
        ours = [pid for attempt in self._attempts for pid in attempt.pids]
        self._processes.bury_orphans([*ours, *self._standbys.pids, *self._carriers.pids])
        self._consider_leaving(ns)
        if self._here is not None and self.exit_code is None:
            self._here.look(ns, self.side.heard_ns)
        self._say(ns)

    @property
    def _attempts(self) -> list[Attempt]:
        return [*self._replaced, *([self._attempt] if self._attempt is not None else [])]

    def _look_at_attempts(self, ns: int, gap_ns: int) -> None:
        for attempt in self._attempts:
            attempt.look(ns, gap_ns)
        self._replaced = [attempt for attempt in self._replaced if not attempt.over]
        if self._attempt is not None and self._attempt.over:
            self._attempt = None
        if self._waiting is not None and (not self._replaced or ns >= self._waiting[2]):
            (id, launch, _), self._waiting = self._waiting, None
            self._start(ns, id, launch)

    def _quiet(self, ns: int) -> bool:
        """Whether nothing that is about to begin here would have to share the processor with a standby."""
        if self._attempts or self._waiting is not None or self._leaving_ns:
            self._busy_ns = ns
        settled = self._attempt is not None and not self._replaced and self._attempt.settled(ns)
        return not self._leaving_ns and (settled or ns - self._busy_ns >= IDLE_NS)

    def _find_coordinator(self, ns: int) -> None:
        """One that was silent for long is called again; one that took its place, at once."""
        lost = self.side.lost(ns)
        if lost:
            self.side.anew(ns)
        elif self._called is not None and ns - self._asked_ns < FIND_NS:
            return
        self._asked_ns = ns
        found = self._address or read_address(self._platform, self._coordinator)
        if found is None or (self._address is None and found.term < self.side.term):
            return
        if lost or found != self._called:
            self.side.anew(ns)
            self._called = found
            self._link.call(found)

    def _hear(self, ns: int) -> None:
        """Beats first: time nobody watched must not be held against what has just been heard."""
        for said in self._ears.arrived():
            if self._attempt is not None and said.attempt == self._attempt.number:
                self._attempt.heard(ns, said) if isinstance(said, Beat) else self._attempt.ready(said)

    def _say(self, ns: int) -> None:
        if self.side.term > self._term:
            self._term = self.side.term
            _write_term(self._platform, self._place.home, self._term)
        attempt = self._attempt
        number = attempt.number if attempt is not None else 0
        hello = Hello(
            node=self._place.node, agent=self._place.incarnation, boot_id=self._platform.boot_id(), term=self.side.term,
            attempt=number, version=self._job.version, procs=self._job.procs, host=self._place.host,
        )
        step, step_s = attempt.progress if attempt is not None else (-1, 0.0)
        pulse = Pulse(
            node=self._place.node, agent=self._place.incarnation, attempt=number, step=step, step_s=step_s,
            phase=attempt.phase if attempt is not None else "",
        )
        for message in self.side.due(ns, hello, pulse):
            if not self._breaker.cut(ns) and not self._link.send(message):
                self.side.unsent(message)

    # --- actions ---

    def _obey(self, ns: int, do: Do) -> None:
        """Begin it. What cannot be done is an answer, too."""
        action = do.action
        match action:
            case Launch():
                self._launch(ns, do.id, action)
            case EndAttempt() if self._runs(action.attempt):
                assert self._attempt is not None
                self._attempt.end(ns, action.carrier_s, lambda: self._did(do.id))
            case AskCarrier() if self._runs(action.attempt):
                self._ask_carrier(ns, do.id, action)
            case TellHeld():
                self._tell_held(ns, do.id)
            case Break():
                attempt = self._attempt if self._runs(action.attempt) else None
                self._breaker.begin(ns, do.id, action, attempt, lambda error: self._did(do.id, error=error))
            case Leave():
                self._did(do.id)
                self._leave(EXIT_DONE)
            case EndAttempt() | EndWorkers() if not self._runs(action.attempt):
                self._did(do.id)  # nothing of it is left here
            case EndWorkers() | GiveOrder() | TakeStacks() | Peers() | RunDone() if self._runs(action.attempt):
                assert self._attempt is not None
                self._did(do.id, error=self._attempt.do(ns, action))
            case _:
                self._did(do.id, error=f"attempt {action.attempt} does not run here")

    def _runs(self, attempt: int) -> bool:
        return self._attempt is not None and self._attempt.number == attempt

    def _did(self, id: int, error: str = "", data: str = "") -> None:
        self.side.did(self._platform.boot_ns(), Did(id=id, error=error, data=data))

    def _launch(self, ns: int, id: int, launch: Launch) -> None:
        """A later attempt ends what lives of an earlier one: its coordinator may not know of that."""
        now = self._attempt
        if self._leaving_ns:
            self._did(id, error="this node goes away")
        elif self._waiting is not None or (now is not None and launch.attempt < now.number):
            self._did(id, error="another attempt begins, or began, here")
        elif now is not None and launch.attempt == now.number:
            self._did(id, error=now.add_workers(ns, launch))
        else:
            if now is not None:
                now.end(ns, 0.0, lambda: None)
                self._replaced.append(now)
                self._attempt = None
            self._waiting = (id, launch, ns + round(REPLACED_S * NS))

    def _start(self, ns: int, id: int, launch: Launch) -> None:
        self._attempt = Attempt(
            self._job, self._place, launch, self._platform, self._processes, self._errands, self._standbys,
            self._carriers, lambda event: self.side.happened(self._platform.boot_ns(), event), self._ears.path,
            self._kernel.killed,
        )
        error = self._attempt.start(ns)
        self._did(id, error=error)

    def _ask_carrier(self, ns: int, id: int, action: AskCarrier) -> None:
        def told(answer: str | Exception | None) -> None:
            if isinstance(answer, str):
                self._did(id, data=answer)
            else:
                self._did(id, error=f"the carrier did not answer: {answer or f'not within {ASK_CARRIER_S:g} s'}")

        assert self._attempt is not None
        self._errands.start(ns, ASK_CARRIER_S, lambda: self._place.ask_carrier(self._platform, action.request), told)

    def _tell_held(self, ns: int, id: int) -> None:
        def told(found: list[slots.Held] | Exception | None) -> None:
            if isinstance(found, list):
                self._did(id, data=msgspec.json.encode(found).decode())
            else:
                self._did(id, error=f"what is in memory cannot be told: {found or f'not within {HELD_S:g} s'}")

        self._errands.start(ns, HELD_S, lambda: slots.held(self._platform, self._job.run_folder), told)

    # --- the end ---

    def _consider_leaving(self, ns: int) -> None:
        """A person or the machine asked, or nobody needs this agent any more."""
        for _ in self._requests.take():
            self._leave(EXIT_AGAIN) if self._leaving_ns else self._drain(ns)
        working = any(attempt.living for attempt in self._attempts)
        if working or self.side.joined:
            self._needed_ns = ns
        if self._leaving_ns and not working:
            self._leaving_ns = min(self._leaving_ns, ns + round(LAST_WORDS_S * NS))
        if self._leaving_ns and ns >= self._leaving_ns:
            self._leave(EXIT_AGAIN)
        elif ns - self._needed_ns >= ALONE_NS or self._is_over(ns):
            self._leave(EXIT_DONE)

    def _is_over(self, ns: int) -> bool:
        """Whether the run ended while its coordinator could not be heard, or somebody cleared its home away."""
        if ns - self._over_ns < FIND_NS:
            return False
        self._over_ns = ns
        with suppress(OSError):
            if not self._platform.exists(self._place.home):
                return True
        if not self._coordinator or not self.side.heard_ns or ns - self.side.heard_ns < LOST_NS:
            return False
        finish = finish_in(self._platform, os.path.dirname(self._coordinator))
        return finish is not None and finish.term >= self.side.term > 0

    def _drain(self, ns: int) -> None:
        """The node goes away: tell, and let the workers save and stop."""
        grace_s = self._job.supervise.grace_s
        self._leaving_ns = ns + round(grace_s * NS)
        self.side.happened(ns, NodeLeaves(grace_s=grace_s))
        if self._attempt is not None:
            last = self._attempt.last_order
            self._attempt.do(ns, GiveOrder(attempt=self._attempt.number, order=last + DRAIN_ID, word=Word.DRAIN))

    def _leave(self, exit_code: int) -> None:
        self._end_all()
        self._say(self._platform.boot_ns())
        self.exit_code = exit_code

    def _end_all(self) -> None:
        for attempt in self._attempts:
            attempt.end_now()
        self._attempt, self._replaced = None, []
        self._standbys.end()
        self._kernel.close()


def _read_term(platform: Platform, home: str) -> int:
    try:
        return int(platform.read(f"{home}/term", 0, 32))
    except (OSError, ValueError):
        return 0


def _write_term(platform: Platform, home: str, term: int) -> None:
    """A disk that refuses costs the memory of the next incarnation, not this one's."""
    try:
        platform.write_replacing(f"{home}/term", str(term).encode(), durable=False)
    except OSError as error:
        print(f"the term cannot be remembered: {error}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="packtrain.supervise.agent")
    parser.add_argument("--job", required=True, help="file of the run's job")
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--home", required=True, help="folder of this agent's own, 0700, with a short path")
    parser.add_argument("--host", default="127.0.0.1", help="where other nodes reach this one: name or address")
    parser.add_argument("--coordinator", default="", help="file in which coordinators say where they listen")
    parser.add_argument("--address", default="", help="instead of that: tcp://host:port")
    parser.add_argument("--server-key", default="", help="and the coordinator's public key")
    parser.add_argument("--local", action="store_true", help="a dead coordinator is of this machine: start it again")
    args = parser.parse_args(argv)
    if bool(args.coordinator) == bool(args.address and args.server_key):
        parser.error("say where the coordinator is: --coordinator, or --address with --server-key")
    env = dict(os.environ)  # of this machine, as a coordinator started from here is to have it
    os.environ[NODE] = args.node  # whoever asks the platform gets this name
    try:
        return _run(LocalPlatform(), args, env)
    except PacktrainError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code


def _run(platform: Platform, args: argparse.Namespace, env: Mapping[str, str]) -> int:
    job = read_job(platform, args.job)
    make_keys(platform, args.home)
    lock = platform.lock(f"{args.home}/agent", str(os.getpid()))
    if lock is None:
        raise RunHeld("an agent of this node runs", where=args.home, fix="wait for its end, or end it with SIGTERM")
    processes = Processes()
    processes.adopt_orphans()
    place = Place(args.node, args.home, args.host, platform.token(), run_id(job.run_folder))
    left = end_leftovers(platform, processes, place.run, place.node, place.incarnation)
    if left:
        print(f"killed, and not gone: processes {left}; a disk may hang", file=sys.stderr)
    held = wait_until_free(platform, processes, place, job, env)
    address = Address(address=args.address, server_key=args.server_key) if args.address else None
    here = _coordinator_here(platform, job, place, env) if args.local else None
    remove_socket(platform, place.beats)
    with listening() as requests:
        link, ears, bell = Caller(platform, args.home), BeatSocket(platform, place.beats), Bell()
        try:
            with bell.at_signals():
                return Agent(
                    job, place, platform, link, ears, processes, requests, args.coordinator, address, here, held, bell
                ).run()
        finally:
            bell.close()
            ears.close()
            link.close()
            lock.release()


def _coordinator_here(platform: Platform, job: Job, place: Place, env: Mapping[str, str]) -> CoordinatorHere:
    live = Live(job.run_folder, os.path.dirname(place.home), place.host, {})
    return CoordinatorHere(platform, Keeper(platform, live, env), place.node)


if __name__ == "__main__":
    sys.exit(main())
