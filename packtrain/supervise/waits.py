"""What a coordinator waits for beside its nodes: a checkpoint on its way back, retention, mirrors. Looked at, never
waited for: the loop goes on. Each has a bound, and where a run has no mirrors nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import Mirror
from packtrain.checkpoint.mirrors import others
from packtrain.checkpoint.reader import missing
from packtrain.core.errors import CheckpointLost, PacktrainError
from packtrain.core.platform import Platform
from packtrain.core.records import ErrorSeen, MirrorDone
from packtrain.core.units import NS
from packtrain.supervise.job import Job
from packtrain.supervise.mirrors import has, missing_file, names

RETAIN_NS = 10 * NS
"""How long the end of an attempt may wait for retention; what is left is planned again next time."""
LOOK_NS = NS // 2
"""Between two looks at a disk."""


@dataclass
class Wait:
    """For the action `id`, until `over` says so or `end_ns`. An action may wait for several things."""

    id: int
    over: Callable[[], bool]
    end_ns: int
    text: Callable[[], str] = str
    """What is waited for, for people; empty: nothing that they would miss."""
    every_ns: int = 0
    """Between two looks, where one costs something."""
    looked_ns: int = 0


class Waits:
    """Of one run. Times are of the watched clock."""

    def __init__(self, platform: Platform, job: Job, log: CommitLog) -> None:
        self._platform, self._job, self._log = platform, job, log
        self._mirrors = others(job.checkpoint.mirrors, job.run_folder)
        self._waits: list[Wait] = []
        self._lost: set[str] = set()
        """Checkpoint folders that were said to be lost."""
        self._tried: dict[str, int] = {}
        """Mirror -> commit that was brought there, or failed to be."""

    def noted(self, record: object) -> None:
        """A journal record has arrived."""
        if isinstance(record, MirrorDone):
            self._tried[record.mirror] = record.commit
        elif isinstance(record, ErrorSeen) and record.name == CheckpointLost.name:
            self._lost.add(record.where.rpartition("/")[2])

    @property
    def text(self) -> str:
        """What is waited for, for people; empty: nothing, or nothing that takes long."""
        return "; ".join(text for wait in self._waits if (text := wait.text()))

    def until_back(self, id: int, ns: int) -> None:
        """One try: where it does not come back the worker finds it damaged, and the run goes back to an older one."""
        self._lost.clear()
        end_ns = ns + _patience_ns(self._mirrors)
        text = "bringing a checkpoint back that was taken away"
        self._waits.append(Wait(id, self._is_back, end_ns, lambda: text, LOOK_NS))

    def _is_back(self) -> bool:
        with suppress(OSError, PacktrainError):
            restored = self._log.restore_point()
            if restored is None or restored.folder in self._lost:
                return True
            return not missing(self._platform, self._job.run_folder, restored)
        return False

    def until_wrapped(self, id: int, retained: Callable[[], bool], done: bool, ns: int) -> None:
        """For retention; when the run is `done` for its last checkpoint to be tried at every mirror, too."""
        self._waits.append(Wait(id, retained, ns + RETAIN_NS))
        point, behind = self._behind() if done else (None, ())
        if point is not None and behind:
            self._until_brought(id, point, behind, ns)

    def _until_brought(self, id: int, point: Commit, behind: Sequence[Mirror], ns: int) -> None:
        self._tried.clear()
        self._lost.clear()
        self._waits.append(Wait(
            id, lambda: not self._may_come(point, behind), ns + _patience_ns(behind),
            lambda: self._bringing(point, behind), LOOK_NS,
        ))

    def _behind(self) -> tuple[Commit | None, Sequence[Mirror]]:
        """The last checkpoint, and the mirrors that lack it. What cannot be known now is told at the end."""
        point: Commit | None = None
        with suppress(OSError, PacktrainError):
            point = self._log.restore_point() if self._mirrors else None
        if point is None:
            return None, ()
        return point, [one for one in self._mirrors if not self._has(one, point)]

    def _may_come(self, point: Commit, behind: Sequence[Mirror]) -> bool:
        """Once tried at each nobody waits on: the next try may be an hour away."""
        lost = point.folder in self._lost and missing_file(self._platform, self._job.run_folder, point)
        return not lost and any(self._tried.get(mirror.name) != point.number for mirror in behind)

    def _bringing(self, point: Commit, behind: Sequence[Mirror]) -> str:
        left = [mirror for mirror in behind if self._tried.get(mirror.name) != point.number]
        return f"bringing step {point.step} to {names(left)} (asked to stop twice, the run ends without it)"

    def _has(self, mirror: Mirror, point: Commit) -> bool:
        return has(self._platform, self._job.run_folder, mirror, point)

    def look(self, ns: int) -> list[int]:
        """Ids of the actions that are over now."""
        over = [wait for wait in self._waits if self._is_over(wait, ns)]
        self._waits = [wait for wait in self._waits if wait not in over]
        going_on = {wait.id for wait in self._waits}
        return sorted({wait.id for wait in over} - going_on)

    def _is_over(self, wait: Wait, ns: int) -> bool:
        if ns < wait.looked_ns + wait.every_ns and ns < wait.end_ns:
            return False
        wait.looked_ns = ns
        return wait.over() or ns >= wait.end_ns


def _patience_ns(mirrors: Iterable[Mirror]) -> int:
    """Each has its own deadline, and one thread may see to all of them."""
    return round(sum(mirror.deadline_s for mirror in mirrors) * NS)
