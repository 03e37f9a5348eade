"""A world that does not exist: nodes, agents, workers, carriers, a link and a commit log, in virtual time.

What decides is shipped code: `Desk` with the policy under it on the coordinator's side, `AgentSide` on the agents'.
Everything else is a model of what machines do, and of how they break. A seed replays a run exactly.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from packtrain.checkpoint.slots import Held
from packtrain.core.contract import Word
from packtrain.core.errors import PacktrainError, SlotDamaged
from packtrain.core.journal import Entry
from packtrain.core.records import AttemptBegan
from packtrain.core.units import NS
from packtrain.supervise import messages as m
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.delivery import AgentSide
from packtrain.supervise.desk import Desk
from packtrain.supervise.detect import WatchedClock
from packtrain.supervise.events import Begin, Begun, Done, Finish, Opened, Published, Setup, Write
from packtrain.supervise.held import Taken, taken
from packtrain.supervise.state import AnyRecord, State, evolve
from tests.supervise.committed import Commits
from tests.supervise.noted import begun, step

CONFIG = SuperviseConfig(
    grace_s=10, beat_overdue_s=5, progress_s=15, go_s=20, nodes_s=10, replace_s=6, node_silent_s=2, node_lost_s=4,
    grow_s=10, attempts_without_progress=20,
)
BROKEN = {"name": "world.broken", "what": "a peer is gone", "where": "", "fix": ""}
LOOK_S = 0.5
STEP_S = 0.5
Node = str


class Killed(Exception):
    """The coordinator is gone, here and now."""


@dataclass
class Rank:
    node: Node
    state: str = "init"
    """init, ready, running, silent, stalled, dead"""
    since: float = 0.0


@dataclass
class World:
    """The workers of one attempt, all over the cluster."""

    attempt: int
    step: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    size: int = 0
    whole: bool = False
    """All ranks took up their work."""
    broken: bool = False
    paused: bool = False


class Agent:
    """One incarnation on one node. Its workers die with it."""

    def __init__(self, sim: Simulation, node: Node, number: int) -> None:
        self.sim, self.node, self.token = sim, node, f"{node}.{number}"
        self.alive = True
        self.stopped_until = 0.0
        self.side = AgentSide(node, self.token, sim.terms.get(node, 0))
        self.attempt = self.called = 0
        self.order: dict[int, tuple[int, Word]] = {}
        self.carrier = False
        self.told: dict[tuple[int, int], list[float]] = {}

    def ranks(self) -> list[tuple[int, Rank]]:
        world = self.sim.worlds.get(self.attempt)
        return [(n, r) for n, r in world.ranks.items() if r.node == self.node and r.state != "dead"] if world else []

    def event(self, event: m.AgentEvent) -> None:
        if self.alive:
            self.side.happened(self.sim.ns, event)

    def look(self) -> None:
        if not self.alive or self.sim.now < self.stopped_until:
            return
        self._watch_ranks()
        sim = self.sim
        if self.side.lost(sim.ns):
            self.side.anew(sim.ns)  # as the agent does when it calls again
        if sim.coordinator.term > self.called and sim.now >= sim.cut.get(self.node, 0.0):
            self.called = sim.coordinator.term  # the file with its address was replaced
            self.side.anew(sim.ns)
        hello = m.Hello(
            node=self.node, agent=self.token, boot_id="b", term=self.side.term, attempt=self.attempt, version="t",
            procs=sim.procs, host=self.node,
        )
        world = sim.worlds.get(self.attempt)
        pulse = m.Pulse(
            node=self.node, agent=self.token, attempt=self.attempt, step=world.step if world else -1,
            step_s=STEP_S * sim.slow.get(self.node, 1.0),
        )
        for message in self.side.due(sim.ns, hello, pulse):
            sim.to_coordinator(self.node, message)

    def _watch_ranks(self) -> None:
        for number, rank in self.ranks():
            if rank.state not in ("silent", "stalled"):
                continue
            kind = m.RankSilent if rank.state == "silent" else m.RankStalled
            bounds = (3.0, 5.0) if rank.state == "silent" else (4.0, 8.0, 15.0)
            told = self.told.setdefault((self.attempt, number), [])
            for bound in bounds:
                if self.sim.now - rank.since >= bound and bound not in told:
                    told.append(bound)
                    more = {} if kind is m.RankSilent else {"step": self.sim.worlds[self.attempt].step}
                    self.event(kind(attempt=self.attempt, rank=number, seconds=bound, **more))

    def receive(self, message: m.FromCoordinator) -> None:
        if not self.alive:
            return
        if self.sim.now < self.stopped_until:
            return self.sim.at(self.stopped_until, lambda: self.receive(message))
        do = self.side.arrived(self.sim.ns, message)
        self.sim.terms[self.node] = self.side.term
        if do is not None:
            self.sim.performed[self.token, do.id] += 1
            self.perform(do)

    def perform(self, do: m.Do) -> None:
        sim, action, error = self.sim, do.action, ""
        match action:
            case m.Launch():
                error = self.launch(action)
            case m.GiveOrder():
                self.order[action.attempt] = (action.order, action.word)
            case m.EndWorkers():
                for number, _ in self.ranks() if action.attempt == self.attempt else []:
                    sim.end(self.attempt, number, -9)
            case m.EndAttempt():
                if action.attempt == self.attempt:
                    for number, _ in self.ranks():
                        sim.end(self.attempt, number, -9)
                    self.attempt, self.carrier = 0, False
            case m.TakeStacks():
                self.stacks(action.attempt)
            case m.TellHeld():
                return self.tell_held(do.id)
            case m.Leave():
                sim.later(0.5, self.leave)
        sim.later(0.02, lambda: self.did(do.id, error))

    def tell_held(self, id: int) -> None:
        """A disk in memory does not hang; now and then an agent is late all the same, or cannot tell."""
        sim, found = self.sim, msgspec.json.encode(self.sim.held.get(self.node, [])).decode()
        kind = sim.random.choices(("told", "late", "refused"), (18, 1, 1))[0]
        error, data = ("cannot be told", "") if kind == "refused" else ("", found)
        sim.later(8 if kind == "late" else 0.02, lambda: self.did(id, error, data))

    def did(self, id: int, error: str, data: str = "") -> None:
        if self.alive:
            self.side.did(self.sim.ns, m.Did(id=id, error=error, data=data))

    def launch(self, action: m.Launch) -> str:
        sim, launched = self.sim, (self.token, action.attempt)
        if sim.old and sim.launched[launched]:
            return "it has begun here already"  # two that lead may both bring its checkpoint back
        sim.launched[launched] += bool(action.ranks)
        carried = action.attempt == self.attempt and action.ranks and not self.ranks()
        assert carried or action.attempt > self.attempt, "an attempt that is over, or a second time the same"
        for number, _ in self.ranks():  # of a coordinator that does not lead any more
            sim.end(self.attempt, number, -9, silently=True)
        if sim.unlaunchable.pop(self.node, 0):
            return "no memory for a process"
        self.attempt, self.carrier = action.attempt, True
        self.event(m.CarrierUp(attempt=action.attempt, address=f"{self.node}:1"))
        if not action.ranks:
            return ""
        world = sim.worlds.setdefault(action.attempt, World(action.attempt, max(0, sim.restored[action.attempt])))
        world.size = action.world_size
        sim.launches.append(action)
        if action.memory and not self._fetch(action):
            sim.lacking.add((action.attempt, self.node))
        for number in action.ranks:
            world.ranks[number] = Rank(self.node, since=sim.now)
            sim.later(sim.random.uniform(0.2, 2), lambda n=number, a=action.attempt: self.ready(a, n))
        return ""

    def _fetch(self, action: m.Launch) -> bool:
        """Whether what it restores from memory came to where its workers look."""
        sim, memory = self.sim, self.sim.commits.records[action.begin - 1].memory
        for writer, source in action.memory_from.items():
            found = [
                one for one in sim.held.get(source, [])
                if one.writer == writer and memory and (one.attempt, one.step) == memory[:2]
            ]
            if not found or not sim.agents[source].alive:
                return False
            sim.held.setdefault(self.node, []).append(msgspec.structs.replace(found[0], node=self.node, own=True))
        return True

    def ready(self, attempt: int, number: int) -> None:
        sim, rank = self.sim, self.sim.worlds[attempt].ranks[number]
        if rank.state != "init" or not self.alive:
            return
        if (attempt, self.node) in sim.lacking:
            return sim.end(attempt, number, 75, SlotDamaged("it did not come", where="", fix="").as_dict())
        if sim.refuse_restore:
            error = sim.refuse_restore.pop()
            return sim.end(attempt, number, 75, error.as_dict())
        rank.state = "ready"
        facts = {"step": str(sim.restored[attempt]), "code": "c"}
        if sim.differs.pop(self.node, 0):
            facts["code"] = "other"
        self.event(m.RankReady(attempt=attempt, rank=number, facts=facts))

    def stacks(self, attempt: int) -> None:
        for number, rank in self.ranks():
            text = "" if rank.state == "silent" else "stuck" if number in self.sim.stuck else "all_reduce"
            self.event(m.Stacks(attempt=attempt, rank=number, how="model", text=text))

    def leave(self) -> None:
        self.die(leaves=True)

    def die(self, leaves: bool = False) -> None:
        """Without a word; its workers with it."""
        for number, _ in self.ranks():
            self.sim.end(self.attempt, number, -9, silently=not leaves)
        self.alive = False


class MemoryLog:
    """A log that survives its coordinator. `kill`: what to do before and after each batch."""

    def __init__(self) -> None:
        self.records: list[AnyRecord] = []
        self.broken = False
        self.kill: Callable[[str], None] = lambda _: None

    def append(self, records: Sequence[AnyRecord], state: State) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        self.kill("append")
        self.records += msgspec.json.decode(msgspec.json.encode(records), type=list[AnyRecord])
        self.kill("appended")

    def copy(self) -> MemoryLog:
        other = MemoryLog()
        other.records = list(self.records)
        return other

    def replay(self) -> State:
        state = State()
        for record in self.records:
            state = evolve(state, record)
        return state


class Coordinator:
    """The shell of a coordinator, with a model of everything it touches."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.alive = sim, True
        self.term = sim.commits.take_term()
        self.log = sim.log
        state = self.log.replay()
        self.clock = WatchedClock(sim.watched, sim.ns)
        self.desk = Desk(state, self.term, sim.log, self.clock.ns)
        saves = sim.commits.lineage()
        best = sim.commits.records[saves[0] - 1].step if saves else 0
        self.desk.happened(Opened(
            ns=self.clock.ns, term=self.term, setup=sim.setup, best_step=best, attempt=sim.commits.attempt
        ))

    def look(self) -> None:
        if not self.alive:
            return
        sim = self.sim
        try:
            ns = self.clock.look(sim.ns)
            sim.watched = ns
            self.desk.look(ns, sim.now)
            if self.desk.outdated:
                self.alive = False
                return
            for issued in self.desk.own():
                self.do(issued.id, issued.own)
            for node, message in self.desk.due(sim.ns):
                self.log.kill("send")
                sim.to_agent(node, message)
            assert sim.quick or self.desk.state == self.log.replay()
        except Killed:
            self.alive = False
            sim.later(1, sim.start_coordinator)

    def do(self, id: int, own: object) -> None:
        sim = self.sim
        self.log.kill("own")
        match own:
            case Begin():
                if sim.commits.term != self.term:
                    self.alive = False  # and not a word to agents that may not know of the other one yet
                    return
                found = sim.in_memory(own, self.desk.state)
                attempt, number, step = sim.commits.begin(own.back, own.writers, found.memory)
                sim.restored[attempt] = step
                sim.note(AttemptBegan(attempt=attempt, commit=number, parent=0, restore_step=step))
                self.log.kill("begun")
                begun = Begun(
                    id=id, attempt=attempt, begin=number, step=step, rolled_back=bool(own.back),
                    memory=found.memory is not None, memory_from=found.moves, note=found.note,
                    away=sim.away and step >= 0 and found.memory is None,
                )
                self._in_time(begun)
            case Write():
                if self is sim.coordinator:  # what one believes that leads no more is in the way of no report's count
                    sim.journal.append(own.record)
                    sim.note(own.record)
            case Finish():
                self.alive = False
                sim.finish = own if self is sim.coordinator else sim.finish
            case _:
                self._in_time(Done(id=id))

    def _in_time(self, event: Begun | Done) -> None:
        """Nobody waits for the run's disk: others happen before it comes."""
        late_s = self.sim.disk_s and self.sim.random.uniform(0, self.sim.disk_s)
        self.sim.later(late_s, lambda: self.desk.happened(msgspec.structs.replace(event, ns=self.clock.ns)))


