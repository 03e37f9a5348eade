"""What a coordinator waits for beside its nodes: a checkpoint on its way back, retention, mirrors. Looked at, never
waited for: the loop goes on. Each has a bound, and where a run has no mirrors nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.mirrors import others
from packtrain.checkpoint.reader import missing
from packtrain.core.errors import CheckpointLost, PacktrainError
from packtrain.core.platform import Platform
from packtrain.core.records import ErrorSeen
from packtrain.core.units import NS
from packtrain.supervise.job import Job

RETAIN_NS = 10 * NS
"""How long the end of an attempt may wait for retention; what is left is planned again next time."""
LOOK_NS = NS // 2


@dataclass
class Wait:
    """For the action `id`, until `over` says so or `end_ns`."""

    id: int
    over: Callable[[], bool]
    end_ns: int
    looked_ns: int = 0


class Waits:
    """Of one run. Times are of the watched clock."""

    def __init__(self, platform: Platform, job: Job, log: CommitLog) -> None:
        self._platform, self._job, self._log = platform, job, log
        self._mirrors = others(job.checkpoint.mirrors, job.run_folder)
        self._waits: list[Wait] = []
        self._lost: set[str] = set()
        """Checkpoint folders that were said to be lost."""

    def noted(self, record: object) -> None:
        """A journal record has arrived."""
        if isinstance(record, ErrorSeen) and record.name == CheckpointLost.name:
            self._lost.add(record.where.rpartition("/")[2])

    def until_back(self, id: int, ns: int) -> None:
        """One try: where it does not come back the worker finds it damaged, and the run goes back to an older one."""
        self._lost.clear()
        patience_s = sum(mirror.deadline_s for mirror in self._mirrors)
        self._waits.append(Wait(id, self._is_back, ns + round(patience_s * NS)))

    def _is_back(self) -> bool:
        with suppress(OSError, PacktrainError):
            restored = self._log.restore_point()
            if restored is None or restored.folder in self._lost:
                return True
            return not missing(self._platform, self._job.run_folder, restored)
        return False

    def until(self, id: int, over: Callable[[], bool], ns: int) -> None:
        """For retention, that is, for what `over` says."""
        self._waits.append(Wait(id, over, ns + RETAIN_NS))

    def look(self, ns: int) -> list[int]:
        """Ids of the actions that are over now."""
        over = [wait for wait in self._waits if self._is_over(wait, ns)]
        self._waits = [wait for wait in self._waits if wait not in over]
        return [wait.id for wait in over]

    def _is_over(self, wait: Wait, ns: int) -> bool:
        if ns < wait.looked_ns + LOOK_NS and ns < wait.end_ns:
            return False
        wait.looked_ns = ns
        return wait.over() or ns >= wait.end_ns
