"""What to do about a run on several nodes: a pure function of what is known and what just happened.

`decide(state, event)` gives the records that a log keeps: the event as it was consumed, what was concluded, what is
known now, and actions with ids. `evolve` (state.py) applies them one by one, and that is all a replay does.

An attempt goes through stages; each look at the state asks what the stage can go on to:

    waiting -> beginning -> (bringing) -> launching -> running -> ending -> wrapping -> closing -> waiting
                                                                                     or leaving -> finished

The death of any rank ends all of them: a world does not go on without a part of itself. What an attempt's end leads to
is in remedies.py, why it ended in causes.py, which nodes are next in assign.py; the words of a person in asked.py.
"""

from __future__ import annotations

from collections.abc import Callable

from packtrain.core.contract import Word
from packtrain.core.errors import EXIT_AGAIN, NodesMissing, error_named
from packtrain.core.records import AttemptReached, WorldChosen
from packtrain.core.units import NS
from packtrain.supervise import causes, held, remedies
from packtrain.supervise.asked import asked, maintenance, order_all, stop_for_change
from packtrain.supervise.assign import (
    comes_last,
    largest_world,
    members,
    places,
    ranks_of,
    spares,
    usable,
    world_now,
)
from packtrain.supervise.doubt import doubted
from packtrain.supervise.edges import back, from_node, joined, silent, slow
from packtrain.supervise.ending import ACTIVE, closing, end, ending, is_gone, leaving, missing, wrapping
from packtrain.supervise.events import (
    AnyEvent,
    Asked,
    Back,
    Begin,
    Begun,
    BreakAsked,
    BringBack,
    CarrierWanted,
    Done,
    Doubted,
    FromNode,
    Joined,
    Opened,
    Progress,
    Published,
    Silent,
    Slow,
    Tick,
    Write,
)
from packtrain.supervise.faults import broken
from packtrain.supervise.holding import hold
from packtrain.supervise.messages import AskCarrier, Launch
from packtrain.supervise.state import (
    BEGINNING,
    BRINGING,
    CLOSING,
    ENDING,
    FINISHED,
    LAUNCHING,
    LEAVING,
    RUNNING,
    WAITING,
    WRAPPING,
    AnyRecord,
    Consumed,
    Issued,
    Launchable,
    Rank,
    State,
    Trouble,
    Turn,
)

GO = 1
"""Id of the order that lets an attempt begin its first step."""
IDS_OF_TERM = 1 << 32
"""Ids of actions begin anew above this with each term: two coordinators that both think they lead, or one that has lost
its log, never give one id to two actions."""
APART_NS = 5 * NS
"""Ranks that leave by themselves (75) do so together: longer than this after the first, the rest hangs."""
NAME_AT_ONCE = 8


def decide(state: State, *events: AnyEvent) -> list[AnyRecord]:
    """The whole policy. Pure: the same state and events always give the same records. Empty: nothing came of it.

    Several events are taken in order and looked at together: what thousands of nodes say at once costs one look at
    everything and not thousands. It is as if they had happened at the same moment.
    """
    turn, over = Turn(state), state.run.stage == FINISHED
    news = [event for event in events if _heard(turn, event, over)]
    if news and not over:
        turn.look_once()
        _go_on(turn)
    records = turn.records()
    if not records and not any(isinstance(event, FromNode | Begun | Done) for event in news):
        return []
    return [*(Consumed(event=event) for event in news), *records]


def _heard(turn: Turn, event: AnyEvent, over: bool) -> bool:
    """Whether it is news; then it is consumed and, unless the run is over, taken."""
    if not _is_news(turn, event):
        return False
    done = turn.consume(event)
    if not over:
        _take(turn, event, done)
    return True


def _is_news(turn: Turn, event: AnyEvent) -> bool:
    """Edges may come from agents that others have replaced; answers to own actions may come twice."""
    if isinstance(event, FromNode):
        node = turn.nodes.get(event.node)
        return node is not None and node.agent == event.agent and event.seq > node.seq
    if isinstance(event, Begun | Done):
        return turn.is_pending(event.id)
    return True


