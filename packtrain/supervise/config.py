"""How a run is kept alive. Silence is noticed before a standstill; that and each value alone is checked here."""

from __future__ import annotations

import msgspec

from packtrain.core.errors import Contradiction

FIRST_BEAT_FACTOR = 2
"""Silence allowed before the first beat, in `beat_overdue_s`: an interpreter starts slowly on a busy machine."""


class SuperviseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    grace_s: float = 60.0
    """From "save and stop" to SIGKILL."""
    beat_overdue_s: float = 60.0
    """Beats (repeated every second by a thread) silent for this long: the worker is taken for dead."""
    progress_s: float = 1800.0
    """No step completed for this long, though beats come: killed and started again. 0: never. Counted from the second
    step heard of (the first compiles), and not while the worker compiles, restores, saves, evaluates or pauses."""
    go_s: float = 600.0
    """How long a rank that is ready waits for all others of its world, before its first collective."""
    attempts_without_progress: int = 3
    allow_faults: bool = False

    def __post_init__(self) -> None:
        if self.beat_overdue_s < 5 or min(self.grace_s, self.go_s) <= 0 or self.attempts_without_progress < 1:
            raise Contradiction(
                "beats come once a second, so overdue must be 5 s or more; grace, go and attempts must be above zero",
                where="supervise", fix="raise supervise.beat_overdue_s, grace_s, go_s or attempts_without_progress",
            )
        if self.progress_s and not self.progress_s > FIRST_BEAT_FACTOR * self.beat_overdue_s:
            raise Contradiction(
                f"a standstill ({self.progress_s:g} s) would be concluded before silence is "
                f"({FIRST_BEAT_FACTOR} x {self.beat_overdue_s:g} s at the first beat)",
                where="supervise.progress_s", fix="raise supervise.progress_s, or set it to 0 to switch it off",
            )
