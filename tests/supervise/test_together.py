"""What many nodes say at the same look is decided together: one look at everything, and the same outcome."""

from __future__ import annotations

import random

import pytest

from packtrain.core.units import NS
from packtrain.supervise import messages as m
from packtrain.supervise.events import AnyEvent, Back, Begin, FromNode, Joined, Silent
from packtrain.supervise.policy import decide
from packtrain.supervise.state import ENDING, LAUNCHING, RUNNING, Changed, Issued, State, evolve
from tests.supervise.played import Play, actions, owns

NODES = 8


def joined(count: int) -> list[AnyEvent]:
    return [Joined(ns=NS, node=f"n{n}", agent="a", host=f"h{n}") for n in range(count)]


def edges(state: State, tell: object) -> list[AnyEvent]:
    """One of each rank's node: what `tell` makes of the rank's number."""
    return [
        FromNode(ns=state.ns, node=rank.node, agent="a", seq=state.nodes[rank.node].seq + 1, event=tell(number))
        for number, rank in state.ranks.items()
    ]


def ready(state: State) -> list[AnyEvent]:
    return edges(state, lambda rank: m.RankReady(attempt=1, rank=rank, facts={"step": "4"}))


def one_by_one(state: State, events: list[AnyEvent]) -> State:
    for event in events:
        state = evolve(state, *decide(state, event))
    return state


def together(state: State, events: list[AnyEvent]) -> tuple[State, list[Issued]]:
    """The state after them, which a replay of each record alone leads to, too; and what was issued."""
    records = decide(state, *events)
    after = evolve(state, *records)
    assert after == evolve_slowly(state, records) and sum(isinstance(one, Changed) for one in records) <= 1
    return after, [one for one in records if isinstance(one, Issued)]


def evolve_slowly(state: State, records: list) -> State:
    for record in records:
        state = evolve(state, record)
    return state


def test_a_world_begins_as_if_its_nodes_had_spoken_one_by_one() -> None:
    """All join, all say that they started, all are ready: the same state, the same ids, GO for everybody."""
    new = Play(nodes=NODES, join=False).state
    state, issued = together(new, joined(NODES))
    assert state == one_by_one(new, joined(NODES)) and len(owns(issued, Begin)) == 1
    play = Play(nodes=NODES)
    play.begun()
    launches = list(play.state.pending.values())
    did = [
        FromNode(ns=play.ns, node=one.node, agent="a", seq=1, event=m.Did(id=one.id)) for one in launches
    ]
    state, _ = together(play.state, did)
    assert state == one_by_one(play.state, did) and not state.pending and state.run.stage == LAUNCHING
    after, issued = together(state, ready(state))
    assert after == one_by_one(state, ready(state)) and after.run.stage == RUNNING
    assert [node for node, _ in actions(issued, m.GiveOrder)] == play.members()


def test_of_those_that_die_at_once_nobody_is_told_to_die() -> None:
    """Only nodes whose ranks live are asked to end them, and each of the ends is known with its status."""
    play = Play(nodes=NODES).run()
    state = play.state
    ends = edges(state, lambda rank: m.RankEnded(attempt=1, rank=rank, status=1 if rank == 5 else -9))[3:]
    after, issued = together(state, ends)
    assert [node for node, _ in actions(issued, m.EndWorkers)] == play.members()[:3] and after.run.stage == ENDING
    assert [rank.status for rank in after.ranks.values()] == [None] * 3 + [-9, -9, 1, -9, -9]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_heard_the_log_leads_to_the_same_state(seed: int) -> None:
    """Agents that are new and known, silence, ends, troubles and outcomes in any order and number at once: what is
    logged leads where the decision led, record by record and all at once; nothing is issued twice."""
    chance = random.Random(seed)
    play = Play(nodes=4, spares=2).run()
    state, ids, agents = play.state, set(play.state.pending), dict.fromkeys(play.state.nodes, "a")
    for turn in range(30):
        seqs, events = {name: node.seq for name, node in state.nodes.items()}, list[AnyEvent]()
        for name in chance.choices(sorted(state.nodes), k=chance.randrange(1, 12)):
            events.append(_anything(chance, state, name, agents, seqs, turn))
        state, issued = together(state, events)
        assert not ids & {one.id for one in issued} and list(state.pending) == sorted(state.pending)
        ids |= {one.id for one in issued}
        agents = {name: node.agent for name, node in state.nodes.items()}


def _anything(
    chance: random.Random, state: State, name: str, agents: dict[str, str], seqs: dict[str, int], turn: int
) -> AnyEvent:
    ns, attempt, rank = state.ns + turn, state.run.attempt, chance.randrange(4)
    match chance.randrange(8):
        case 0:
            return Joined(ns=ns, node=name, agent=f"b{turn}", attempt=chance.choice((0, attempt)))
        case 1:
            return Silent(ns=ns, node=name, seconds=3.0)
        case 2:
            return Back(ns=ns, node=name)
    seqs[name] += 1
    event = chance.choice((
        m.RankEnded(attempt=attempt, rank=rank, status=chance.choice((0, 1, 75, -9))),
        m.RankStalled(attempt=attempt, rank=rank, seconds=90.0, step=5),
        m.RankHeard(attempt=attempt, rank=rank, step=6), m.Did(id=chance.choice([*state.pending, 1])),
        m.CarrierUp(attempt=attempt, address="h:1"),
        m.Stacks(attempt=attempt, rank=rank, how="", text=str(rank)),
    ))
    return FromNode(ns=ns, node=name, agent=agents[name], seq=seqs[name], event=event)