class Simulation:
    """`faults`: (second, name) in order; the run must end by itself after the last of them."""

    def __init__(
        self, seed: int = 0, nodes: int = 3, spares: int = 1, procs: int = 1, steps: int = 40,
        worlds: tuple[int, ...] = (1, 2), loss: float = 0.0, quick: bool = True, plain: bool = False,
        memory: bool = False, peers: bool = False, disk_s: float = 0.0, away: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.quick, self.procs, self.steps, self.loss = quick, procs, steps, loss
        self.setup = Setup(nodes=nodes, procs=procs, worlds=worlds, supervise=CONFIG, plain=plain, memory=memory)
        self.peers, self.disk_s, self.away = peers, disk_s, away
        """How long what the coordinator itself does takes at most; whether checkpoints have to be brought back."""
        self.held: dict[Node, list[Held]] = {}
        """What lies in the memory of each; it outlives agents."""
        self.launches: list[m.Launch] = []
        self.lacking: set[tuple[int, Node]] = set()
        """(attempt, node) where a slot was not to be had."""
        self.now = 0.0
        self.watched = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.commits, self.log = Commits(), MemoryLog()
        self.worlds: dict[int, World] = {}
        self.restored: dict[int, int] = {}
        self.journal: list[object] = []
        self.entries: list[Entry] = []
        """The same and what workers write, as a journal has it."""
        self.performed: Counter[tuple[str, int]] = Counter()
        self.launched: Counter[tuple[str, int]] = Counter()
        self.terms: dict[Node, int] = {}
        self.cut: dict[Node, float] = {}
        self.slow: dict[Node, float] = {}
        """Node -> so many times as long it takes for a step, as its agent tells."""
        self.unlaunchable: dict[Node, int] = {}
        self.differs: dict[Node, int] = {}
        self.differed = False
        self.refuse_restore: list[PacktrainError] = []
        self.stuck: set[int] = set()
        self.finish: Finish | None = None
        self.old: list[Coordinator] = []
        self.agents: dict[Node, Agent] = {}
        self._incarnations: Counter[Node] = Counter()
        for n in range(nodes + spares):
            self.start_agent(f"n{n}")
        self.coordinator = Coordinator(self)
        self.at(0.0, self._tick)

    @property
    def ns(self) -> int:
        return round(self.now * NS) + NS

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), call))

    def note(self, *records: Any, writer: str = "coordinator0") -> None:
        self.entries += [Entry(record, writer, "b", self.ns, 0) for record in records]

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def start_agent(self, node: Node) -> None:
        self._incarnations[node] += 1
        self.agents[node] = Agent(self, node, self._incarnations[node])

    def start_coordinator(self) -> None:
        if self.finish is None and not self.coordinator.alive:
            self.coordinator = Coordinator(self)

    # --- the link ---

    def _passes(self, node: Node) -> bool:
        return self.now >= self.cut.get(node, 0.0) and (not self.loss or self.random.random() >= self.loss)

    def to_coordinator(self, node: Node, message: m.FromAgent) -> None:
        if self._passes(node):
            self.later(self.random.uniform(0.001, 0.05), lambda: self._hear(message))

    def _hear(self, message: m.FromAgent) -> None:
        if self.coordinator.alive:
            self.coordinator.desk.hear(self.coordinator.clock.ns, message)
        for old in self.old:
            if old.alive:
                old.desk.hear(old.clock.ns, message)

    def to_agent(self, node: Node, message: m.FromCoordinator) -> None:
        if self._passes(node):
            self.later(self.random.uniform(0.001, 0.05), lambda: self.agents[node].receive(message))

    # --- time ---

    def _tick(self) -> None:
        for agent in list(self.agents.values()):
            agent.look()
        for world in list(self.worlds.values()):
            self._advance(world)
        self.coordinator.look()
        for old in self.old:
            old.look()
        self.later(LOOK_S, self._tick)

    def run(self, until: float, steps: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= until and self.finish is None and not steps():
            self.now, _, call = heapq.heappop(self._queue)
            call()
        if self.finish is None and not steps():
            self.now = until

    # --- workers ---

    def end(self, attempt: int, number: int, status: int, error: dict | None = None, silently: bool = False) -> None:
        world = self.worlds[attempt]
        rank = world.ranks[number]
        if rank.state == "dead":
            return
        rank.state, world.broken = "dead", True
        if not silently:
            ended = m.RankEnded(attempt=attempt, rank=number, status=status, step=world.step, error=error or {})
            self.agents[rank.node].event(ended)

    def _advance(self, world: World) -> None:
        living = {number: rank for number, rank in world.ranks.items() if rank.state != "dead"}
        if world.broken:
            for number, rank in living.items():
                if rank.state == "running" and self.random.random() < 0.5:
                    self.end(world.attempt, number, 75, BROKEN)
                elif rank.state == "running":
                    rank.state, rank.since = "stalled", self.now
            return
        for number, rank in living.items():
            self._obey_go(world, number, rank)
        hung = [number for number, rank in living.items() if rank.state in ("silent", "stalled")]
        if hung:
            for rank in living.values():
                if rank.state == "running":
                    rank.state, rank.since = "stalled", self.now
            return
        whole = len(living) == world.size and all(rank.state == "running" for rank in living.values())
        if whole and not world.whole:
            world.whole = True
            self.note(*begun(world.attempt), writer=f"trainer{world.attempt}")
        if whole and int(self.now / STEP_S) != int((self.now - LOOK_S) / STEP_S):
            self._step(world, living)

    def _obey_go(self, world: World, number: int, rank: Rank) -> None:
        order, word = self.agents[rank.node].order.get(world.attempt, (0, Word.NONE))
        if rank.state == "ready" and word in (Word.STOP, Word.DRAIN):
            self.end(world.attempt, number, 75)
        elif rank.state == "ready" and order:
            rank.state = "running"

    def _step(self, world: World, living: dict[int, Rank]) -> None:
        orders = [self.agents[rank.node].order.get(world.attempt, (0, Word.NONE)) for rank in living.values()]
        _, word = max(orders, key=lambda order: order[0])
        if word in (Word.PAUSE,):
            return
        world.step = min(world.step + 1, self.steps)
        self.note(step(world.step), writer=f"trainer{world.attempt}")
        stop = word in (Word.STOP, Word.DRAIN) and min(orders) == max(orders)
        done = world.step >= self.steps
        if self.setup.memory:
            self._keep(world)
        if stop or done or word == Word.SAVE or world.step % 10 == 0:
            self._save(world)
        if done or stop:
            for number in living:
                self.end(world.attempt, number, 0 if done else 75)

    def _keep(self, world: World) -> None:
        """Each rank copies its state into memory, where a slot is free; every third step goes to the next node, too."""
        begin = next(number for number, one in enumerate(self.commits.records, 1) if one.attempt == world.attempt)
        nodes = sorted({rank.node for rank in world.ranks.values()})
        for number, rank in world.ranks.items():
            if self.random.random() < 0.1:
                continue
            one = Held(
                begin=f"b{begin}", attempt=world.attempt, step=world.step, writer=f"r{number:05d}", node=rank.node,
                sha256=f"{world.attempt}.{world.step}.{number}", own=True,
            )
            self._hold(one)
            if self.peers and len(nodes) > 1 and world.step % 3 == 0:
                peer = nodes[(nodes.index(rank.node) + 1) % len(nodes)]
                self._hold(msgspec.structs.replace(one, node=peer, own=False))

    def _hold(self, new: Held) -> None:
        """Beside it the three before, of the same attempt; what others keep of earlier ones stays until they write."""
        alike = [one for one in self.held.get(new.node, []) if (one.writer, one.own) == (new.writer, new.own)]
        others = [one for one in self.held.get(new.node, []) if one not in alike]
        self.held[new.node] = [*others, *[one for one in alike if one.attempt == new.attempt][-3:], new]

    def in_memory(self, asked: Begin, state: State) -> Taken:
        """What the shipped choice takes; all that it takes must be where it says."""
        begun = self.commits.begun()
        if not asked.memory or asked.back or begun is None:
            return Taken()
        found = taken(state.nodes, asked.writers, begun, self.commits.newest())
        if found.memory is not None:
            assert self.setup.memory and found.memory[1] > self.commits.newest(), "the disk has what is as new"
        return found

    def _save(self, world: World) -> None:
        carriers = all(self.agents[rank.node].carrier for rank in world.ranks.values())
        new = world.step > self.commits.newest()
        if carriers and new and self.commits.publish(world.attempt, world.step) and self.coordinator.alive:
            self.coordinator.desk.happened(Published(ns=self.coordinator.clock.ns, step=world.step))

    # --- what a fault strikes ---

    def running(self) -> World | None:
        return next((w for w in reversed(self.worlds.values()) if not w.broken), None)

    def some_rank(self) -> tuple[World, int] | None:
        world = self.running()
        living = [n for n, rank in world.ranks.items() if rank.state != "dead"] if world else []
        return (world, self.random.choice(living)) if world and living else None

    def some_node(self) -> Node:
        return self.random.choice(sorted(self.agents))
