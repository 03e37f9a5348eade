"""What a coordinator waits for beside its nodes: a checkpoint on its way back, retention, mirrors. Looked at, never
waited for: the loop goes on, and a disk is asked in an errand (papers.py), so that one that hangs stops nobody. Each
has a bound, and where a run has no mirrors nothing is waited for.
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
from packtrain.supervise.papers import Do

RETAIN_NS = 10 * NS
"""How long the end of an attempt may wait for retention; what is left is planned again next time."""
LOOK_NS = NS // 2
"""Between two looks at a disk."""
WAIT = "wait"
"""Kind of the errand."""


@dataclass
class Wait:
    """For the action `id`, until `over` says so or `end_ns`. An action may wait for several things."""

    id: int
    over: Callable[[], bool]
    end_ns: Callable[[], int]
    text: Callable[[], str] = str
    """What is waited for, for people; empty: nothing that they would miss."""
    disk: bool = False
    """`over` asks a disk."""
    looked_ns: int = 0
    was_over: bool = False
    """What the disk said last."""

    def told(self, over: bool | Exception) -> None:
        if isinstance(over, Exception):
            raise over
        self.was_over = over


class Waits:
    """Of one run. Times are of the watched clock. `log`: nobody else's, for it is read in errands."""

    def __init__(self, platform: Platform, job: Job, log: CommitLog, do: Do) -> None:
        self._platform, self._job, self._log, self._do = platform, job, log, do
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
        self._waits.append(Wait(id, self._is_back, lambda: end_ns, lambda: text, disk=True))

    def _is_back(self) -> bool:
        with suppress(OSError, PacktrainError):
            restored = self._log.restore_point()
            if restored is None or restored.folder in self._lost:
                return True
            return not missing(self._platform, self._job.run_folder, restored)
        return False

    def until_wrapped(self, id: int, retained: Callable[[], bool], done: bool, ns: int) -> None:
        """For retention; when the run is `done` for its last checkpoint to be tried at every mirror, too."""
        self._waits.append(Wait(id, retained, lambda: ns + RETAIN_NS))
        if done and self._mirrors:
            self._until_brought(id, ns)

    def _until_brought(self, id: int, ns: int) -> None:
        self._tried.clear()
        self._lost.clear()
        found = list[tuple[Commit | None, Sequence[Mirror]]]()

        def over() -> bool:
            if not found:
                found.append(self._behind())
            point, behind = found[0]
            return point is None or not self._may_come(point, behind)

        def text() -> str:
            point, behind = found[0] if found else (None, ())
            return self._bringing(point, behind) if point is not None else ""

        self._waits.append(Wait(
            id, over, lambda: ns + _patience_ns(found[0][1] if found else self._mirrors), text, disk=True
        ))

    def _behind(self) -> tuple[Commit | None, Sequence[Mirror]]:
        """The last checkpoint, and the mirrors that lack it. What cannot be known now is told at the end."""
        point: Commit | None = None
        with suppress(OSError, PacktrainError):
            point = self._log.restore_point()
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
        if not wait.disk:
            return wait.over() or ns >= wait.end_ns()
        if ns >= wait.looked_ns + LOOK_NS and self._do(WAIT, wait.over, wait.told):
            wait.looked_ns = ns
        return wait.was_over or ns >= wait.end_ns()


def _patience_ns(mirrors: Iterable[Mirror]) -> int:
    """Each has its own deadline, and one thread may see to all of them."""
    return round(sum(mirror.deadline_s for mirror in mirrors) * NS)
