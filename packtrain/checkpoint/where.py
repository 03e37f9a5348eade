"""Where the files of a published checkpoint lie: in the run folder, or where its save fell back to.

A save that the run's own disk would not take lies in another home, which its record names: `ROOT/RUN-<tag>`, laid out
like a run folder. What lies in the run folder goes first: a copy of the run, or what was brought back, is read there.
"""

from __future__ import annotations

import hashlib
import os
import posixpath

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.blocks import as_damaged, as_unreadable
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.core.platform import Platform


def checkpoint_folder(platform: Platform, run_folder: str, commit: Commit) -> str:
    """Where it lies, or would; only a plain checkpoint folder name under checkpoints/ passes.

    Raises CheckpointDamaged for a record that leads elsewhere, CheckpointUnreadable.
    """
    return f"{home_of(platform, run_folder, commit)}/checkpoints/{commit.folder}"


def own_folder(run_folder: str, commit: Commit) -> str:
    """The same in the run folder, whether it lies there or not."""
    name = fmt.parse_folder(commit.folder)
    if name is None or (name.step, name.attempt) != (commit.step, commit.attempt):
        raise as_damaged(f"{commit.folder!r} is not the folder of step {commit.step}", f"commit {commit.number}")
    return f"{run_folder}/checkpoints/{commit.folder}"


def home_of(platform: Platform, run_folder: str, commit: Commit) -> str:
    """The folder whose `checkpoints` hold it: the run folder, unless it is only where its save fell back to."""
    own, place = own_folder(run_folder, commit), commit.place
    if not place:
        return run_folder
    if not place.startswith("/") or posixpath.normpath(place) != place:
        raise as_damaged(f"{place!r} is no place of a checkpoint", f"commit {commit.number}")
    try:
        there = not platform.is_dir(own) and platform.is_dir(f"{place}/checkpoints/{commit.folder}")
    except OSError as error:
        raise as_unreadable(error, own) from error
    return place if there else run_folder


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


def is_own_home(platform: Platform, run_folder: str, home: str) -> bool:
    """Whether this run folder is the one whose saves fell back there: a copy of it may read them, not purge them."""
    first = CommitLog(platform, f"{run_folder}/commits").read(1)
    return first is not None and fall_back_home(posixpath.dirname(home), run_folder, first) == home
