"""What nodes hold in memory: asked of them before an attempt begins, chosen from when it does. Pure.

Between two attempts nothing changes there, so each node is asked as soon as it is free, while others still end or are
waited for. Only nodes that the attempt begins on count: a slot is read by their ranks, or fetched from their carriers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from packtrain.checkpoint import slots
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.slots import Held, Memory
from packtrain.core.units import NS
from packtrain.supervise.assign import members, usable
from packtrain.supervise.messages import Did, TellHeld
from packtrain.supervise.state import Issued, Node, Turn

TELL_NS = 6 * NS
"""A node that has not told by then holds nothing. Its agent gives itself five seconds to look."""


# --- asked -------------------------------------------------------------------------------------------


def all_told(turn: Turn) -> bool:
    """Ask the nodes that are free and were not asked while this attempt waits to begin. Whether all have told, or had
    their time; true where nothing may be taken from memory."""
    run = turn.run
    if not (run.setup.memory and run.memory and run.attempt) or run.back:
        return True
    asked = {one.node: one.ns for one in turn.pending if _is_of_this_wait(turn, one)}
    silent = [name for name in usable(turn.nodes, run.setup) if turn.nodes[name].held is None]
    for name in silent:
        if name not in asked:
            turn.do(name, TellHeld())
    return all(turn.ns - asked.get(name, turn.ns) >= TELL_NS for name in silent)


def told(turn: Turn, name: str, did: Did, issued: Issued) -> None:
    """An answer that comes when its attempt has begun, or later, says nothing about the next one."""
    if _is_of_this_wait(turn, issued):
        turn.node(name, held="" if did.error else did.data)
    if did.error:
        turn.say(f"node {name}: {did.error}")


def _is_of_this_wait(turn: Turn, issued: Issued) -> bool:
    return isinstance(issued.action, TellHeld) and issued.ns >= turn.run.since_ns


def forget(turn: Turn) -> None:
    """Workers are about to change it."""
    for name, node in turn.nodes.items():
        if node.held is not None:
            turn.node(name, held=None)


# --- chosen from -------------------------------------------------------------------------------------


class Taken(msgspec.Struct, frozen=True):
    """What an attempt begins from in the memory of its nodes; `memory` None: nothing."""

    memory: Memory | None = None
    moves: dict[str, dict[str, str]] = {}
    """Node -> (writer -> node to fetch its slot from), for slots that do not lie where that node's workers look."""
    note: str = ""
    """What to say of it; empty: nothing."""


def taken(nodes: Mapping[str, Node], writers: Sequence[str], begun: Commit, on_disk: int) -> Taken:
    """`writers`: of the attempt that begins, by rank; `begun`: the last attempt; `on_disk`: as `slots.choose`.

    Each writer's slot goes to the node that has the rank of that name now, or stays where it is.
    """
    names = members(nodes)
    helds = [one for name in names for one in _parsed(name, nodes[name].held or "")]
    chosen = slots.choose(helds, begun, on_disk)
    if chosen.memory is None:
        return Taken(note=chosen.note if chosen.lacking else "")
    procs = len(writers) // len(names)
    homes = {writer: names[rank // procs] for rank, writer in enumerate(writers)}
    there = {(one.node, one.writer) for one in helds if one.own and (one.attempt, one.step) == chosen.memory[:2]}
    moves = {
        node: {writer: source for writer, source in moved.items() if (node, writer) not in there}
        for node, moved in slots.bringing(chosen, homes).items()
    }
    return Taken(chosen.memory, {node: moved for node, moved in moves.items() if moved}, chosen.note)


def _parsed(name: str, told: str) -> list[Held]:
    """A node speaks for itself alone; what is no list of slots is none."""
    try:
        found = msgspec.json.decode(told or "[]", type=list[Held])
    except msgspec.MsgspecError:
        return []
    return [one for one in found if one.node == name]
