"""Logs as they may grow, with folders and tombstones beside them: what retention is asked about."""

from __future__ import annotations

from hypothesis import strategies as st

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.format import FolderName
from packtrain.checkpoint.retention import Survey, Tombstone

HOUR_S = 3600.0


def saved(number: int, attempt: int, step: int) -> Commit:
    folder = str(FolderName(step, attempt, 1))
    return Commit(number=number, kind="save", attempt=attempt, step=step, parent=number - 1, nonce="", folder=folder)


@st.composite
def logs(draw):
    """A log as it may grow: attempts, saves, rollbacks to any earlier save."""
    commits: list[Commit] = []
    attempt, step = 0, 0
    for number in range(1, draw(st.integers(1, 25)) + 1):
        if not commits or draw(st.integers(0, 3)) == 0:
            attempt += 1
            parents = [0] if not commits else [number - 1, *(c.number for c in commits if c.kind == "save")]
            parent = draw(st.sampled_from(parents))
            step = commits[parent - 1].step if parent else -1
            commits.append(Commit(number=number, kind="begin", attempt=attempt, step=step, parent=parent, nonce=""))
        else:
            step += draw(st.integers(1, 10))
            commits.append(saved(number, attempt, step))
    return tuple(commits)


@st.composite
def surveys(draw):
    commits = draw(logs())
    attempt = commits[-1].attempt
    published = [commit.folder for commit in commits if commit.kind == "save"]
    debris = [str(FolderName(draw(st.integers(0, 99)), draw(st.integers(1, attempt + 1)), 9)) for _ in range(3)]
    present = [folder for folder in {*published, *debris} if draw(st.integers(0, 9))]
    now_s = 1e9
    ages = {folder: draw(st.sampled_from([0.0, HOUR_S, 23 * HOUR_S, 25 * HOUR_S])) for folder in sorted(present)}
    stones = {
        folder: Tombstone(folder, now_s - draw(st.sampled_from([-HOUR_S, 0.0, HOUR_S / 2, HOUR_S, 9 * HOUR_S])), "why")
        for folder in sorted({*published, *debris}) if draw(st.booleans())
    }
    return Survey(commits=commits, tombstones=stones, ages_s=ages, now_s=now_s)


configs = st.builds(
    CheckpointConfig, keep_last=st.integers(1, 4), keep_every_steps=st.sampled_from([0, 3, 10]),
    grace_s=st.just(HOUR_S), debris_s=st.just(24 * HOUR_S),
)
