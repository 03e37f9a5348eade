"""The carrier of one attempt on one node: started, asked how it stands, given up where it hangs, started again.

What to do about it is decided in one_carrier.py; here it is carried out for an agent, which tells its coordinator what
became of it and waits for nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from packtrain.core.contract import Word
from packtrain.core.platform import Platform, Process
from packtrain.supervise import one_carrier
from packtrain.supervise.job import Job
from packtrain.supervise.messages import AgentEvent, CarrierEnded, CarrierHomeBack, CarrierUp, GiveOrder, Launch
from packtrain.supervise.place import Place
from packtrain.supervise.processes import Processes
from packtrain.supervise.sockets import remove_socket
from packtrain.supervise.watch import CarrierWatch

CANNOT_EXECUTE = 126
"""Exit status of what could not be started, as shells have it."""
STOPPING = (Word.STOP, Word.DRAIN)
HURRY = signal.SIGUSR1
"""Tells a carrier that the run is done: what is due some time is due now."""


@dataclass
class Known:
    """What an agent knows of its carriers, from one attempt to the next: which homes they hung in, which of those that
    were given up have not ended."""

    watch: CarrierWatch
    state: one_carrier.State

    @property
    def pids(self) -> list[int]:
        """Of those that were given up and have not ended."""
        return [process.pid for process in self.watch.left()]


def nothing_known(job: Job, place: Place, platform: Platform, processes: Processes) -> Known:
    """Of an agent that begins."""
    watch = CarrierWatch(platform, place.carrier, processes.kill_group)
    return Known(watch, one_carrier.State(overdue_s=job.supervise.carrier_overdue_s))


class NodeCarrier:
    """None is started where the job has no command for it. `tell`: takes what happens."""

    def __init__(
        self, job: Job, place: Place, launch: Launch, env: Mapping[str, str], log: str, platform: Platform,
        processes: Processes, known: Known, tell: Callable[[AgentEvent], None],
    ) -> None:
        self._job, self._place, self._launch, self._env, self._log = job, place, launch, env, log
        self._platform, self._processes, self._tell = platform, processes, tell
        self._known, self._watch = known, known.watch
        self._process: Process | None = None
        self._address = ""
        self._stopping = False
        """The last save of the workers is waited for."""
        self._ending = False
        self._run_done = False
        """Each carrier is to be told so."""
        self._hurried: Process | None = None
        """The one that was."""

    @property
    def living(self) -> bool:
        return self._process is not None

    @property
    def listens(self) -> bool:
        """For carriers of other nodes, and so for this one's."""
        return bool(self._address) and self.living

    @property
    def pids(self) -> list[int]:
        """Of the one that runs."""
        return [self._process.pid] if self._process is not None else []

    def start(self, ns: int) -> None:
        """Nobody waits for it to listen: a worker offers later than that, and tries again where it does not. Raises
        OSError."""
        if self._job.carrier:
            self._spawn(self._known.state.quarantine)
            self._known.state = one_carrier.began(self._known.state, ns)

    def ordered(self, action: GiveOrder) -> None:
        """The workers are told a word."""
        self._stopping = self._stopping or action.word in STOPPING

    def look(self, ns: int, gap_ns: int) -> None:
        """What became of it, and what follows. `gap_ns`: for so long nobody looked."""
        if not self._job.carrier:
            return
        events: list[one_carrier.Event] = [] if self._ending else self._watch.look()
        status = self._process.poll() if self._process is not None else None
        if status is not None:
            self._process = None
            self._watch.drop()
            others = [event for event in events if not isinstance(event, one_carrier.Stands)]  # it stands no more
            events = [*others, one_carrier.Gone(ns=ns, status=status)]
        if self._ending:
            return
        for event in events:
            if isinstance(event, one_carrier.Gone):
                self._ended(one_carrier.status_text(event.status))
            self._known.state, actions = one_carrier.happened(self._known.state, event, self._stopping)
            self._do(ns, actions)
        self._known.state, actions = one_carrier.tick(self._known.state, ns, gap_ns)
        self._do(ns, actions)
        self._find_address()
        self._hurry()

    def run_done(self) -> None:
        """What it owes the mirrors is due now, and another one that comes in its place is told as well."""
        self._run_done = True
        self._hurry()

    def _hurry(self) -> None:
        """Once it listens: one that still starts would die of the signal."""
        if self._run_done and self._process is not None and self._process is not self._hurried:
            with suppress(OSError):
                if self._platform.exists(self._place.carrier):
                    self._process.send_signal(HURRY)
                    self._hurried = self._process

    def end(self) -> None:
        """It may finish the saves it took, and no other one comes."""
        self._ending = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def strike(self) -> str:
        """SIGKILL on purpose, and another one comes as ever. Why not; empty: it is done."""
        if self._process is None:
            return "no carrier runs here"
        self._processes.kill_group(self._process)
        return ""

    def kill(self) -> None:
        """What hangs in a dead file system goes when that comes back; nobody waits."""
        self._ending = True
        if self._process is not None:
            self._processes.kill_group(self._process)
        self._watch.drop()

    def _do(self, ns: int, actions: Sequence[one_carrier.Action]) -> None:
        for action in actions:
            match action:
                case one_carrier.Start(_, quarantine):
                    self._again(ns, quarantine)
                case one_carrier.GiveUp():
                    self._give_up(action)
                case one_carrier.TakenBack(path):
                    self._tell(CarrierHomeBack(attempt=self._launch.attempt, path=path))

    def _give_up(self, action: one_carrier.GiveUp) -> None:
        if self._process is not None:
            self._watch.give_up(self._process)
        self._process = None
        self._tell(CarrierEnded(
            attempt=self._launch.attempt, why=action.reason, given_up=True, quarantine=action.quarantine,
            error=action.error.as_dict(),
        ))

    def _again(self, ns: int, quarantine: Sequence[str]) -> None:
        """One that cannot be started now is one that ended at once: the next try comes later and later."""
        try:
            self._spawn(quarantine)
        except OSError as error:
            self._ended(f"it cannot be started: {error.strerror}")
            gone = one_carrier.Gone(ns=ns, status=CANNOT_EXECUTE)
            self._known.state, _ = one_carrier.happened(self._known.state, gone, self._stopping)

    def _ended(self, why: str) -> None:
        self._tell(CarrierEnded(attempt=self._launch.attempt, why=why))

    def _spawn(self, quarantine: Sequence[str]) -> None:
        place, run = self._place, self._job.run_folder
        remove_socket(self._platform, place.carrier)
        remove_socket(self._platform, place.carrier_address)
        self._address = ""
        config = msgspec.json.encode(self._job.checkpoint).decode()
        words = ["--run", run, "--socket", place.carrier, "--begin", str(self._launch.begin), "--checkpoint", config]
        words += [word for path in quarantine for word in ("--quarantine", path)]
        if self._job.supervise.allow_faults:
            words += ["--faults", place.disk_faults]
        if self._has_neighbours:
            words += ["--peers", place.peers, "--listen", place.host]
        self._process = self._platform.spawn((*self._job.carrier, *words), self._env, log_path=self._log)

    @property
    def _has_neighbours(self) -> bool:
        return self._job.nodes + self._job.spares > 1

    def _find_address(self) -> None:
        """Where it listens for others, once it does."""
        if self._address or self._process is None or not self._has_neighbours:
            return
        with suppress(OSError, ValueError, KeyError, TypeError):
            self._address = str(self._platform.read_json(self._place.carrier_address)["address"])
            self._tell(CarrierUp(attempt=self._launch.attempt, address=self._address))
