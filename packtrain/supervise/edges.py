"""What is heard from nodes: who they are, that they are silent or back, and the edges of their agents. Pure."""

from __future__ import annotations

from packtrain.core.errors import CarrierLost, ProcessHangs, error_named
from packtrain.core.records import (
    AttemptReached,
    CarrierGivenUp,
    FaultMissed,
    HomeBack,
    NodeBack,
    NodeSuspected,
    StacksTaken,
)
from packtrain.core.units import NS
from packtrain.supervise import causes, held, holding, remedies
from packtrain.supervise.asked import stop_for_change
from packtrain.supervise.assign import members, spares
from packtrain.supervise.ending import ACTIVE, CARRIER_S, end, gone, notice
from packtrain.supervise.events import Back, FromNode, Joined, Silent, Slow, Write
from packtrain.supervise.hardware import failing
from packtrain.supervise.messages import (
    Break,
    CarrierEnded,
    CarrierHomeBack,
    CarrierUp,
    Did,
    EndAttempt,
    EndWorkers,
    HardwareSeen,
    Launch,
    NodeLeaves,
    Peers,
    RankEnded,
    RankHeard,
    RankIdle,
    RankReady,
    RankSilent,
    RankStalled,
    Stacks,
    TakeStacks,
    TellHeld,
    Unkillable,
)
from packtrain.supervise.state import ENDING, LAUNCHING, RUNNING, Issued, Trouble, Turn

STACKS_NS = 2 * NS
"""How long the end of a hung attempt waits for its stacks."""


def joined(turn: Turn, event: Joined) -> None:
    """Another agent than before means that the workers of the one before are gone."""
    name, known = event.node, turn.nodes.get(event.node)
    if known is not None and known.agent == event.agent:
        if not known.here:
            _back_from_loss(turn, name)
        turn.node(name, here=True, silent_ns=0)
        if event.attempt > max(known.attempt, turn.run.attempt):
            _put_away(turn, name, event.attempt)
        return
    turn.drop(name)
    turn.node(
        name, agent=event.agent, boot_id=event.boot_id, host=event.host, procs=event.procs, seq=0, here=True,
        silent_ns=0, back_ns=turn.ns, attempt=event.attempt, carrier="", draining="", held=None,
        blames=max(known.blames if known else 0, turn.run.lemons.get(event.host, 0)),
    )
    if known is not None:
        turn.own(Write(record=NodeBack(node=name, reason="another agent runs there")))
        if known.attempt and known.attempt == turn.run.attempt:
            gone(turn, name, "agent", f"the agent of node {name} was lost, and its workers with it")
    if event.attempt:
        _put_away(turn, name, event.attempt)


def _back_from_loss(turn: Turn, name: str) -> None:
    """It was no loss: only nobody heard it."""
    turn.own(Write(record=NodeBack(node=name, reason="it is heard again")))
    turn.node(name, back_ns=turn.ns)
    turn.set(mistaken=turn.run.mistaken + 1)


def _put_away(turn: Turn, name: str, attempt: int) -> None:
    """Workers that a coordinator started whose log is not ours."""
    turn.node(name, attempt=attempt)
    turn.do(name, EndWorkers(attempt=attempt, reason="they belong to nobody any more"))
    turn.do(name, EndAttempt(attempt=attempt, carrier_s=CARRIER_S))


def silent(turn: Turn, event: Silent) -> None:
    node = turn.nodes.get(event.node)
    if node is not None and node.here and not node.silent_ns:
        turn.node(event.node, silent_ns=turn.ns, symptom="silent agent", symptom_ns=turn.ns)
        turn.say(f"node {event.node} is silent")


def back(turn: Turn, event: Back) -> None:
    node = turn.nodes.get(event.node)
    if node is None or (node.here and not node.silent_ns):
        return
    if not node.here:
        _back_from_loss(turn, event.node)
    turn.node(event.node, here=True, silent_ns=0)


