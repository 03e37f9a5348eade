"""Rounds: whichever node is lost, and whenever, all that was held by all is somewhere, and nobody waits for nobody."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.checkpoint.lending import Lend
from packtrain.checkpoint.rounds import NEVER, Round, Rounds
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import RECORD, BufferFolder, choose, memory_folder
from packtrain.core.bulk import Crew
from packtrain.core.fake import FakePlatform, fail
from tests.checkpoint.keepers import Nodes
from tests.checkpoint.test_slots import Client
from tests.checkpoint.worlds import RUN, tensor_of


def test_a_round_begins_when_all_have_ended_with_the_last():
    """Only at steps of the cadence, only when the last round has ended for each rank; a round that one of them did not
    hold is passed over as the one before. None where a rank has no memory tier, which could make no step whole."""
    rounds = Rounds(10)
    assert rounds.begins(5, ()) is None and rounds.begins(10, (0, 0)) == Round(10, 0)
    assert rounds.begins(20, (10, 0)) is None and rounds.begins(25, (10, 10)) is None
    assert rounds.begins(30, (10, 10)) == Round(30, 10)
    assert rounds.begins(40, (30, 10)) is None and rounds.begins(40, (30, -30)) == Round(40, 10)
    assert rounds.begins(50, (40, 40)) == Round(50, 40)
    assert rounds.begins(60, (50, NEVER)) is None and rounds.begins(70, (50, 50)) == Round(70, 50)
    assert Rounds(0).begins(10, (0, 0)) is None


class Late(Crew):
    """Work is done when the test says so, or when somebody waits for it."""

    def __init__(self):
        self.work = []

    def start(self, work):
        self.work.append(work)
        return self.run

    def run(self):
        while self.work:
            self.work.pop()()

    def close(self):
        pass


class Slow(FakePlatform):
    """Its records come late, and its memory may have no room."""

    def __init__(self, disk, name):
        super().__init__(disk, name)
        self.late = Late()

    def crew(self, threads):
        return self.late


class World(Nodes):
    """Nodes that train in step with each other. `speeds`: how likely it is that a copy is brought, or fails, while one
    step goes by; `faults`: how likely a copy is not made, or does not arrive."""

    def __init__(self, speeds, faults, chance):
        super().__init__(len(speeds))
        self.speeds, self.fault, self.chance = dict(zip(self.names, speeds)), faults, chance
        self.breaks, self.step_s, self.mute = 0.3, 0.0, ""
        """How likely a copy is cut; how long a step takes; whose carrier brings nothing and does not say so."""
        self.copying, self.heard, self.arrived = {}, (), {}
        self.fresh()

    def fresh(self):
        """Workers of an attempt that has just begun."""
        self.rounds = {name: Rounds(2) for name in self.names}
        self.workers = {name: Slow(self.disk, name) for name in self.names}
        for name, writer in zip(self.names, self.writers):
            where = BufferFolder(memory_folder(RUN, name), slots=True, lends=True)
            attempt = self.begun.attempt
            self.savers[name] = Saver(self.workers[name], where, Client(), attempt, writer, 60.0, self.begun, True)
        self.copying.clear()
        self.heard = ()
        self.promised = self.begun.memory[1] if self.begun.memory else 0
        """Step of the last round that all held and have ended with; 0: none."""
        kept = {one.writer for one in self.helds() if not one.own}
        self.arrived = {
            name: {self.promised} if writer in kept else set() for name, writer in zip(self.names, self.writers)
        }

    def train(self, step, check):
        """One step of all; `check` is called after whatever one of them does."""
        self.heard = tuple(self.savers[name].round_ended for name in self.names)
        for name in self.chance.sample(self.names, len(self.names)):
            self.remember_on(name, step)
            check()
        for name in self.chance.sample(self.names, len(self.names)):
            if self.chance.random() < self.speeds[name]:
                self.workers[name].late.run()
            self.savers[name].poll()
            check()
        self.platforms["n0"].sleep(self.step_s)
        for name in self.chance.sample(self.names, len(self.names)):
            if name != self.mute and self.savers[name]._client.told and self.chance.random() < self.speeds[name]:
                self.carry(name)
                check()

    def remember_on(self, name, step):
        platform, begins = self.workers[name], self.rounds[name].begins(step, self.heard)
        if self.chance.random() < self.fault:
            platform.faults = lambda op, path, n: fail(28) if op in ("unlink", "map_file") else None
        writer = self.writers[self.names.index(name)]
        self.savers[name].remember(step, [tensor_of(writer, "float32", (10, 40), step)], {"data_index": step}, begins)
        platform.faults = None

    def carry(self, name):
        """Part of a copy, or the rest of it, or its failure."""
        client = self.savers[name]._client
        line = client.told[-1]
        lend = Lend(**{key: value for key, value in line.items() if key != "op"})
        assert self.workers[name].exists(lend.image + RECORD), "it is lent when it is whole"
        self.cuts, self.cut_at = False, 0
        if self.copying.setdefault(name, lend.id) == lend.id and self.chance.random() < self.breaks:
            self.cuts, self.cut_at = True, self.pieces + self.chance.randint(1, 25)
            self.lendings[name].bring(lend)
            self.cuts, self.cut_at = False, 0
            return
        failed = self.chance.random() < self.fault
        ok = not failed and isinstance(self.lendings[name].bring(lend), dict)
        if ok:
            self.arrived[name].add(lend.step)
        client.ended.append({"id": lend.id, "ok": ok})
        client.told.clear()
        del self.copying[name]

    def without(self, name, helds):
        """What the next attempt would begin from, were that node lost now."""
        return choose([one for one in helds if one.node != name], self.begun)


def played(world, steps):
    """Train; after each event each node in turn is taken for lost. Returns how many rounds were promised."""
    seen = set()

    def check():
        ended = {saver.round_ended for saver in world.savers.values()}
        world.promised = max(world.promised, ended.pop() if len(ended) == 1 else 0)
        helds = world.helds()
        for name in world.names:
            if world.promised and world.promised in world.arrived[name]:
                chosen = world.without(name, helds)
                assert chosen.memory and chosen.memory[1] >= world.promised, (name, world.promised, chosen.note)
        seen.add(world.promised)

    for step in steps:
        world.train(step, check)
    return seen - {0}


def must_go_on(world, steps):
    """Train: a later step than before is held by all in the end."""
    before = world.promised
    assert max(played(world, steps), default=0) > before


SPEEDS = st.lists(st.sampled_from([0.1, 0.3, 0.6, 1.0]), min_size=2, max_size=4)


@settings(max_examples=10, deadline=None)
@given(SPEEDS, st.integers(0, 2**32))
def test_any_one_node_may_be_lost_at_any_moment(speeds, seed):
    """However slow copies are, and differently so, and whenever a record comes: at no moment is there a node without
    which the last round that all ended with could not be begun from, or a later one."""
    world = World(speeds, 0.0, random.Random(seed))
    promised = played(world, range(1, 25))
    assert promised or min(speeds) < 0.5
    assert all(saver.forgot == 0 for saver in world.savers.values())


@settings(max_examples=10, deadline=None)
@given(SPEEDS, st.integers(0, 2**32))
def test_what_fails_costs_its_own_node_alone(speeds, seed):
    """Copies that do not arrive, and steps that a writer could not hold: the loss of any other node costs no more, and
    rounds go on."""
    world = World(speeds, 0.15, random.Random(seed))
    played(world, range(1, 25))
    world.fault = world.breaks = 0.0
    world.speeds = dict.fromkeys(world.names, 1.0)
    must_go_on(world, range(25, 33))


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**32), st.booleans())
def test_a_carrier_that_never_answers_costs_its_own_node_alone(nodes, seed, told):
    """It hangs, or nothing can be told to it, at whatever step: rounds go on, each for as long as a copy has time, and
    the loss of any other node costs no more."""
    world = World([1.0] * nodes, 0.0, random.Random(seed))
    world.breaks, world.step_s = 0.0, 20.0
    begins = world.chance.randint(1, 9)
    played(world, range(1, begins))
    world.mute = world.chance.choice(world.names)
    world.savers[world.mute]._client.lost = not told
    for at in range(begins, begins + 48, 16):
        must_go_on(world, range(at, at + 16))


@settings(max_examples=10, deadline=None)
@given(SPEEDS, st.integers(0, 2**32), st.integers(6, 24))
def test_a_node_lost_twice(speeds, seed, lost_at):
    """An attempt that begins from what a peer kept can be begun again from the same, or from newer, at each moment, and
    what it began from is kept for no longer than that."""
    world = World(speeds, 0.0, random.Random(seed))
    played(world, range(1, lost_at))
    victim = world.chance.choice(world.names)
    chosen = world.without(victim, world.helds())
    if chosen.memory is None:
        return
    step = chosen.memory[1]
    world.lose(victim)
    world.dead.clear()
    world.begin(chosen.memory)
    for name, writer in zip(world.names, world.writers):
        source = name if name in chosen.holders[writer] else chosen.holders[writer][0]
        world.fetch(name, writer, source)
    world.fresh()
    promised = played(world, range(step + 1, step + 25))
    if len(promised) > 3:
        assert {one.attempt for one in world.helds() if not one.own} == {world.begun.attempt}