def _take(turn: Turn, event: AnyEvent, done: Issued | None) -> None:
    """`done`: the action that this event is the end of."""
    match event:
        case Opened():
            _opened(turn, event)
        case Joined():
            joined(turn, event)
        case Silent():
            silent(turn, event)
        case Back():
            back(turn, event)
        case FromNode():
            from_node(turn, event, done)
        case Begun():
            _begun(turn, event)
        case Done():
            pass  # what waits for its action sees that it is pending no longer
        case Progress():
            if event.attempt == turn.run.attempt:
                turn.set(
                    attempt_step=max(turn.run.attempt_step, event.step), step_s=event.step_s or turn.run.step_s
                )
        case Slow():
            slow(turn, event)
        case Published():
            _published(turn, event)
        case Doubted():
            doubted(turn, event)
        case CarrierWanted():
            _ask_carrier(turn, event.request)
        case Asked():
            asked(turn, event)
        case BreakAsked():
            broken(turn, event)
        case Tick():
            maintenance(turn, event.wall_s)


def _opened(turn: Turn, event: Opened) -> None:
    run = turn.run
    turn.set(
        term=event.term, setup=event.setup, lemons={**run.lemons, **event.blames},
        next_id=max(run.next_id, event.term * IDS_OF_TERM),
        cordons_ns=(*run.cordons_ns, *(turn.ns for _ in run.cordons)), cordons=(),
    )
    if run.term == 0:
        turn.set(
            best_step=event.best_step, highest_step=event.best_step, attempt=event.attempt, since_ns=turn.ns,
        )
    turn.say(f"a coordinator leads, term {event.term}")


# --- an attempt begins -------------------------------------------------------------------------------


def _waiting(turn: Turn) -> None:
    run = turn.run
    if run.stopping:
        return remedies.finish(turn, EXIT_AGAIN, "stopped on request", remedies.stopped())
    told = held.all_told(turn)
    if turn.ns < run.begin_ns:
        return
    count = world_now(run, turn.nodes, turn.ns)
    if count:
        return _begin(turn, count) if told else None
    if turn.ns - run.since_ns >= run.setup.supervise.nobody_s * NS:
        _nobody(turn)


def _nobody(turn: Turn) -> None:
    run = turn.run
    there = usable(turn.nodes, run.setup)
    error = NodesMissing(
        f"{len(there)} of {run.setup.nodes} nodes were there for {run.setup.supervise.nobody_s:g} s",
        where=", ".join(sorted(there)[:NAME_AT_ONCE]), fix="bring up the others; then give the same command",
    )
    remedies.finish(turn, error.exit_code, error.what, error.as_dict())


def _begin(turn: Turn, count: int) -> None:
    run, chosen = turn.run, places(turn.run.setup, turn.nodes, count)
    slots = {name: slot for slot, name in enumerate(chosen)}
    for name, node in turn.nodes.items():
        slot = slots.get(name, -1)
        if node.slot != slot:
            turn.node(name, slot=slot)
    writers = tuple(f"r{rank:05d}" for rank in range(count * run.setup.procs))
    turn.own(Begin(
        reason=run.reason, writers=writers, node=chosen[0], back=run.back, memory=run.memory
    ))
    turn.set(world=count)
    turn.enter(BEGINNING)


def _begun(turn: Turn, event: Begun) -> None:
    if event.error:
        return _not_begun(turn, event)
    run = turn.run
    recalled = event.step if event.memory else -1
    turn.set(
        attempt=event.attempt, begin=event.begin, began_ns=turn.ns, first=False, refused=0, order=GO, purpose="",
        trouble=None, noticed=False, ended=0, ended_ns=0, stacks_ns=0, kill_at_ns=0, grow_ns=0, attempt_step=-1,
        hold_step=0, restored=event.step,
        best_step=event.step if event.rolled_back else max(run.best_step, recalled),
        highest_step=max(run.highest_step, recalled),
        launch=Launchable(
            restore=event.restore, memory=event.memory, memory_from=event.memory_from, master=event.master,
            failures=event.failures, node_minutes=event.node_minutes, spec=event.spec,
        ),
    )
    turn.own(Write(record=WorldChosen(
        attempt=event.attempt, nodes=members(turn.nodes), procs=run.setup.procs,
        spares=spares(run.setup, turn.nodes), wanted=run.setup.nodes
    )))
    if event.note:
        turn.say(event.note)
    held.forget(turn)
    turn.new_ranks({})
    if event.away and _hindrance(turn) is None:
        _launch_on(turn, members(turn.nodes)[0], ())
        turn.own(BringBack(attempt=event.attempt))
    turn.enter(BRINGING)


