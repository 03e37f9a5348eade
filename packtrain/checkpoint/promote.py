"""Makes a place of copies the run: its log is the one that goes on, and that of the old place is closed.

There must never be two places in which the next attempt of one run may begin. The old log decides: its last record is
created exclusively, like any other, and names the one place it goes on in. So it is closed first, and with it the
attempts that may still be alive there: none of them publishes afterwards, none begins, and a second place is refused.
Only then a record of the new log says that it is no copy any more. Killed in between, the same call goes on.

What the old log leads to decides where the place goes on, also where that is not the latest copy because the run went
back, or was asked to: then the place begins from there too, or is refused until it has that save.

Where the old log cannot be reached nothing can close it. Then a person must say that it is lost; if it is not, whatever
still trains there goes on and publishes there, and neither place hears of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from packtrain.checkpoint.asked import next_restored, wished
from packtrain.checkpoint.commits import DIGITS, Commit, CommitLog
from packtrain.checkpoint.reader import copied_numbers, verify_commit
from packtrain.core.errors import CommitUnknown, PromoteRefused
from packtrain.core.platform import Platform


class Promoted(NamedTuple):
    """What the place is now."""

    restored: Commit
    """What its next attempt begins from."""
    closed: bool
    """The old log; False: it was said to be lost."""
    left: tuple[Commit, ...]
    """Saves of the old log that never came to this place, oldest first."""


def promote(
    platform: Platform, old: str | None, place: str, lost: bool = False,
    told: Callable[[int], None] = lambda n_bytes: None,
) -> Promoted:
    """Make the folder `place` the run whose copies it holds; `old` is the folder of the run, None: not to be found.

    Call it while holding both. Everything the next attempt reads is verified first. Raises PromoteRefused, RunMoved
    where the old log goes on elsewhere already, and what reading the new log raises. `lost`: go on although the old
    log cannot be closed. Called again after a kill, or after all went well, it ends in the same state.
    """
    log = CommitLog(platform, f"{place}/commits")
    records = _whole_log(platform, place, log)
    log.probe()
    named = copied_numbers(platform, place, records)
    brought = [number for number in named if number <= len(records)]  # the others are under way
    copied = max(brought, default=0) if len(brought) == len(named) else len(records)
    last = records[-1] if records else None
    taken = _was_taken(records, copied)
    if last is None or not (taken or last.number <= copied):
        raise _refused("this is no place of copies, or has been gone on with", place, _USE)
    theirs = _old_log(platform, old, records[:copied], place)
    behind = len(theirs or ()) < copied  # it has lost its last records: what it leads to is not where it was
    restored = _chosen(platform, None if taken or behind else old, place, log, brought)
    _verify(platform, place, restored, told)
    left = tuple(one for one in theirs or () if one.kind == "save" and one.number > copied)
    closed = _closed(platform, old, place) if theirs is not None else None
    if closed is None and not lost:
        raise _refused(
            "the log of the run cannot be closed: it cannot be reached, read or written", old or "the run",
            "bring it back and give the same command; if it is gone for good, and nothing can train there any more, "
            "add --lost: should something still train there, it will go on, and the run exists twice",
        )
    if not taken:
        parent = restored.number if restored != log.restore_point() else last.number
        log.take_over(parent, closed.attempt if closed else 0)
    return Promoted(restored, closed is not None, left)


_USE = "give the folder that `packtrain ckpt copy` or a mirror filled; a run of its own is trained by its own name"


def is_origin(platform: Platform, run_folder: str, place: str) -> bool:
    """Whether an attempt may begin in `run_folder`, and the log in `place` began there. False where one cannot be read.
    """
    try:
        records = CommitLog(platform, f"{run_folder}/commits").all()
        first = CommitLog(platform, f"{place}/commits").read(1)
        copied = max(copied_numbers(platform, run_folder, records), default=0)
    except (CommitUnknown, OSError):
        return False
    if not records or records[0] != first or (records[-1].kind == "moved" and records[-1].place):
        return False
    return records[-1].number > copied


def _whole_log(platform: Platform, place: str, log: CommitLog) -> list[Commit]:
    """Every record, read and checked. Raises PromoteRefused where there are names beyond the head: a hole."""
    records = log.all()
    names = [name for name in platform.listdir(f"{place}/commits") if name.isdecimal()]
    if names != [f"{number:0{DIGITS}d}" for number in range(1, len(records) + 1)]:
        raise _refused(
            f"the log has {len(records)} records, and {len(names)} files: one of them is missing", f"{place}/commits",
            "copy the checkpoint there once more, or promote another place",
        )
    return records


def _was_taken(records: list[Commit], copied: int) -> bool:
    """Whether behind what was copied is the record by which this place was taken over."""
    return any(one.kind == "moved" and not one.place for one in records[copied:])


def _chosen(platform: Platform, old: str | None, place: str, log: CommitLog, brought: Collection[int]) -> Commit:
    """What the next attempt begins from: what was asked for in the place, or the save that the run in `old` would go on
    from, or, where that is later than all copies, the one the place's log leads to."""
    here = next_restored(platform, place, log)
    if here is None:
        raise _refused("this place has no checkpoint to go on from", place, "copy one there")
    if old is None or wished(platform, place, log) is not None:
        return here
    theirs = CommitLog(platform, f"{old}/commits")
    wanted = next_restored(platform, old, theirs)
    if wanted is not None and wanted.number in brought:
        return wanted
    if wanted is None or here in theirs.follow(wanted.number):
        return here
    raise _refused(
        f"the run went back: it goes on from step {wanted.step}, which is not here, and not from step {here.step}",
        place,
        f"packtrain ckpt copy {old} --step {wanted.step} --to {place}, then the same command; or choose another: "
        f"packtrain ckpt restore {place} STEP",
    )


def _verify(platform: Platform, place: str, restored: Commit, told: Callable[[int], None]) -> None:
    """Every byte of what the next attempt begins from."""
    damage = verify_commit(platform, place, restored, told)
    if damage:
        raise _refused(
            f"step {restored.step}, from which it would go on, is damaged: {damage[0].file}: {damage[0].what}", place,
            f"mend it: packtrain ckpt repair {place} --from ANOTHER; or choose another: packtrain ckpt restore {place} "
            "STEP",
        )


def _old_log(platform: Platform, old: str | None, copied: list[Commit], place: str) -> list[Commit] | None:
    """All records of the run but the one that closes it for this place; None: it cannot be reached or read. Raises
    PromoteRefused where it is another run's.

    A log that ends before the copies do, and is the same up to there, is this run's: its last records were lost.
    """
    if old is None:
        return None
    try:
        theirs = CommitLog(platform, f"{old}/commits").all()
    except CommitUnknown:
        return None
    if theirs and theirs[-1].kind == "moved" and theirs[-1].place == place:
        del theirs[-1]
    if not theirs or theirs[: len(copied)] != copied[: len(theirs)]:
        raise _refused(
            "what was copied there is of another run, or this run went back behind it", place,
            "give the run whose copies these are",
        )
    return theirs


def _closed(platform: Platform, old: str | None, place: str) -> Commit | None:
    """The last record of the old log. None: it can be read and not written, or who knows.

    It leads to what was asked for there, which that record would end: called again after a kill, this goes on from it.
    """
    log = CommitLog(platform, f"{old}/commits")
    try:
        asked = wished(platform, str(old), log)
        return log.close(place, asked.number if asked else 0)
    except CommitUnknown:
        return None


def _refused(what: str, where: str, fix: str) -> PromoteRefused:
    return PromoteRefused(what, where=where, fix=fix)
