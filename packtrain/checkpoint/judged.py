"""How good a run's states were, read from its journal: what best.py judges by.

Only what rank 0 of the trainer wrote counts, and each of its writers names its attempt (`TrainerStarted`). A writer may
die while its disk refuses an evaluation, so the silence of one is believed only up to the last step that it told of, or
for good where it told how it ended; and never where something of it is missing, damaged, or told to be lost. Nothing is
believed of an attempt that the journal does not know (it was deleted, or the run was promoted from a place of copies).
"""

from __future__ import annotations

import math

from packtrain.checkpoint.best import Evaluation, Judged
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.core.journal import MISSING, UNREADABLE, Entry, Tail, Unknown, writer_of
from packtrain.core.platform import Platform
from packtrain.core.records import ErrorSeen, EvalDone, RecordsLost, SaveDone, StepDone, TrainerStarted, TrainingDone

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
        self._read_to: dict[str, float] = {}
        """Writer -> the last step that it told of; inf: it told how it ended."""
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
                self._reached(entry.writer, done.step)
            case StepDone() | SaveDone() as told:
                self._reached(entry.writer, told.step)
            case TrainingDone() | ErrorSeen(severity="error"):
                self._reached(entry.writer, math.inf)
            case RecordsLost():
                self._torn.add(entry.writer)
            case Unknown(kind="eval" | "trainer_started"):
                self._torn.add(entry.writer)

    def _reached(self, writer: str, step: float) -> None:
        self._read_to[writer] = max(step, self._read_to.get(writer, 0))

    def _judged(self, torn: set[str]) -> Judged:
        read_to: dict[int, float] = {}
        for writer, attempt in self._attempts.items():
            to = 0 if writer in torn else self._read_to.get(writer, 0)
            read_to[attempt] = min(to, read_to.get(attempt, math.inf))
        evaluations = [
            _evaluation(self._attempts[writer], done)
            for (writer, *_), done in self._found.items() if writer in self._attempts
        ]
        return Judged(tuple(evaluations), read_to)


def _evaluation(attempt: int, done: EvalDone) -> Evaluation:
    return Evaluation(attempt, done.step, done.final, done.store, done.loss, done.bits_per_byte, done.tokens)