def _not_begun(turn: Turn, event: Begun) -> None:
    """The first attempt of all is not tried again: whoever gave the command is still there."""
    error = error_named(**event.error)
    refused = turn.run.refused + 1
    final = error.exit_code != EXIT_AGAIN or error.name == "commits.stale" or turn.run.first
    if final or refused >= remedies.UNREADABLE_MAX:
        return remedies.finish(turn, error.exit_code, error.what, event.error)
    remedies.warn(turn, error)
    turn.set(refused=refused, begin_ns=turn.ns + remedies.pause_s(refused) * NS)
    turn.enter(WAITING)


def _bringing(turn: Turn) -> None:
    trouble = _hindrance(turn)
    if trouble is not None:
        return end(turn, trouble)
    if turn.undone(BringBack) is None:
        _launch(turn)


def _hindrance(turn: Turn) -> Trouble | None:
    """What came between the choice of an attempt's nodes and its workers, so that none is to start; None: nothing.

    A node that is silent may be back in a moment; if it is not, the attempt ends when it is lost.
    """
    run, nodes = turn.run, turn.nodes
    if run.stopping:
        return Trouble(kind="asked", reason="stopped on request")
    better = any(not comes_last(nodes[name]) for name in spares(run.setup, nodes))
    for name in members(nodes):
        node, before = nodes[name], "before its workers were started"
        if not node.here:
            return Trouble(kind="lost", reason=f"node {name} was lost {before}", node=name)
        if node.draining:
            return Trouble(kind="asked", reason=f"node {name} was drained {before} ({node.draining})")
        if node.cordoned:
            return Trouble(kind="asked", reason=f"node {name} was cordoned {before} ({node.cordoned})")
        if comes_last(node) and better:
            return Trouble(kind="asked", reason=f"node {name} was replaced {before}")
    return None


def _launch(turn: Turn) -> None:
    run, ranks = turn.run, dict[int, Rank]()
    for slot, name in enumerate(members(turn.nodes)):
        mine = ranks_of(slot, run.setup.procs)
        ranks.update({rank: Rank(node=name) for rank in mine})
        _launch_on(turn, name, mine)
    turn.new_ranks(ranks)
    turn.say(f"attempt {run.attempt} begins on {run.world} nodes: {run.reason}")
    turn.enter(LAUNCHING)


def _launch_on(turn: Turn, name: str, ranks: tuple[int, ...]) -> None:
    """No ranks: only its carrier."""
    run, launch = turn.run, turn.run.launch or Launchable()
    turn.node(name, attempt=run.attempt, carrier="")
    turn.do(name, Launch(
        attempt=run.attempt, begin=run.begin, ranks=ranks, world_size=run.world * run.setup.procs,
        master=launch.master, restore=launch.restore, memory=launch.memory,
        memory_from=launch.memory_from.get(name, {}), spec=launch.spec,
        failures=launch.failures, node_minutes=launch.node_minutes,
    ))


# --- an attempt runs ---------------------------------------------------------------------------------


def _watch(turn: Turn) -> None:
    """What ends an attempt, whichever stage it is in; then what only one stage knows."""
    run = turn.run
    missing(turn)
    if turn.run.stage not in ACTIVE:
        return
    if run.kill_at_ns and turn.ns >= run.kill_at_ns:
        why = "" if run.stopping else f"{run.reason}; "
        reason = f"{why}not stopped {run.setup.supervise.grace_s:g} s after they were asked to (supervise.grace_s)"
        return end(turn, Trouble(kind="grace", reason=reason))
    if run.trouble is not None and (turn.ns >= run.stacks_ns or _all_stacks(turn)):
        return end(turn, _with_odd(turn, run.trouble))
    if run.stage == BRINGING:
        return _bringing(turn)
    if run.ended:
        return _deaths(turn)
    if run.stage == LAUNCHING:
        return _launching(turn)
    hold(turn)
    _grow(turn)


def _all_stacks(turn: Turn) -> bool:
    return all(rank.stack is not None or rank.status is not None for rank in turn.ranks.values())


def _with_odd(turn: Turn, trouble: Trouble) -> Trouble:
    """A world without a step stands still on every rank: the one whose stack differs from all others holds it up."""
    if trouble.kind != "stalled":
        return trouble
    silent = [rank.node for rank in turn.ranks.values() if rank.trouble == "silent"]
    stacks = {number: rank.stack for number, rank in turn.ranks.items() if rank.stack}
    odd = causes.odd_one(stacks)
    node = silent[0] if silent else turn.ranks[odd].node if odd is not None else ""
    told = f"; rank {odd} is not where the others are" if odd is not None and not silent else ""
    return Trouble(kind=trouble.kind, reason=trouble.reason + told, node=node)


