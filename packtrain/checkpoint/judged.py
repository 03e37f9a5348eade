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
from packtrain.checkpoint.mirrors import retry_s
from packtrain.core.journal import MISSING, UNREADABLE, Entry, Tail, Unknown, writer_of
from packtrain.core.platform import Platform
from packtrain.core.records import ErrorSeen, EvalDone, RecordsLost, SaveDone, StepDone, TrainerStarted, TrainingDone
from packtrain.core.units import NS

SPEAKER = "trainer0-"
"""How the names of rank 0's writers begin."""


class Judging:
    """Of one run, for as long as somebody asks. Used by one thread at a time; each look reads what is new."""

    def __init__(self, platform: Platform, run_folder: str, config: CheckpointConfig) -> None:
        self._platform = platform
        self._wanted = config.keep_best > 0
        self._tail = Tail(platform, f"{run_folder}/journal", SPEAKER)
        self._again: dict[str, tuple[int, int]] = {}
        """Writer that was not read whole -> how often it was read anew, and when it may be next."""
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
        self._read_anew()
        for entry in self._tail.poll():
            self._take(entry)
        return self._judged(self._torn | {writer_of(one.file) for one in self._tail.damage if one.alarming})

    def _read_anew(self) -> None:
        """Writers of which something was not there: it may be now (a disk that refused, a segment that came late). With
        growing pauses, for it may be gone for good."""
        now_ns = self._platform.boot_ns()
        for writer in {writer_of(one.file) for one in self._tail.damage if one.reason in (UNREADABLE, MISSING)}:
            tries, due_ns = self._again.get(writer, (0, now_ns))
            if now_ns >= due_ns:
                self._again[writer] = tries + 1, now_ns + round(retry_s(tries + 1) * NS)
                self._forget(writer)

    def _forget(self, writer: str) -> None:
        self._tail.forget(writer)
        self._attempts.pop(writer, None)
        self._read_to.pop(writer, None)
        self._torn.discard(writer)
        for key in [key for key in self._found if key[0] == writer]:
            del self._found[key]

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
