"""What the foreground waits for where a run has mirrors: at the beginning of an attempt for a checkpoint that was
deleted from outside and is on its way back, at the end of the run for its last checkpoint to be everywhere.

The carrier does both (checkpoint/mirroring.py); here is only looked, until it is done, cannot be, or a person asks to
stop.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.mirrors import holders, others, read_state
from packtrain.checkpoint.reader import missing, survey
from packtrain.checkpoint.retention import owed
from packtrain.core.errors import CheckpointLost, PacktrainError
from packtrain.core.platform import Platform, Process
from packtrain.core.records import ErrorSeen, MirrorDone
from packtrain.core.units import NS

HURRY = signal.SIGUSR1
"""Tells the carrier that the run is done: what is due some time is due now."""


class Waits:
    """Of one run."""

    def __init__(
        self, platform: Platform, run_folder: str, config: CheckpointConfig, look: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        """`look` waits a moment and hears what there is to hear; True: a person asks to stop."""
        self._platform, self._run_folder, self._config = platform, run_folder, config
        self._mirrors = others(config.mirrors, run_folder)
        self._look, self._say = look, say
        self._told_lost = False
        self._tried: dict[str, int] = {}
        """Mirror -> commit that was brought there, or failed to be."""

    def noted(self, record: object) -> None:
        """A journal record has arrived."""
        if isinstance(record, MirrorDone):
            self._tried[record.mirror] = record.commit
        elif isinstance(record, ErrorSeen) and record.name == CheckpointLost.name:
            self._told_lost = True

    def until_back(self, restored: Commit, carrier: Process) -> None:
        """A worker would only find it damaged, and the run go back to an older one. One try: if that fails, it does."""
        file = self._missing(restored)
        if not file or not self._mirrors or not self._is_owed(restored):
            return
        self._told_lost = False
        self._say(
            f"step {restored.step} was taken away from outside ({file}): it is brought back from a mirror before "
            "training goes on (Ctrl-C stops)"
        )
        end_ns = self._end_ns(self._mirrors)
        while self._missing(restored) and not self._told_lost and self._goes_on(carrier, end_ns):
            continue

    def until_brought(self, point: Commit | None, carrier: Process) -> None:
        """The last checkpoint of a run that is done goes to every mirror at once, whatever the cadence."""
        behind = [] if point is None else [mirror for mirror in self._mirrors if not self._has(mirror, point)]
        if point is None or not behind:
            return
        names = ", ".join(mirror.name for mirror in behind)
        self._say(f"bringing step {point.step} to {names} (Ctrl-C leaves it)")
        self._tried.clear()
        carrier.send_signal(HURRY)
        end_ns = self._end_ns(behind)
        while any(self._tried.get(mirror.name) != point.number for mirror in behind):
            if not self._goes_on(carrier, end_ns):
                self._say(f"left: not every mirror has step {point.step}; packtrain ckpt copy brings it")
                return
        having = [mirror.name for mirror in behind if self._has(mirror, point)]
        if having:
            self._say(f"step {point.step} is on {', '.join(having)}")

    def _goes_on(self, carrier: Process, end_ns: int) -> bool:
        return not self._look() and carrier.poll() is None and self._platform.boot_ns() < end_ns

    def _end_ns(self, mirrors: Sequence[Mirror]) -> int:
        return self._platform.boot_ns() + int(sum(mirror.deadline_s for mirror in mirrors) * NS)

    def _is_owed(self, commit: Commit) -> bool:
        """Whether the carrier brings it back at all."""
        with suppress(OSError, PacktrainError):
            return commit in owed(survey(self._platform, self._run_folder), self._config)
        return False

    def _missing(self, commit: Commit) -> str:
        """"" too where the disk refuses to say: then the worker says it."""
        with suppress(OSError, PacktrainError):
            return missing(self._platform, self._run_folder, commit)
        return ""

    def _has(self, mirror: Mirror, commit: Commit) -> bool:
        state = read_state(self._platform, self._run_folder, mirror.name, mirror.place)
        return bool(holders([state]).get(commit.number))
