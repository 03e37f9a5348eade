"""What is said of the mirrors of a run before it begins and when it is done: where they may lie, what they lack."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.mirrors import holders, others, read_state
from packtrain.checkpoint.reader import COPIED, missing
from packtrain.core.errors import CheckpointLost, Contradiction, MirrorFailed, PacktrainError
from packtrain.core.platform import Platform


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