def from_node(turn: Turn, event: FromNode, done: Issued | None) -> None:
    """`done`: the action whose outcome it tells."""
    edge, name = event.event, event.node
    if isinstance(edge, Did):
        if done is not None:
            _did(turn, name, edge, done)
        return
    if isinstance(edge, NodeLeaves):
        return _leaves(turn, name, edge)
    if isinstance(edge, HardwareSeen):
        return failing(turn, name, edge)
    if edge.attempt != turn.run.attempt:
        return
    match edge:
        case RankReady() if turn.run.stage == LAUNCHING and edge.rank in turn.ranks:
            turn.rank(edge.rank, facts=edge.facts)
        case RankSilent() | RankStalled() if edge.rank in turn.ranks:
            _hung(turn, name, edge)
        case RankIdle() if edge.rank in turn.ranks:
            _idle(turn, name, edge)
        case RankHeard() if edge.rank in turn.ranks:
            turn.rank(edge.rank, trouble="")
        case RankEnded() if edge.rank in turn.ranks:
            _ended(turn, name, edge)
        case CarrierUp():
            turn.node(name, carrier=edge.address)
            turn.once(_introduce)
        case CarrierEnded():
            _carrier_ended(turn, name, edge)
        case CarrierHomeBack():
            turn.own(Write(record=HomeBack(path=edge.path, node=name)))
        case Unkillable():
            _unkillable(turn, name, edge)
        case Stacks() if edge.rank in turn.ranks:
            turn.rank(edge.rank, stack=edge.text)
            turn.own(Write(record=StacksTaken(
                attempt=edge.attempt, rank=edge.rank, node=name, how=edge.how, text=edge.text
            )))


def _did(turn: Turn, name: str, did: Did, issued: Issued) -> None:
    match issued.action:
        case EndAttempt(attempt=attempt) if attempt == turn.nodes[name].attempt:
            turn.node(name, attempt=0)
        case TellHeld():
            held.told(turn, name, did, issued)
        case Launch(attempt=attempt) if did.error and attempt == turn.run.attempt and turn.run.stage in ACTIVE:
            end(turn, Trouble(kind="launch", reason=f"node {name} cannot start workers: {did.error}", node=name))
        case Break(fault=fault, rank=rank) if did.error:
            turn.own(Write(record=FaultMissed(fault=fault, node=name, rank=rank, why=did.error)))
        case Launch(attempt=attempt, ranks=ranks) if ranks and attempt == turn.run.attempt:
            turn.once(_started)
        case _ if did.error:
            turn.say(f"node {name}: {did.error}")


def _started(turn: Turn) -> None:
    """The last node that starts its workers is a point of a recovery."""
    open_ = [one.action for one in turn.pending if isinstance(one.action, Launch)]
    if turn.run.stage in ACTIVE and not any(action.attempt == turn.run.attempt for action in open_):
        turn.own(Write(record=AttemptReached(attempt=turn.run.attempt, point="started")))


def _leaves(turn: Turn, name: str, edge: NodeLeaves) -> None:
    """Its workers were told to save by their agent, and the word is the whole world's."""
    remedies.drained(turn, name, "its agent was told to end")
    if turn.nodes[name].slot >= 0 and turn.run.stage in (LAUNCHING, RUNNING) and not turn.run.purpose:
        reason = f"node {name} leaves: its agent was told to end"
        turn.set(purpose="drain", reason=reason, kill_at_ns=turn.ns + round(edge.grace_s * NS))
        notice(turn)
        turn.say(reason)


def _hung(turn: Turn, name: str, edge: RankSilent | RankStalled) -> None:
    """Told early, for the stacks, and again when it is certain."""
    config = turn.run.setup.supervise
    if isinstance(edge, RankSilent):
        kind, certain_s, key, what = "silent", config.beat_overdue_s, "beat_overdue_s", "silent"
    else:
        kind, certain_s, key = "stalled", config.progress_s, "progress_s"
        what = f"beats, but no step after {edge.step},"
    if turn.run.stage not in ACTIVE:
        return
    fresh = not any(rank.trouble for rank in turn.ranks.values())
    turn.rank(edge.rank, trouble=kind)
    turn.node(name, symptom=f"{kind} rank", symptom_ns=turn.ns)
    if fresh:
        _take_stacks(turn)
    if turn.run.trouble is None and certain_s and edge.seconds >= certain_s:
        reason = f"rank {edge.rank} on {name}: {what} for {edge.seconds:.0f} s (supervise.{key})"
        turn.set(trouble=Trouble(kind=kind, reason=reason, node=name))
        notice(turn, edge.seconds)
        turn.say(reason)


