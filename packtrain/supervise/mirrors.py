"""What the foreground waits for where a run has mirrors: at the beginning of an attempt for a checkpoint that was
deleted from outside and is on its way back, at the end of the run for its last checkpoint to be everywhere.

The carrier does both (checkpoint/mirroring.py); here is only looked, until it is done, cannot be, or a person asks to
stop.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.mirrors import holders, others, read_state
from packtrain.checkpoint.reader import COPIED, missing, survey
from packtrain.checkpoint.retention import owed
from packtrain.core.errors import CheckpointLost, Contradiction, MirrorFailed, PacktrainError
from packtrain.core.platform import Platform, Process
from packtrain.core.records import ErrorSeen, MirrorDone
from packtrain.core.units import NS

HURRY = signal.SIGUSR1
"""Tells the carrier that the run is done: what is due some time is due now."""


class Waits:
    """Of one run."""

    def __init__(
        self, platform: Platform, run_folder: str, config: CheckpointConfig, carrier_path: str,
        look: Callable[[], bool], say: Callable[[str], None], warn: Callable[[PacktrainError], None],
    ) -> None:
        """`carrier_path`: the socket of each carrier. `look` waits a moment and hears what there is to hear; True: a
        person asks to stop."""
        self._platform, self._run_folder, self._config = platform, run_folder, config
        self._mirrors = others(config.mirrors, run_folder)
        self._log = CommitLog(platform, f"{run_folder}/commits")
        self._carrier_path = carrier_path
        self._look, self._say, self._warn = look, say, warn
        self._asked = False
        """A person asked to stop while we waited."""
        self._told_lost: set[str] = set()
        """Checkpoint folders that were said to be lost."""
        self._tried: dict[str, int] = {}
        """Mirror -> commit that was brought there, or failed to be."""

    def noted(self, record: object) -> None:
        """A journal record has arrived."""
        if isinstance(record, MirrorDone):
            self._tried[record.mirror] = record.commit
        elif isinstance(record, ErrorSeen) and record.name == CheckpointLost.name:
            self._told_lost.add(record.where.rpartition("/")[2])

    def until_back(self, restored: Commit, carrier: Process) -> bool:
        """A worker would only find it damaged, and the run go back to an older one. One try: if that fails, it does.
        True: a person asked to stop before it was back."""
        file = self._missing(restored)
        if not file or not self._mirrors or not self._is_owed(restored):
            return False
        self._told_lost.clear()
        self._say(
            f"step {restored.step} was taken away from outside ({file}): it is brought back from a mirror before "
            "training goes on (Ctrl-C stops)"
        )
        end_ns = self._end_ns(self._mirrors)
        while self._missing(restored) and not self._is_told_lost(restored) and self._goes_on(carrier, end_ns):
            continue
        return self._asked and bool(self._missing(restored))

    def until_brought(self, carrier: Process | None) -> None:
        """The last checkpoint of a run that is done goes to every mirror at once, whatever the cadence. Whatever comes
        of it, which mirrors are left without it is told at the end, and whether it is there at all."""
        if not self._mirrors:
            return
        point: Commit | None = None
        with suppress(PacktrainError):  # told below
            point = self._log.restore_point()
        behind = [mirror for mirror in self._mirrors if point is not None and not self._has(mirror, point)]
        if point is not None and behind and carrier is not None:
            self._bring(point, behind, carrier)
        for told in shortfall(self._platform, self._run_folder, self._config):
            self._warn(told)

    def _bring(self, point: Commit, behind: Sequence[Mirror], carrier: Process) -> None:
        """Until each mirror was tried, or nothing more can come of it."""
        self._say(f"bringing step {point.step} to {names(behind)} (Ctrl-C leaves it)")
        self._tried.clear()
        self._told_lost.clear()
        end_ns = self._end_ns(behind)
        if self._starts(carrier, end_ns):
            carrier.send_signal(HURRY)
            while self._may_come(point, behind) and self._goes_on(carrier, end_ns):
                continue
        having = [mirror for mirror in behind if self._has(mirror, point)]
        if having:
            self._say(f"step {point.step} is on {names(having)}")

    def _may_come(self, point: Commit, behind: Sequence[Mirror]) -> bool:
        if self._is_told_lost(point) and self._missing(point):
            return False
        return any(self._tried.get(mirror.name) != point.number for mirror in behind)

    def _starts(self, carrier: Process, end_ns: int) -> bool:
        """Whether it listens at last: one that still starts would die of the signal."""
        while not self._listens() and self._goes_on(carrier, end_ns):
            continue
        return self._listens()

    def _listens(self) -> bool:
        with suppress(OSError):
            return self._platform.exists(self._carrier_path)
        return False

    def _goes_on(self, carrier: Process, end_ns: int) -> bool:
        self._asked = self._look()
        return not self._asked and carrier.poll() is None and self._platform.boot_ns() < end_ns

    def _end_ns(self, mirrors: Sequence[Mirror]) -> int:
        return self._platform.boot_ns() + int(sum(mirror.deadline_s for mirror in mirrors) * NS)

    def _is_told_lost(self, commit: Commit) -> bool:
        return commit.folder in self._told_lost

    def _is_owed(self, commit: Commit) -> bool:
        """Whether the carrier brings it back at all."""
        with suppress(OSError, PacktrainError):
            return commit in owed(survey(self._platform, self._run_folder), self._config)
        return False

    def _missing(self, commit: Commit) -> str:
        return missing_file(self._platform, self._run_folder, commit)

    def _has(self, mirror: Mirror, commit: Commit) -> bool:
        return has(self._platform, self._run_folder, mirror, commit)


def check_places(platform: Platform, mirrors: Sequence[Mirror], run_folder: str) -> None:
    """Raises Contradiction where a mirror is the run folder itself, lies in it, or among the checkpoints of a run.

    Only a run that began as a copy may name its own folder: its spec came from the run that it was a mirror of.
    """
    own = os.path.realpath(run_folder)
    for mirror in mirrors:
        if not mirror.store.url.startswith(("/", "file://")):
            continue
        place = os.path.realpath(mirror.place.removeprefix("file://"))
        if place == own and not platform.exists(f"{own}/{COPIED}"):
            raise _no_place(mirror, "is the run folder itself")
        if place.startswith(f"{own}/"):
            raise _no_place(mirror, "lies inside the run folder")
        if _is_among_checkpoints(platform, place):
            raise _no_place(mirror, "lies among the checkpoints of a run")


def _is_among_checkpoints(platform: Platform, place: str) -> bool:
    while place != "/":
        place, name = os.path.split(place)
        if name == "checkpoints" and platform.exists(f"{place}/commits"):
            return True
    return False


def _no_place(mirror: Mirror, why: str) -> Contradiction:
    return Contradiction(
        f"the place of mirror {mirror.name} {why}: {mirror.place}", where=f"checkpoint.mirrors, {mirror.name}",
        fix="give a folder of its own, best on another disk",
    )


def shortfall(platform: Platform, run_folder: str, config: CheckpointConfig) -> list[PacktrainError]:
    """Of a run that is done: that its last checkpoint is gone, or which mirrors do not have it."""
    mirrors = others(config.mirrors, run_folder)
    try:
        point = CommitLog(platform, f"{run_folder}/commits").restore_point() if mirrors else None
    except PacktrainError as error:
        what = f"nobody knows which mirrors have the last checkpoint: {error.what}"
        return [MirrorFailed(what, where=error.where, fix=error.fix)]
    if point is None:
        return []
    file = missing_file(platform, run_folder, point)
    having = [mirror for mirror in mirrors if has(platform, run_folder, mirror, point)]
    if file:
        return [_gone(run_folder, point, file, having)]
    return [_not_on(mirror, run_folder, point) for mirror in mirrors if mirror not in having]


def _not_on(mirror: Mirror, run_folder: str, point: Commit) -> MirrorFailed:
    return MirrorFailed(
        f"step {point.step}, the last one, is not on mirror {mirror.name}", where=mirror.place,
        fix=f"bring it there: {_copy_command(run_folder, mirror)}",
    )


def _gone(run_folder: str, point: Commit, file: str, having: Sequence[Mirror]) -> CheckpointLost:
    there = f"mirror {names(having)} has it" if having else "no mirror has it"
    fix = (
        f"bring it back: packtrain ckpt repair {shlex.quote(run_folder)}" if having
        else "copy this folder from another copy of the run, if there is one; `packtrain ckpt ls` shows what is left"
    )
    return CheckpointLost(
        f"the last checkpoint, step {point.step}, was taken away from outside ({file}): {there}",
        where=f"{run_folder}/checkpoints/{point.folder}", fix=fix,
    )


def names(mirrors: Sequence[Mirror]) -> str:
    return ", ".join(mirror.name for mirror in mirrors)


def _copy_command(run_folder: str, mirror: Mirror) -> str:
    options = {
        "--to": mirror.place, "--endpoint": mirror.endpoint, "--region": mirror.region, "--key-id": mirror.key_id,
        "--secret": mirror.secret,
    }
    return shlex.join([
        "packtrain", "ckpt", "copy", run_folder, *(word for item in options.items() if item[1] for word in item)
    ])


def missing_file(platform: Platform, run_folder: str, commit: Commit) -> str:
    """What of a checkpoint is gone; empty too where the disk refuses to say: then the worker says it."""
    with suppress(OSError, PacktrainError):
        return missing(platform, run_folder, commit)
    return ""


def has(platform: Platform, run_folder: str, mirror: Mirror, commit: Commit) -> bool:
    """Whether the mirror is known to have it."""
    state = read_state(platform, run_folder, mirror.name, mirror.place)
    return bool(holders([state]).get(commit.number))
