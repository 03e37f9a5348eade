"""How a run is kept alive. All limits in time form one ladder, checked here: what is inside is over before what is
outside (`ladder` is what `packtrain doctor` prints)."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec

from packtrain.core.errors import Contradiction

FIRST_BEAT_FACTOR = 2
"""Silence allowed before the first beat, in `beat_overdue_s`: an interpreter starts slowly on a busy machine."""

CARRIER_OVERDUE_S_MIN = 5.0


class Rung(NamedTuple):
    """One limit: `key` is waited for so long, and that is `why`."""

    key: str
    seconds: float
    why: str


class SuperviseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    grace_s: float = 60.0
    """From "save and stop" to SIGKILL."""
    beat_overdue_s: float = 60.0
    """Beats (repeated every second by a thread) silent for this long: the worker is taken for dead."""
    progress_s: float = 1800.0
    """No step completed for this long, though beats come: killed and started again. 0: never. Counted from the second
    step heard of (the first compiles), and not while the worker compiles, restores, saves, evaluates or pauses."""
    stopped_s: float = 10.0
    """A program (`packtrain run`) that was stopped from outside (SIGSTOP) is killed and started again after this long.
    0: never."""
    go_s: float = 600.0
    """How long a rank that is ready waits for all others of its world, before its first collective; after that long
    the attempt ends."""
    carrier_overdue_s: float = 30.0
    """The carrier answers nothing for this long (twice that when it starts), or a thread of it hangs in a disk for so
    long: it is given up for a new one."""
    attempts_without_progress: int = 3
    node_silent_s: float = 3.0
    """An agent says each second that it lives. Silent for this long: no attempt waits for its node any more."""
    node_lost_s: float = 10.0
    """Silent for this long while all else is well: its node is lost and the attempt ends."""
    nodes_s: float = 600.0
    """How long an attempt waits for all of `--nodes`; then it begins on the largest world that is there."""
    replace_s: float = 20.0
    """The same once the run has begun: a restarted agent is back in seconds, a broken machine is not."""
    nobody_s: float = 86400.0
    """How long a run waits for enough nodes to begin at all; then it ends with exit code 75."""
    grow_s: float = 120.0
    """Nodes that came back must stay for this long before a smaller world stops at its next save to take them in."""
    replace_stragglers: bool = False
    """Stop and go on with a spare when a node takes much longer for its steps than the others; otherwise it is told."""
    second_log: str = ""
    """An absolute folder on another disk, where the coordinator's log goes on when its home cannot be written for ten
    seconds. Empty: then nothing is decided until it can be written again, and the attempt runs on."""
    allow_faults: bool = False

    def __post_init__(self) -> None:
        if self.beat_overdue_s < 5 or min(self.grace_s, self.go_s) <= 0 or self.attempts_without_progress < 1:
            raise Contradiction(
                "beats come once a second, so overdue must be 5 s or more; grace, go and attempts must be above zero",
                where="supervise", fix="raise supervise.beat_overdue_s, grace_s, go_s or attempts_without_progress",
            )
        if self.node_silent_s < 2:
            raise Contradiction(
                "agents speak once a second, so silence must be 2 s or more", where="supervise.node_silent_s",
                fix="raise supervise.node_silent_s",
            )
        if self.carrier_overdue_s < CARRIER_OVERDUE_S_MIN:
            raise Contradiction(
                "a carrier is asked once a second, and may be busy", where="supervise.carrier_overdue_s",
                fix=f"set it to {CARRIER_OVERDUE_S_MIN:g} s or more",
            )
        if self.second_log and not self.second_log.startswith("/"):
            raise Contradiction(
                f"{self.second_log!r} is another folder for each process", where="supervise.second_log",
                fix="give an absolute path, on another disk than that of sockets (XDG_RUNTIME_DIR or /tmp)",
            )
        if self.progress_s and not self.progress_s > FIRST_BEAT_FACTOR * self.beat_overdue_s:
            raise Contradiction(
                f"a standstill ({self.progress_s:g} s) would be concluded before silence is "
                f"({FIRST_BEAT_FACTOR} x {self.beat_overdue_s:g} s at the first beat)",
                where="supervise.progress_s", fix="raise supervise.progress_s, or set it to 0 to switch it off",
            )
        self._check_order()

    def _check_order(self) -> None:
        for rungs in self.ladder():
            for inner, outer in pairwise(rungs):
                if not inner.seconds < outer.seconds:
                    raise Contradiction(
                        f"{inner.key} ({inner.seconds:g} s: {inner.why}) must be over before {outer.key} "
                        f"({outer.seconds:g} s: {outer.why})",
                        where=f"supervise.{outer.key}", fix=f"raise supervise.{outer.key}, or lower {inner.key}",
                    )

    def ladder(self) -> list[list[Rung]]:
        """The limits by what they look at, each list from inner to outer."""
        first = Rung(
            f"{FIRST_BEAT_FACTOR} x beat_overdue_s", FIRST_BEAT_FACTOR * self.beat_overdue_s, "no first beat"
        )
        beats = [Rung("beat_overdue_s", self.beat_overdue_s, "no beats: the worker is taken for dead"), first]
        if self.progress_s:
            beats.append(Rung("progress_s", self.progress_s, "beats but no step: the attempt ends"))
        waits = Rung("nobody_s", self.nobody_s, "too few nodes for any world: the run ends")
        stopped = Rung("stopped_s", self.stopped_s, "a program was stopped: the attempt ends")
        return [
            [
                Rung("node_silent_s", self.node_silent_s, "an agent is silent: nothing waits for its node"),
                Rung("node_lost_s", self.node_lost_s, "an agent is silent while all is well: its node is lost"),
            ],
            beats,
            [first, Rung("go_s", self.go_s, "a rank is not ready to begin: the attempt ends")],
            [Rung("nodes_s", self.nodes_s, "nodes are missing: a smaller world begins"), waits],
            [Rung("replace_s", self.replace_s, "the same once the run has begun"), waits],
            *([[stopped, beats[-1]]] if self.stopped_s and self.progress_s else []),
        ]
