"""The carrier's care for copies: sends couriers to the mirrors when they are due, and for what was lost.

A thread of the carrier, because it touches the run's disk, and all it touches is its own: the loop that serves the
workers never waits for it. Each mirror has one courier at most (courier.py, a process); one that hangs is killed at its
deadline, and one that not even SIGKILL ends keeps its own mirror waiting and nobody else.

After each published save, and when an attempt begins, the checkpoints that retention keeps are looked for on the disk.
One that is not there, or lost a file, and that nobody marked, was taken away from outside: it is brought back.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.courier import command, lost, mirror_failed, warning
from packtrain.checkpoint.judged import Judging
from packtrain.checkpoint.mirrors import RETRY_S_MIN, State, due_in_s, others, read_state, retry_s
from packtrain.checkpoint.reader import missing, survey
from packtrain.checkpoint.retention import lineage_of, owed
from packtrain.core.errors import EXIT_AGAIN, EXIT_CONFIG, EXIT_DONE, MirrorFailed, OurError, PacktrainError
from packtrain.core.journal import Journal
from packtrain.core.platform import Platform, Process
from packtrain.core.records import MirrorDone, Record
from packtrain.core.units import NS

LOOK_S = 0.5
"""How often couriers under way are looked at."""
STOP_S = 2.0
HANG_S = 30.0
"""After its deadline a courier has this long to say what held it, before it is killed."""
BACK = "(back)"
"""Key of the courier that brings a lost checkpoint back; no mirror has such a name."""


@dataclass(eq=False)
class _Courier:
    process: Process
    commit: Commit
    end_ns: int
    killed: bool = False


@dataclass
class _Tries:
    """At one mirror, or for one lost checkpoint: after each failure the next one comes later."""

    failures: int = 0
    again_ns: int = 0
    """Not before."""
    hopeless: bool = False

    def put_off(self, now_ns: int) -> None:
        self.failures += 1
        self.again_ns = now_ns + int(retry_s(self.failures) * NS)

    def left_s(self, now_ns: int) -> float:
        return math.inf if self.hopeless else max(0.0, (self.again_ns - now_ns) / NS)


class Mirroring:
    """Of one attempt. Its carrier calls `start`, `published`, `hurry`, `busy` and `stop`; the rest is the thread's."""

    def __init__(self, platform: Platform, run_folder: str, attempt: int, config: CheckpointConfig) -> None:
        self._platform, self._run_folder, self._attempt, self._config = platform, run_folder, attempt, config
        self._mirrors = others(config.mirrors, run_folder)
        self._log = CommitLog(platform, f"{run_folder}/commits")
        self._judging = Judging(platform, run_folder, config)
        self._couriers: dict[str, _Courier] = {}
        self._saves, self._lost = dict[int, Commit](), dict[int, Commit]()
        self._tries: dict[str, _Tries] = {}
        self._point: Commit | None = None
        self._journal: Journal | None = None
        self._news = threading.Event()
        self._stopped = self._hurries = self._hurried = False
        self._unseen = False
        """The disk refused the last survey."""
        self._busy: frozenset[str] = frozenset()
        self._news.set()
        self._thread = threading.Thread(target=self._serve, name="mirroring", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def published(self) -> None:
        """There is a new checkpoint."""
        self._news.set()

    def hurry(self) -> None:
        """The run is done: its last checkpoint is due everywhere, whatever the cadence and what failed before."""
        self._hurries = True
        self._news.set()

    @property
    def busy(self) -> frozenset[str]:
        """Checkpoint folders that are being copied: no moment to delete them."""
        return self._busy

    def stop(self) -> None:
        """Couriers end now; what has arrived is gone on with by the next ones. A thread that hangs is left behind."""
        self._stopped = True
        self._news.set()
        self._thread.join(STOP_S)

    def _serve(self) -> None:
        wait_s = 0.0
        while not self._stopped:
            self._news.wait(None if math.isinf(wait_s) else wait_s)
            if not self._stopped:
                wait_s = self.look()
        for courier in self._couriers.values():
            courier.process.send_signal(signal.SIGKILL)
            courier.process.wait(STOP_S)

    # --- one look ---

    def look(self) -> float:
        """Do what is due now. Seconds until something may be due again without news; inf: nothing will be.

        A fault of ours is told and costs this look, not those after it.
        """
        try:
            return self._look()
        except Exception as error:
            what = f"mirrors were not seen to: {type(error).__name__}: {error}"
            self._tell(warning(OurError(what, where="carrier", fix="please report this; it goes on")))
            return RETRY_S_MIN

    def _look(self) -> float:
        for name, courier in list(self._couriers.items()):
            self._tend(name, courier)
        if self._news.is_set() or self._unseen:
            self._news.clear()
            self._survey()
            if self._hurries and not self._hurried:
                self._hurried = True
                self._tries.clear()
        again_s = RETRY_S_MIN if self._unseen else math.inf
        waits = [again_s, self._start_back(), *(self._start(mirror) for mirror in self._mirrors)]
        self._busy = frozenset(courier.commit.folder for courier in self._couriers.values())
        return min(waits) if not self._couriers else min(LOOK_S, *waits)

    def _survey(self) -> None:
        """What comes last, what it follows from, and what is lost. What was known stands while the disk refuses, and it
        is asked again soon: no save may come any more that would be news."""
        self._unseen = True
        with suppress(PacktrainError, OSError):
            self._point = self._log.restore_point()
            found = survey(self._platform, self._run_folder, self._judging.look)
            self._saves = {commit.number: commit for commit in lineage_of(found.commits) if commit.kind == "save"}
            gone = [commit for commit in owed(found, self._config) if self._is_gone(commit)]
            for number in self._lost.keys() - {commit.number for commit in gone}:
                self._tries.pop(_back_key(number), None)
            self._lost = {commit.number: commit for commit in gone}
            self._unseen = False

    def _is_gone(self, commit: Commit) -> bool:
        """False where its disk refuses to say: nobody knows then."""
        with suppress(PacktrainError, OSError):
            return bool(missing(self._platform, self._run_folder, commit))
        return False

    # --- to the mirrors ---

    def _start(self, mirror: Mirror) -> float:
        """Send a courier to the mirror if one is due. Seconds until one will be."""
        commit = self._point
        if commit is None or commit.number in self._lost or mirror.name in self._couriers:
            return math.inf
        state = read_state(self._platform, self._run_folder, mirror.name, mirror.place)
        due_s = due_in_s(mirror, state, commit, self._platform.wall_s())
        left_s = max(
            0.0 if self._hurries and not math.isinf(due_s) else due_s,
            self._of(mirror.name).left_s(self._platform.boot_ns()),
        )
        if left_s > 0:
            return left_s
        self._send(mirror.name, self._begun(state) or commit, [mirror], mirror.deadline_s)
        return LOOK_S

    def _begun(self, state: State) -> Commit | None:
        """What the mirror has a part of goes on, while it is here: a mirror slower than the saves would else never have
        one whole. A run that is done has only one left to bring."""
        commit = None if self._hurries else self._saves.get(state.begun)
        return commit if commit is not None and not self._is_gone(commit) else None

    # --- what was lost ---

    def _start_back(self) -> float:
        """Send for the latest checkpoint that is lost. Seconds until it may be tried."""
        if BACK in self._couriers:
            return math.inf
        mirrors, now_ns = self._mirrors, self._platform.boot_ns()
        waits = {number: self._of(_back_key(number)).left_s(now_ns) for number in self._lost}
        due = next((number for number in sorted(waits, reverse=True) if waits[number] == 0), None)
        if due is None:
            return min(waits.values(), default=math.inf)
        if mirrors:
            self._send(BACK, self._lost[due], mirrors, sum(mirror.deadline_s for mirror in mirrors))
        else:
            self._of(_back_key(due)).hopeless = True
            self._tell(warning(lost(self._run_folder, self._lost[due], "there is no mirror", again=False)))
        return LOOK_S

    # --- couriers ---

    def _send(self, name: str, commit: Commit, mirrors: Sequence[Mirror], deadline_s: float) -> None:
        """Where no process can be started now, it is tried again later."""
        logs = f"{self._run_folder}/logs/{self._attempt:04d}"
        argv = command(self._run_folder, commit, mirrors, name == BACK)
        try:
            self._platform.mkdir(logs)
            process = self._platform.spawn(argv, os.environ, log_path=f"{logs}/courier.log")
        except OSError:
            self._put_off(name, commit)
            return
        end_ns = self._platform.boot_ns() + int((deadline_s + HANG_S) * NS)
        self._couriers[name] = _Courier(process, commit, end_ns)

    def _tend(self, name: str, courier: _Courier) -> None:
        status = courier.process.poll()
        if status is not None:
            del self._couriers[name]
            if not courier.killed:
                self._ended(name, courier, status)
        elif self._platform.boot_ns() >= courier.end_ns and not courier.killed:
            courier.killed = True
            courier.process.send_signal(signal.SIGKILL)
            self._not_done(name, courier, f"no end {HANG_S:g} s after its deadline, so it was killed")

    def _ended(self, name: str, courier: _Courier, status: int) -> None:
        """With 75 and 78 it said itself why."""
        key = _key(name, courier.commit)
        if status == EXIT_DONE and name != BACK:
            self._tries.pop(key, None)
        elif status == EXIT_CONFIG and name == BACK:
            self._of(key).hopeless = True
        elif status in (EXIT_DONE, EXIT_AGAIN, EXIT_CONFIG):  # of what is back the next survey knows
            self._put_off(name, courier.commit)
        else:
            self._not_done(name, courier, f"its courier ended with {status}")
        if status == EXIT_DONE:
            self._news.set()

    def _not_done(self, name: str, courier: _Courier, why: str) -> None:
        """It could not say so itself."""
        commit = courier.commit
        if name == BACK:
            self._tell(warning(lost(self._run_folder, commit, why, again=True)))
        else:
            self._tell(MirrorDone(mirror=name, step=commit.step, commit=commit.number, error=why))
            error = MirrorFailed(why, where=f"{self._run_folder}/logs", fix="see courier.log there")
            self._tell(warning(mirror_failed(name, commit.step, error)))
        self._put_off(name, commit)

    def _put_off(self, name: str, commit: Commit) -> None:
        """But of a run that is done the last checkpoint is tried at once, whatever happened to one before it."""
        if not (self._hurries and name != BACK and commit != self._point):
            self._of(_key(name, commit)).put_off(self._platform.boot_ns())

    def _of(self, key: str) -> _Tries:
        return self._tries.setdefault(key, _Tries())

    def _tell(self, record: Record) -> None:
        """The journal is opened when there is something to say."""
        if self._journal is None:
            self._journal = Journal(self._platform, f"{self._run_folder}/journal", role="carrier")
        self._journal.write(record, durable=True)


def _key(name: str, commit: Commit) -> str:
    return _back_key(commit.number) if name == BACK else name


def _back_key(number: int) -> str:
    return f"{BACK} {number}"
