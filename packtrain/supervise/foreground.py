"""Agent and coordinator of a run on one node, in the foreground of a terminal, until agents of their own replace it.

Holds the run, reads its commit log, commits `begin`, starts the carrier and the worker as siblings that die with it,
hears beats, follows the journal, asks for retention, and turns Ctrl-C and SIGTERM into the word STOP. What to do is
decided in `one_node`; this file only carries it out. It knows nothing of JAX, of recipes or of what a worker does.

In:   a `Job`: what to start, how to keep it alive.       Out: journal records, a `Finish` with the exit code:
      0 done · 70 no progress · 75 stopped on request, or the world got in the way · 78 configuration, never restarted.
Fails: RunHeld, CommitsUnfit, CommitUnknown (then no attempt begins), whatever `Finish.error` names.

Runs in the main thread: signals arrive there, and children die when the thread that started them ends (prctl(2)).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from packtrain.checkpoint import slots
from packtrain.checkpoint.asked import wished
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.core.contract import NO_ORDER, Beat, Order, Place, Restore, Word, order_bytes, worker_env
from packtrain.core.errors import (
    EXIT_AGAIN,
    EXIT_DONE,
    OurError,
    PacktrainError,
    RunUnusable,
    error_named,
)
from packtrain.core.holder import hold
from packtrain.core.journal import Entry, Journal, Tail
from packtrain.core.platform import Platform, Process
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    CarrierGivenUp,
    ErrorSeen,
    HomeBack,
    OrderGiven,
    PhaseTotals,
    RetentionDone,
    RunCreated,
    SaveDone,
)
from packtrain.core.units import NS
from packtrain.monitor.fold import Facts, failures
from packtrain.supervise import one_carrier, one_node
from packtrain.supervise.beginning import further_back
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.mirrors import Waits
from packtrain.supervise.one_node import Finish
from packtrain.supervise.requests import Requests, listening
from packtrain.supervise.retain import Retainer
from packtrain.supervise.sockets import BeatSocket, private_folder, remove_socket
from packtrain.supervise.watch import CarrierWatch, kill_group

LOOK_S = 0.2
"""A look at everything comes at least this often; a beat wakes it earlier."""
CARRIER_STOP_S = 10.0
"""How long the carrier of an ended attempt may go on with a save it took."""
KILL_S = 5.0
"""How long a killed process is waited for: one that hangs inside a dead file system goes when that comes back."""
CANNOT_EXECUTE = 126
"""Exit status of what could not be started, as shells have it."""
RETAIN_S = 10.0
"""How long the end of an attempt may wait for retention; what is left is planned again next time."""
LOG_TAIL_BYTES = 8192
WRITER = "r00000"
"""The one writer of a run on one node: its rank 0."""


@dataclass(frozen=True)
class Job:
    """What to run and how to keep it alive. Paths are absolute."""

    name: str
    run_folder: str
    worker: tuple[str, ...]
    """Command of the worker; everything else reaches it through its environment."""
    carrier: tuple[str, ...]
    """Command of the carrier, to which `--run RUN --socket PATH --begin N --checkpoint JSON` is added."""
    version: str
    env: Mapping[str, str]
    supervise: SuperviseConfig = SuperviseConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    spec: int = 1


class View(Protocol):
    """Somebody who watches. Never asked for anything, so a view cannot change what happens."""

    def entries(self, entries: Sequence[Entry]) -> None:
        """Journal entries, each once, the past of the run first."""

    def beat(self, beat: Beat) -> None: ...

    def say(self, text: str) -> None:
        """One line about what was just done."""

    def tick(self, now_ns: int) -> None:
        """Called several times a second."""


class Shielded:
    """A view that may break without breaking the run: it is told of once, and then not used any more."""

    def __init__(self, view: View, tell: Callable[[PacktrainError], None]) -> None:
        self._view, self._tell, self._broken = view, tell, False

    def entries(self, entries: Sequence[Entry]) -> None:
        self._try(self._view.entries, entries)

    def beat(self, beat: Beat) -> None:
        self._try(self._view.beat, beat)

    def say(self, text: str) -> None:
        self._try(self._view.say, text)

    def tick(self, now_ns: int) -> None:
        self._try(self._view.tick, now_ns)

    def _try(self, call: Callable[[Any], None], argument: Any) -> None:
        if self._broken:
            return
        try:
            call(argument)
        except Exception as error:
            self._broken = True
            self._tell(OurError(
                f"the display broke: {type(error).__name__}: {error}", where="view", fix="the run goes on without it"
            ))


@dataclass
class Attempt:
    """What belongs to one attempt."""

    begin: Commit
    worker: Process
    carrier: Process | None
    log_path: str
    order: int = 0
    error: PacktrainError | None = None
    """The last error its worker journalled."""


def run(job: Job, platform: Platform, view: View) -> Finish:
    """Keep the run alive until it is done, stopped or cannot go on. Raises RunHeld and errors of the commit log."""
    with held(job, platform), private_folder(platform, job.run_folder, job.env) as folder, listening() as requests:
        foreground = Foreground(job, platform, view, folder, requests)
        try:
            return foreground.run()
        finally:
            foreground.close()


@contextmanager
def held(job: Job, platform: Platform) -> Iterator[None]:
    """The run's holder lock. The kernel drops it when this process ends, however it ends. Raises RunHeld."""
    try:
        lock = hold(platform, job.run_folder, job.name)
    except OSError as error:
        raise unusable("the run cannot be held", error, f"{job.run_folder}/holder") from error
    try:
        yield
    finally:
        lock.release()


