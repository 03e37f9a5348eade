"""What follows where a node may compute wrong numbers: the interval in doubt is to be replayed elsewhere. Pure.

A guard's verdict says that a step did not repeat itself; it does not say on which node, unless the world has one. The
order to replay is written down with its plan, and waits for whoever carries replays out; nothing here waits for it.
"""

from __future__ import annotations

from packtrain.core.records import GuardVerdict, NodeSuspected, Record, ReplayOrdered
from packtrain.supervise.asked import stop_for_change
from packtrain.supervise.assign import members, spares
from packtrain.supervise.events import Doubted, Write
from packtrain.supervise.state import CLOSING, ENDING, LAUNCHING, RUNNING, WAITING, WRAPPING, Replay, Turn

LIVED = (LAUNCHING, RUNNING, ENDING, WRAPPING, CLOSING, WAITING)
"""Stages in which the nodes are those of the last attempt. A verdict may be read when the rank that gave it is gone."""
KEPT = 16
"""Orders to replay that are remembered."""


def doubt_of(record: Record) -> str:
    """Why a record makes the hardware suspect; empty: it does not.

    A rerun of the same batch from the same state gave other bits (`clean`, `different`), or copies of one gradient
    differ. `same` is the batch's own fault, and from `unknown` nothing follows.
    """
    if not isinstance(record, GuardVerdict):
        return ""
    if record.rerun in ("clean", "different"):
        return f"step {record.step} was {record.reason}, and its rerun gave other bits ({record.rerun})"
    return f"copies of the gradient differ in step {record.step}" if record.reason == "copies_differ" else ""


def doubted(turn: Turn, event: Doubted) -> None:
    """One order an attempt: what comes after it lies in the same interval, or has the same nodes to blame."""
    run, nodes = turn.run, members(turn.nodes)
    known = event.attempt == run.attempt and run.stage in LIVED and nodes
    if not known or any(one.attempt == run.attempt for one in run.replays):
        return
    waiting = spares(run.setup, turn.nodes)
    first = max((step for step in (run.published, run.restored) if 0 <= step <= event.step), default=0)
    replay = Replay(
        attempt=run.attempt, first=first, last=event.step, nodes=tuple(nodes), on=tuple(waiting[: len(nodes)]),
        halves=_halves(nodes) if len(nodes) > 1 else (),
    )
    turn.set(replays=(*run.replays, replay)[-KEPT:])
    turn.own(Write(record=ReplayOrdered(
        attempt=replay.attempt, first=replay.first, last=replay.last, nodes=nodes, on=list(replay.on),
        halves=[list(half) for half in replay.halves], reason=event.reason,
    )))
    if len(nodes) == 1:
        _suspect(turn, nodes[0], event.reason, bool(waiting))


def _suspect(turn: Turn, name: str, reason: str, spare: bool) -> None:
    turn.node(name, suspect=reason)
    done = "a spare takes its place, and what it computed is to be replayed" if spare else (
        "no spare is there: it goes on, and what it computed is to be replayed"
    )
    turn.own(Write(record=NodeSuspected(node=name, reason=reason, in_row=1, done=done, blamed=False)))
    if spare:
        stop_for_change(turn, "replace", f"node {name} may compute wrong numbers: {reason}")


def _halves(nodes: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Who is to be replaced first, and who then: one replay tells in which half it is, the next in which quarter."""
    middle = len(nodes) // 2
    return tuple(nodes[:middle]), tuple(nodes[middle:])
