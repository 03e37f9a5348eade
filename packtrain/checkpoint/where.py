"""Where the files of a published checkpoint lie: in the run folder, or where its save fell back to.

A save that the run's own disk would not take lies in another home, which its record names: `ROOT/RUN-<tag>`, laid out
like a run folder. What lies in the run folder goes first: a copy of the run, or what was brought back, is read there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
from collections.abc import Sequence

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.blocks import as_damaged, as_unreadable
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.core.errors import Contradiction
from packtrain.core.platform import Platform


def checkpoint_folder(platform: Platform, run_folder: str, commit: Commit) -> str:
    """Where it lies, or would; only a plain checkpoint folder name under checkpoints/ passes.

    Raises CheckpointDamaged for a record that leads elsewhere, CheckpointUnreadable, also where its place is away.
    """
    return f"{home_of(platform, run_folder, commit)}/checkpoints/{commit.folder}"


def reachable_folder(platform: Platform, run_folder: str, commit: Commit) -> str:
    """The same, but where its place is away: that in the run folder, which it may be brought back into."""
    return f"{_home_now(platform, run_folder, commit) or run_folder}/checkpoints/{commit.folder}"


def own_folder(run_folder: str, commit: Commit) -> str:
    """The same in the run folder, whether it lies there or not."""
    name = fmt.parse_folder(commit.folder)
    if name is None or (name.step, name.attempt) != (commit.step, commit.attempt):
        raise as_damaged(f"{commit.folder!r} is not the folder of step {commit.step}", f"commit {commit.number}")
    return f"{run_folder}/checkpoints/{commit.folder}"


def home_of(platform: Platform, run_folder: str, commit: Commit) -> str:
    """The folder whose `checkpoints` hold it: the run folder, unless it is only where its save fell back to.

    A place that is away is a disk that is not mounted: that says nothing about what lies there, so it is no damage.
    """
    home = _home_now(platform, run_folder, commit)
    if home is None:
        away = FileNotFoundError(errno.ENOENT, "the place its save fell back to is not there", commit.place)
        raise as_unreadable(away, commit.place)
    return home


def _home_now(platform: Platform, run_folder: str, commit: Commit) -> str | None:
    """None: it is not in the run folder, and its place is away."""
    own, place = own_folder(run_folder, commit), commit.place
    if not place:
        return run_folder
    if not is_place(place):
        raise as_damaged(f"{place!r} is no place of a checkpoint", f"commit {commit.number}")
    try:
        if platform.is_dir(own):
            return run_folder
        if platform.is_dir(f"{place}/checkpoints/{commit.folder}"):
            return place
        return run_folder if platform.is_dir(place) else None
    except OSError as error:
        raise as_unreadable(error, place) from error


def is_place(path: str) -> bool:
    """Whether a record may name it: an absolute path that says where it leads."""
    return path.startswith("/") and posixpath.normpath(path) == path


def folder_named(platform: Platform, run_folder: str, folder: str) -> str:
    """Where the checkpoint folder of that name lies, published or not."""
    own = f"{run_folder}/checkpoints/{folder}"
    if platform.exists(own):
        return own
    commits = CommitLog(platform, f"{run_folder}/commits").all()
    found = next((commit for commit in commits if commit.folder == folder and commit.place), None)
    return own if found is None else checkpoint_folder(platform, run_folder, found)


def fall_back_home(root: str, run_folder: str, first: Commit) -> str:
    """Where saves of the run in `run_folder` go under `root`; `first`: record 1 of its log. No other run folder has the
    same one, nor has a copy of this run: what lies there belongs to one log."""
    path = os.path.realpath(run_folder)
    tag = hashlib.sha256(f"{first.nonce} {path}".encode()).hexdigest()[:12]
    return f"{root.rstrip('/')}/{posixpath.basename(path)}-{tag}"


def require_outside(roots: Sequence[str], run_folder: str) -> None:
    """Raises Contradiction for a place to fall back to inside the run folder: that is the disk that would not take it,
    and what lies there is deleted with the run."""
    own = os.path.realpath(run_folder)
    for root in roots:
        if os.path.commonpath((own, os.path.realpath(root))) == own:
            raise Contradiction(
                f"{root} lies in the run folder {run_folder}, whose saves are to fall back to it",
                where="checkpoint.fallback", fix="name a folder on another disk, or leave it out",
            )


def is_own_home(platform: Platform, run_folder: str, home: str) -> bool:
    """Whether this run folder is the one whose saves fell back there: a copy of it may read them, not purge them."""
    first = CommitLog(platform, f"{run_folder}/commits").read(1)
    return first is not None and fall_back_home(posixpath.dirname(home), run_folder, first) == home
