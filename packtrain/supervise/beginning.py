"""How a coordinator begins an attempt: from where, its record in the commit log, what its workers are told.

In:   `Begin`, as decided.      Out: a `Begun`, with an error where the log or the folder refuses.
Fails: TermLost: another coordinator leads, and this one stops without another word.
"""

from __future__ import annotations

from contextlib import suppress

from packtrain.checkpoint import slots
from packtrain.checkpoint.asked import wished
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.mirrors import others
from packtrain.checkpoint.reader import missing, open_checkpoint, survey
from packtrain.checkpoint.retention import owed
from packtrain.core.errors import (
    CheckpointDamaged,
    CheckpointUnreadable,
    FormatUnknown,
    PacktrainError,
    RunUnusable,
    TermLost,
)
from packtrain.core.platform import Platform
from packtrain.core.specs import newest_number
from packtrain.core.units import NS
from packtrain.monitor.fold import Facts, failures
from packtrain.supervise.events import Begin, Begun
from packtrain.supervise.held import Taken, taken
from packtrain.supervise.job import Job
from packtrain.supervise.sockets import free_port
from packtrain.supervise.state import State

PORTS, PORTS_COUNT = 29500, 500
"""On another machine nobody looks for a free one: each attempt takes the next."""


def further_back(platform: Platform, run_folder: str, log: CommitLog, back: int) -> int | None:
    """Number of the first save that opens, `back` or more before the one the log leads to; None: go back to none.

    None too when the disk refuses: nobody knows then whether that save is good, and it must not be passed over.
    """
    saves = [commit for commit in log.follow(log.head()) if commit.kind == "save"]
    for save in saves[back:]:
        try:
            open_checkpoint(platform, run_folder, save)
            return save.number
        except (CheckpointDamaged, FormatUnknown):
            continue
        except CheckpointUnreadable:
            return None
    return None


class Beginnings:
    """Of one run, under one term."""

    def __init__(self, platform: Platform, job: Job, log: CommitLog, term: int) -> None:
        self._platform, self._job, self._log, self._term = platform, job, log, term

    def begin(self, id: int, asked: Begin, state: State, past: Facts) -> tuple[Begun, Commit | None]:
        """What came of it, and the record. Raises TermLost."""
        try:
            return self._begin(id, asked, state, past)
        except TermLost:
            raise
        except PacktrainError as error:
            return Begun(id=id, error=error.as_dict()), None
        except OSError as error:
            where = str(error.filename or self._job.run_folder)
            unusable = RunUnusable(
                f"an attempt cannot begin: {error.strerror or error}", where=where,
                fix="see that the disk is there, writable and not full; the same command tries again",
            )
            return Begun(id=id, error=unusable.as_dict()), None

    def _begin(self, id: int, asked: Begin, state: State, past: Facts) -> tuple[Begun, Commit | None]:
        platform, folder = self._platform, self._job.run_folder
        spec = newest_number(platform, folder)  # one for all ranks, also where `packtrain set` writes another meanwhile
        wish = wished(platform, folder, self._log)
        parent = further_back(platform, folder, self._log, asked.back) if asked.back else wish.number if wish else None
        found = self._in_memory(asked, state) if parent is None and not asked.back and asked.memory else Taken()
        begin = self._log.begin(parent, asked.writers, asked.node, memory=found.memory, term=self._term)
        restored = self._log.restore_point()
        platform.mkdir(f"{folder}/logs/{begin.attempt:04d}")
        failed, ns = failures([one for one in past.attempts if one.attempt < begin.attempt])
        away = self._away(restored) if restored is not None and begin.memory is None else ""
        return Begun(
            id=id, attempt=begin.attempt, begin=begin.number, step=begin.step,
            rolled_back=parent is not None, restore=_what(begin, restored),
            memory=begin.memory is not None, memory_from=found.moves, note=away or found.note,
            master=self._master(state, asked.node, begin.attempt), away=bool(away),
            failures=failed, node_minutes=round(ns / (60 * NS)), spec=spec,
        ), begin

    def _in_memory(self, asked: Begin, state: State) -> Taken:
        begun, point = slots.last_begun(self._log), self._log.restore_point()
        if begun is None:
            return Taken()
        return taken(state.nodes, asked.writers, begun, point.step if point is not None else -1)

    def _master(self, state: State, node: str, attempt: int) -> str:
        known = state.nodes.get(node)
        if known is None or known.boot_id == self._platform.boot_id():
            return f"127.0.0.1:{free_port()}"
        return f"{known.host}:{PORTS + attempt % PORTS_COUNT}"

    def _away(self, restored: Commit) -> str:
        """What is said where it was deleted from outside, and a mirror is there to bring it back from; else empty."""
        folder, config = self._job.run_folder, self._job.checkpoint
        with suppress(OSError, PacktrainError):
            file = missing(self._platform, folder, restored) if others(config.mirrors, folder) else ""
            if file and restored in owed(survey(self._platform, folder), config):
                return f"step {restored.step} was taken away from outside ({file}): it is brought back from a mirror " \
                    "before training goes on"
        return ""


def _what(begin: Commit, restored: Commit | None) -> str:
    """What workers restore, as `Launch.restore`."""
    if begin.memory is not None:
        return f"{begin.number}:{begin.memory[2]}"
    return f"{restored.number}:{restored.digest}" if restored is not None else ""
