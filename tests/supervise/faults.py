"""What befalls a simulated world, in the words of the field: each fault strikes at a moment, on what chance chooses."""

from __future__ import annotations

from collections.abc import Callable

from packtrain.core.errors import CheckpointDamaged, CheckpointUnreadable, GuardRollback
from packtrain.monitor.kernel import Signs
from packtrain.supervise import messages as m
from packtrain.supervise.asked import refusal
from packtrain.supervise.events import Asked
from tests.supervise.simulated import Coordinator, Node, Simulation


def strike(sim: Simulation, fault: str) -> None:
    FAULTS[fault](sim)


def _kill_rank(status: int, error: dict | None = None) -> Callable[[Simulation], None]:
    def strike(sim: Simulation) -> None:
        found = sim.some_rank()
        if found:
            sim.end(found[0].attempt, found[1], status, error)

    return strike


def _hang(state: str) -> Callable[[Simulation], None]:
    def strike(sim: Simulation) -> None:
        found = sim.some_rank()
        if found and found[0].ranks[found[1]].state == "running":
            rank = found[0].ranks[found[1]]
            rank.state, rank.since = state, sim.now
            sim.stuck = {found[1]}

    return strike


def _hang_all(sim: Simulation) -> None:
    world = sim.running()
    for rank in world.ranks.values() if world else ():
        if rank.state == "running":
            rank.state, rank.since = "stalled", sim.now


def _kill_agent(sim: Simulation) -> None:
    node = sim.some_node()
    sim.agents[node].die()
    sim.later(sim.random.uniform(0.5, 20), lambda: sim.agents[node].alive or sim.start_agent(node))


def _lose_machine(sim: Simulation) -> None:
    """What was in its memory goes with it."""
    node = sim.some_node()
    sim.agents[node].die()
    sim.held.pop(node, None)
    sim.later(sim.random.uniform(5, 20), lambda: sim.agents[node].alive or sim.start_agent(node))


def _cut(least: float, most: float) -> Callable[[Simulation], None]:
    def strike(sim: Simulation) -> None:
        sim.cut[sim.some_node()] = sim.now + sim.random.uniform(least, most)

    return strike


def _stop_agent(sim: Simulation) -> None:
    sim.agents[sim.some_node()].stopped_until = sim.now + sim.random.uniform(1, 12)


def _carrier(sim: Simulation) -> None:
    agent = sim.agents[sim.some_node()]
    if agent.alive and agent.carrier:
        agent.event(m.CarrierEnded(attempt=agent.attempt, why="killed by SIGKILL"))
        agent.event(m.CarrierUp(attempt=agent.attempt, address=f"{agent.node}:2"))


def _kill_coordinator(sim: Simulation) -> None:
    if sim.coordinator.alive:
        sim.coordinator.alive = False
        sim.later(sim.random.uniform(0.5, 8), sim.start_coordinator)


def _two_leaders(sim: Simulation) -> None:
    """The old one does not know: it thinks and speaks on. Its log is its own from here on."""
    if sim.coordinator.alive:
        old = sim.coordinator
        sim.old.append(old)
        sim.log = sim.log.copy()  # its own goes on without us
        sim.coordinator = Coordinator(sim)


def _full_log(sim: Simulation) -> None:
    sim.log.broken = True

    def mend() -> None:
        sim.log.broken = False

    sim.later(sim.random.uniform(1, 30), mend)


def _ask(op: str) -> Callable[[Simulation], None]:
    def strike(sim: Simulation) -> None:
        node = sim.some_node()
        if sim.coordinator.alive:
            word = Asked(ns=sim.coordinator.clock.ns, op=op, node=node)
            if refusal(sim.coordinator.desk.state, word):
                return
            sim.coordinator.desk.happened(word)
            back = {"drain": "uncordon", "cordon": "uncordon", "pause": "resume"}.get(op)
            if back:
                sim.later(8, lambda: _word_back(sim, back, node))

    return strike


def _word_back(sim: Simulation, op: str, node: Node) -> None:
    """A person looks again and again whether the word is needed: one said to a coordinator that died is lost, and one
    that waits for the log may be obeyed late."""
    desk = sim.coordinator.desk
    known = desk.state.nodes.get(node)
    needed = desk.state.run.paused if op == "resume" else known and (known.cordoned or known.draining)
    if needed and sim.coordinator.alive:
        desk.happened(Asked(ns=sim.coordinator.clock.ns, op=op, node=node))
    sim.later(2, lambda: _word_back(sim, op, node))


def _other_code(sim: Simulation) -> None:
    """Once: twice in a row ends a run, and rightly so."""
    if not sim.differed:
        sim.differed = True
        sim.differs[sim.some_node()] = 1


def _slow(factor: float) -> Callable[[Simulation], None]:
    """For a while, or for good."""

    def strike(sim: Simulation) -> None:
        node = sim.some_node()
        sim.slow[node] = factor
        sim.later(sim.random.choice([10, 60, 1e6]), lambda: sim.slow.pop(node, None))

    return strike


def _kernel(*lines: str) -> Callable[[Simulation], None]:
    """A node's kernel says this; what it says next is what the agent makes of it."""

    def strike(sim: Simulation) -> None:
        agent, signs = sim.agents[sim.some_node()], Signs()
        for line in lines:
            found = signs.seen(sim.now, line)
            if found is not None:
                agent.event(m.HardwareSeen(**found._asdict()))

    return strike


def _plant(kind: type, least: int = 1) -> Callable[[Simulation], None]:
    def strike(sim: Simulation) -> None:
        sim.refuse_restore += [kind("planted", where="here", fix="none")] * least
        found = sim.some_rank()
        if found:
            sim.end(found[0].attempt, found[1], -9)

    return strike


FAULTS: dict[str, Callable[[Simulation], None]] = {
    "kill": _kill_rank(-9),
    "out of memory": _kill_rank(70),
    "straggler at 70%": _slow(1 / 0.69),
    "slow": _slow(3.0),
    "GPU off the bus": _kernel("NVRM: Xid (PCI:0000:01:00): 79, pid=1122, GPU has fallen off the bus."),
    "ECC burst": _kernel(*["EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (a b)"] * 12),
    "Xid": _kernel("NVRM: Xid (PCI:0000:52:00): 94, pid=7, name=python, Contained: SM (0x1). RST: No, D-RST: No"),
    "segfault": _kill_rank(-11),
    "exit 1": _kill_rank(1),
    "exit 75": _kill_rank(75),
    "guard rollback": _kill_rank(75, GuardRollback("bad twice", where="", fix="").as_dict()),
    "stop (SIGSTOP)": _hang("silent"),
    "hang of one": _hang("stalled"),
    "hang of all": _hang_all,
    "kill agent": _kill_agent,
    "lose machine": _lose_machine,
    "agent stopped": _stop_agent,
    "link flap": _cut(0.2, 3),
    "network cut": _cut(4, 30),
    "kill carrier": _carrier,
    "kill coordinator": _kill_coordinator,
    "two leaders": _two_leaders,
    "disk of decisions full": _full_log,
    "cannot launch": lambda sim: sim.unlaunchable.update({sim.some_node(): 1}),
    "ranks differ": _other_code,
    "checkpoint damaged": _plant(CheckpointDamaged),
    "checkpoint unreadable": _plant(CheckpointUnreadable),
    "pause": _ask("pause"),
    "drain": _ask("drain"),
    "cordon": _ask("cordon"),
    "replace": _ask("replace"),
    "save": _ask("save"),
}