def unusable(what: str, error: OSError, where: str) -> RunUnusable:
    return RunUnusable(
        f"{what}: {error.strerror}", where=str(error.filename or where),
        fix="see that the disk is there, writable and not full; then run the same command",
    )


def seems_held(platform: Platform, run_folder: str) -> bool:
    """Whether the process named in the holder file lives, for tables. Taking the lock to see would refuse a start."""
    try:
        note = platform.read_json(f"{run_folder}/holder")
        if note["node"] != platform.node():
            return False
        os.kill(int(note["pid"]), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return True


class Foreground:
    """The shell around `one_node.decide`: turns what the machine says into events, and actions into deeds."""

    def __init__(self, job: Job, platform: Platform, view: View, folder: str, requests: Requests) -> None:
        self._job, self._platform, self._requests = job, platform, requests
        self._view = Shielded(view, lambda error: self._tell("warning", error))
        self._log = CommitLog(platform, f"{job.run_folder}/commits")
        self._journal = Journal(platform, f"{job.run_folder}/journal", role="foreground")
        self._tail = Tail(platform, f"{job.run_folder}/journal")
        self._beats = BeatSocket(platform, f"{folder}/beats")
        self._carrier_path, self._control_path = f"{folder}/carrier", f"{folder}/control.json"
        self._retainer = Retainer(platform, job.run_folder, job.checkpoint, self._carrier_path)
        self._watch = CarrierWatch(platform, self._carrier_path)
        self._mirrors = self._waits()
        self._past = Facts()
        """What is known of attempts, nothing else: how often they failed."""
        self._state = one_node.State(config=job.supervise)
        self._attempt: Attempt | None = None
        self._finish: Finish | None = None

    def _waits(self) -> Waits:
        folder, config = self._job.run_folder, self._job.checkpoint
        return Waits(
            self._platform, folder, config, self._carrier_path, self._glance, self._view.say, self._warn
        )

    def run(self) -> Finish:
        try:
            self._open()
            while self._finish is None:
                self._look()
        except PacktrainError as error:
            self._tell("error", error)
            raise
        self._view.entries(self._arrived())
        return self._finish

    def _open(self) -> None:
        past = self._arrived()
        self._view.entries(past)
        for entry in past:
            self._remember(entry)
        self._log.probe()
        if self._log.head() == 0:
            self._journal.write(
                RunCreated(run=self._job.name, spec=self._job.spec, version=self._job.version), durable=True
            )
        point = self._log.restore_point()
        self._happened(one_node.Opened(best_step=point.step if point else 0))

    # --- what happened ---

    def _look(self) -> None:
        """The clock first: time nobody watched must not be added to what is about to be heard."""
        self._beats.wait(LOOK_S)
        self._happened(one_node.Tick(ns=self._platform.boot_ns()))
        self._hear()
        for name in self._requests.take():
            self._happened(one_node.Asked(ns=self._platform.boot_ns(), by=name))
        attempt = self._attempt
        if attempt is not None:
            self._look_at_processes(attempt)
        for event in self._watch.look():
            self._happened(event)
        self._retained(self._retainer.look())
        self._view.tick(self._platform.boot_ns())

    def _look_at_processes(self, attempt: Attempt) -> None:
        status = attempt.worker.poll()
        if status is not None:
            self._hear()  # what it said before it ended
            self._happened(one_node.WorkerEnded(
                ns=self._platform.boot_ns(), status=status, error=attempt.error, tail=self._end_of(attempt.log_path),
            ))
            return
        gone = attempt.carrier.poll() if attempt.carrier else None
        if gone is not None:
            attempt.carrier = None
            self._watch.drop()
            self._happened(one_carrier.Gone(ns=self._platform.boot_ns(), status=gone))

    def _glance(self) -> bool:
        """While something else is waited for: hear, show; whether a person asks to stop."""
        self._beats.wait(LOOK_S)
        self._hear()
        self._view.tick(self._platform.boot_ns())
        return self._requests.waiting

    def _hear(self) -> None:
        """Beats and journal entries that have arrived."""
        for beat in self._beats.drain():
            if self._attempt is not None and beat.attempt == self._attempt.begin.attempt:
                self._happened(one_node.Heard(self._platform.boot_ns(), beat.step, beat.phase))
                self._view.beat(beat)
        entries = self._arrived()
        self._view.entries(entries)
        for entry in entries:
            self._noted(entry)

    def _arrived(self) -> list[Entry]:
        """New journal entries; none while the folder cannot be listed: they come at a later look."""
        try:
            return self._tail.poll()
        except OSError:
            return []

    def _noted(self, entry: Entry) -> None:
        self._remember(entry)
        record = entry.record
        self._mirrors.noted(record)
        if isinstance(record, SaveDone) and record.commit:
            self._retainer.save_published()
        if isinstance(record, ErrorSeen) and entry.writer != self._journal.writer:
            self._worker_error(error_named(record.name, record.what, record.where, record.fix), record.severity)

    def _remember(self, entry: Entry) -> None:
        if isinstance(entry.record, AttemptBegan | AttemptEnded | OrderGiven | PhaseTotals):
            self._past.take(entry)

    def _worker_error(self, error: PacktrainError, severity: str) -> None:
        """A warning is shown at once; an error says why its attempt is about to end."""
        if severity == "warning":
            self._view.say(f"warning: {error.render()}")
        elif self._attempt is not None:
            self._attempt.error = error

    def _retained(self, done: Sequence[Mapping[str, Any]]) -> None:
        """Write down what the carrier did; what it refused is left for the next plan and not news."""
        for item in done:
            if item.get("error") is None:
                self._journal.write(RetentionDone(
                    action=item["action"], folder=item["folder"], reason=item.get("reason", ""),
                ))

    def _end_of(self, path: str) -> str:
        with suppress(OSError):
            start = max(0, self._platform.size(path) - LOG_TAIL_BYTES)
            return self._platform.read(path, start, LOG_TAIL_BYTES).decode(errors="replace")
        return ""

    # --- what to do about it ---

    def _happened(self, event: one_node.Event) -> None:
        self._state, actions = one_node.decide(self._state, event)
        for action in actions:
            self._do(action)

    def _do(self, action: one_node.Action) -> None:
        match action:
            case one_node.Begin():
                self._begin(action)
            case one_carrier.Start(_, quarantine):
                self._start_carrier(quarantine)
            case one_carrier.GiveUp(reason, quarantine):
                self._give_up_carrier(reason, quarantine)
            case one_carrier.TakenBack(path):
                self._journal.write(HomeBack(path=path))
                self._view.say(f"{path} answers again: saves may go there")
            case one_node.OrderStop(reason):
                self._order(Word.STOP, reason)
            case one_node.Kill(reason):
                self._kill(reason)
            case one_node.EndAttempt(exit_code, reason):
                self._end_attempt(exit_code, reason)
            case one_carrier.Warn(error):
                self._tell("warning", error)
                self._view.say(error.what)
            case one_node.Finish():
                self._finish = action

    def _begin(self, action: one_node.Begin) -> None:
        """Raises RunUnusable when the folder refuses what an attempt needs."""
        try:
            self._commit_and_start(action)
        except OSError as error:
            raise unusable("an attempt cannot begin", error, self._job.run_folder) from error

    def _commit_and_start(self, action: one_node.Begin) -> None:
        """In this order: from the commit on no earlier attempt can publish, whatever is still alive of it."""
        platform, job = self._platform, self._job
        parent = further_back(platform, job.run_folder, self._log, action.back) if action.back else self._asked_for()
        found = self._in_memory() if action.memory and not action.back and parent is None else slots.Found()
        begin = self._log.begin(parent, writers=(WRITER,), node=platform.node(), memory=found.memory)
        restored = self._log.restore_point()
        logs = f"{job.run_folder}/logs/{begin.attempt:04d}"
        platform.mkdir(logs)
        platform.write_replacing(self._control_path, order_bytes(NO_ORDER))
        self._journal.write(AttemptBegan(
            attempt=begin.attempt, commit=begin.number, parent=begin.parent,
            restore_step=begin.step, note=found.note,
        ), durable=True)
        if found.note:
            self._view.say(found.note)
        carrier = self._spawn_carrier(begin, self._state.carrier.quarantine)
        if restored is not None and begin.memory is None and self._mirrors.until_back(restored, carrier):
            self._leave_unbegun(begin, carrier)
            return
        worker = platform.spawn(job.worker, self._worker_env(begin, restored), log_path=f"{logs}/0.log")
        self._attempt = Attempt(begin, worker, carrier, f"{logs}/0.log")
        rolled_back_to = restored.step if parent is not None and restored is not None else None
        held = begin.memory[1] if begin.memory is not None else -1
        self._happened(one_node.Began(ns=platform.boot_ns(), step=rolled_back_to, held=held))

    def _leave_unbegun(self, begin: Commit, carrier: Process) -> None:
        """A person asked to stop before there was anything to begin from: the next look takes that request."""
        self._journal.write(OrderGiven(order=1, word=Word.STOP.name.lower(), reason="before a worker was started"))
        self._stop(carrier)
        self._journal.write(
            AttemptEnded(attempt=begin.attempt, exit_code=EXIT_AGAIN, reason="stopped on request"), durable=True
        )

    def _in_memory(self) -> slots.Found:
        """What the last attempt left there, if this run keeps anything there."""
        if not self._job.checkpoint.memory_every_steps:
            return slots.Found()
        return slots.look(self._platform, self._job.run_folder, self._log)

    def _asked_for(self) -> int | None:
        """Number of the save that a person asked the next attempt to begin from; None: nobody did."""
        asked = wished(self._platform, self._job.run_folder, self._log)
        return asked.number if asked is not None else None

    def _worker_env(self, begin: Commit, restored: Commit | None) -> dict[str, str]:
        restore = Restore(restored.number, restored.digest) if restored else None
        if begin.memory is not None:
            restore = Restore(begin.number, begin.memory[2])
        failed, ns = failures([one for one in self._past.attempts if one.attempt < begin.attempt])
        place = Place(
            run=self._job.run_folder, attempt=begin.attempt, fresh=restore is None, restore=restore,
            carrier=self._carrier_path, socket=self._beats.path, control=self._control_path,
            grace_s=self._job.supervise.grace_s, node=begin.node, failures=failed, node_minutes=round(ns / (60 * NS)),
        )
        return {**self._plain_env(), **worker_env(place)}

    def _plain_env(self) -> dict[str, str]:
        """The environment without what another packtrain may have put there."""
        return {key: value for key, value in self._job.env.items() if not key.startswith("PACKTRAIN_")}

    def _spawn_carrier(self, begin: Commit, quarantine: Sequence[str]) -> Process:
        """Nobody waits for it to listen: a worker offers later than that, and tries again where it does not."""
        remove_socket(self._platform, self._carrier_path)
        run_folder = self._job.run_folder
        config = msgspec.json.encode(self._job.checkpoint).decode()
        words = ("--run", run_folder, "--socket", self._carrier_path, "--begin", str(begin.number))
        keep_off = [word for path in quarantine for word in ("--quarantine", path)]
        return self._platform.spawn(
            (*self._job.carrier, *words, "--checkpoint", config, *keep_off),
            {**self._plain_env(), "PACKTRAIN_NODE": begin.node},
            log_path=f"{run_folder}/logs/{begin.attempt:04d}/carrier.log",
        )

    def _start_carrier(self, quarantine: Sequence[str]) -> None:
        """A carrier that cannot be started now is one that ended at once: the next try comes later and later."""
        assert self._attempt is not None
        try:
            self._attempt.carrier = self._spawn_carrier(self._attempt.begin, quarantine)
        except OSError:
            self._happened(one_carrier.Gone(ns=self._platform.boot_ns(), status=CANNOT_EXECUTE))

    def _give_up_carrier(self, reason: str, quarantine: Sequence[str]) -> None:
        """What was asked of it for retention is planned again; the worker sees by itself that another one listens."""
        assert self._attempt is not None and self._attempt.carrier is not None
        self._watch.give_up(self._attempt.carrier)
        self._attempt.carrier = None
        self._retainer.ask_again()
        self._journal.write(CarrierGivenUp(reason=reason, quarantine=list(quarantine)), durable=True)

    def _order(self, word: Word, reason: str) -> None:
        assert self._attempt is not None
        self._attempt.order += 1
        order = Order(self._attempt.order, word)
        try:
            self._platform.write_replacing(self._control_path, order_bytes(order))
        except OSError:
            self._attempt.worker.send_signal(signal.SIGTERM)  # which every worker takes for the word STOP
        self._journal.write(OrderGiven(order=order.id, word=word.name.lower(), reason=reason), durable=True)
        self._view.say(f"{reason}: saving, then stopping (once more kills)")

    def _kill(self, reason: str) -> None:
        assert self._attempt is not None
        self._view.say(f"killing the worker: {reason}")
        kill_group(self._attempt.worker)

    def _end_attempt(self, exit_code: int, reason: str) -> None:
        attempt = self._attempt
        assert attempt is not None
        kill_group(attempt.worker)  # whatever it started and left behind
        if exit_code == EXIT_DONE:
            self._mirrors.until_brought(attempt.carrier)
        if attempt.carrier is not None:
            self._retained(self._retainer.finish(RETAIN_S))
            self._stop(attempt.carrier)
        self._attempt = None
        self._watch.drop()
        self._journal.write(
            AttemptEnded(attempt=attempt.begin.attempt, exit_code=exit_code, reason=reason), durable=True
        )

    def _stop(self, process: Process) -> None:
        """SIGTERM, then SIGKILL; returns when it is gone, or does not go."""
        process.send_signal(signal.SIGTERM)
        if process.wait(CARRIER_STOP_S) is None:
            self._kill_and_wait(process)

    def _kill_and_wait(self, process: Process) -> None:
        kill_group(process)
        if process.wait(KILL_S) is None:
            self._say_undead(process)

    def _say_undead(self, process: Process) -> None:
        self._view.say(f"process {process.pid} was killed and has not ended in {KILL_S:g} s: a disk may hang")

    def _warn(self, error: PacktrainError) -> None:
        self._tell("warning", error)
        self._view.say(f"warning: {error.render()}")

    def _tell(self, severity: Literal["warning", "error"], error: PacktrainError) -> None:
        seen = ErrorSeen(severity=severity, name=error.name, what=error.what, where=error.where, fix=error.fix)
        self._journal.write(seen, durable=True)

    def close(self) -> None:
        """However we leave, nothing stays behind."""
        attempt = self._attempt
        if attempt is not None:
            for process in (attempt.worker, attempt.carrier):
                if process is not None:
                    self._kill_and_wait(process)
        for process in self._watch.left():
            self._say_undead(process)
        self._watch.drop()
        self._retainer.drop()
        self._beats.close()
        self._journal.close()

