"""The only module that deletes checkpoints. Everything here checks again what the plan decided, at the last moment.

A purge needs a tombstone as old as the grace, an attempt that is still the last begun, a restore point every byte of
which was read back and found good, and a folder that is neither it, nor what a person asked to restore, nor pinned. The
manifest goes first: a purge cut short leaves a folder that refuses to open at once.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from packtrain.checkpoint.asked import pins, wished
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.format import MANIFEST, parse_folder
from packtrain.checkpoint.reader import verify_commit
from packtrain.checkpoint.retention import (
    TOMBSTONE_BYTES_MAX,
    Action,
    Tombstone,
    parse_tombstone,
    purging_name,
    tombstone_name,
)
from packtrain.checkpoint.where import folder_named, is_own_home
from packtrain.core.errors import PacktrainError, PurgeRefused
from packtrain.core.platform import Platform


class Done(NamedTuple):
    """One action and how it ended; `error` None: carried out."""

    action: Action
    error: dict[str, str] | None


def execute(
    platform: Platform, run_folder: str, attempt: int, actions: Sequence[Action], grace_s: float,
    verified: set[int] | None = None, busy: Collection[str] = (),
) -> list[Done]:
    """Carry out a plan made under `attempt`. One that is refused or fails keeps none of the others.

    `verified`: numbers of the commits read back whole so far; it grows, so a restore point is read once and not again.
    `busy`: folders that are being copied elsewhere, which are purged another time.
    """
    verified = set() if verified is None else verified
    done = []
    for action in actions:
        try:
            if action.action == "purge" and action.folder in busy:
                raise _refused(action.folder, "it is being copied elsewhere")
            _execute(platform, run_folder, attempt, action, grace_s, verified)
            done.append(Done(action, None))
        except PacktrainError as error:
            done.append(Done(action, error.as_dict()))
        except OSError as error:
            done.append(Done(action, _refused(action.folder, f"{action.action} failed: {error}").as_dict()))
    return done


def discard_try(platform: Platform, folder: str) -> bool:
    """Take away a folder that the caller made and never handed to the log. False: what resisted is left as debris.

    Once it is gone its name may be somebody else's: it must not be taken away twice.
    """
    with suppress(OSError):
        for name in platform.listdir(folder):
            platform.unlink(f"{folder}/{name}")
        platform.rmdir(folder)
        return True
    return False


def _execute(
    platform: Platform, run_folder: str, attempt: int, action: Action, grace_s: float, verified: set[int]
) -> None:
    if parse_folder(action.folder) is None:
        raise _refused(action.folder, "this is no checkpoint folder")
    _require_current(platform, run_folder, attempt, action.folder)
    stone = f"{run_folder}/tombstones/{tombstone_name(action.folder)}"
    claim = f"{run_folder}/tombstones/{purging_name(action.folder)}"
    match action.action:
        case "tombstone":
            _require_unpinned(platform, run_folder, action.folder)
            _mark(platform, stone, action)
        case "lift":
            for mark in (stone, claim):
                with suppress(FileNotFoundError):
                    platform.unlink(mark)
        case "purge":
            _require_grace(platform, stone, action.folder, grace_s)
            _require_restorable(platform, run_folder, action.folder, verified)
            checkpoints = _checkpoints_of(platform, run_folder, action.folder)
            _claim(platform, run_folder, action.folder, claim)
            _remove(platform, checkpoints, action.folder)
            platform.unlink(claim)


def _checkpoints_of(platform: Platform, run_folder: str, folder: str) -> str:
    """What it lies in: the run's own, or that which its save fell back to and no other run, nor a copy of this one."""
    checkpoints = posixpath.dirname(folder_named(platform, run_folder, folder))
    home = posixpath.dirname(checkpoints)
    if home != run_folder and not is_own_home(platform, run_folder, home):
        raise _refused(folder, f"it lies in {home}, which belongs to another run folder")
    return checkpoints


def _claim(platform: Platform, run_folder: str, folder: str, claim: str) -> None:
    """Say that the end of this folder begins, then look whether it is pinned: who pins does it the other way round."""
    with suppress(FileExistsError):
        platform.write_new(claim, b"")
    try:
        _require_unpinned(platform, run_folder, folder)
    except PurgeRefused:
        platform.unlink(claim)
        raise


def _require_unpinned(platform: Platform, run_folder: str, folder: str) -> None:
    if folder in pins(platform, run_folder):
        raise _refused(folder, "it is pinned")


def _mark(platform: Platform, stone: str, action: Action) -> None:
    """Write the tombstone; one that is there already keeps its time, unless it is damaged and so never counted. A
    person's mark outweighs one of retention's own."""
    mark = Tombstone(action.folder, platform.wall_s(), action.reason, action.asked)
    folder = stone.rpartition("/")[0]
    platform.mkdir(folder)
    try:
        platform.write_new(stone, msgspec.json.encode(mark))
        platform.fsync_dir(folder)
    except FileExistsError:
        found = parse_tombstone(platform.read(stone, 0, TOMBSTONE_BYTES_MAX))
        if found is not None and found.folder == mark.folder:
            if found.asked or not mark.asked:
                return
            mark = msgspec.structs.replace(mark, written_s=found.written_s)
        platform.write_replacing(stone, msgspec.json.encode(mark))


def _require_current(platform: Platform, run_folder: str, attempt: int, folder: str) -> None:
    last = CommitLog(platform, f"{run_folder}/commits").last()
    if last is None or last.attempt != attempt:
        raise _refused(folder, f"the plan was made under attempt {attempt}, which is not the last one begun")


def _require_grace(platform: Platform, stone: str, folder: str, grace_s: float) -> None:
    try:
        found = parse_tombstone(platform.read(stone, 0, TOMBSTONE_BYTES_MAX))
    except FileNotFoundError:
        found = None
    if found is None or found.folder != folder:
        raise _refused(folder, "it has no tombstone")
    if platform.wall_s() - found.written_s < grace_s:
        raise _refused(folder, f"its tombstone is younger than {grace_s:.0f} s")


def _require_restorable(platform: Platform, run_folder: str, folder: str, verified: set[int]) -> None:
    """The checkpoint that restore would read is another one, and whole: raises PurgeRefused, CheckpointUnreadable."""
    log = CommitLog(platform, f"{run_folder}/commits")
    point, asked = log.restore_point(), wished(platform, run_folder, log)
    if asked is not None and asked.folder == folder:
        raise _refused(folder, "the next attempt was asked to begin from it")
    if point is None or point.folder == folder:
        raise _refused(folder, "restore would read it now" if point else "no other checkpoint is published")
    if point.number in verified:
        return
    damage = verify_commit(platform, run_folder, point)
    if damage:
        raise _refused(folder, f"restore would read step {point.step}, which is damaged: {damage[0].what}")
    verified.add(point.number)


def _remove(platform: Platform, checkpoints: str, folder: str) -> None:
    path = f"{checkpoints}/{folder}"
    names = platform.listdir(path) if platform.exists(path) else []
    for name in sorted(names, key=lambda name: name != MANIFEST):
        platform.unlink(f"{path}/{name}")
    if platform.exists(path):
        platform.rmdir(path)
    platform.fsync_dir(checkpoints)


def _refused(folder: str, what: str) -> PurgeRefused:
    return PurgeRefused(what, where=f"checkpoints/{folder}", fix="nothing was deleted; the next plan looks again")
