"""Which nodes run the next attempt, and which ranks each of them has. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from packtrain.core.units import NS
from packtrain.supervise.events import Setup
from packtrain.supervise.state import Node, Run


def is_usable(node: Node, setup: Setup) -> bool:
    """Whether an attempt may begin on it now."""
    there = node.here and not node.silent_ns and node.procs >= setup.procs
    return there and not node.attempt and not node.cordoned and not node.draining


def usable(nodes: Mapping[str, Node], setup: Setup) -> list[str]:
    return [name for name, node in nodes.items() if is_usable(node, setup)]


def spares(setup: Setup, nodes: Mapping[str, Node]) -> list[str]:
    """Nodes that wait."""
    return sorted(name for name in usable(nodes, setup) if nodes[name].slot < 0)


def members(nodes: Mapping[str, Node]) -> list[str]:
    """Nodes of the attempt that begins or runs, by place."""
    return [name for _, name in sorted((node.slot, name) for name, node in nodes.items() if node.slot >= 0)]


def largest_world(setup: Setup, available: int) -> int:
    """The largest number of nodes that the job can run on and `available` fill; 0: none."""
    return max((size for size in (*setup.worlds, setup.nodes) if size <= available), default=0)


def world_now(run: Run, nodes: Mapping[str, Node], ns: int) -> int:
    """How many nodes the next attempt begins with; 0: it waits.

    All that are asked for at once; fewer only once the others had their time to come.
    """
    available = len(usable(nodes, run.setup))
    if available >= run.setup.nodes:
        return run.setup.nodes
    config = run.setup.supervise
    patience_s = config.nodes_s if run.first else config.replace_s
    return largest_world(run.setup, available) if ns - run.since_ns >= patience_s * NS else 0


def comes_last(node: Node) -> bool:
    """Whether any other takes its place."""
    return node.aside > 0 or bool(node.suspect)


def places(setup: Setup, nodes: Mapping[str, Node], count: int) -> list[str]:
    """The `count` nodes of a world, by place. A node that had one keeps it where that still exists; one that was
    replaced, is suspect, or was blamed more often than others, comes last."""

    def rank(name: str) -> tuple[bool, bool, int, str]:
        node = nodes[name]
        return comes_last(node), node.slot < 0, node.blames, name

    order = sorted(usable(nodes, setup), key=rank)
    chosen = order[:count]
    kept = {nodes[name].slot: name for name in reversed(chosen) if 0 <= nodes[name].slot < count}
    placed = set(kept.values())
    rest = iter(name for name in chosen if name not in placed)
    return [kept[slot] if slot in kept else next(rest) for slot in range(count)]


def ranks_of(slot: int, procs: int) -> tuple[int, ...]:
    return tuple(range(slot * procs, (slot + 1) * procs))
