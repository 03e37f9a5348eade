"""What belongs to one attempt on one node: its workers, its carrier, what is known of each rank. Driven by agent.py."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import suppress

import msgspec

from packtrain.core import contract
from packtrain.core.breaking import NO_FAULT, fault_bytes
from packtrain.core.contract import NO_ORDER, Beat, Order, Ready, Restore, order_bytes, worker_env
from packtrain.core.errors import EXIT_AGAIN, SlotDamaged
from packtrain.core.journal import newest_records
from packtrain.core.platform import Platform, Process
from packtrain.core.records import ErrorSeen
from packtrain.core.units import NS
from packtrain.core.wire import json_object
from packtrain.supervise import programs, ranks, stacks
from packtrain.supervise.errands import Errands
from packtrain.supervise.job import Job
from packtrain.supervise.messages import (
    AgentEvent,
    EndWorkers,
    GiveOrder,
    Launch,
    Peers,
    RankEnded,
    RankReady,
    RunDone,
    Stacks,
    TakeStacks,
    Unkillable,
)
from packtrain.supervise.node_carrier import CANNOT_EXECUTE, Known, NodeCarrier
from packtrain.supervise.place import ANSWER_BYTES_MAX, Place
from packtrain.supervise.processes import MARK, Processes
from packtrain.supervise.quiet import QuietWatch
from packtrain.supervise.ranks import Rank
from packtrain.supervise.warm import Standbys

SETTLED_NS = 60 * NS
"""A program that says no step has begun by then."""
FETCH_S_MAX = 600.0
FETCH_PART = 0.5
"""Of `supervise.go_s`, for the slots in memory of a lost node to come from where they are held: the rest of it is the
workers', and nobody is blamed for being late where memory was."""
FROM_DISK = "nothing: the next attempt begins from disk"
UNKILLABLE_NS = 5 * NS
"""A killed process that is still there after so long hangs in the kernel."""
WHY_S = 1.0
"""How long the end of a worker may wait for its journal and log, on a disk that may hang."""
LOG_TAIL_BYTES = 8192
JOURNAL_TAIL_BYTES = 256 << 10


def child_env(job: Job, place: Place) -> dict[str, str]:
    """What every child gets: the job's, without what another packtrain may have put there, and the mark."""
    plain = {key: value for key, value in job.env.items() if not key.startswith("PACKTRAIN_")}
    return {**plain, MARK: place.mark, contract.NODE: place.node}


