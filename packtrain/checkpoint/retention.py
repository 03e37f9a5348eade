"""Which checkpoints are kept: a pure plan from the log, the folders and the tombstones. Nothing here touches a disk.

A folder goes in two steps: a tombstone first, and a purge only `grace_s` later. Never planned for either: what restore
would read now, the `keep_last` saves of the lineage (at least one), each `keep_every_steps`-th, the `keep_best` of the
lineage (best.py), and what is pinned. A person may mark what is kept for its number or for being good (`asked`): then
the next best takes its place. The floor, which is the last ones and the pinned, nobody may mark.
A tombstoned folder that is kept again (a rollback leads to it, say) loses its tombstone and with it the time
already served. In a place of copies, and in one that was promoted, saves that never came there count for nothing.
Uncommitted folders count as debris when a later attempt has begun and `debris_s` have passed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import msgspec

from packtrain.checkpoint.best import Judged, best, unknown
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.format import parse_folder

TOMBSTONE_BYTES_MAX = 1 << 16


class Tombstone(msgspec.Struct, frozen=True):
    """tombstones/<folder>.json: that folder may be purged `grace_s` after `written_s`."""

    folder: str
    written_s: float
    """Wall clock: a grace period spans reboots."""
    reason: str
    asked: bool = False
    """A person marked it."""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made from, all seen at one moment."""

    commits: tuple[Commit, ...]
    """The whole log, number 1 first."""
    tombstones: Mapping[str, Tombstone]
    ages_s: Mapping[str, float]
    """Checkpoint folders present, with seconds since they last changed."""
    now_s: float
    pinned: Collection[str] = frozenset()
    """Folders."""
    going: Collection[str] = frozenset()
    """Folders that a purge which was cut short took the manifest of."""
    copied: Collection[int] = frozenset()
    """Numbers of the records whose checkpoints were brought here; (): this folder is no copy."""
    mirrored: Mapping[int, tuple[str, ...]] = {}
    """Number of a record -> names of the mirrors that its checkpoint was brought to."""
    judged: Judged = Judged()
    """What is known of how good they are. Empty: nothing is."""


class Reason(msgspec.Struct, frozen=True):
    """unknown: it may be one of the best."""

    why: Literal["last", "pinned", "every", "best", "unknown"]
    words: str


class Action(msgspec.Struct, frozen=True):
    """tombstone: mark. purge: delete what has been marked long enough. lift: take the mark away."""

    action: Literal["tombstone", "purge", "lift"]
    folder: str
    reason: str
    asked: bool = False


def plan(survey: Survey, config: CheckpointConfig) -> list[Action]:
    """What to do now, in the order of folder names.

    A tombstone from the future (the clock was set back) has served no time. An empty log plans nothing.
    """
    if not survey.commits:
        return []
    kept = kept_folders(survey, config)
    published = {commit.folder for commit in survey.commits if commit.kind == "save"}
    attempt = survey.commits[-1].attempt
    actions: list[Action] = []
    for folder in sorted(survey.ages_s):
        stone = survey.tombstones.get(folder)
        reason = _reason(folder, published, attempt, survey.ages_s[folder], config)
        if folder in kept or reason is None:
            if stone is not None:
                actions.append(Action("lift", folder, "kept again"))
        elif stone is None:
            actions.append(Action("tombstone", folder, reason))
        elif survey.now_s - stone.written_s >= config.grace_s:
            actions.append(Action("purge", folder, stone.reason))
    return actions


def kept_folders(survey: Survey, config: CheckpointConfig) -> set[str]:
    return set(reasons(survey, config))


def reasons(survey: Survey, config: CheckpointConfig) -> dict[str, list[Reason]]:
    """Folder that stays -> why. The last ones and the pinned stay even if a person marked them."""
    lineage = _lineage_here(survey)
    free = [commit for commit in lineage if _may_be_kept(survey, commit.folder)]
    found: defaultdict[str, list[Reason]] = defaultdict(list)
    for commit in lineage[: config.keep_last]:
        found[commit.folder].append(Reason("last", f"one of the last {config.keep_last}"))
    for folder in survey.pinned:
        found[folder].append(Reason("pinned", "pinned"))
    for commit in free if config.keep_every_steps else ():
        if commit.step % config.keep_every_steps == 0:
            found[commit.folder].append(Reason("every", f"every {config.keep_every_steps} steps"))
    for commit, reason in _as_best(survey, config, free):
        found[commit.folder].append(reason)
    return dict(found)


