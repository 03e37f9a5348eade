"""Which node keeps whose copies: one each, never itself, outside the failure domain wherever that can be."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from packtrain.checkpoint.peering import peers_of


@st.composite
def clusters(draw, nodes_max=9):
    """Nodes in order, the domains of some of them, and groups that share shards."""
    nodes = [f"n{i}" for i in range(draw(st.integers(2, nodes_max)))]
    domains = draw(st.dictionaries(st.sampled_from(nodes), st.sampled_from("abc")))
    groups = draw(st.lists(st.sets(st.sampled_from(nodes), max_size=4), max_size=3))
    return nodes, domains, groups


def outside(node, peer, domains):
    return node != peer and (node not in domains or domains[node] != domains.get(peer))


@given(clusters())
def test_each_keeps_one(cluster):
    """Every node has one peer, which is another node, and keeps the copies of one; the plan is the same each time."""
    nodes, domains, groups = cluster
    peers = peers_of(*cluster)
    assert list(peers) == nodes and sorted(peers.values()) == sorted(nodes)
    assert all(node != peer for node, peer in peers.items())
    assert peers == peers_of(list(nodes), dict(domains), [set(group) for group in groups])


@given(clusters(nodes_max=6))
def test_as_many_outside_their_domain_as_can_be(cluster):
    """No way to give each node one other node leaves more of them with a peer outside their failure domain."""
    nodes, domains, _ = cluster
    found = sum(outside(node, peer, domains) for node, peer in peers_of(*cluster).items())
    best = max(
        sum(outside(node, peer, domains) for node, peer in zip(nodes, order))
        for order in itertools.permutations(nodes) if all(node != peer for node, peer in zip(nodes, order))
    )
    assert found == best


def test_the_next_one_that_will_do():
    """In order, in another rack and in another group, each node takes the next; where racks are alike in size all go
    outside; without racks and groups it is the next node."""
    assert peers_of(["a", "b", "c"]) == {"a": "b", "b": "c", "c": "a"}
    nodes, racks = list("abcdef"), dict(zip("abcdef", "xxyyzz"))
    assert peers_of(nodes, racks) == dict(zip("abcdef", "cdefab"))
    sharing = [{"a", "c"}, {"b", "d"}]
    peers = peers_of(nodes, racks, sharing)
    assert (peers["a"], peers["b"]) == ("d", "c") and all(racks[n] != racks[p] for n, p in peers.items())
    assert peers_of(["a", "b"], {"a": "x", "b": "x"}) == {"a": "b", "b": "a"}
    assert peers_of(["a"]) == peers_of([]) == {}


@given(st.integers(3, 40), st.integers(1, 6), st.data())
def test_few_move_when_a_node_leaves(nodes_n, rack, data):
    """Racks in a row, one node gone: those that get another peer are fewer than two racks have nodes."""
    nodes = [f"n{i}" for i in range(nodes_n)]
    racks = {node: str(i // rack) for i, node in enumerate(nodes)}
    gone = data.draw(st.sampled_from(nodes))
    before, after = peers_of(nodes, racks), peers_of([node for node in nodes if node != gone], racks)
    moved = [node for node in after if after[node] != before[node]]
    assert len(moved) < max(2, 2 * rack), (before, after)


def test_a_thousand_nodes():
    """A thousand nodes of which most are in one rack get a plan, each keeping one other's copies."""
    nodes = [f"n{i}" for i in range(1000)]
    peers = peers_of(nodes, {node: "big" if i % 5 else str(i) for i, node in enumerate(nodes)})
    assert max(Counter(peers.values()).values()) == 1 and len(peers) == 1000
