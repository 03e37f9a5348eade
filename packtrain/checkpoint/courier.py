"""One errand of the carrier in a process of its own: bring a checkpoint to a mirror, or a lost one back from there.

    python -m packtrain.checkpoint.courier --run RUN --commit N --mirrors JSON [--back]

A process, because a dead file system or a client that hangs must cost the carrier nothing: it kills this one at the
deadline and goes on. It writes its own records: what it did, or what stood in the way, as a warning. It runs at a low
priority and gives way when steps suffer. Exit codes: 0 done, 75 try again later, 78 nothing to be done about it.
SIGTERM stops it at the next chunk; what has arrived stays, on whichever side.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from packtrain.checkpoint.bring_back import bring_back
from packtrain.checkpoint.commits import DIGITS, Commit, CommitLog
from packtrain.checkpoint.config import Mirror
from packtrain.checkpoint.copies import send
from packtrain.checkpoint.mirrors import State, holders, read_state, with_held, write_state
from packtrain.checkpoint.reader import COPIED, missing
from packtrain.checkpoint.yielding import Yielding
from packtrain.core.errors import (
    EXIT_AGAIN,
    EXIT_CONFIG,
    EXIT_DONE,
    CheckpointLost,
    CommitUnknown,
    MirrorFailed,
    NameAbsent,
    NotLocked,
    PacktrainError,
    PurgeRefused,
    TransferStopped,
)
from packtrain.core.journal import Journal
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.records import BroughtBack, ErrorSeen, MirrorDone, Record
from packtrain.core.stores import Store, open_store
from packtrain.core.transfer import Progress, Tally, TransferConfig
from packtrain.core.units import NS, bytes_text, duration_text

THREADS = 2
NICE = 10
LOST_FIX = "see what deletes there: a cleaner, a quota, a script; copies on another disk or in a bucket outlive that"
Tell = Callable[[Record], object]


@dataclass(frozen=True)
class Errand:
    """What both kinds have in common."""

    platform: Platform
    run_folder: str
    commit: Commit
    tell: Tell
    """Writes a record."""
    stop: threading.Event

    def config(self, mirror: Mirror) -> TransferConfig:
        return TransferConfig(
            threads=THREADS, copy_bytes_per_s_max=mirror.bytes_per_s_max or math.inf, deadline_s=mirror.deadline_s
        )

    def rate(self, mirror: Mirror) -> Yielding:
        return Yielding(self.platform, self.run_folder, mirror.bytes_per_s_max or math.inf)


# --- to a mirror ---------------------------------------------------------------------------------------


def bring(errand: Errand, mirror: Mirror) -> int:
    """Bring the checkpoint there, with what a run needs to go on from there alone; note it. The exit code."""
    platform, commit = errand.platform, errand.commit
    began_s, began_ns = platform.wall_s(), platform.boot_ns()
    try:
        done, days = _brought(errand, mirror, began_s)
    except TransferStopped as error:
        return error.exit_code
    except (PacktrainError, OSError) as error:
        return _not_brought(errand, mirror, error)
    errand.tell(MirrorDone(
        mirror=mirror.name, step=commit.step, commit=commit.number, bytes=done.bytes_checked,
        bytes_sent=done.bytes_sent, seconds=(platform.boot_ns() - began_ns) / NS, verified="r", locked_days=days,
    ))
    return EXIT_DONE


def _brought(errand: Errand, mirror: Mirror, began_s: float) -> tuple[Tally, int]:
    """What was copied, and the days of retention it got."""
    platform, run_folder, commit = errand.platform, errand.run_folder, errand.commit
    store = open_store(platform, mirror.store)
    done = send(
        platform, run_folder, commit, store, errand.config(mirror), rate=errand.rate(mirror), stop=errand.stop,
        progress=_Begins(errand, mirror),
    )
    state = read_state(platform, run_folder, mirror.name, mirror.place)
    locks = _may_lock(errand, mirror, store, state) if mirror.lock_days else state.locks
    if mirror.lock_days and locks:
        lock(errand, mirror, store, state.held[-1].commit if state.locks and state.held else 0)
    write_state(platform, run_folder, with_held(msgspec.structs.replace(state, locks=locks), commit, began_s))
    return done, mirror.lock_days if locks else 0


class _Begins:
    """Notes, once, that a part of the checkpoint has arrived: from then on the next try is for the same one."""

    def __init__(self, errand: Errand, mirror: Mirror) -> None:
        self._errand, self._mirror = errand, mirror
        self._noted = False

    def __call__(self, progress: Progress) -> None:
        if self._noted:
            return
        self._noted = True
        errand, mirror = self._errand, self._mirror
        state = read_state(errand.platform, errand.run_folder, mirror.name, mirror.place)
        if state.begun != errand.commit.number:
            begun = msgspec.structs.replace(state, begun=errand.commit.number)
            write_state(errand.platform, errand.run_folder, begun)


def _not_brought(errand: Errand, mirror: Mirror, error: PacktrainError | OSError) -> int:
    told = error if isinstance(error, PacktrainError) else MirrorFailed(str(error), where=errand.run_folder)
    commit = errand.commit
    told = _gone_here(errand) or told
    errand.tell(MirrorDone(mirror=mirror.name, step=commit.step, commit=commit.number, error=told.what))
    errand.tell(warning(mirror_failed(mirror.name, commit.step, told)))
    return told.exit_code


def _gone_here(errand: Errand) -> MirrorFailed | None:
    """Whatever stood in the way: what is not here any more cannot be mirrored, and that is no damage."""
    file = ""
    with suppress(PacktrainError, OSError):
        file = missing(errand.platform, errand.run_folder, errand.commit)
    return MirrorFailed(
        f"the checkpoint is gone here ({file})", where=f"{errand.run_folder}/checkpoints/{errand.commit.folder}",
        fix="what was deleted from outside comes back from a mirror that has it; the next save is mirrored",
    ) if file else None


def mirror_failed(mirror: str, step: int, error: PacktrainError) -> MirrorFailed:
    return MirrorFailed(
        f"step {step} is not on mirror {mirror}: {error.what}", where=error.where,
        fix=f"it is tried again, later and later, while the run goes on; {error.fix or 'see the log of the carrier'}",
    )


# --- locks ---------------------------------------------------------------------------------------------


def _may_lock(errand: Errand, mirror: Mirror, store: Store, state: State) -> bool:
    """Whether the place was seen to enforce locks, now or before; where it was not, that is said once."""
    from packtrain.core.probe import probe_lock

    if state.locks:
        return True
    answer = probe_lock(errand.platform, store)
    if not answer.holds and state.locks is None:
        errand.tell(warning(NotLocked(
            f"mirror {mirror.name} does not lock what is brought there: {answer.words}", where=mirror.place,
            fix="make a bucket with object lock, or set lock_days of this mirror to 0; copies go there unlocked",
        )))
    return bool(answer.holds)


def lock(errand: Errand, mirror: Mirror, store: Store, known: int) -> None:
    """Governance retention for the checkpoint's files, its record among the copies, the spec, and those records of the
    log that came after commit `known`."""
    from packtrain.core.probe import lock_until

    until_s = errand.platform.wall_s() + 86_400.0 * mirror.lock_days
    number = errand.commit.number
    names = [name for folder in (f"checkpoints/{errand.commit.folder}", "spec") for name, _ in store.list_all(folder)]
    names += [f"{COPIED}/{number:0{DIGITS}d}", *(f"commits/{n:0{DIGITS}d}" for n in range(known + 1, number + 1))]
    for name in names:
        lock_until(store, name, until_s)


# --- back from a mirror --------------------------------------------------------------------------------


def back(errand: Errand, mirrors: Sequence[Mirror]) -> int:
    """Bring the lost checkpoint back from the first mirror that has it whole. The exit code: 78 where none has it."""
    obstacles: list[tuple[str, PacktrainError]] = []
    for mirror in nearest(errand, mirrors):
        began_ns = errand.platform.boot_ns()
        try:
            store = open_store(errand.platform, mirror.store)
            done = bring_back(
                errand.platform, errand.run_folder, errand.commit, store, errand.config(mirror),
                rate=errand.rate(mirror), stop=errand.stop,
            )
        except PurgeRefused:
            return EXIT_DONE  # retention let go of it
        except TransferStopped as error:
            return error.exit_code
        except (PacktrainError, OSError) as error:
            told = error if isinstance(error, PacktrainError) else CheckpointLost(str(error), where=errand.run_folder)
            obstacles.append((mirror.name, told))
        else:
            _tell_back(errand, mirror, done, (errand.platform.boot_ns() - began_ns) / NS)
            return EXIT_DONE
    return _tell_lost(errand, obstacles)


def nearest(errand: Errand, mirrors: Sequence[Mirror]) -> list[Mirror]:
    """Those that are known to have it first; disks before buckets."""
    states = [read_state(errand.platform, errand.run_folder, mirror.name, mirror.place) for mirror in mirrors]
    having = holders(states).get(errand.commit.number, ())
    return sorted(mirrors, key=lambda mirror: (mirror.name not in having, not mirror.place.startswith(("/", "file:"))))


def _tell_back(errand: Errand, mirror: Mirror, done: Tally, seconds: float) -> None:
    commit = errand.commit
    errand.tell(BroughtBack(
        mirror=mirror.name, step=commit.step, commit=commit.number, folder=commit.folder, bytes=done.bytes_checked,
        seconds=seconds,
    ))
    errand.tell(warning(CheckpointLost(
        f"step {commit.step} was taken away from outside and is back, from mirror {mirror.name}: "
        f"{bytes_text(done.bytes_checked)} verified in {duration_text(seconds)}",
        where=f"{errand.run_folder}/checkpoints/{commit.folder}", fix=LOST_FIX,
    )))


def _tell_lost(errand: Errand, obstacles: Sequence[tuple[str, PacktrainError]]) -> int:
    again = any(error.exit_code == EXIT_AGAIN for _, error in obstacles)
    said = "; ".join(
        f"{name} {'has it not' if isinstance(error, NameAbsent) else error.what}" for name, error in obstacles
    )
    errand.tell(warning(lost(errand.run_folder, errand.commit, f"mirrors: {said}", again)))
    return EXIT_AGAIN if again else EXIT_CONFIG


def lost(run_folder: str, commit: Commit, why_not_back: str, again: bool) -> CheckpointLost:
    fix = "it is tried again" if again else "copy this folder from another copy of the run, if there is one"
    gone = "was taken away from outside"
    if commit.place:
        gone = f"is not in {commit.place} any more, where its save fell back to,"
        fix = f"see that the disk of {commit.place} is mounted; {fix}"
    return CheckpointLost(
        f"step {commit.step} {gone} and cannot be brought back{' yet' if again else ''} "
        f"({why_not_back})", where=f"{run_folder}/checkpoints/{commit.folder}", fix=f"{fix}; {LOST_FIX}",
    )


def warning(error: PacktrainError) -> ErrorSeen:
    return ErrorSeen(severity="warning", name=error.name, what=error.what, where=error.where, fix=error.fix)


# --- the process ---------------------------------------------------------------------------------------


def command(run_folder: str, commit: Commit, mirrors: Sequence[Mirror], is_back: bool) -> list[str]:
    """What `main` is started with."""
    return [
        sys.executable, "-P", "-m", "packtrain.checkpoint.courier", "--run", run_folder, "--commit", str(commit.number),
        "--mirrors", msgspec.json.encode(mirrors).decode(), *(["--back"] if is_back else []),
    ]


def run(platform: Platform, argv: Sequence[str], stop: threading.Event) -> int:
    """The errand that `argv` names. Its exit code."""
    parser = argparse.ArgumentParser(prog="packtrain.checkpoint.courier")
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--commit", required=True, type=int, help="number of the save's record")
    parser.add_argument("--mirrors", required=True, help="JSON of the mirrors")
    parser.add_argument("--back", action="store_true", help="from there, not to there")
    args = parser.parse_args(argv)
    mirrors = msgspec.json.decode(args.mirrors, type=tuple[Mirror, ...])
    commit = CommitLog(platform, f"{args.run}/commits").read(args.commit)
    if commit is None or commit.kind != "save":
        raise CommitUnknown(f"record {args.commit} is no save", where=args.run, fix="see whether the log is whole")
    journal = Journal(platform, f"{args.run}/journal", role="courier")
    try:
        errand = Errand(platform, args.run, commit, partial(journal.write, durable=True), stop)
        return back(errand, mirrors) if args.back else bring(errand, mirrors[0])
    finally:
        journal.close()


def main(argv: Sequence[str] | None = None) -> int:
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever watches; the agent decides what ends when
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
    os.nice(NICE)
    try:
        return run(LocalPlatform(), sys.argv[1:] if argv is None else argv, stop)
    except PacktrainError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