def _deaths(turn: Turn) -> None:
    """Any death ends all; ranks that leave by themselves have a moment to do so together."""
    run, ranks = turn.run, turn.ranks.values()
    living = [rank for rank in ranks if rank.status is None and not is_gone(turn.nodes[rank.node], rank)]
    if not living:
        return end(turn, None)
    asked_to = causes.was_asked(run)
    by_themselves = all(
        rank.status in (None, 0, EXIT_AGAIN) or (asked_to and causes.left_as_asked(rank)) for rank in ranks
    )
    if not by_themselves or run.stage == LAUNCHING:
        return end(turn, None)
    done = all(rank.status in (None, 0) for rank in ranks)
    if done and run.setup.plain:  # what the ranks of any program still have to do is its own affair
        return
    patience = round(run.setup.supervise.grace_s * NS) if done else APART_NS
    if not run.purpose and turn.ns - run.ended_ns >= patience:
        # Those that left may say why; only where all of them were done is it the others' fault.
        hung = Trouble(kind="apart", reason=f"{len(living)} workers did not end with the others") if done else None
        end(turn, hung)


def _launching(turn: Turn) -> None:
    run = turn.run
    if run.setup.plain:
        return _running(turn)
    facts = {number: rank.facts for number, rank in turn.ranks.items()}
    late = [number for number, told in facts.items() if told is None]
    if not late:
        differ = causes.difference({number: told for number, told in facts.items() if told is not None})
        if differ is not None:
            rank, what = differ
            return end(turn, Trouble(kind="differs", reason=what, node=turn.ranks[rank].node))
        order_all(turn, Word.GO, order=GO)
        turn.own(Write(record=AttemptReached(attempt=run.attempt, point="go")))
        return _running(turn)
    if turn.ns - run.since_ns >= run.setup.supervise.go_s * NS:
        nodes = {turn.ranks[number].node for number in late}
        reason = f"rank {late[0]} and {len(late) - 1} others were not ready in {run.setup.supervise.go_s:g} s"
        end(turn, Trouble(kind="late", reason=reason, node=nodes.pop() if len(nodes) == 1 else ""))


def _running(turn: Turn) -> None:
    turn.enter(RUNNING)
    if turn.run.paused:
        order_all(turn, Word.PAUSE)


def _larger(turn: Turn) -> int:
    """The world that those who run and those who wait could fill; 0: none that is larger."""
    run = turn.run
    count = largest_world(run.setup, run.world + len(usable(turn.nodes, run.setup)))
    return count if count > run.world else 0


def _grow(turn: Turn) -> None:
    """Note since when a larger world is possible; the next save that is published stops for it."""
    larger = _larger(turn) if turn.run.world < turn.run.setup.nodes else 0
    if bool(larger) != bool(turn.run.grow_ns):
        turn.set(grow_ns=turn.ns if larger else 0)


def _ask_carrier(turn: Turn, request: str) -> None:
    """Of the node that publishes; one request at a time, and another one is made after the next save. Carriers outlive
    the workers."""
    busy = any(isinstance(one.action, AskCarrier) and turn.nodes[one.node].here for one in turn.pending)
    if turn.run.stage in (RUNNING, WRAPPING) and not busy:
        turn.do(members(turn.nodes)[0], AskCarrier(attempt=turn.run.attempt, request=request))


def _published(turn: Turn, event: Published) -> None:
    turn.set(published=event.step)
    run = turn.run
    stays = run.grow_ns and turn.ns - run.grow_ns >= run.setup.supervise.grow_s * NS
    if run.stage == RUNNING and stays and not run.purpose:
        stop_for_change(turn, "grow", f"nodes are back: the world grows from {run.world} to {_larger(turn)}")


STAGES: dict[str, Callable[[Turn], None]] = {
    WAITING: _waiting, BRINGING: _watch, LAUNCHING: _watch, RUNNING: _watch, ENDING: ending, CLOSING: closing,
    LEAVING: leaving, WRAPPING: wrapping, BEGINNING: missing,
}


def _go_on(turn: Turn) -> None:
    """As far as what is known allows; each pass enters another stage, and the longest way round has nine."""
    for _ in range(9):
        stage = turn.run.stage
        if stage == FINISHED:
            return
        STAGES[stage](turn)
        if turn.run.stage == stage:
            return
