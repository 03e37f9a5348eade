"""How fast a copy may go beside a run that trains: it gives way when steps take longer than before it began.

The step times are those rank 0 writes into the journal; its last lines are enough, so a month's journal costs nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from packtrain.core.platform import Platform
from packtrain.core.units import MIB, NS

LOOK_NS = 2 * NS
TAIL_BYTES = 1 << 16
STEPS_MIN = 4
"""Steps that a judgement needs."""
STEPS_MAX = 32
SLOWER = 1.1
"""Steps that take this much longer than before are taken to suffer."""
SHARE_MIN = 1 / 64
UNCAPPED_BYTES_PER_S = 256.0 * MIB
"""What a share is of, where there is no cap."""


class Share:
    """Of the full rate, by what steps took: halved where they suffer, grown where they do not. Pure.

    A share as small as it gets under steps that still suffer is not to blame: what they take then is the new measure.
    """

    def __init__(self, before_s: Sequence[float]) -> None:
        """`before_s`: step times before the copy began; too few: the first that come are the measure."""
        self.share = 1.0
        self._usual_s = statistics.median(before_s) if len(before_s) >= STEPS_MIN else 0.0
        self._seen: list[float] = []

    def heard(self, steps_s: Sequence[float]) -> None:
        """Steps that ended since the last call."""
        self._seen += steps_s
        if len(self._seen) < STEPS_MIN:
            return
        now_s, self._seen = statistics.median(self._seen), []
        suffers = self._usual_s > 0 and now_s > SLOWER * self._usual_s
        if not self._usual_s or (suffers and self.share <= SHARE_MIN):
            self._usual_s = now_s
        self.share = max(SHARE_MIN, self.share / 2) if suffers else min(1.0, self.share * 1.5)


class Yielding:
    """A rate for `transfer.copy`, asked before every chunk."""

    def __init__(self, platform: Platform, run_folder: str, bytes_per_s_max: float) -> None:
        """`bytes_per_s_max` inf: no cap, until steps suffer."""
        self._platform, self._folder, self._cap = platform, f"{run_folder}/journal", bytes_per_s_max
        before = self._steps()
        self._last = max(before, default=-1)
        self._share = Share(list(before.values()))
        self._look_ns = platform.boot_ns() + LOOK_NS

    def __call__(self) -> float:
        now_ns = self._platform.boot_ns()
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            new = {step: seconds for step, seconds in self._steps().items() if step > self._last}
            self._last = max(new, default=self._last)
            self._share.heard(list(new.values()))
        share = self._share.share
        return self._cap if share == 1.0 else share * min(self._cap, UNCAPPED_BYTES_PER_S)

    def _steps(self) -> dict[int, float]:
        """Seconds of the last steps, by step; {} where nobody trains or the journal cannot be read."""
        try:
            names = [name for name in self._platform.listdir(self._folder) if name.startswith("trainer0-")]
            paths = [f"{self._folder}/{name}" for name in names]
            if not paths:
                return {}
            newest = max(paths, key=self._platform.modified_s)
            start = max(0, self._platform.size(newest) - TAIL_BYTES)
            lines = self._platform.read(newest, start, TAIL_BYTES).splitlines()
        except OSError:
            return {}
        found = dict(step for line in lines if (step := step_of(line)) is not None)
        return {step: found[step] for step in sorted(found)[-STEPS_MAX:]}


class _Step(msgspec.Struct, tag_field="kind", tag="step"):
    step: int
    seconds: float


class _Line(msgspec.Struct):
    record: _Step


def step_of(line: bytes) -> tuple[int, float] | None:
    """(step, seconds) of a journal line; None where it tells of something else, or is torn."""
    try:
        record = msgspec.json.decode(line, type=_Line).record
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return (record.step, record.seconds) if math.isfinite(record.seconds) else None
