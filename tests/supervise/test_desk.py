"""The desk: nothing leaves before it is in the log, and what agents say while that is away is not lost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from packtrain.core.units import NS
from packtrain.supervise import messages as m
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.desk import Desk
from packtrain.supervise.events import Asked, Opened, Setup
from packtrain.supervise.state import AnyRecord, State
from tests.supervise.played import CONFIG, Play
from tests.supervise.simulated import MemoryLog


class Counted(MemoryLog):
    """`refused`: records of the last batch that it was given."""

    refused = 0

    def append(self, records: Sequence[AnyRecord], state: State) -> None:
        self.refused = len(records)
        super().append(records, state)


def desk(log: MemoryLog, state: State | None = None, term: int = 1) -> Desk:
    one = Desk(state or State(), term, log, 0)
    one.happened(Opened(term=term, setup=Setup(nodes=1, supervise=CONFIG)))
    return one


def hello(term: int = 0) -> m.Hello:
    return m.Hello(node="n0", agent="a", boot_id="b", term=term, attempt=0, version="t")


def kinds(one: Desk, ns: int) -> list[str]:
    return [type(message).__name__ for _, message in one.due(ns)]


def test_nothing_leaves_while_the_log_is_away() -> None:
    """A node that says Hello is not welcomed, and no action is there to do, until the log can be written; then all
    that happened meanwhile is decided, once."""
    log = MemoryLog()
    log.broken = True
    one = desk(log)
    for second in range(1, 4):
        one.hear(second * NS, hello())
        one.look(second * NS, 0.0)
        assert one.trouble is not None and not kinds(one, second * NS) and not one.own()
    one.happened(Asked(ns=3 * NS, op="pause"))
    log.broken = False
    one.hear(4 * NS, hello())
    one.look(4 * NS, 0.0)
    assert one.trouble is None and kinds(one, 4 * NS) == ["Welcome"] and len(one.own()) == 1
    assert one.state.run.paused and log.replay() == one.state


def test_what_is_said_again_and_again_does_not_pile_up() -> None:
    """Ten minutes without a log: new agents say Hello each second, and the attempt gets on. A look decides no more than
    in the first minute, and afterwards all is known as it was last."""
    log, play = Counted(), Play(nodes=2, supervise=CONFIG).run()
    one, decided = Desk(play.state, 1, log, play.ns), list[int]()
    log.broken = True
    for second in range(10, 610):
        ns = play.ns + second * NS
        for n in range(2):
            node = f"n{n}"
            one.hear(ns, m.Pulse(node=node, agent="a", attempt=1, step=second, step_s=1.0))
            one.hear(ns, msgspec.structs.replace(hello(), node=f"new{n}"))
        one.look(ns, 0.0)
        decided.append(log.refused)
    assert max(decided) <= 6
    log.broken = False
    one.look(ns + NS // 10, 0.0)
    assert one.trouble is None and one.state.run.attempt_step >= 600 and {"new0", "new1"} < set(one.state.nodes)


def test_an_edge_is_acknowledged_when_it_is_in_the_log() -> None:
    """What was taken while the log is away is acknowledged only once it is written, and consumed once."""
    log = MemoryLog()
    one = desk(log)
    one.hear(NS, hello())
    one.look(NS, 0.0)
    one.due(NS)
    log.broken = True
    edge = m.Edge(node="n0", agent="a", seq=1, ns=0, event=m.CarrierUp(attempt=0, address="h:1"))
    for second in (2, 3):
        one.hear(second * NS, edge)
        one.look(second * NS, 0.0)
        said = [message for _, message in one.due(second * NS) if isinstance(message, m.Acknowledge)]
        assert all(message.seq == 0 for message in said)
    log.broken = False
    one.look(4 * NS, 0.0)
    assert [message.seq for _, message in one.due(4 * NS) if isinstance(message, m.Acknowledge)] == [1]
    assert one.state.nodes["n0"].seq == 1


def test_a_node_that_was_lost_before_is_heard_again() -> None:
    """The next coordinator knows from the log who is lost, and notices when such a node speaks."""
    play = Play(nodes=1, supervise=CONFIG)
    state = play.state
    lost = msgspec.structs.replace(state.nodes["n0"], here=False, silent_ns=1)
    one = desk(MemoryLog(), msgspec.structs.replace(state, nodes={"n0": lost}), term=2)
    one.hear(NS, m.Pulse(node="n0", agent="a", attempt=0, step=-1))
    one.look(NS, 0.0)
    assert one.state.nodes["n0"].here and not one.state.nodes["n0"].silent_ns


def test_a_node_that_fell_silent_before_is_heard_again() -> None:
    """It is not lost yet, and the next coordinator knows from the log that it was silent."""
    state = Play(nodes=1, supervise=CONFIG).state
    silent = msgspec.structs.replace(state.nodes["n0"], silent_ns=1)
    one = desk(MemoryLog(), msgspec.structs.replace(state, nodes={"n0": silent}), term=2)
    one.hear(NS, m.Pulse(node="n0", agent="a", attempt=0, step=-1))
    one.look(NS, 0.0)
    assert one.state.nodes["n0"].here and not one.state.nodes["n0"].silent_ns


def test_silence_is_known_within_what_the_run_allows() -> None:
    """Of the first coordinator, too, which learns what the run's configuration says when it begins; and a look's time
    before it, not after."""
    config = SuperviseConfig(node_silent_s=8.0, node_lost_s=12.0)
    one = Desk(State(), 1, MemoryLog(), 0)
    one.happened(Opened(term=1, setup=Setup(nodes=1, supervise=config)))
    one.hear(NS, hello())
    silent = []
    for tick in range(10, 100):
        one.look(tick * NS // 10, 0.0)
        silent += [tick - 10] if one.state.nodes["n0"].silent_ns else []
    assert silent[0] == 79


def test_a_higher_term_is_noticed() -> None:
    """An agent that has seen a higher term says so in its Hello or its answer; one that has seen this or a lower one
    does not matter."""
    for message, outdated in (
        (hello(1), False), (hello(3), True), (m.Outdated(node="n0", term=2), False),
        (m.Outdated(node="n0", term=5), True),
    ):
        one = desk(MemoryLog(), term=2)
        one.hear(NS, message)
        assert one.outdated == outdated


def test_an_agent_that_comes_as_its_predecessor_falls_silent_is_heard() -> None:
    """Both may be found in one look, the silence of the dead one after the Hello of the new: that one speaks, and is
    neither silent nor lost."""
    one = desk(MemoryLog())
    one.hear(NS, hello())
    one.look(NS, 0.0)
    for tenth in range(11, 200):
        ns = tenth * NS // 10
        if tenth == 40:  # node_silent_s after the last word of the first one
            one.hear(ns, msgspec.structs.replace(hello(), agent="another"))
        elif tenth > 40:
            one.hear(ns, m.Pulse(node="n0", agent="another", attempt=0, step=-1))
        one.look(ns, 0.0)
    node = one.state.nodes["n0"]
    assert (node.agent, node.here, node.silent_ns) == ("another", True, 0)


EDGE = m.Edge(node="n0", agent="a", seq=1, ns=0, event=m.CarrierUp(attempt=0, address="h:1"))


def acknowledged(one: Desk, ns: int) -> list[int]:
    return [message.seq for _, message in one.due(ns) if isinstance(message, m.Acknowledge)]


def test_an_edge_that_comes_again_is_acknowledged_again() -> None:
    """At once: its acknowledgement was lost, and the agent says it until it has one. It is consumed once."""
    one = desk(MemoryLog())
    one.hear(NS, hello())
    one.look(NS, 0.0)
    one.due(NS)
    for tenth in (20, 21, 22):
        one.hear(tenth * NS // 10, EDGE)
        one.look(tenth * NS // 10, 0.0)
        assert acknowledged(one, tenth * NS // 10) == [1]
    assert one.state.nodes["n0"].seq == 1


def test_a_predecessor_is_heard_no_more() -> None:
    """What an agent says whose node has another one now, on a connection that lives on: neither its edges count nor its
    pulses, and the new one is silent where only the old one speaks."""
    one = desk(MemoryLog())
    for second, agent in ((1, "a"), (2, "another")):
        one.hear(second * NS, msgspec.structs.replace(hello(), agent=agent))
        one.look(second * NS, 0.0)
    one.due(2 * NS)
    one.hear(2 * NS + 1, EDGE)
    for tenth in range(21, 100):
        one.hear(tenth * NS // 10, m.Pulse(node="n0", agent="a", attempt=0, step=-1))
        one.look(tenth * NS // 10, 0.0)
        assert not any(acknowledged(one, tenth * NS // 10))
    node = one.state.nodes["n0"]
    assert (node.agent, node.seq) == ("another", 0) and node.silent_ns
    one.hear(10 * NS, msgspec.structs.replace(EDGE, agent="another"))
    one.look(10 * NS, 0.0)
    assert one.state.nodes["n0"].seq == 1, "the first of its own"


def test_steps_of_another_attempt_are_not_those_of_this_one() -> None:
    """A pulse that was long under way."""
    state = Play(nodes=1, supervise=CONFIG).state
    running = msgspec.structs.replace(state, run=msgspec.structs.replace(state.run, attempt=2))
    one = desk(MemoryLog(), running, term=2)
    for attempt, steps in ((1, {}), (2, {"n0": 7}), (3, {"n0": 7}), (0, {"n0": 7})):
        one.hear(NS, m.Pulse(node="n0", agent="a", attempt=attempt, step=5 + attempt))
        assert one.steps == steps


def test_what_nodes_say_at_once_is_decided_together() -> None:
    """One look at everything for all of them; what persons ask for is decided by itself, one after the other."""
    log = MemoryLog()
    one = desk(log)
    for node in ("n0", "n1", "n2"):
        one.hear(NS, msgspec.structs.replace(hello(), node=node))
    for op in ("pause", "resume"):
        one.happened(Asked(ns=NS, op=op))
    one.look(NS, 0.0)
    events = [getattr(record, "event", None) for record in log.records]
    kinds = "".join("." if event is None else type(event).__name__[0] for event in events)
    assert "JJJ" in kinds and "A.A" in kinds.replace("..", "."), kinds


def test_time_is_not_held_back_by_a_log_that_cannot_be_written() -> None:
    """What only time leads to is decided at the time at which it can be written down."""
    log = MemoryLog()
    one = desk(log)
    one.hear(NS, hello())
    one.look(NS, 0.0)
    ns = NS
    while one.state.nodes["n0"].here:  # it is silent: in the end it is lost, by the clock alone
        log.broken = one.state.nodes["n0"].silent_ns > 0 and ns < 100 * NS
        ns += NS // 2
        one.look(ns, 0.0)
    assert ns >= 100 * NS and log.records[-1].ns >= 100 * NS
