"""How a run is kept alive. Times form one ladder, checked here: inner < outer."""

from __future__ import annotations

import msgspec

from packtrain.core.errors import Contradiction


class SuperviseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    grace_s: float = 60.0
    """From "save and stop" to SIGKILL."""
    beat_overdue_s: float = 60.0
    """Beats (repeated every second by a thread) silent for this long: the worker is taken for dead."""
    attempts_without_progress: int = 3
    allow_faults: bool = False

    def __post_init__(self) -> None:
        if self.beat_overdue_s < 5 or self.grace_s <= 0 or self.attempts_without_progress < 1:
            raise Contradiction(
                "beats come once a second, so overdue must be 5 s or more; grace and attempts must be above zero",
                where="supervise", fix="raise supervise.beat_overdue_s, grace_s or attempts_without_progress",
            )
