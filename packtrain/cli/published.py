"""Which of a run's published steps a person means."""

from __future__ import annotations

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.core.errors import RunMissing
from packtrain.core.platform import Platform

NAMED_MAX = 8


def commit_of(platform: Platform, folder: str, step: int | None) -> Commit:
    """The save of `step` on the run's lineage, None: the last. Raises RunMissing naming those there are.

    A step that retention took away is not there: its record is, but not its folder.
    """
    log = CommitLog(platform, f"{folder}/commits")
    saves = [
        commit for commit in log.lineage(log.head())
        if commit.kind == "save" and platform.is_dir(f"{folder}/checkpoints/{commit.folder}")
    ]
    if not saves:
        raise RunMissing("this run has published no checkpoint yet", where=folder, fix="let it train until a save")
    found = next((commit for commit in saves if step in (None, commit.step)), None)
    if found is None:
        there = ", ".join(str(commit.step) for commit in saves[:NAMED_MAX])
        raise RunMissing(f"there is no checkpoint of step {step}", where=folder, fix=f"there are steps {there}")
    return found
