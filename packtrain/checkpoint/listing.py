"""What `packtrain ckpt ls` shows: every checkpoint folder of a run and how it stands. Pure."""

from __future__ import annotations

import msgspec

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.format import parse_folder
from packtrain.checkpoint.retention import Reason, Survey, left_out, lineage_of, reasons


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One folder, or a published save whose folder is gone."""

    step: int
    attempt: int
    commit: int
    """0: never published."""
    folder: str
    present: bool
    age_s: float
    """Since it last changed; 0 where it is gone."""
    lineage: bool
    """Published, and not rolled back."""
    next: bool
    """The next attempt begins from it."""
    pinned: bool
    purge_in_s: float | None
    """Until it may be purged; None: it has no tombstone."""
    purged: bool
    """Gone as retention had announced; what is gone otherwise was taken by somebody else."""
    left: bool = False
    """This folder is a copy, and that one was not brought."""
    mirrors: tuple[str, ...] = ()
    """That it was brought to, as this run remembers it."""
    kept: tuple[Reason, ...] = ()
    """Why retention keeps it; (): it does not."""

    def words(self) -> str:
        """How it stands, for people who know the purge time from elsewhere. To be one of the last needs no word."""
        said = [
            "restored next" if self.next else "", *(reason.words for reason in self.kept if reason.why != "last"),
            "uncommitted" if not self.commit else "rolled back" if not self.lineage else "",
            "" if self.present else "purged" if self.purged else "not copied" if self.left else "GONE",
            f"on {', '.join(self.mirrors)}" if self.mirrors else "",
        ]
        return ", ".join(word for word in said if word)


def listing(survey: Survey, config: CheckpointConfig, restored: Commit | None) -> list[Listed]:
    """By step and attempt. `restored`: what the next attempt begins from (`asked.next_restored`)."""
    lineage, kept = {commit.number for commit in lineage_of(survey.commits)}, reasons(survey, config)
    saves = {commit.folder: commit for commit in survey.commits if commit.kind == "save"}
    found = [
        msgspec.structs.replace(
            _listed(folder, saves.get(folder), survey, config, lineage, restored), kept=tuple(kept.get(folder, ()))
        )
        for folder in dict.fromkeys([*saves, *survey.ages_s])
    ]
    return sorted(found, key=lambda one: (one.step, one.attempt, one.folder))


def purge_in_s(survey: Survey, config: CheckpointConfig, folder: str) -> float | None:
    """Seconds until its tombstone has served its time, 0 when it has; None: it has no tombstone."""
    stone = survey.tombstones.get(folder)
    return None if stone is None else max(0.0, config.grace_s - (survey.now_s - stone.written_s))


def _listed(
    folder: str, commit: Commit | None, survey: Survey, config: CheckpointConfig, lineage: set[int],
    restored: Commit | None,
) -> Listed:
    name = parse_folder(folder)
    step, attempt = (commit.step, commit.attempt) if commit else (name.step, name.attempt) if name else (0, 0)
    left_s, present = purge_in_s(survey, config, folder), folder in survey.ages_s
    number = commit.number if commit else 0
    return Listed(
        step=step, attempt=attempt, commit=number, folder=folder, present=present,
        age_s=survey.ages_s.get(folder, 0.0), lineage=commit is not None and commit.number in lineage,
        next=restored is not None and restored.folder == folder, pinned=folder in survey.pinned,
        purge_in_s=left_s if present else None, purged=not present and left_s is not None,
        left=not present and commit is not None and left_out(survey, commit),
        mirrors=survey.mirrored.get(number, ()),
    )
