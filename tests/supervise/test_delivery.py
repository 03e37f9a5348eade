"""Both ends of what agents and coordinator say, over a link that loses, repeats and reorders as hypothesis likes."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packtrain.core.fake_schedule import explore
from packtrain.core.units import NS
from packtrain.supervise.delivery import (
    ALIVE_NS,
    LOST_NS,
    LOST_NS_MAX,
    OUTCOMES_MAX,
    WAITING_MAX,
    WINDOW,
    Agenda,
    AgentSide,
    Done,
    NodeSide,
    Outbox,
)
from packtrain.supervise.messages import (
    Acknowledge,
    CarrierEnded,
    Did,
    Do,
    Edge,
    EndWorkers,
    HardwareSeen,
    Hello,
    Leave,
    Outdated,
    Pulse,
    RankEnded,
    RankHeard,
    RankPhase,
    RankSilent,
    Welcome,
)

HELLO = Hello(node="n0", agent="a", boot_id="b", term=0, attempt=0, version="1")
PULSE = Pulse(node="n0", agent="a", attempt=0, step=-1)


def ended(n: int) -> RankEnded:
    return RankEnded(attempt=1, rank=n, status=1)


class World:
    """An agent, the log of its run, and a coordinator that may be replaced; what is said lies in two heaps."""

    def __init__(self) -> None:
        self.ns = 10 * NS
        self.agent = AgentSide("n0", "a")
        self.log: list[Any] = []
        self.asked: dict[int, EndWorkers] = {}
        self.outcomes: dict[int, Did] = {}
        self.seq = 0
        self.done: list[int] = []
        self.put = 0
        self.term = 1
        self.node: NodeSide | None = None
        self.up: list[Any] = []
        self.down: list[Any] = []

    def happen(self) -> None:
        self.put += 1
        self.agent.happened(self.ns, ended(self.put))

    def ask(self) -> None:
        id = 10 * (len(self.asked) + 1)
        self.asked[id] = EndWorkers(attempt=id, reason="")
        if self.node is not None:
            self.node.ask(id, self.asked[id])

    def replace(self) -> None:
        """The coordinator is killed; the next one knows what is in the log."""
        self.term, self.node = self.term + 1, None

    def pass_s(self, seconds: float) -> None:
        self.ns += int(seconds * NS)
        if self.agent.lost(self.ns):
            self.agent.anew(self.ns)
        self.up += self.agent.due(self.ns, HELLO, PULSE)
        if self.node is not None:
            self.down += self.node.due(self.ns)

    def hear_up(self, message: Any) -> None:
        if isinstance(message, Hello) and self.node is None:
            self.node = NodeSide(self.term, "a", self.seq)
            for id, action in self.asked.items():
                if id not in self.outcomes:
                    self.node.ask(id, action)
        if isinstance(message, Hello) and self.node is not None:
            self.node.hello(self.ns)
        if isinstance(message, Edge) and self.node is not None and self.node.take(message):
            self.log.append(message.event)
            self.seq = message.seq
            self.node.logged()
            if isinstance(message.event, Did):
                self.outcomes[message.event.id] = message.event
                self.node.did(message.event.id)

    def hear_down(self, message: Any) -> None:
        do = self.agent.arrived(self.ns, message)
        if do is not None:
            self.done.append(do.id)
            self.agent.did(self.ns, Did(id=do.id))

    def move(self, kind: str, at: int) -> None:
        """One message of a heap is heard, heard and left to come again, or lost."""
        way, _, fate = kind.partition(" ")
        heap, hear = (self.up, self.hear_up) if way == "up" else (self.down, self.hear_down)
        if heap:
            at %= len(heap)
            message = heap[at] if fate == "twice" else heap.pop(at)
            if fate != "lost":
                hear(message)

    def settle(self) -> None:
        """The link is good from now on, and some time passes."""
        for _ in range(40):
            self.pass_s(1.0)
            for _ in range(2 * len(self.up + self.down) + 2):
                self.move("up", 0)
                self.move("down", 0)

    def check(self) -> None:
        """Never wrong on the way."""
        ends = [event.rank for event in self.log if isinstance(event, RankEnded)]
        assert ends == list(range(1, len(ends) + 1)), "an edge was lost, repeated or out of order"
        assert self.done == list(self.asked)[: len(self.done)], "an action was done twice or out of order"

    def check_settled(self) -> None:
        self.check()
        assert sum(isinstance(event, RankEnded) for event in self.log) == self.put
        assert self.done == list(self.asked) == list(self.outcomes)
        assert self.node is not None and self.node.gaps == 0


MOVES = ["up", "up twice", "up lost", "down", "down twice", "down lost"]
steps = st.one_of(
    st.tuples(st.sampled_from(MOVES), st.integers(0, 200)),
    st.tuples(st.sampled_from(["happen", "ask", "replace"]), st.just(0)),
    st.tuples(st.just("pass"), st.integers(1, 9)),
)


def play(world: World, script: list[tuple[str, int]]) -> None:
    for kind, n in script:
        match kind:
            case "happen":
                world.happen()
            case "ask":
                world.ask()
            case "replace":
                world.replace()
            case "pass":
                world.pass_s(float(n))
            case _:
                world.move(kind, n)
        world.check()


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, max_size=60))
@example([("pass", 1), ("up", 0), ("ask", 0), ("ask", 0), ("pass", 1), ("down", 0), ("down", 1), ("replace", 0)])
def test_nothing_is_lost_repeated_or_out_of_order(script: list[tuple[str, int]]) -> None:
    """Whatever the link does and however often the coordinator is replaced, each edge is logged once and in order, each
    action is done once and in order, and all of them in the end."""
    world = World()
    play(world, script)
    world.settle()
    world.check_settled()


def test_edges_are_taken_in_order_and_once() -> None:
    """The second before the first waits until it comes again."""
    node = NodeSide(1, "a")
    edges = [Edge(node="n0", agent="a", seq=seq, ns=0, event=ended(seq)) for seq in (1, 2, 3)]
    order = (1, 0, 2, 1, 1, 0, 2)
    assert [node.take(edges[at]) for at in order] == [False, True, False, True, False, False, True]
    node.logged()
    assert node.due(0) == [Acknowledge(term=1, seq=3, agent="a")]


def test_every_fate_of_the_first_messages() -> None:
    """Two edges, two actions: each of the first ten deliveries heard, lost or repeated, in every combination with a
    replacement of the coordinator at any place."""
    worlds = 0
    for choices in explore():
        world = World()
        world.happen()
        world.ask()
        world.ask()
        for turn in range(5):
            if choices.pick(2, rare=True):
                world.replace()
            world.pass_s(1.0)
            for way in ("up", "down"):
                world.move(way + ("", " lost", " twice")[choices.pick(3)], 0)
            if turn == 1:
                world.happen()
            world.check()
        world.settle()
        world.check_settled()
        worlds += 1
        if worlds == 300:
            break
    assert worlds == 300


def test_of_two_coordinators_the_higher_term_is_obeyed() -> None:
    """A lower term changes nothing and is told so once a message; what is meant for another incarnation is dropped."""
    agent = AgentSide("n0", "a")
    agent.arrived(NS, Welcome(term=7, seq=0))
    assert agent.arrived(NS, Do(term=6, id=1, action=EndWorkers(attempt=1, reason=""))) is None
    assert agent.arrived(NS, Do(term=7, id=1, action=EndWorkers(attempt=1, reason=""), agent="dead")) is None
    assert [m for m in agent.due(NS, HELLO, PULSE) if isinstance(m, Outdated)] == [Outdated(node="n0", term=7)]
    assert not [m for m in agent.due(2 * NS, HELLO, PULSE) if isinstance(m, Outdated)]
    assert agent.arrived(NS, Do(term=8, id=1, action=EndWorkers(attempt=1, reason=""))) is not None
    assert (agent.term, agent.refused, agent.joined) == (8, 2, False)


def test_an_agent_that_starts_again_remembers_the_term() -> None:
    """The term an earlier incarnation saw refuses a lower one, and is told in Hello."""
    agent = AgentSide("n0", "a", term=5)
    assert agent.arrived(NS, Welcome(term=4, seq=0)) is None
    assert [m.term for m in agent.due(NS, HELLO, PULSE) if isinstance(m, Hello)] == [5]
    assert not agent.joined


def test_a_silent_coordinator_is_looked_for_anew() -> None:
    """After `LOST_NS` without a word, or half as much again; a coordinator is silent for `ALIVE_NS` at most."""
    agent, node = AgentSide("n0", "a"), NodeSide(1, "a")
    assert agent.lost(100 * NS)
    agent.anew(100 * NS)
    assert not agent.lost(100 * NS + 1)
    node.hello(101 * NS)
    for ns in range(101 * NS, 130 * NS, NS // 2):
        for message in node.due(ns):
            agent.arrived(ns, message)
        assert not agent.lost(ns) and agent.joined
    assert ALIVE_NS < LOST_NS and not agent.lost(ns + LOST_NS - ALIVE_NS - 1)
    assert agent.lost(ns + LOST_NS * 3 // 2)
    agent.anew(ns + LOST_NS)
    assert not agent.joined and not agent.lost(ns + 2 * LOST_NS - 1)
    assert [type(m) for m in agent.due(ns + LOST_NS, HELLO, PULSE)] == [Hello]


def first_lost(agent: AgentSide, ns: int) -> int:
    """How long after `ns` it looks for its coordinator."""
    return next(later for later in range(0, 60 * NS, NS // 100) if agent.lost(ns + later))


def test_agents_that_lose_their_coordinator_at_once_do_not_call_at_once() -> None:
    """Each waits between `LOST_NS` and half as much again, spread evenly; who called in vain waits twice as long at
    most, and who was answered as long as at first."""
    many = [AgentSide(f"n{n}", f"token{n}") for n in range(1000)]
    for agent in many:
        agent.anew(100 * NS)
    waits = sorted(first_lost(agent, 100 * NS) for agent in many)
    assert waits[0] >= LOST_NS and waits[-1] <= LOST_NS * 3 // 2 + NS // 100
    assert 0.2 < sum(wait < LOST_NS * 5 // 4 for wait in waits) / len(waits) < 0.8
    one, first = many[0], first_lost(many[0], 100 * NS)
    for ns in (200 * NS, 300 * NS, 400 * NS):
        one.anew(ns)
        assert first < first_lost(one, ns) <= LOST_NS_MAX * 3 // 2
    one.arrived(401 * NS, Welcome(term=1, seq=0))
    assert abs(first_lost(one, 401 * NS) - first) <= NS // 50


@given(st.lists(st.tuples(st.sampled_from(["ask", "hello", "edge", "did", ""]), st.integers(0, 3 * NS)), max_size=60))
def test_a_coordinator_speaks_when_it_said_it_would(story: list[tuple[str, int]]) -> None:
    """`next_ns` is when `due` has something to say next: before it nothing, then something, whatever happened."""
    node, ns, id, seq = NodeSide(1, "a"), NS, 0, 0
    for kind, passed_ns in story:
        ns += passed_ns
        match kind:
            case "ask":
                id += 1
                node.ask(id, Leave(reason="over"))
            case "hello":
                node.hello(ns)
            case "edge":
                seq += 1
                node.take(Edge(node="n0", agent="a", seq=seq, ns=0, event=CarrierEnded(attempt=1, why="")))
                node.logged()
            case "did":
                node.did(id)
        due_ns = node.next_ns
        assert bool(node.due(ns)) == (due_ns <= ns)
        assert node.next_ns > ns


def test_an_agenda_names_each_once_and_in_time() -> None:
    """What was set last counts, earlier or later; a name comes once for each time it was set."""
    agenda = Agenda()
    for name, at_ns in (("a", 5), ("b", 7), ("a", 9), ("c", 8), ("c", 2), ("b", 7)):
        agenda.set(name, at_ns)
    assert [agenda.due(ns) for ns in (1, 2, 6, 7, 8, 9, 10)] == [[], ["c"], [], ["b"], [], ["a"], []]


def test_a_day_without_a_coordinator_takes_no_memory() -> None:
    """A hundred thousand changes of phase and silences leave one of each a rank; every end is kept, in order."""
    outbox = Outbox("n0", "a")
    for n in range(25_000):
        outbox.put(n, RankPhase(attempt=1, rank=n % 8, phase="steps" if n % 3 else "save", step=n))
        outbox.put(n, RankSilent(attempt=1, rank=n % 8, seconds=3.0))
        outbox.put(n, RankHeard(attempt=1, rank=n % 8, step=n))
        if n % 1000 == 0:
            outbox.put(n, ended(n))
    events = [edge.event for edge in outbox.due(0)]
    assert len(events) == 8 + 8 + 25
    assert [e.rank for e in events if isinstance(e, RankEnded)] == list(range(0, 25_000, 1000))
    assert {e.step for e in events if isinstance(e, RankPhase)} == set(range(24_992, 25_000))
    assert not [e for e in events if isinstance(e, RankSilent)]


def test_what_is_merged_is_told_where_the_later_one_happened() -> None:
    """A phase before an end that is said again after it comes after it."""
    outbox = Outbox("n0", "a")
    for event in (RankPhase(attempt=1, rank=0, phase="init", step=-1), ended(1)):
        outbox.put(0, event)
    outbox.put(0, RankPhase(attempt=1, rank=0, phase="steps", step=0))
    first, second = outbox.due(0)
    assert (first.event, type(second.event), outbox.merged) == (ended(1), RankPhase, 1)


def test_no_line_of_a_kernel_takes_the_place_of_another() -> None:
    """A GPU that is lost is told, whatever its kernel says next; the same thing once more is merged."""
    outbox = Outbox("n0", "a")
    lost = HardwareSeen(verdict="lost", what="Xid 79: fell off the bus", where="0000:01:00", text="the first line")
    told = HardwareSeen(verdict="tell", what="Xid 154: it asks for another remedy", where="0000:01:00", text="line")
    other = HardwareSeen(verdict="lost", what="Xid 79: fell off the bus", where="0000:02:00", text="line")
    for event in (lost, told, other, told):
        outbox.put(0, event)
    assert [edge.event for edge in outbox.due(0)] == [lost, other, told] and outbox.merged == 1


def test_a_welcome_says_what_need_not_be_said_again() -> None:
    """What is in the log already is forgotten; the rest is said at once."""
    agent = AgentSide("n0", "a")
    agent.arrived(NS, Welcome(term=1, seq=0))
    for n in (1, 2, 3):
        agent.happened(NS, ended(n))
    agent.due(NS, HELLO, PULSE)
    agent.arrived(NS + 1, Welcome(term=2, seq=2))
    assert [m.seq for m in agent.due(NS + 1, HELLO, PULSE) if isinstance(m, Edge)] == [3]


def test_what_waits_is_bounded_and_ends_outlive_the_bound() -> None:
    """Beyond `WAITING_MAX` the oldest that is no end goes, and is counted."""
    outbox = Outbox("n0", "a")
    outbox.put(0, ended(0))
    for n in range(WAITING_MAX + 9):
        outbox.put(n, RankPhase(attempt=n, rank=0, phase="init", step=-1))
    assert outbox.dropped == 10
    first = outbox.due(0)
    assert len(first) == WINDOW and first[0].event == ended(0)
    assert isinstance(first[1].event, RankPhase) and first[1].event.attempt == 10


def test_repetitions_come_later_and_later() -> None:
    """An edge that nobody acknowledges is said at once, then after pauses that double up to eight seconds."""
    outbox = Outbox("n0", "a")
    outbox.put(0, ended(1))
    said = [second for second in range(40) if outbox.due(second * NS)]
    assert said == [0, 1, 3, 7, 15, 23, 31, 39]
    outbox.put(0, ended(2))
    assert [edge.seq for edge in outbox.due(40 * NS)] == [2]
    outbox.acknowledge(40 * NS, 2)
    assert not outbox.due(90 * NS)


def test_a_log_that_lost_its_end_is_noticed_and_gone_on_with() -> None:
    """Edges that were acknowledged into a log that no longer has them are a gap, not a wait without end."""
    agent, old = AgentSide("n0", "a"), NodeSide(1, "a")
    agent.arrived(NS, Welcome(term=1, seq=0))
    for n in range(3):
        agent.happened(NS, ended(n))
    for message in agent.due(NS, HELLO, PULSE):
        if isinstance(message, Edge):
            assert old.take(message)
    old.logged()
    for reply in old.due(NS):
        agent.arrived(NS, reply)
    agent.happened(NS, ended(3))
    new = NodeSide(2, "a", seq=1)
    taken = [m.event for m in agent.due(NS, HELLO, PULSE) if isinstance(m, Edge) and new.take(m)]
    assert taken == [ended(3)] and new.gaps == 2


def test_what_came_of_an_action_is_said_again_when_it_is_asked_for_again() -> None:
    """An id that is repeated after its outcome was acknowledged (the log lost its end) is answered and not done."""
    agent = AgentSide("n0", "a")
    agent.arrived(NS, Welcome(term=1, seq=0))
    do = Do(term=1, id=5, action=EndWorkers(attempt=1, reason=""))
    assert agent.arrived(NS, do) is not None
    assert agent.arrived(NS, do) is None and len(agent.due(NS, HELLO, PULSE)) == 1, "it is under way: nothing to say"
    agent.did(NS, Did(id=5, data="x"))
    assert agent.arrived(NS, do) is None, "its outcome waits to be said"
    assert [m.event for m in agent.due(NS, HELLO, PULSE) if isinstance(m, Edge)] == [Did(id=5, data="x")]
    agent.arrived(NS, Acknowledge(term=1, seq=1))
    assert agent.arrived(NS, do) is None
    again = [m for m in agent.due(NS, HELLO, PULSE) if isinstance(m, Edge)]
    assert [(m.seq, m.since, m.event) for m in again] == [(2, 2, Did(id=5, data="x"))]


def test_ids_that_are_forgotten_are_never_done_again() -> None:
    """Only outcomes are forgotten, the oldest first; an id below a forgotten one is taken for done."""
    done = Done()
    done.begin(1)
    for id in range(2, 2 * OUTCOMES_MAX):
        done.begin(id)
        done.end(Did(id=id))
    assert all(done.begun(id) for id in range(1, 2 * OUTCOMES_MAX)) and not done.begun(2 * OUTCOMES_MAX)
    known = [id for id in range(2, 2 * OUTCOMES_MAX) if done.outcome(id) is not None]
    assert known == list(range(OUTCOMES_MAX + 1, 2 * OUTCOMES_MAX)), "and one is under way"


def test_messages_survive_the_wire() -> None:
    """What is said is read back equal, edges with any event in them."""
    for message in (
        Edge(node="n0", agent="a", seq=1, ns=5, event=Did(id=3, data="{}")),
        Do(term=1, id=2, action=EndWorkers(attempt=1, reason="r"), agent="a", after=1),
    ):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
