"""Which node keeps copies of which: a pure plan that every node computes alike.

Each node gets one peer, and no node is the peer of two, so each keeps the copies of one other. A peer lies outside the
failure domain of its node (a rack, a power feed, a provider) and outside the group of nodes that hold the same shards,
if that can be; else outside the failure domain alone; else it is any other node: a copy in the same rack is better than
none. Among those that will do it is the next one in order, and when a node leaves, only those around it and around its
peer get another.

The number of nodes with a peer outside their failure domain is the largest possible: where a free peer is not to be had
others are asked to move on to their next (an augmenting path, as in Kuhn's method for matchings).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence

Peers = dict[str, str]
"""Node -> the node that keeps its copies."""


def in_order(nodes: Collection[str]) -> list[str]:
    """As people count them: node-2 before node-10."""
    return sorted(sorted(nodes), key=lambda node: [(word, int("0" + n)) for word, n in _COUNTED.findall(node)])


_COUNTED = re.compile(r"(\D*)(\d*)")


def peers_of(
    nodes: Sequence[str], domains: Mapping[str, str] | None = None, groups: Sequence[Collection[str]] = ()
) -> Peers:
    """`nodes` in order, each once; `domains`: node -> failure domain, a node without one is a domain of its own;
    `groups`: nodes that hold the same shards. One node alone has no peer.
    """
    assert len(set(nodes)) == len(nodes), "a node is named twice"
    if len(nodes) < 2:
        return {}
    plan = _Plan(nodes, _levels(nodes, domains or {}, groups))
    for level in (0, 1):
        plan.match(level)
    plan.fill()
    return {nodes[giver]: nodes[taker] for giver, taker in sorted(plan.takers.items())}


Levels = list[list[int]]
"""Of each pair how good that peer is: 0 outside domain and group, 1 outside the domain, 2 any other, 3 itself."""


def _levels(nodes: Sequence[str], domains: Mapping[str, str], groups: Sequence[Collection[str]]) -> Levels:
    places = [("of", domains[node]) if node in domains else ("alone", node) for node in nodes]
    members = [{number for number, group in enumerate(groups) if node in group} for node in nodes]
    size = range(len(nodes))
    return [
        [3 if a == b else 2 if places[a] == places[b] else int(bool(members[a] & members[b])) for b in size]
        for a in size
    ]


class _Plan:
    """Givers and takers by their places in the order."""

    def __init__(self, nodes: Sequence[str], levels: Levels) -> None:
        self._size, self._levels = len(nodes), levels
        self.takers: dict[int, int] = {}
        """Giver -> who keeps its copies."""
        self._givers: dict[int, int] = {}

    def match(self, level: int) -> None:
        """Give a peer of that level or better to as many as can have one."""
        dead: set[int] = set()  # takers from which no free one is reached: none ever will be, at this level
        for giver in range(self._size):
            if giver not in self.takers:
                self._augment(giver, level, dead)

    def _augment(self, giver: int, level: int, dead: set[int]) -> None:
        came_from: dict[int, int] = {}
        waiting = deque([giver])
        while waiting:
            asking = waiting.popleft()
            for taker in self._after(asking):
                if taker in came_from or taker in dead or self._levels[asking][taker] > level:
                    continue
                came_from[taker] = asking
                if taker not in self._givers:
                    self._move_along(taker, came_from)
                    return
                waiting.append(self._givers[taker])
        dead.update(came_from)

    def _after(self, giver: int) -> list[int]:
        """The others, the next one first."""
        return [(giver + away) % self._size for away in range(1, self._size)]

    def _move_along(self, taker: int, came_from: Mapping[int, int]) -> None:
        """The last one asked takes the free taker, and each before it the one that was left."""
        while True:
            giver = came_from[taker]
            left = self.takers.get(giver)
            self._set(giver, taker)
            if left is None:
                return
            taker = left

    def _set(self, giver: int, taker: int) -> None:
        self.takers[giver], self._givers[taker] = taker, giver

    def fill(self) -> None:
        """Those left over keep each other's copies; one that would keep its own changes places with another."""
        free = [taker for taker in range(self._size) if taker not in self._givers]
        for giver in [giver for giver in range(self._size) if giver not in self.takers]:
            at = next((i for i, taker in enumerate(free) if taker != giver), 0)
            self._set(giver, free.pop(at))
        for giver in [giver for giver, taker in self.takers.items() if giver == taker]:
            other = min(self._after(giver), key=lambda other: self._worst(giver, other))
            self._set(giver, self.takers[other])
            self._set(other, giver)

    def _worst(self, giver: int, other: int) -> tuple[int, int]:
        """How bad it is when `giver` takes the peer of `other`, which gets `giver` for its own."""
        pair = self._levels[giver][self.takers[other]], self._levels[other][giver]
        return max(pair), sum(pair)