class Attempt:
    """From `Launch` until nothing of it is left. `tell`: takes what happens. `said`: what the kernel said when it
    killed the process with this number."""

    def __init__(
        self, job: Job, place: Place, launch: Launch, platform: Platform, processes: Processes, errands: Errands,
        standbys: Standbys, carriers: Known, tell: Callable[[AgentEvent], None], beats: str,
        said: Callable[[int], str],
    ) -> None:
        self.number = launch.attempt
        self.last_order = 0
        self.over = False
        """Nothing is left of it."""
        self._job, self._place, self._launch, self._beats = job, place, launch, beats
        self._platform, self._processes, self._errands, self._tell = platform, processes, errands, tell
        self._standbys, self._said = standbys, said
        self._logs = f"{job.run_folder}/logs/{launch.attempt:04d}"
        self._workers: dict[int, Process] = {}
        """Rank -> process, while it lives."""
        self._ranks: dict[int, Rank] = {}
        self._facts: dict[int, dict[str, str]] = {}
        """What ranks said they begin from."""
        self._started_ns = 0
        self._carrier = NodeCarrier(
            job, place, launch, child_env(job, place), f"{self._logs}/carrier-{place.node}.log", platform, processes,
            carriers, tell,
        )
        self._ending: tuple[int, Callable[[], None]] | None = None
        """(when the carrier is killed, what to call when it is gone)"""
        self._quiet = QuietWatch(
            platform, errands, job.supervise, self.number, self._log, processes.usage, tell
        ) if job.plain else None
        self._terminated = False
        """A program of anybody got SIGTERM."""
        self._killed: dict[int, tuple[str, int]] = {}
        """Pid -> (what it is, when it was killed)."""
        self._unkillable: set[int] = set()
        """Those that were told not to end."""
        self._slots_by_ns = 0
        """Until when the slots must be here that the workers wait for; 0: they wait for none."""
        self._fetching = False
        self._introduced: frozenset[str] = frozenset()
        """Nodes whose carriers this one's knows."""

    # --- the beginning ---

    def start(self, ns: int) -> str:
        """Carrier and workers; why not, where that fails (nothing is left then)."""
        try:
            self._platform.mkdir(self._logs)
            self._platform.write_replacing(self._place.control, order_bytes(NO_ORDER), durable=False)
            self._platform.write_replacing(self._place.peers, b"{}", durable=False)
            self._started_ns = ns
            self._carrier.start(ns)
        except OSError as error:
            return self._refused(ns, error)
        return self._begin_workers(ns)

    def add_workers(self, ns: int, launch: Launch) -> str:
        """The carrier went ahead alone: now the ranks come."""
        if self._launch.ranks or self._ending is not None:
            return f"attempt {self.number} has begun here already"
        self._launch = launch
        return self._begin_workers(ns)

    def _begin_workers(self, ns: int) -> str:
        """Workers whose slots in memory lie elsewhere start when these are here."""
        if not (self._launch.memory_from and self._launch.ranks):
            return self._start_workers(ns)
        self._slots_by_ns = ns + round(min(FETCH_S_MAX, FETCH_PART * self._job.supervise.go_s) * NS)
        return ""

    def _look_for_slots(self, ns: int) -> None:
        """They are fetched once the carriers of all that hold them are known."""
        if not self._slots_by_ns or self._fetching:
            return
        known = {*self._introduced, *([self._place.node] if self._carrier.listens else [])}
        holders = set(self._launch.memory_from.values())
        if ns >= self._slots_by_ns:
            unknown = ", ".join(sorted(holders - known))
            self._no_slots(f"no carrier was known in time of {unknown or self._place.node}")
        elif holders <= known and self._carrier.listens:
            self._fetch_slots(ns)

    def _fetch_slots(self, ns: int) -> None:
        """The carrier's own deadline comes first, so that it says what held it."""
        self._fetching = True
        left_s = (self._slots_by_ns - ns) / NS
        wanted = self._launch.memory_from
        request = json.dumps({"op": "fetch", "id": 1, "writers": wanted, "deadline_s": 0.9 * left_s})
        self._errands.start(ns, left_s, lambda: self._place.ask_carrier(self._platform, request), self._fetched)

    def _fetched(self, answer: str | Exception | None) -> None:
        if not self._slots_by_ns:
            return  # nobody waits for them any more
        outcome = json_object(answer.encode(), ANSWER_BYTES_MAX) if isinstance(answer, str) else None
        if outcome is None or outcome.get("ok") is not True:
            told = (outcome or {}).get("error")
            what = told.get("what") if isinstance(told, dict) else answer
            return self._no_slots(str(what or "its carrier did not answer in time"))
        self._slots_by_ns = 0
        error = self._start_workers(self._platform.boot_ns())
        for rank in self._launch.ranks if error else ():
            if rank not in self._workers:
                self._tell(RankEnded(attempt=self.number, rank=rank, status=CANNOT_EXECUTE, tail=error))

    def _no_slots(self, why: str) -> None:
        """As if each rank had found it itself: the next attempt begins from disk."""
        what = f"slots in memory cannot be brought to node {self._place.node}: {why}"
        error = SlotDamaged(what, where=f"node {self._place.node}", fix=FROM_DISK)
        self._forget_slots(EXIT_AGAIN, error.as_dict())

    def _forget_slots(self, status: int, error: dict[str, str] | None = None) -> None:
        """Workers that wait for them never start: that is their end."""
        if self._slots_by_ns:
            self._slots_by_ns = 0
            for rank in self._launch.ranks:
                self._tell(RankEnded(attempt=self.number, rank=rank, status=status, error=error or {}))

    def _start_workers(self, ns: int) -> str:
        try:
            for local, rank in enumerate(self._launch.ranks):
                if self._breakable:
                    self._platform.write_replacing(self._place.faults(rank), fault_bytes(NO_FAULT), durable=False)
                env = self._program_env(local, rank) if self._job.plain else self._worker_env(local, rank)
                warm = self._standbys.take(env, self._log(rank)) if self._launch.reuse_standby else None
                self._workers[rank] = warm or self._platform.spawn(
                    self._job.worker, env, cwd=self._job.cwd or None, log_path=self._log(rank)
                )
                self._ranks[rank] = Rank(self.number, rank, ns, speaks=not self._job.plain)
        except OSError as error:
            return self._refused(ns, error)
        return ""

    def _refused(self, ns: int, error: OSError) -> str:
        """What was started ends, and says so."""
        self.end(ns, 0.0, lambda: None)
        return f"an attempt cannot begin here: {error.strerror or error} ({error.filename or self._logs})"

    def _log(self, rank: int) -> str:
        return f"{self._logs}/{rank}.log"

    def _program_env(self, local: int, rank: int) -> dict[str, str]:
        """Of a program that knows nothing of us: who it is, in the words of other launchers."""
        env, place = programs.inherited(self._job.env), self._seat(local, rank)
        seat = programs.Seat(
            self._job.name, place.attempt, rank, place.world_size, local, place.local_world_size, place.master_addr,
            place.master_port,
        )
        return {**env, **worker_env(place), **programs.seat_env(seat, env), MARK: self._place.mark}

    def _worker_env(self, local: int, rank: int) -> dict[str, str]:
        return {**child_env(self._job, self._place), **worker_env(self._seat(local, rank))}

    @property
    def _breakable(self) -> bool:
        """Whether workers look at what they are to suffer on purpose."""
        return self._job.supervise.allow_faults and not self._job.plain

    def _seat(self, local: int, rank: int) -> contract.Place:
        launch, place = self._launch, self._place
        number, _, digest = launch.restore.partition(":")
        host, _, port = launch.master.rpartition(":")
        return contract.Place(
            run=self._job.run_folder, attempt=launch.attempt, fresh=not launch.restore,
            restore=Restore(int(number), digest) if launch.restore else None,
            carrier=place.carrier if self._job.carrier else "", socket=self._beats, control=place.control,
            faults=place.faults(rank) if self._breakable else "",
            grace_s=self._job.supervise.grace_s, go_s=0.0 if self._job.plain else self._job.supervise.go_s,
            node=place.node, failures=launch.failures, node_minutes=launch.node_minutes, spec=launch.spec, rank=rank,
            world_size=launch.world_size, local_rank=local,
            local_world_size=len(launch.ranks), master_addr=host, master_port=int(port or 0),
        )

    # --- what goes on ---

    @property
    def living(self) -> bool:
        """Whether a worker lives."""
        return bool(self._workers)

    def settled(self, ns: int) -> bool:
        """Whether nothing of it waits to begin or compiles, so that what comes next may use the processor."""
        stepped = all(one.step_s for rank, one in self._ranks.items() if rank in self._workers)
        return stepped or ns - self._started_ns > SETTLED_NS

    @property
    def pids(self) -> list[int]:
        """Of the children that this attempt polls."""
        return [*(worker.pid for worker in self._workers.values()), *self._carrier.pids]

    @property
    def progress(self) -> tuple[int, float]:
        """(step completed by all ranks of this node, median seconds of a step); -1 and 0 where nobody knows."""
        if not self._ranks:
            return -1, 0.0
        return min(one.step for one in self._ranks.values()), max(one.step_s for one in self._ranks.values())

    @property
    def phase(self) -> str:
        """Of its first rank, to be shown; empty: not known."""
        kind = self._ranks[min(self._ranks)].kind if self._ranks else ""
        return "step" if kind == ranks.STEPS else kind

    def heard(self, ns: int, beat: Beat) -> None:
        rank = self._ranks.get(beat.rank)
        if rank is not None:
            self._ranks[beat.rank], events = ranks.heard(rank, beat, ns)
            self._tell_all(events)

    def ready(self, said: Ready) -> None:
        """It waits for GO; said again and again, told once."""
        if said.rank in self._workers and self._facts.get(said.rank) != said.facts:
            self._facts[said.rank] = said.facts
            self._tell(RankReady(attempt=self.number, rank=said.rank, facts=said.facts))

    def look(self, ns: int, gap_ns: int) -> None:
        """Exits, silence, the carrier, the end. `gap_ns`: for so long nobody looked."""
        for rank, worker in list(self._workers.items()):
            status = worker.poll()
            if status is not None and not self._leaves_others(worker):
                self._ended(ns, rank, worker, status)
            elif status is None:
                self._ranks[rank], events = ranks.looked(self._ranks[rank], self._job.supervise, ns, gap_ns)
                self._tell_all(events)
        if self._quiet is not None:
            pids = {rank: worker.pid for rank, worker in self._workers.items()}
            self._quiet.look(ns, pids, [rank for rank in pids if self._ranks[rank].seq])
        self._carrier.look(ns, gap_ns)
        self._look_for_slots(ns)
        self._look_at_killed(ns)
        self._look_at_end(ns)

    def _look_at_killed(self, ns: int) -> None:
        """What not even SIGKILL ends is told once."""
        for pid in {*self._killed} & {*self.pids} - self._unkillable:
            what, since_ns = self._killed[pid]
            if ns - since_ns >= UNKILLABLE_NS:
                self._unkillable.add(pid)
                seconds = (ns - since_ns) / NS
                self._tell(Unkillable(attempt=self.number, what=what, pid=pid, seconds=seconds))

    def _leaves_others(self, worker: Process) -> bool:
        """A shell dies of SIGTERM before the program that it started has saved."""
        return self._terminated and self._processes.group_lives(worker)

    def _tell_all(self, events: list[AgentEvent]) -> None:
        for event in events:
            self._tell(event)

    def _ended(self, ns: int, rank: int, worker: Process, status: int) -> None:
        """It, and whatever it started and left behind, is gone; why is asked of a disk that may hang."""
        del self._workers[rank]
        self._processes.kill_group(worker)
        step, stepped_ns = self._ranks[rank].step, self._ranks[rank].stepped_ns

        def told(why: tuple[dict[str, str], str] | Exception | None) -> None:
            error, tail = why if isinstance(why, tuple) else ({}, "")
            said = self._said(worker.pid) if status == -signal.SIGKILL else ""
            tail = f"{tail}\n{said}" if said else tail
            since_s = (self._platform.boot_ns() - stepped_ns) / NS if stepped_ns else -1.0
            self._tell(RankEnded(
                attempt=self.number, rank=rank, status=status, step=step, since_step_s=since_s, error=error, tail=tail
            ))

        self._errands.start(ns, WHY_S, lambda: (self._last_error(rank), self._tail(rank)), told)

    def _last_error(self, rank: int) -> dict[str, str]:
        """The last error that a worker journalled in this attempt: name, what, where, fix."""
        with suppress(OSError):
            stem = f"trainer{rank}-{self._place.node}"
            folder = f"{self._job.run_folder}/journal"
            for ns, record in reversed(newest_records(self._platform, folder, stem, JOURNAL_TAIL_BYTES)):
                if isinstance(record, ErrorSeen) and record.severity == "error" and ns >= self._started_ns:
                    return {"name": record.name, "what": record.what, "where": record.where, "fix": record.fix}
        return {}

    def _tail(self, rank: int) -> str:
        with suppress(OSError):
            path = self._log(rank)
            start = max(0, self._platform.size(path) - LOG_TAIL_BYTES)
            return self._platform.read(path, start, LOG_TAIL_BYTES).decode(errors="replace")
        return ""

    # --- what is asked for ---

    def do(self, ns: int, action: EndWorkers | GiveOrder | TakeStacks | Peers | RunDone) -> str:
        """Why it could not be done; empty: it is done."""
        match action:
            case EndWorkers():
                self._kill_workers()
            case GiveOrder():
                return self._order(action)
            case TakeStacks():
                for rank, worker in self._workers.items():
                    self._take_stacks(ns, rank, worker.pid)
            case RunDone():
                self._carrier.run_done()
            case Peers():
                error = self._write(self._place.peers, msgspec.json.encode(action.addresses))
                self._introduced = frozenset() if error else frozenset(action.addresses)
                return error
        return ""

    def _order(self, action: GiveOrder) -> str:
        self.last_order = max(self.last_order, action.order)
        self._carrier.ordered(action)
        error = self._write(self._place.control, order_bytes(Order(action.order, action.word, action.a, action.b)))
        if action.word in (contract.Word.STOP, contract.Word.DRAIN):
            self._forget_slots(EXIT_AGAIN)  # there is nothing to save
            return self._terminate(error)
        return error

    def _terminate(self, error: str) -> str:
        """SIGTERM, where the word could not be given: every worker takes that for STOP. A program of anybody may know
        nothing else; a shell between would die of it alone and leave its child, so the whole group gets it."""
        for worker in self._workers.values():
            if self._job.plain:
                self._terminated = True
                self._processes.terminate_group(worker)
            elif error:
                worker.send_signal(signal.SIGTERM)
        return ""

    def _write(self, path: str, data: bytes) -> str:
        """A busy disk must not hold up the pulse: these files mean nothing after a power cut."""
        try:
            self._platform.write_replacing(path, data, durable=False)
        except OSError as error:
            return f"{path}: {error.strerror}"
        return ""

    def _take_stacks(self, ns: int, rank: int, pid: int) -> None:
        def told(taken: stacks.Taken | Exception | None) -> None:
            found = taken if isinstance(taken, stacks.Taken) else stacks.Taken(f"not within 2 s: {taken or ''}", "")
            self._tell(Stacks(attempt=self.number, rank=rank, how=found.how, text=found.text))

        scratch = f"{self._place.home}/stacks-{rank}"
        self._errands.start(
            ns, stacks.STACKS_S, lambda: stacks.take(self._platform, pid, self._log(rank), scratch), told
        )

    # --- broken on purpose ---

    def runs(self, rank: int) -> bool:
        return rank in self._workers

    def signal(self, rank: int, signum: signal.Signals) -> str:
        """To one worker alone. Why not; empty: it is done."""
        if rank not in self._workers:
            return f"rank {rank} does not run here"
        self._workers[rank].send_signal(signum)
        return ""

    def kill_carrier(self) -> str:
        """Why not; empty: it is done."""
        return self._carrier.strike()

    # --- the end ---

    def _kill_workers(self) -> None:
        """With all they started: their groups first, then what left those, known by its mark."""
        self._forget_slots(-signal.SIGKILL)
        for rank, worker in self._workers.items():
            self._killed.setdefault(worker.pid, (f"rank {rank}", self._platform.boot_ns()))
            self._processes.kill_group(worker)
        for one in self._processes.marked(self._place.run, self._place.node):
            if one.mark == self._place.mark and one.attempt == str(self.number):
                self._processes.kill(one.pid)

    def end(self, ns: int, carrier_s: float, then: Callable[[], None]) -> None:
        """The carrier may finish the saves it took; `then` is called when all is gone."""
        self._kill_workers()
        self._ending = (ns + round(carrier_s * NS), then)
        self._carrier.end()

    def _look_at_end(self, ns: int) -> None:
        if self._ending is None:
            return
        end_ns, then = self._ending
        if self._carrier.living and ns >= end_ns:
            for pid in self._carrier.pids:
                self._killed.setdefault(pid, ("the carrier", ns))
            self._carrier.kill()
        if not self._carrier.living and not self._workers:
            self._kill_workers()
            self.over = True
            then()

    def end_now(self) -> None:
        """Nothing stays behind, and nobody waits: what hangs in a dead file system goes when that comes back."""
        self._kill_workers()
        self._carrier.kill()