def _idle(turn: Turn, name: str, edge: RankIdle) -> None:
    """A program of anybody; its agent told it when it was certain."""
    if turn.run.stage not in ACTIVE or turn.run.trouble is not None:
        return
    why = "stopped (SIGSTOP)" if edge.stopped else "no output and no processor time"
    key = "stopped_s" if edge.stopped else "progress_s"
    reason = f"rank {edge.rank} on {name}: {why} for {edge.seconds:.0f} s (supervise.{key})"
    turn.rank(edge.rank, trouble="idle")
    turn.node(name, symptom="idle rank", symptom_ns=turn.ns)
    _take_stacks(turn)
    turn.set(trouble=Trouble(kind="idle", reason=reason, node=name if edge.stopped else ""))
    notice(turn)
    turn.say(reason)


def _take_stacks(turn: Turn) -> None:
    for name in members(turn.nodes):
        turn.do(name, TakeStacks(attempt=turn.run.attempt))
    for number in turn.ranks:
        turn.rank(number, stack=None)
    turn.set(stacks_ns=turn.ns + STACKS_NS)


def _ended(turn: Turn, name: str, edge: RankEnded) -> None:
    killed = turn.run.stage == ENDING and edge.status == -9
    if edge.status:  # ranks that are done may wait long for the others
        notice(turn, edge.since_step_s)
    turn.rank(
        edge.rank, status=edge.status, step=edge.step, error=edge.error, tail=edge.tail[-2000:],
        order=turn.run.ended + 1, killed=killed,
    )
    turn.set(
        ended=turn.run.ended + 1, ended_ns=turn.run.ended_ns or turn.ns,
        attempt_step=max(turn.run.attempt_step, edge.step),
    )
    word = causes.symptom(turn.ranks[edge.rank])
    if word:
        turn.node(name, symptom=word, symptom_ns=turn.ns)


def _carrier_ended(turn: Turn, name: str, edge: CarrierEnded) -> None:
    turn.node(name, carrier="", symptom=holding.CARRIER_ENDED, symptom_ns=turn.ns)
    if edge.given_up:
        turn.own(Write(record=CarrierGivenUp(reason=edge.why, quarantine=list(edge.quarantine), node=name)))
    error = error_named(**edge.error) if edge.error else CarrierLost(
        f"the carrier of node {name} ended ({edge.why}); another one starts, the workers go on", where=f"node {name}",
        fix=f"see carrier-{name}.log beside the workers' logs; a save under way is tried again",
    )
    remedies.warn(turn, error)
    turn.once(holding.show)


def _unkillable(turn: Turn, name: str, edge: Unkillable) -> None:
    remedies.warn(turn, ProcessHangs(
        f"{edge.what} (process {edge.pid}) was killed and has not ended in {edge.seconds:.0f} s: a disk may hang",
        where=f"node {name}", fix="see dmesg, and whether the disks of the run answer; it goes when they come back",
    ))


def _introduce(turn: Turn) -> None:
    """Every carrier of the attempt learns where the others are, once all are up and again when one is new."""
    names = members(turn.nodes)
    addresses = {name: turn.nodes[name].carrier for name in names}
    if len(names) > 1 and all(addresses.values()):
        for name in names:
            turn.do(name, Peers(attempt=turn.run.attempt, addresses=addresses))


def slow(turn: Turn, event: Slow) -> None:
    if event.attempt != turn.run.attempt or turn.run.stage != RUNNING or event.node not in turn.nodes:
        return
    reason = f"{event.step_s:.3g} s for a step, the others {event.median_s:.3g} s"
    done = "it is told, and goes on"
    waiting = spares(turn.run.setup, turn.nodes)
    if turn.run.setup.supervise.replace_stragglers and waiting and not turn.run.purpose:
        turn.node(event.node, aside=turn.run.attempt)
        stop_for_change(turn, "replace", f"node {event.node} is slow: {reason}")
        done = "it is replaced"
    turn.own(Write(record=NodeSuspected(node=event.node, reason=reason, in_row=1, done=done, blamed=False)))
