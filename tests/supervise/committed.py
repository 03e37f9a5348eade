"""A model of the commit log of a run, for the simulation."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.slots import Memory


@dataclass
class Record:
    kind: str
    attempt: int
    step: int
    parent: int
    writers: tuple[str, ...] = ()
    memory: Memory | None = None


class Commits:
    """What the commit log of a run promises: dense numbers, no save of an attempt after another has begun, one term."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.term = 0
        self.refused = 0

    def take_term(self) -> int:
        self.term += 1
        return self.term

    @property
    def attempt(self) -> int:
        return self.records[-1].attempt if self.records else 0

    def lineage(self) -> list[int]:
        """Numbers of the saves that the log leads to, latest first."""
        number, found = len(self.records), []
        while number:
            record = self.records[number - 1]
            found += [number] if record.kind == "save" else []
            number = record.parent
        return found

    def newest(self) -> int:
        """Step of the save that the log leads to; -1: none."""
        saves = self.lineage()
        return self.records[saves[0] - 1].step if saves else -1

    def begun(self) -> Commit | None:
        """The last attempt, as the commit log has it."""
        number = len(self.records)
        while number and self.records[number - 1].kind == "save":
            number = self.records[number - 1].parent
        if not number:
            return None
        one = self.records[number - 1]
        return Commit(
            number=number, kind="begin", attempt=one.attempt, step=one.step, parent=one.parent, nonce=f"b{number}",
            writers=one.writers, memory=one.memory,
        )

    def begin(self, back: int, writers: tuple[str, ...] = (), memory: Memory | None = None) -> tuple[int, int, int]:
        """(attempt, number, step it restores)"""
        saves = self.lineage()
        parent = saves[min(back, len(saves) - 1)] if back and saves else len(self.records)
        self.records.append(Record("begin", self.attempt + 1, -1, parent, writers, memory))
        step = self.records[-1].step = memory[1] if memory else self.newest()
        return self.attempt, len(self.records), step

    def publish(self, attempt: int, step: int) -> bool:
        if attempt != self.attempt:
            self.refused += 1
            return False
        self.records.append(Record("save", attempt, step, len(self.records)))
        return True
