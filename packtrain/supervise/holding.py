"""Saves are held while many nodes show the same trouble at once: what they share is sick, storage most likely. Pure.

Workers go on and keep their state in memory; nobody is blamed, no attempt ends. When nothing of it was seen for a
minute the cadence goes on as ever. A world is told until which step it holds its saves, and told again while the cause
lasts: a word that gets lost then costs a few saves, and not all that would have followed.
"""

from __future__ import annotations

import math

from packtrain.core.contract import Word
from packtrain.core.units import NS
from packtrain.supervise import causes, remedies
from packtrain.supervise.asked import order_all
from packtrain.supervise.state import RUNNING, Turn

CARRIER_ENDED = "carrier ended"
"""The symptom."""
AHEAD = 2.0
"""Saves are held for this many times as long as the cause may last, in steps, and told again at half of it."""
STEP_S = 1.0
"""Where nobody knows how long a step takes."""
SPACING_NS = 5 * NS
SPACING_STEPS = 3
"""A rank looks once a step, and sees the last word only: a word that it has not obeyed yet is not written over."""


def show(turn: Turn) -> None:
    """The carrier of a node has ended while its workers go on."""
    together = causes.shared(turn.nodes, CARRIER_ENDED, turn.run.world, turn.ns)
    if not together or turn.run.stage != RUNNING:
        return
    if turn.ns >= turn.run.shared_ns:
        remedies.tell_shared(turn, CARRIER_ENDED, together)
    turn.set(shared_ns=turn.ns + causes.SHARED_NS)


def hold(turn: Turn) -> None:
    """In an attempt that runs: tell the world, again, or that it is over."""
    run = turn.run
    due = turn.ns < run.shared_ns
    if not (due or run.hold_step) or run.setup.plain or run.purpose or run.paused or not _may_speak(turn):
        return
    if due:
        return _hold_on(turn)
    turn.set(hold_step=0)
    order_all(turn, Word.HOLD, reason="what many nodes showed at once is over: saves as ever")


def _may_speak(turn: Turn) -> bool:
    spacing_ns = max(SPACING_NS, round(SPACING_STEPS * turn.run.step_s * NS))
    return turn.ns - turn.run.order_ns >= spacing_ns


def _hold_on(turn: Turn) -> None:
    run = turn.run
    lasts = math.ceil(AHEAD * causes.SHARED_NS / NS / (run.step_s or STEP_S))
    step = max(0, run.attempt_step)
    if run.hold_step - step > lasts // 2:
        return
    turn.set(hold_step=step + lasts)
    order_all(turn, Word.HOLD, reason="many nodes show the same at once: saves are held", a=step + lasts)
