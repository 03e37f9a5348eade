"""What a person asked of a run's checkpoints: which ones stay, and which one the next attempt begins from.

    RUN/pins/<folder>.json    Pin: this checkpoint stays, whatever the plan says. Unpinning replaces the file.
    RUN/restore.json          Wish: the next attempt begins from that save.

A pin is written first, and only then is it looked whether a purge of its folder has begun; a purge says that it begins
first, and only then looks for pins (purge.py). So one of the two always sees the other. What cannot be read is pinned.

A wish holds for the log as it was when it was made. The next `begin` obeys it and makes the log longer by that, which
ends it: nobody has to take it away, and no attempt obeys it twice.
"""

from __future__ import annotations

import msgspec

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.format import MANIFEST, parse_folder
from packtrain.checkpoint.retention import purging_name
from packtrain.checkpoint.where import folder_named
from packtrain.core.errors import CheckpointGone, CommitUnknown
from packtrain.core.platform import Platform

BYTES_MAX = 1 << 16


class Pin(msgspec.Struct, frozen=True):
    """pins/<folder>.json."""

    folder: str
    pinned: bool
    """False: it was unpinned."""
    written_s: float
    """Wall clock, for showing."""
    reason: str = ""


class Wish(msgspec.Struct, frozen=True):
    """restore.json."""

    commit: int
    digest: str
    step: int
    head: int
    """Number of the last record that was no `term` when this was asked."""
    written_s: float


# --- pins --------------------------------------------------------------------------------------------


def pins(platform: Platform, run_folder: str) -> dict[str, Pin]:
    """Pinned folders. Raises OSError where they cannot be listed: then nobody knows what may go."""
    folder = f"{run_folder}/pins"
    names = platform.listdir(folder) if platform.exists(folder) else []
    found = [_pin(platform, f"{folder}/{name}", name.removesuffix(".json")) for name in names if _is_pin(name)]
    return {pin.folder: pin for pin in found if pin.pinned}


def pin(platform: Platform, run_folder: str, folder: str, reason: str = "") -> None:
    """From here on no purge begins on this checkpoint. Raises CheckpointGone where one has, or it is not there."""
    _write(platform, run_folder, Pin(folder, True, platform.wall_s(), reason))
    going = platform.exists(f"{run_folder}/tombstones/{purging_name(folder)}")
    if going or not platform.exists(f"{folder_named(platform, run_folder, folder)}/{MANIFEST}"):
        unpin(platform, run_folder, folder)
        raise CheckpointGone(
            "a purge of this checkpoint has begun" if going else "this checkpoint is not there any more",
            where=f"{run_folder}/checkpoints/{folder}", fix="packtrain ckpt ls RUN shows those there are",
        )


def unpin(platform: Platform, run_folder: str, folder: str) -> None:
    _write(platform, run_folder, Pin(folder, False, platform.wall_s()))


def _is_pin(name: str) -> bool:
    return name.endswith(".json") and parse_folder(name.removesuffix(".json")) is not None


def _pin(platform: Platform, path: str, folder: str) -> Pin:
    """What the file says; of one that is damaged, that its folder is pinned."""
    try:
        said = msgspec.json.decode(platform.read(path, 0, BYTES_MAX), type=Pin)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Pin(folder, True, 0.0, "its file is damaged")
    return msgspec.structs.replace(said, folder=folder)


def _write(platform: Platform, run_folder: str, said: Pin) -> None:
    assert parse_folder(said.folder) is not None, f"{said.folder} is no checkpoint folder"
    platform.mkdir(f"{run_folder}/pins")
    platform.write_replacing(f"{run_folder}/pins/{said.folder}.json", msgspec.json.encode(said))


# --- where the next attempt begins ---------------------------------------------------------------------


def wish(platform: Platform, run_folder: str, commit: Commit, head: int) -> None:
    """Ask that the attempt after record `head` begins from the save `commit`. Call it while holding the run."""
    asked = Wish(commit.number, commit.digest, commit.step, head, platform.wall_s())
    platform.write_replacing(_path(run_folder), msgspec.json.encode(asked))


def wished(platform: Platform, run_folder: str, log: CommitLog) -> Commit | None:
    """The save that the next attempt was asked to begin from; None: nothing was asked since the last one began.

    Raises CommitUnknown where that cannot be read: nobody begins from elsewhere than was asked.
    """
    try:
        asked = msgspec.json.decode(platform.read(_path(run_folder), 0, BYTES_MAX), type=Wish)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unknown(f"what the next attempt is to begin from cannot be read: {error}", run_folder) from error
    last = log.last()
    if asked.head != (last.number if last else 0):
        return None
    commit = log.read(asked.commit)
    if commit is None or commit.kind != "save" or commit.digest != asked.digest:
        raise _unknown(f"the next attempt was asked to begin from record {asked.commit}, which is no such save",
                       run_folder)
    return commit


def next_restored(platform: Platform, run_folder: str, log: CommitLog) -> Commit | None:
    """The save that the next attempt begins from: the one that was asked for, or the one the log leads to."""
    return wished(platform, run_folder, log) or log.restore_point()


def _path(run_folder: str) -> str:
    return f"{run_folder}/restore.json"


def _unknown(what: str, run_folder: str) -> CommitUnknown:
    return CommitUnknown(what, where=_path(run_folder), fix="ask again with `packtrain ckpt restore RUN STEP`")
