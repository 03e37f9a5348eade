"""The end of an attempt: whose silence ends it, how its workers are killed, when it is over. Pure.

What follows is in remedies.py.
"""

from __future__ import annotations

from packtrain.core.records import AttemptReached, NodeLost
from packtrain.core.units import NS
from packtrain.supervise import causes, remedies
from packtrain.supervise.assign import members
from packtrain.supervise.events import Finish, WrapUp, Write
from packtrain.supervise.messages import EndAttempt, EndWorkers, Launch, Leave, RunDone
from packtrain.supervise.state import (
    BRINGING,
    CLOSING,
    ENDING,
    FINISHED,
    LAUNCHING,
    RUNNING,
    WRAPPING,
    Node,
    Rank,
    Trouble,
    Turn,
)

MISTAKEN_MAX = 3
"""A node is lost after `node_lost_s`, and after twice as long for each attempt in a row that the loss of a node ended
before a new step, where such nodes came back; for so many at most. Where many messages get lost attempts would end as
fast as they begin. Source: Chandra and Toueg, Unreliable Failure Detectors, 1996: who was wrong is more patient."""
ACTIVE = (BRINGING, LAUNCHING, RUNNING)
ANSWER_NS = 30 * NS
"""A node that is heard and does not do for this long what an attempt needs is treated as lost."""
KILL_NS = 15 * NS
"""A killed process that hangs in a dead file system goes when that comes back: nobody waits longer."""
CARRIER_S = 10.0
LEAVE_NS = 10 * NS


def lost(turn: Turn, name: str, reason: str) -> None:
    turn.node(name, here=False)
    turn.own(Write(record=NodeLost(node=name, reason=reason)))
    if turn.nodes[name].attempt and turn.nodes[name].attempt == turn.run.attempt:
        gone(turn, name, "lost", f"node {name} is lost: {reason}")


def gone(turn: Turn, name: str, kind: str, reason: str) -> None:
    """The ranks of a node are gone with it."""
    for number in turn.ranks_on(name):
        if turn.ranks[number].status is None:
            turn.rank(number, trouble=kind)
    if turn.run.stage in ACTIVE:
        end(turn, Trouble(kind=kind, reason=reason, node=name))


def patience(turn: Turn) -> int:
    """How many times `node_lost_s` a node may be silent before it is lost."""
    run = turn.run
    return 1 if remedies.progressed(turn) else 1 << min(run.mistaken, run.disturbed, MISTAKEN_MAX)


def missing(turn: Turn) -> None:
    """Nodes that are silent for too long, or do not do what they were asked to."""
    config, times = turn.run.setup.supervise, patience(turn)
    for name, node in turn.nodes.items():
        if not node.here:
            continue
        if node.silent_ns and turn.ns - node.silent_ns >= (times * config.node_lost_s - config.node_silent_s) * NS:
            limit = "supervise.node_lost_s" if times == 1 else f"{times} x supervise.node_lost_s"
            lost(turn, name, f"its agent is silent for {times * config.node_lost_s:g} s ({limit})")
    waiting = {
        one.node for one in turn.pending
        if isinstance(one.action, Launch) and turn.ns - one.ns >= ANSWER_NS and turn.nodes[one.node].here
    }
    for name in sorted(waiting):
        if turn.run.stage in ACTIVE and turn.nodes[name].attempt == turn.run.attempt:
            reason = f"node {name} is heard and has not started its workers in {ANSWER_NS // NS} s"
            end(turn, Trouble(kind="launch", reason=reason, node=name))


def notice(turn: Turn, since_step_s: float = -1.0) -> None:
    """From now on it is known that this attempt is over; said once, for what a recovery takes."""
    if not turn.run.noticed:
        turn.set(noticed=True)
        turn.own(Write(record=AttemptReached(
            attempt=turn.run.attempt, point="noticed", since_step_s=since_step_s
        )))


def end(turn: Turn, trouble: Trouble | None) -> None:
    """Kill what is left. `trouble` None: the ranks that ended say why."""
    notice(turn)
    reason = trouble.reason if trouble else "a worker ended"
    left = {rank.node for rank in turn.ranks.values() if rank.status is None}
    for name, node in turn.nodes.items():
        if node.attempt == turn.run.attempt and (name in left or turn.run.stage == BRINGING):
            turn.do(name, EndWorkers(attempt=turn.run.attempt, reason=reason))
    turn.set(trouble=trouble)
    turn.say(f"attempt {turn.run.attempt} ends: {reason}")
    turn.enter(ENDING)


def ending(turn: Turn) -> None:
    missing(turn)
    waited = turn.ns - turn.run.since_ns >= KILL_NS
    living = [
        rank for rank in turn.ranks.values() if rank.status is None and not is_gone(turn.nodes[rank.node], rank)
    ]
    if living and not waited:
        return
    for number, rank in turn.ranks.items():
        if rank.status is None and not rank.trouble and is_gone(turn.nodes[rank.node], rank):
            turn.rank(number, trouble="lost")
    done = causes.cause(turn.run, turn.ranks).kind == "done"
    turn.own(WrapUp(attempt=turn.run.attempt, done=done))
    for name in _of_attempt(turn) if done else ():
        turn.do(name, RunDone(attempt=turn.run.attempt))
    turn.enter(WRAPPING)


def _of_attempt(turn: Turn) -> list[str]:
    return [name for name, node in turn.nodes.items() if node.attempt == turn.run.attempt]


def wrapping(turn: Turn) -> None:
    """Retention and mirrors are waited for, while something may come of it and whoever asked to stop has patience."""
    missing(turn)
    run, first, wrap = turn.run, turn.nodes[members(turn.nodes)[0]], turn.undone(WrapUp)
    publisher_gone = not first.here or first.attempt != run.attempt
    if wrap is None or publisher_gone or (wrap.done and run.kill_at_ns and turn.ns >= run.kill_at_ns):
        _wrapped(turn)


def _wrapped(turn: Turn) -> None:
    """Whether or not all of it is done: carriers finish the saves they took."""
    turn.drop("")
    for name in _of_attempt(turn):
        turn.do(name, EndAttempt(attempt=turn.run.attempt, carrier_s=CARRIER_S))
    turn.enter(CLOSING)


def is_gone(node: Node, rank: Rank) -> bool:
    """Whether nobody waits to hear how it ended."""
    return not node.here or bool(node.silent_ns) or rank.trouble in ("lost", "agent")


def closing(turn: Turn) -> None:
    missing(turn)
    waited = turn.ns - turn.run.since_ns >= round(CARRIER_S * NS) + KILL_NS
    open_ = [
        name for name, node in turn.nodes.items()
        if node.attempt == turn.run.attempt and node.here and not node.silent_ns
    ]
    if not open_ or waited:
        remedies.conclude(turn)


def leaving(turn: Turn) -> None:
    left = [one for one in turn.pending if isinstance(one.action, Leave) and turn.nodes[one.node].here]
    if not left or turn.ns - turn.run.since_ns >= LEAVE_NS:
        run = turn.run
        turn.own(Finish(exit_code=run.exit_code, reason=run.reason, error=run.error))
        turn.enter(FINISHED)
