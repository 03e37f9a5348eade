"""How good a run's states were, read from its journal: what best.py judges by.

Only what rank 0 of the trainer wrote counts, and each of its writers names its attempt (`TrainerStarted`). An attempt
is whole when its writers were read and nothing of them is missing, damaged, or told to be lost. One that the journal
does not know of (it was deleted, or the run was promoted from a place of copies) is not.
"""

from __future__ import annotations

from packtrain.checkpoint.best import Evaluation, Judged
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.core.journal import MISSING, UNREADABLE, Entry, Tail, Unknown, writer_of
from packtrain.core.platform import Platform
from packtrain.core.records import EvalDone, RecordsLost, TrainerStarted

SPEAKER = "trainer0-"
"""How the names of rank 0's writers begin."""


class Judging:
    """Of one run, for as long as somebody asks. Used by one thread at a time; each look reads what is new."""

    def __init__(self, platform: Platform, run_folder: str, config: CheckpointConfig) -> None:
        self._platform, self._folder = platform, f"{run_folder}/journal"
        self._wanted = config.keep_best > 0
        self._begin()

    def _begin(self) -> None:
        self._tail = Tail(self._platform, self._folder)
        self._attempts: dict[str, int] = {}
        """Writer -> its attempt."""
        self._torn: set[str] = set()
        """Writers of which something is lost."""
        self._found: dict[tuple[str, int, bool, str], EvalDone] = {}

    def look(self) -> Judged:
        """What is known now; nothing where nothing is kept for being good. Raises OSError where the journal cannot be
        listed."""
        if not self._wanted:
            return Judged()
        for entry in self._tail.poll():
            if entry.writer.startswith(SPEAKER):
                self._take(entry)
        damage = [one for one in self._tail.damage if one.alarming and one.file.startswith(SPEAKER)]
        judged = self._judged(self._torn | {writer_of(one.file) for one in damage})
        if any(one.reason in (UNREADABLE, MISSING) for one in damage):
            self._begin()  # it may be there next time: a disk that refused, a segment that came late
        return judged

    def _take(self, entry: Entry) -> None:
        match entry.record:
            case TrainerStarted() as started:
                self._attempts[entry.writer] = started.attempt
            case EvalDone() as done:
                self._found[entry.writer, done.step, done.final, done.store] = done
            case RecordsLost():
                self._torn.add(entry.writer)
            case Unknown(kind="eval" | "trainer_started"):
                self._torn.add(entry.writer)

    def _judged(self, torn: set[str]) -> Judged:
        doubtful = {attempt for writer, attempt in self._attempts.items() if writer in torn}
        evaluations = [
            _evaluation(self._attempts[writer], done)
            for (writer, *_), done in self._found.items() if writer in self._attempts
        ]
        return Judged(tuple(evaluations), frozenset(self._attempts.values()) - doubtful)


def _evaluation(attempt: int, done: EvalDone) -> Evaluation:
    return Evaluation(attempt, done.step, done.final, done.store, done.loss, done.bits_per_byte, done.tokens)
