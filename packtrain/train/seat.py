"""Where a worker sits: under a supervisor, which said all in the environment, or by hand, holding the run itself.

By hand a worker does what an agent would: it takes the run's lock, commits its own `begin`, and starts its carrier as a
child that dies with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from packtrain.checkpoint.asked import next_restored, wished
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.slots import Found, look
from packtrain.core import contract
from packtrain.core.contract import Beats, Place, Restore
from packtrain.core.errors import Contradiction, NeitherRestoreNorFresh
from packtrain.core.holder import hold
from packtrain.core.journal import Journal
from packtrain.core.platform import Platform, Process
from packtrain.core.records import AttemptBegan
from packtrain.train.sections import Sections

CARRIER_START_S = 10.0
CARRIER_STOP_S = 10.0


@dataclass(frozen=True)
class Desk:
    """What a worker has before it has JAX."""

    platform: Platform
    place: Place
    spec: Sections
    journal: Journal
    beats: Beats
    on_sigterm: Callable[[Callable[[], None]], None]
    """Hands over who is to be told of a SIGTERM; told at once when it came already."""
    profile_steps: int = 0
    """Steps of this attempt to trace; 0: none."""


def writer_name(rank: int) -> str:
    """The name under which a rank's parts are published; `begin` lists those of all ranks."""
    return f"r{rank:05d}"


@dataclass(frozen=True)
class Seat:
    """`began`: by hand, what was begun, for the journal; under a supervisor that is the supervisor's to say."""

    place: Place
    began: AttemptBegan | None = None


@contextmanager
def seated(
    platform: Platform, env: Mapping[str, str], run: str, fresh: bool, memory: bool = False
) -> Iterator[Seat]:
    """The place to train from. `memory`: by hand, it may begin from what the last attempt left in memory.

    Raises NeitherRestoreNorFresh, BadValue, Contradiction, RunHeld and errors of the commit log.
    """
    place = Place.from_env(env)
    if not place.run:
        with _by_hand(platform, env, place, os.path.abspath(run), fresh, memory) as own:
            yield own
        return
    contract.restore(env)
    if run and os.path.abspath(run) != os.path.abspath(place.run):
        raise Contradiction(
            f"the command names {run} and {contract.RUN} names {place.run}", where="command line, environment",
            fix=f"unset {contract.RUN} to run by hand",
        )
    if fresh and place.restore:
        raise Contradiction(
            f"--fresh was given, but {contract.RESTORE} names a checkpoint", where="command line, environment",
            fix="leave out --fresh",
        )
    yield Seat(place)


@contextmanager
def _by_hand(
    platform: Platform, env: Mapping[str, str], place: Place, run: str, fresh: bool, memory: bool
) -> Iterator[Seat]:
    if place.world_size > 1:
        raise Contradiction(
            f"by hand there is one process, and {contract.WORLD_SIZE} is {place.world_size}", where="environment",
            fix="start several through `packtrain train`, or unset RANK and WORLD_SIZE",
        )
    with _held(platform, run):
        begin, restore, note = _begin(platform, run, fresh, memory)
        folder = f"/tmp/packtrain-{platform.token()}"
        platform.mkdir(folder, 0o700)
        carrier = _start_carrier(platform, env, run, f"{folder}/carrier", begin)
        try:
            own = Place(
                run=run, attempt=begin.attempt, restore=restore, fresh=restore is None, carrier=f"{folder}/carrier",
                grace_s=place.grace_s, node=platform.node(),
            )
            yield Seat(own, AttemptBegan(
                attempt=begin.attempt, commit=begin.number, parent=begin.parent, restore_step=begin.step, note=note,
            ))
        finally:
            _stop(carrier)
            _remove(platform, folder)


@contextmanager
def _held(platform: Platform, run: str) -> Iterator[None]:
    """The run's lock, dropped by the kernel however this process ends. Raises RunHeld naming who has it."""
    lock = hold(platform, run, os.path.basename(run))
    try:
        yield
    finally:
        lock.release()


def _begin(platform: Platform, run: str, fresh: bool, memory: bool = False) -> tuple[Commit, Restore | None, str]:
    """Commit an attempt of our own; from then on no earlier one can publish. What it restores, and a word on that."""
    log = CommitLog(platform, f"{run}/commits")
    log.probe()
    asked, point = wished(platform, run, log), next_restored(platform, run, log)
    found = _in_memory(platform, run, log) if memory and not fresh and asked is None else Found()
    if point is None and found.memory is None and not fresh:
        raise NeitherRestoreNorFresh(
            "this run has published no checkpoint, and nothing starts from random by accident", where=run,
            fix="give --fresh to start it from nothing",
        )
    if point is not None and fresh:
        raise Contradiction(
            f"--fresh was given, but this run has published step {point.step}", where=run,
            fix="leave out --fresh to go on from there, or make another run",
        )
    begin = log.begin(asked.number if asked else None, (writer_name(0),), platform.node(), memory=found.memory)
    if found.memory is not None:
        return begin, Restore(begin.number, found.memory[2]), found.note
    return begin, Restore(point.number, point.digest) if point else None, found.note


def _in_memory(platform: Platform, run: str, log: CommitLog) -> Found:
    """What the last attempt left there. Where it began from that itself and got no further, the disk is trusted more:
    whatever ended it might end every attempt after it."""
    found, begun = look(platform, run, log), log.begun()
    if found.memory is None or begun is None or found.memory != begun.memory:
        return found
    return Found(None, f"step {found.memory[1]} in memory led to nothing newer, so this attempt begins from disk")


def _start_carrier(platform: Platform, env: Mapping[str, str], run: str, socket: str, begin: Commit) -> Process:
    logs = f"{run}/logs/{begin.attempt:04d}"
    platform.mkdir(logs)
    program = (sys.executable, "-m", "packtrain.checkpoint.carrier")
    carrier = platform.spawn(
        (*program, "--run", run, "--socket", socket, "--begin", str(begin.number)), env, log_path=f"{logs}/carrier.log"
    )
    give_up_ns = platform.boot_ns() + round(CARRIER_START_S * 1e9)
    while not platform.exists(socket) and carrier.poll() is None and platform.boot_ns() < give_up_ns:
        platform.sleep(0.01)
    return carrier


def _stop(carrier: Process) -> None:
    carrier.send_signal(15)
    if carrier.wait(CARRIER_STOP_S) is None:
        carrier.send_signal(9)
        carrier.wait()


def _remove(platform: Platform, folder: str) -> None:
    with suppress(OSError):
        for name in platform.listdir(folder):
            platform.unlink(f"{folder}/{name}")
        platform.rmdir(folder)
