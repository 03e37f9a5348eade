"""Makes a place of copies the run: its log is the one that goes on, and that of the old place is closed.

There must never be two places in which the next attempt of one run may begin. The old log decides: its last record is
created exclusively, like any other, and names the one place it goes on in. So it is closed first, and with it the
attempts that may still be alive there: none of them publishes afterwards, none begins, and a second place is refused.
Only then a record of the new log says that it is no copy any more. Killed in between, the same call goes on.

Where the old log cannot be reached nothing can close it. Then a person must say that it is lost; if it is not, whatever
still trains there goes on and publishes there, and neither place hears of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from packtrain.checkpoint.asked import next_restored
from packtrain.checkpoint.commits import DIGITS, Commit, CommitLog
from packtrain.checkpoint.reader import COPIED, verify_commit
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
    copied = _copied(platform, place)
    last = records[-1] if records else None
    taken = _was_taken(records, copied)
    if last is None or not (taken or last.number <= copied):
        raise _refused("this is no place of copies, or has been gone on with", place, _USE)
    restored = _verified(platform, place, log, told)
    theirs = _old_log(platform, old, records[:copied], place)
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


def _copied(platform: Platform, place: str) -> int:
    """The highest record whose checkpoint was brought here; 0: none."""
    folder = f"{place}/{COPIED}"
    names = platform.listdir(folder) if platform.exists(folder) else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _was_taken(records: list[Commit], copied: int) -> bool:
    """Whether what follows what was copied is the record by which this place was taken over."""
    after = records[copied : copied + 1]
    return bool(after) and after[0].kind == "moved" and not after[0].place


def _verified(platform: Platform, place: str, log: CommitLog, told: Callable[[int], None]) -> Commit:
    """What the next attempt begins from, every byte of it read."""
    restored = next_restored(platform, place, log)
    if restored is None:
        raise _refused("this place has no checkpoint to go on from", place, "copy one there")
    damage = verify_commit(platform, place, restored, told)
    if damage:
        raise _refused(
            f"step {restored.step}, from which it would go on, is damaged: {damage[0].file}: {damage[0].what}", place,
            f"mend it: packtrain ckpt repair {place} --from ANOTHER; or choose another: packtrain ckpt restore {place} "
            "STEP",
        )
    return restored


def _old_log(platform: Platform, old: str | None, copied: list[Commit], place: str) -> list[Commit] | None:
    """All records of the run; None: it cannot be reached or read. Raises PromoteRefused where it is another run's."""
    if old is None:
        return None
    try:
        theirs = CommitLog(platform, f"{old}/commits").all()
    except CommitUnknown:
        return None
    if theirs[: len(copied)] != copied:
        raise _refused(
            "what was copied there is of another run, or this run went back behind it", place,
            "give the run whose copies these are",
        )
    return theirs


def _closed(platform: Platform, old: str | None, place: str) -> Commit | None:
    """The last record of the old log. None: it can be read and not written, or who knows."""
    try:
        return CommitLog(platform, f"{old}/commits").close(place)
    except CommitUnknown:
        return None


def _refused(what: str, where: str, fix: str) -> PromoteRefused:
    return PromoteRefused(what, where=where, fix=fix)