def _may_be_kept(survey: Survey, folder: str) -> bool:
    """For its number, or for being good: no purge of it has begun, and no person marked it."""
    stone = survey.tombstones.get(folder)
    return stone is None or (folder in survey.ages_s and folder not in survey.going and not stone.asked)


def _as_best(survey: Survey, config: CheckpointConfig, saves: list[Commit]) -> Iterator[tuple[Commit, Reason]]:
    reach = [one for one in saves if one.folder in survey.ages_s or one.number in survey.mirrored]
    ranks = best(reach, survey.commits, survey.judged, config)
    yield from ((save, Reason("best", rank.words())) for save in saves for rank in ranks.get(save.number, ()))
    here = [commit for commit in saves if commit.folder in survey.ages_s]
    for save in unknown(here, survey.commits, survey.judged, config):
        words = f"perhaps one of the best: the journal of attempt {save.attempt} may lack its evaluation"
        yield save, Reason("unknown", words)


def owed(survey: Survey, config: CheckpointConfig) -> list[Commit]:
    """Published saves that must be there, latest first: kept, never marked, and not left out where this is a copy."""
    kept = kept_folders(survey, config)
    return [
        commit for commit in reversed(survey.commits)
        if commit.kind == "save" and commit.folder in kept and commit.folder not in survey.tombstones
        and not left_out(survey, commit)
    ]


def left_out(survey: Survey, commit: Commit) -> bool:
    """Whether this folder began as a copy that this checkpoint was not brought to. After the record by which a place
    was promoted all saves are its own."""
    if not survey.copied:
        return False
    taken = max((one.number for one in survey.commits if one.kind == "moved" and not one.place), default=0)
    return commit.number < max(taken, *survey.copied) and commit.number not in survey.copied


def why_kept(survey: Survey, config: CheckpointConfig, folder: str) -> str | None:
    """Why a person cannot mark a published folder, in words; None: that is allowed."""
    lineage = [commit.folder for commit in _lineage_here(survey)]
    if folder in survey.pinned:
        return "it is pinned"
    if folder in lineage[:1]:
        return "a restart would read it"
    if folder in lineage[: config.keep_last]:
        return f"it is one of the last {config.keep_last} saves (checkpoint.keep_last)"
    return None


def _lineage_here(survey: Survey) -> list[Commit]:
    """Saves of the lineage, latest first, without those that never came to this place."""
    return [
        commit for commit in lineage_of(survey.commits)
        if commit.kind == "save" and (commit.folder in survey.ages_s or not left_out(survey, commit))
    ]


def lineage_of(commits: tuple[Commit, ...]) -> list[Commit]:
    """The last record and its ancestors, latest first."""
    found: list[Commit] = []
    number = len(commits)
    while number:
        commit = commits[number - 1]
        assert commit.number == number and commit.parent < number, f"the log is not dense at {number}"
        found.append(commit)
        number = commit.parent
    return found


def tombstone_name(folder: str) -> str:
    return f"{folder}.json"


def purging_name(folder: str) -> str:
    """Beside the tombstone, while a purge of the folder is under way."""
    return f"{folder}.purging"


def parse_tombstone(data: bytes) -> Tombstone | None:
    """None when it is damaged: then nothing has been marked."""
    try:
        stone = msgspec.json.decode(data, type=Tombstone)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return stone if parse_folder(stone.folder) is not None else None


def _reason(folder: str, published: set[str], attempt: int, age_s: float, config: CheckpointConfig) -> str | None:
    """Why a folder that is not kept may go; None: it may not."""
    name = parse_folder(folder)
    assert name is not None, f"{folder} is no checkpoint folder"
    if folder in published:
        return f"beyond the last {config.keep_last}, or off the lineage"
    if name.attempt < attempt and age_s >= config.debris_s:
        return f"never published, and attempt {name.attempt} is over"
    return None
