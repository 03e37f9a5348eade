"""How a run is kept alive. Silence is noticed before a standstill; that and each value alone is checked here."""

from __future__ import annotations

import msgspec

from packtrain.core.errors import Contradiction

FIRST_BEAT_FACTOR = 2
"""Silence allowed before the first beat, in `beat_overdue_s`: an interpreter starts slowly on a busy machine."""

CARRIER_OVERDUE_S_MIN = 5.0


class SuperviseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    grace_s: float = 60.0
    """From "save and stop" to SIGKILL."""
    beat_overdue_s: float = 60.0
    """Beats (repeated every second by a thread) silent for this long: the worker is taken for dead."""
    progress_s: float = 1800.0
    """No step completed for this long, though beats come: killed and started again. 0: never. Counted from the second
    step heard of (the first compiles), and not while the worker compiles, restores, saves, evaluates or pauses."""
    carrier_overdue_s: float = 30.0
    """The carrier answers nothing for this long (twice that when it starts), or a thread of it hangs in a disk for so
    long: it is given up for a new one."""
    attempts_without_progress: int = 3
    allow_faults: bool = False

    def __post_init__(self) -> None:
        if self.beat_overdue_s < 5 or self.grace_s <= 0 or self.attempts_without_progress < 1:
            raise Contradiction(
                "beats come once a second, so overdue must be 5 s or more; grace and attempts must be above zero",
                where="supervise", fix="raise supervise.beat_overdue_s, grace_s or attempts_without_progress",
            )
        if self.carrier_overdue_s < CARRIER_OVERDUE_S_MIN:
            raise Contradiction(
                "a carrier is asked once a second, and may be busy", where="supervise.carrier_overdue_s",
                fix=f"set it to {CARRIER_OVERDUE_S_MIN:g} s or more",
            )
        if self.progress_s and not self.progress_s > FIRST_BEAT_FACTOR * self.beat_overdue_s:
            raise Contradiction(
                f"a standstill ({self.progress_s:g} s) would be concluded before silence is "
                f"({FIRST_BEAT_FACTOR} x {self.beat_overdue_s:g} s at the first beat)",
                where="supervise.progress_s", fix="raise supervise.progress_s, or set it to 0 to switch it off",
            )
