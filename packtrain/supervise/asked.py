"""The words of a person, and dates that were told before: what they change. Pure.

Whether a word can be obeyed is answered by `refusal`, before it becomes an event.
"""

from __future__ import annotations

from packtrain.core.contract import Word
from packtrain.core.records import NodeCordoned, OrderGiven
from packtrain.core.units import NS
from packtrain.supervise.assign import largest_world, spares
from packtrain.supervise.ending import notice
from packtrain.supervise.events import Asked, Write
from packtrain.supervise.messages import EndWorkers, GiveOrder
from packtrain.supervise.remedies import drained
from packtrain.supervise.state import (
    BRINGING,
    ENDING,
    LAUNCHING,
    RUNNING,
    WRAPPING,
    State,
    Trouble,
    Turn,
)

WORDS = ("stop", "pause", "resume", "save", "drain", "cordon", "uncordon", "replace")


def refusal(state: State, word: Asked) -> str:
    """Why a word cannot be obeyed; empty: it can."""
    run, nodes = state.run, state.nodes
    if word.op not in WORDS:
        return f"no such word: {word.op}; there are {', '.join(WORDS)}"
    if word.op in ("drain", "cordon", "uncordon", "replace") and word.node not in nodes:
        return f"no such node: {word.node or '(none named)'}; there are {', '.join(sorted(nodes))}"
    if word.op in ("pause", "resume") and run.setup.plain:
        return "this program knows no such word"
    if word.op in ("pause", "resume", "save") and run.stopping:
        return f"the run stops ({run.stopping}); the command that made it goes on with it afterwards"
    if word.op == "save" and run.stage != RUNNING:
        return f"nothing runs now (the run is {run.stage})"
    waiting = spares(run.setup, nodes)
    if word.op == "replace" and not waiting:
        return "no spare is there"
    others = len(waiting) + run.world - 1
    if word.op in ("drain", "cordon") and nodes[word.node].slot >= 0 and not largest_world(run.setup, others):
        return f"without {word.node} no world is left that this run can run on"
    return ""


def asked(turn: Turn, event: Asked) -> None:
    match event.op:
        case "stop":
            _stop(turn, event.by, event.at_once)
        case "pause" | "resume":
            turn.set(paused=event.op == "pause")
            _order(turn, Word.PAUSE if event.op == "pause" else Word.RESUME)
        case "save":
            _order(turn, Word.SAVE)
        case "drain" if event.at_s:
            turn.set(leaves={**turn.run.leaves, event.node: event.at_s})
        case "drain":
            _drain(turn, event.node, event.by)
        case "cordon":
            turn.node(event.node, cordoned=event.by)
            turn.own(Write(record=NodeCordoned(node=event.node, by=event.by)))
        case "uncordon":
            turn.node(event.node, cordoned="", draining="", aside=0, suspect="")
            turn.own(Write(record=NodeCordoned(node=event.node, by=event.by, cordoned=False)))
        case "replace":
            turn.node(event.node, aside=max(1, turn.run.attempt))  # 0 says that it is not, also before the first
            stop_for_change(turn, "replace", f"{event.by} asks to replace node {event.node}")


def _order(turn: Turn, word: Word) -> None:
    """To workers that go on. Those that were told to save and end are told nothing else: a worker that compiles hears
    the last order alone."""
    if turn.run.stage == RUNNING and not turn.run.purpose:
        order_all(turn, word)


def _stop(turn: Turn, by: str, at_once: bool) -> None:
    """Save and stop. Said again it changes nothing: who heard no answer says it again. Only `at_once` kills, and only
    what was asked before. Mirrors are waited for as long as workers would be."""
    run = turn.run
    if run.stopping:
        if at_once and run.stage in (LAUNCHING, RUNNING, BRINGING):
            _kill(turn, f"asked twice to stop ({by})")
        if at_once and run.stage == WRAPPING:
            turn.set(kill_at_ns=turn.ns)
        return
    turn.set(stopping=by)
    if run.stage in (LAUNCHING, RUNNING):
        _order_stop(turn, "stop", by, Word.STOP)
    if run.stage == WRAPPING:
        turn.set(kill_at_ns=turn.ns + round(run.setup.supervise.grace_s * NS))


def _kill(turn: Turn, reason: str) -> None:
    for name, node in turn.nodes.items():
        if node.attempt == turn.run.attempt:
            turn.do(name, EndWorkers(attempt=turn.run.attempt, reason=reason))
    turn.set(trouble=Trouble(kind="grace", reason=reason))
    turn.enter(ENDING)


def _drain(turn: Turn, name: str, by: str) -> None:
    """Its ranks are saved, and the next attempt begins without it."""
    drained(turn, name, by)
    if turn.nodes[name].slot >= 0:
        stop_for_change(turn, "drain", f"node {name} is drained ({by})", Word.DRAIN)


def stop_for_change(turn: Turn, purpose: str, reason: str, word: Word = Word.STOP) -> None:
    """The workers save and end, and another attempt follows at once."""
    if turn.run.stage in (LAUNCHING, RUNNING) and not turn.run.purpose:
        _order_stop(turn, purpose, reason, word)


def _order_stop(turn: Turn, purpose: str, reason: str, word: Word) -> None:
    run = turn.run
    turn.set(
        purpose=purpose, reason=reason,
        kill_at_ns=turn.ns + round(run.setup.supervise.grace_s * NS),
    )
    notice(turn)
    order_all(turn, word, reason=reason)


def order_all(turn: Turn, word: Word, order: int = 0, reason: str = "", a: int = 0) -> None:
    """A word for the whole world: each node puts it into its control file. Ids only grow."""
    number = order or turn.run.order + 1
    turn.set(order=number, order_ns=turn.ns)
    for name, node in turn.nodes.items():
        if node.slot >= 0 and node.attempt == turn.run.attempt:
            turn.do(name, GiveOrder(attempt=turn.run.attempt, order=number, word=word, a=a))
    if not order:
        turn.own(Write(record=OrderGiven(order=number, word=word.name.lower(), reason=reason or "asked for")))


def maintenance(turn: Turn, wall_s: float) -> None:
    """Nodes that will not be there any more are left before that. `wall_s`: the date now; 0: not known."""
    lead_s = 2 * turn.run.setup.supervise.grace_s
    due = [name for name, date in turn.run.leaves.items() if wall_s and wall_s >= date - lead_s]
    if due:
        turn.set(leaves={name: date for name, date in turn.run.leaves.items() if name not in due})
    for name in due:
        if name in turn.nodes:
            _drain(turn, name, "planned maintenance")
