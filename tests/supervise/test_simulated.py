"""Worlds that break, by seed, in virtual time: the shipped decisions heal them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from packtrain.core.records import AttemptEnded
from packtrain.supervise.events import BringBack
from packtrain.supervise.messages import Launch
from packtrain.supervise.state import BEGINNING, BRINGING, Issued, State, evolve
from tests.supervise.committed import Record
from tests.supervise.faults import FAULTS, strike
from tests.supervise.simulated import Killed, Simulation

FAULTS_S = 25.0
"""Faults come until then."""
HEALED_S = 600.0
"""Nothing that heals takes longer, with the limits of the simulation."""
GOES_BACK = ("guard rollback", "checkpoint damaged")
SHARE = 200
"""Seeds of `make test`; the soak takes a thousand."""


def world_of(seed: int, **options: Any) -> tuple[Simulation, list[str]]:
    """A cluster and what befalls it, all from the seed."""
    chance = random.Random(seed)
    chosen = {
        "nodes": chance.choice([1, 2, 3, 4]), "spares": chance.choice([0, 1, 2]), "procs": chance.choice([1, 2]),
        "loss": chance.choice([0.0, 0.0, 0.1, 0.3]),
        "memory": seed % 3 == 0, "peers": seed % 2 == 0, "disk_s": (0.0, 0.0, 0.3, 3.0, 20.0)[seed % 5],
        "away": seed % 7 < 3,
        **options,
    }
    sim = Simulation(seed, **chosen)
    faults = [chance.choice(sorted(FAULTS)) for _ in range(chance.randint(1, 8))]
    for fault in faults:
        sim.at(chance.uniform(0, FAULTS_S), lambda fault=fault: strike(sim, fault))
    return sim, faults


def check(sim: Simulation, faults: list[str]) -> None:
    """What must hold of every run that is over, whatever befell it."""
    assert sim.finish is not None, f"still {sim.coordinator.desk.state.run.stage} after {sim.now:.0f} s"
    assert sim.finish.exit_code == 0, sim.finish
    saves = sim.commits.lineage()
    assert sim.commits.records[saves[0] - 1].step == sim.steps, "the last step is not published"
    assert set(sim.performed.values()) == {1}, "an action was done twice"
    assert max(sim.launched.values()) == 1, "an attempt was launched twice on one node"
    ended = [record.attempt for record in sim.journal if isinstance(record, AttemptEnded)]
    assert len(ended) == len(set(ended)), "an attempt ended twice"
    assert len(went_back(sim)) <= sum(fault in GOES_BACK for fault in faults), "a published checkpoint was left behind"
    assert sim.coordinator.desk.state == replayed(sim), "the log leads to another state"


def replayed(sim: Simulation) -> State:
    """Where its log leads. On the way no worker was started where none was to be, nor before its checkpoint was there.
    """
    state = State()
    for record in sim.log.records:
        if isinstance(record, Issued) and isinstance(record.action, Launch) and record.action.ranks:
            node = state.nodes[record.node]
            assert node.here and not node.cordoned and not node.draining, f"workers on {record.node}: {node}"
            assert not any(isinstance(one.own, BringBack) for one in state.pending.values()), "it was not back yet"
        state = evolve(state, record)
    return state


def went_back(sim: Simulation) -> list[int]:
    """Begins that restored something else than the newest save before them."""
    found, newest = [], 0
    for number, record in enumerate(sim.commits.records, 1):
        if record.kind == "begin" and record.parent < newest:
            found.append(number)
        newest = number if record.kind == "save" else newest
    return found


def play(seed: int) -> None:
    sim, faults = world_of(seed)
    sim.run(FAULTS_S + HEALED_S)
    check(sim, faults)


@pytest.mark.parametrize("first", range(0, SHARE, 50))
def test_a_world_that_breaks_heals_by_itself(first: int) -> None:
    """Whatever befalls a cluster, once it is over the run ends with its last step published, no published checkpoint
    was left behind, no action was done twice, and the log leads to the state of its coordinator."""
    for seed in range(first, first + 50):
        play(seed)


def test_a_world_that_is_hardly_heard_gets_further() -> None:
    """The same where 30% of all messages are lost for good and the run's disk takes up to 20 s for each answer. With a
    limit that did not grow one world in three stood still: one of its nodes was taken for lost before each first step.
    """
    for seed in range(12):
        sim, faults = world_of(seed, nodes=4, spares=2, loss=0.3, disk_s=20.0, away=True)
        sim.run(FAULTS_S + HEALED_S)
        check(sim, faults)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_worlds_heal(first: int) -> None:
    """The same for a thousand seeds."""
    for seed in range(first, first + 50):
        play(seed)


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize(("nodes", "spares"), [(1, 0), (3, 1)])
def test_each_fault_alone_heals(fault: str, nodes: int, spares: int) -> None:
    """Each fault of the table, in the middle of a run, leads to a run that ends well, at most three attempts later."""
    sim = Simulation(7, nodes=nodes, spares=spares)
    sim.at(9.0, lambda: strike(sim, fault))
    sim.run(HEALED_S)
    check(sim, [fault])
    assert sim.commits.attempt <= 3


NEEDS_NO_WORKER = (
    "ECC burst", "GPU off the bus", "Xid", "agent stopped", "cannot launch", "cordon", "disk of decisions full",
    "drain", "kill agent", "kill carrier", "kill coordinator", "link flap", "lose machine", "network cut", "pause",
    "replace", "two leaders",
)


@pytest.mark.parametrize("stage", [BEGINNING, BRINGING])
@pytest.mark.parametrize("fault", NEEDS_NO_WORKER)
def test_a_fault_before_workers_start_heals(fault: str, stage: str) -> None:
    """The same where it strikes once the second attempt has its nodes, on one of three or on the spare, and before it
    has workers: no worker is started where none is to be, and nothing waits for one."""
    for seed in (1, 2, 3):
        sim = Simulation(seed, nodes=3, spares=1, disk_s=6.0, away=True)
        sim.at(18.0, lambda sim=sim: strike(sim, "kill"))
        struck: list[str] = []

        def look(sim: Simulation = sim, struck: list[str] = struck) -> None:
            if sim.coordinator.desk.state.run.stage != stage:
                return sim.later(0.1, look)
            struck.append(fault)
            strike(sim, fault)

        sim.at(18.0, look)
        sim.run(HEALED_S)
        check(sim, struck)
        assert struck and sim.commits.attempt <= 4


MOMENTS = ("append", "appended", "own", "begun")
"""Before and after each batch of the log, before each action of the coordinator itself, after its `begin`."""


def killed_at(count: int, sim: Simulation, *moments: str) -> int:
    """Play a run whose coordinator dies at the `count`-th of these moments (0: never); how many there were."""
    seen = [0]

    def kill(moment: str) -> None:
        seen[0] += moment in moments
        if moment in moments and seen[0] == count:
            raise Killed

    sim.log.kill = kill
    sim.run(HEALED_S)
    return seen[0]


def test_a_killed_coordinator_disturbs_no_worker() -> None:
    """SIGKILL of the coordinator before, while and after its log is written and around each of its own actions, at
    every such moment of a run: the next one goes on from the log, the attempt runs through, nothing is done twice."""
    total = killed_at(0, Simulation(3, nodes=2, spares=0), *MOMENTS)
    assert total >= 40
    for count in range(1, total + 1):
        sim = Simulation(3, nodes=2, spares=0)
        killed_at(count, sim, *MOMENTS)
        check(sim, [])
        assert len(sim.worlds) == 1, f"killing the coordinator at moment {count} disturbed the workers"


def healing() -> Simulation:
    """A lost agent and a hung rank, with copies in memory."""
    sim = Simulation(5, nodes=3, spares=1, memory=True, peers=True)
    sim.at(9.0, lambda: strike(sim, "kill agent"))
    sim.at(16.0, lambda: strike(sim, "hang of one"))
    return sim


@pytest.mark.parametrize("start", range(0, 20, 10))
def test_killed_while_it_heals(start: int) -> None:
    """The same at every tenth moment of healing a lost agent and a hung rank, each message on its way included."""
    killed_while_healing(start)


@pytest.mark.soak
@pytest.mark.parametrize("start", range(20))
def test_killed_at_every_moment_of_healing(start: int) -> None:
    """The same at every moment."""
    killed_while_healing(start)


def killed_while_healing(start: int) -> None:
    total = killed_at(0, healing(), *MOMENTS, "send")
    assert total >= 100
    for count in range(1 + start, total + 1, 20):
        sim = healing()
        killed_at(count, sim, *MOMENTS, "send")
        check(sim, [])


def test_replay_is_the_state_at_every_look() -> None:
    """At each look at a run that breaks in many ways the log so far leads to exactly the state of the coordinator."""
    for seed in range(200, 203):
        sim, faults = world_of(seed, quick=False)
        sim.run(FAULTS_S + HEALED_S)
        check(sim, faults)


def from_memory(sim: Simulation) -> list[Record]:
    return [record for record in sim.commits.records if record.memory is not None]


def test_worlds_begin_from_memory() -> None:
    """Whoever dies, a rank, an agent, a machine or a coordinator, many attempts begin from memory, some with slots that
    come from a peer, each with all that it needs and newer than the disk; and the run ends as any other."""
    begins = moved = 0
    for seed in range(40):
        sim = Simulation(seed, memory=True, peers=True)
        faults = [sim.random.choice(["kill", "kill agent", "lose machine", "kill coordinator"]) for _ in range(4)]
        for fault in faults:
            sim.at(sim.random.uniform(8, FAULTS_S), lambda fault=fault, sim=sim: strike(sim, fault))
        sim.run(FAULTS_S + HEALED_S)
        check(sim, faults)
        begins += len(from_memory(sim))
        moved += sum(bool(launch.memory_from) for launch in sim.launches)
    assert begins >= 20 and moved >= 10, (begins, moved)


def test_a_killed_rank_costs_two_steps_at_most() -> None:
    """Wherever a rank is killed, the next attempt goes on at most two steps before, whatever is on disk."""
    checked = 0
    for when in range(8, 22):
        sim = Simulation(when, nodes=2, spares=0, memory=True)
        sim.at(when, lambda sim=sim: strike(sim, "kill"))
        sim.run(when - 0.01)
        step = max((world.step for world in sim.worlds.values()), default=0)
        sim.run(HEALED_S)
        check(sim, ["kill"])
        checked += any(record.step >= step - 2 for record in from_memory(sim))
    assert checked >= 7, checked


def test_a_seed_replays_exactly() -> None:
    """Two runs of one seed write the same log."""
    logs = []
    for _ in range(2):
        sim, _ = world_of(42)
        sim.run(FAULTS_S + HEALED_S)
        logs.append(sim.log.records)
    assert logs[0] == logs[1]
