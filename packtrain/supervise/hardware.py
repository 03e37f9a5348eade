"""What is done when a node's kernel says that its hardware fails, before its workers notice, or where they never would;
and when a node's devices were not free as its agent began. Pure.
"""

from __future__ import annotations

from packtrain.core.records import NodeSuspected
from packtrain.monitor.devices import HELD, UNKNOWN
from packtrain.monitor.kernel import LEAVE, LOST
from packtrain.supervise.asked import stop_for_change
from packtrain.supervise.ending import ACTIVE, end
from packtrain.supervise.events import Write
from packtrain.supervise.messages import HardwareSeen
from packtrain.supervise.remedies import cordon, may_cordon
from packtrain.supervise.state import Trouble, Turn


def failing(turn: Turn, name: str, seen: HardwareSeen) -> None:
    """No attempt begins there any more, where that is allowed without a person; what runs there ends, or saves first.

    A node that may not be cordoned works on, and that is told: it may be all there is.
    """
    reason = f"its kernel says: {seen.what} ({seen.where})"
    told = "it is told, and goes on"
    if seen.verdict in (HELD, UNKNOWN):
        reason = f"as it began: {seen.what} ({seen.where})"
    if seen.verdict == HELD:
        turn.node(name, aside=max(1, turn.run.attempt))
        told = "it is chosen last"
    if seen.verdict in (LOST, LEAVE) and not turn.nodes[name].cordoned:
        told = "it is cordoned" if may_cordon(turn) else "it may not be cordoned: it goes on"
        if told == "it is cordoned":
            _leave(turn, name, seen.verdict, reason)
    turn.own(Write(record=NodeSuspected(
        node=name, reason=f"{reason}: {seen.text}", in_row=1, done=told, blamed=False,
    )))


def _leave(turn: Turn, name: str, verdict: str, reason: str) -> None:
    cordon(turn, name, reason)
    works = turn.nodes[name].slot >= 0 and turn.nodes[name].attempt == turn.run.attempt
    if works and verdict == LEAVE:
        stop_for_change(turn, "replace", f"node {name}: {reason}")
    elif works and turn.run.stage in ACTIVE:
        end(turn, Trouble(kind="hardware", reason=f"node {name}: {reason}", node=name))
