"""What many nodes say at once costs as much for each of them in a large world as in a small one: counted in steps of
the interpreter, by no clock. Where it did not, a coordinator of thousands was held up for seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from packtrain.core.units import NS
from packtrain.supervise import messages as m
from packtrain.supervise.events import AnyEvent, Back, FromNode, Joined, Silent, Tick
from packtrain.supervise.policy import decide
from packtrain.supervise.state import State, evolve
from tests.supervise.played import Play

FEW, MANY = 60, 120
TWICE = 2.3
"""Of the work for half as many; where each costs more, the more there are, it is nearly four times as much."""


def steps_of(call: Callable[[], object]) -> int:
    """Instructions that the interpreter carries out in `call`, whatever it calls included."""
    count = 0

    def traced(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def begun(nodes: int) -> State:
    """All are asked to start their workers."""
    play = Play(nodes=nodes)
    play.begun()
    return play.state


def launched(nodes: int) -> State:
    state = begun(nodes)
    return evolve(state, *decide(state, *outcomes(state)))


def going(nodes: int) -> State:
    """All were told to go."""
    state = launched(nodes)
    return evolve(state, *decide(state, *each(state, lambda rank: m.RankReady(attempt=1, rank=rank, facts={}))))


def running(nodes: int) -> State:
    state = going(nodes)
    return evolve(state, *decide(state, *outcomes(state)))


def outcomes(state: State) -> list[AnyEvent]:
    """Everybody has done what is pending."""
    return [_told(state, one.node, m.Did(id=one.id)) for one in state.pending.values()]


def each(state: State, event: Callable[[int], m.AgentEvent]) -> list[AnyEvent]:
    return [_told(state, rank.node, event(number)) for number, rank in state.ranks.items()]


def _told(state: State, node: str, event: m.AgentEvent) -> AnyEvent:
    return FromNode(ns=state.ns, node=node, agent="a", seq=state.nodes[node].seq + 1, event=event)


def save(state: State) -> list[AnyEvent]:
    return each(state, lambda rank: m.RankPhase(attempt=1, rank=rank, phase="save", step=9))


def death(state: State) -> list[AnyEvent]:
    return each(state, lambda rank: m.RankEnded(attempt=1, rank=rank, status=1))


def silence(state: State) -> list[AnyEvent]:
    return [Silent(ns=state.ns, node=name, seconds=3.0) for name in state.nodes]


def voices(state: State) -> list[AnyEvent]:
    return [Back(ns=state.ns, node=name) for name in state.nodes]


def arrival(state: State) -> list[AnyEvent]:
    return [Joined(ns=state.ns, node=name, agent="a", attempt=1) for name in state.nodes]


def silent(nodes: int) -> State:
    state = running(nodes)
    return evolve(state, *decide(state, *silence(state)))


def busy(nodes: int) -> State:
    """All have yet to do what they were asked to: tell their stacks."""
    state = running(nodes)
    [first, *_] = each(state, lambda rank: m.RankStalled(attempt=1, rank=rank, seconds=9.0, step=5))
    return evolve(state, *decide(state, first))


def loss(state: State) -> list[AnyEvent]:
    """All have been silent for too long at the same look."""
    return [Tick(ns=state.ns + 1000 * NS)]


def change(state: State) -> list[AnyEvent]:
    """Each has another agent."""
    return [Joined(ns=state.ns, node=name, agent="b") for name in state.nodes]


def carriers(state: State) -> list[AnyEvent]:
    return each(state, lambda rank: m.CarrierUp(attempt=1, address=f"host:{rank + 1}"))


def ends(state: State) -> list[AnyEvent]:
    return each(state, lambda rank: m.CarrierEnded(attempt=1, why="SIGKILL"))


@pytest.mark.parametrize(("world", "said"), [
    (begun, outcomes), (launched, lambda state: each(state, lambda rank: m.RankReady(attempt=1, rank=rank, facts={}))),
    (going, outcomes), (running, save), (running, death), (running, silence), (running, voices), (running, arrival),
    (silent, loss), (busy, change), (running, carriers), (running, ends),
], ids=[
    "launched", "ready", "go", "save", "death", "silence", "voices", "arrival", "loss", "change", "carriers", "ends",
])
def test_a_word_costs_the_same_in_a_large_world(
    world: Callable[[int], State], said: Callable[[State], list[AnyEvent]]
) -> None:
    """Twice as many nodes that say the same at once are twice the work, to decide and to replay it."""

    def work(nodes: int) -> int:
        state = world(nodes)
        events = said(state)
        return steps_of(lambda: evolve(state, *decide(state, *events)))

    assert work(MANY) <= TWICE * work(FEW)
