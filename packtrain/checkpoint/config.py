"""How often a run saves, how long a save may take, and what is kept."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from packtrain.core.errors import Contradiction

DEADLINE_S_MAX = 86_400.0
"""A carrier takes no save with a later deadline."""


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    every_steps: int = 0
    """Save every so many steps; 0: by time alone."""
    every_s: float | Literal["auto"] = 120.0
    """Save when this long has passed since the last save began; 0: by steps alone. `auto`: the optimum for what saves
    cost and how often attempts fail (checkpoint/interval.py)."""
    deadline_s: float = 300.0
    """A save that is not published by then has failed (a warning, unless it is the last one)."""
    keep_last: int = 3
    keep_every_steps: int = 0
    """Also keep every published step divisible by this; 0: none."""
    grace_s: float = 3600.0
    """From tombstone to purge."""
    debris_s: float = 86_400.0
    """Age at which uncommitted folders of older attempts may be purged."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise Contradiction(
                "at least one checkpoint is kept", where="checkpoint.keep_last", fix="set it to 1 or more"
            )
        every_s = 0.0 if self.every_s == "auto" else self.every_s
        steps, times_s = (self.every_steps, self.keep_every_steps), (every_s, self.grace_s, self.debris_s)
        if min(steps) < 0 or not all(0 <= time_s < math.inf for time_s in times_s):
            raise Contradiction(
                "times and steps cannot be negative", where="checkpoint", fix="use 0 to switch a cadence off"
            )
        if not 0 < self.deadline_s <= DEADLINE_S_MAX:
            raise Contradiction(
                f"a save needs a deadline, of {DEADLINE_S_MAX:.0f} s at most", where="checkpoint.deadline_s",
                fix="300 is a good value",
            )
