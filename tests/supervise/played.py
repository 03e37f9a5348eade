"""A run on several nodes played by hand: events in, what was issued out. Every step is checked against its replay."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from packtrain.core.errors import PacktrainError
from packtrain.core.units import NS
from packtrain.supervise import messages as m
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.events import (
    AnyEvent,
    Asked,
    Begin,
    Begun,
    Done,
    Finish,
    FromNode,
    Joined,
    Opened,
    Progress,
    Setup,
    Tick,
    WrapUp,
    Write,
)
from packtrain.supervise.policy import decide
from packtrain.supervise.state import Issued, State, evolve

CONFIG = SuperviseConfig(
    grace_s=30, beat_overdue_s=10, progress_s=60, go_s=40, nodes_s=20, replace_s=8, grow_s=30, nobody_s=500
)
T = TypeVar("T")


class Play:
    """The clock moves only when it is told to. `issued`: what the last call led to."""

    def __init__(self, nodes: int = 3, spares: int = 0, procs: int = 1, join: bool = True, **setup: Any) -> None:
        self.state, self.now_s, self.issued = State(), 1.0, list[Issued]()
        self._seq: dict[str, int] = {}
        config = setup.pop("supervise", CONFIG)
        self.setup = Setup(nodes=nodes, procs=procs, supervise=config, **setup)
        self.happened(Opened(term=1, setup=self.setup, best_step=4))
        self.procs = procs
        if join:
            for n in range(nodes + spares):
                self.join(f"n{n}")

    @property
    def ns(self) -> int:
        return round(self.now_s * NS)

    def happened(self, event: AnyEvent) -> list[Issued]:
        self.issued = []
        self._take(event)
        return self.issued

    def _take(self, event: AnyEvent) -> None:
        for record in decide(self.state, msgspec.structs.replace(event, ns=self.ns)):
            self.state = evolve(self.state, record)
            self.issued += [record] if isinstance(record, Issued) else []

    def wait(self, seconds: float, wall_s: float = 0.0) -> list[Issued]:
        """Time passes, looked at twice a second; all that it led to."""
        self.issued, end_s = [], self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s = min(end_s, self.now_s + 0.5)
            self._take(Tick(wall_s=wall_s))
        return self.issued

    def join(self, node: str, agent: str = "a", attempt: int = 0, host: str = "") -> list[Issued]:
        self._seq[node] = 0
        return self.happened(
            Joined(node=node, agent=agent, procs=self.procs, attempt=attempt, host=host or node)
        )

    def edge(self, node: str, event: m.AgentEvent) -> list[Issued]:
        self._seq[node] += 1
        return self.happened(
            FromNode(node=node, agent=self.state.nodes[node].agent, seq=self._seq[node], event=event)
        )

    def ask(self, op: str, node: str = "", **more: Any) -> list[Issued]:
        return self.happened(Asked(op=op, node=node, **more))

    def did_all(self) -> list[Issued]:
        """Every node does all that it was asked to, and the coordinator wraps up."""
        found: list[Issued] = []
        for issued in list(self.state.pending.values()):
            if isinstance(issued.own, WrapUp):
                found += self.happened(Done(id=issued.id))
            elif issued.node and self.state.nodes[issued.node].here:
                found += self.edge(issued.node, m.Did(id=issued.id))
        self.issued = found
        return found

    # --- an attempt, in one word ---

    @property
    def attempt(self) -> int:
        return self.state.run.attempt

    def members(self) -> list[str]:
        return [name for _, name in sorted((n.slot, name) for name, n in self.state.nodes.items() if n.slot >= 0)]

    def begun(self, step: int = 4, **more: Any) -> list[Issued]:
        """The attempt that waits to begin has begun."""
        begin = next(one for one in self.state.pending.values() if isinstance(one.own, Begin))
        return self.happened(
            Begun(id=begin.id, attempt=self.attempt + 1, begin=9, step=step, **more)
        )

    def ready(self, facts: dict[str, str] | None = None) -> list[Issued]:
        """Every rank says that it is."""
        found: list[Issued] = []
        for number, rank in self.state.ranks.items():
            ready = m.RankReady(attempt=self.attempt, rank=number, facts=facts or {"step": "4"})
            found += self.edge(rank.node, ready)
        self.issued = found
        return found

    def run(self, step: int = 5) -> Play:
        """An attempt begins and has completed `step` steps."""
        self.begun()
        self.did_all()
        self.ready()
        self.did_all()
        self.progress(step)
        return self

    def progress(self, step: int) -> None:
        self.happened(Progress(attempt=self.attempt, step=step))

    def end(
        self, rank: int, status: int, error: PacktrainError | None = None, tail: str = "", step: int = -1
    ) -> list[Issued]:
        told = error.as_dict() if error else {}
        ended = m.RankEnded(attempt=self.attempt, rank=rank, status=status, error=told, tail=tail, step=step)
        return self.edge(self.state.ranks[rank].node, ended)

    def end_rest(self, status: int = -9, error: PacktrainError | None = None) -> list[Issued]:
        """Every rank that lives ends like this, and its attempt is put away."""
        for number, rank in self.state.ranks.items():
            if rank.status is None and self.state.nodes[rank.node].here:
                self.end(number, status, error)
        found = self.did_all()
        self.issued = found + self.did_all()
        return self.issued

    def fail(self, rank: int = 0, status: int = 1, error: PacktrainError | None = None, tail: str = "") -> list[Issued]:
        """A rank ends, the others are killed, and what follows was decided."""
        self.end(rank, status, error, tail)
        return self.end_rest()


def actions(issued: list[Issued], kind: type[T]) -> list[tuple[str, T]]:
    """(node, action) of one kind."""
    return [(one.node, one.action) for one in issued if isinstance(one.action, kind)]


def owns(issued: list[Issued], kind: type[T]) -> list[T]:
    return [one.own for one in issued if isinstance(one.own, kind)]


def begin_of(issued: list[Issued]) -> Begin:
    (begin,) = owns(issued, Begin)
    return begin


def written(issued: list[Issued], kind: type[T]) -> list[T]:
    """Records for the journal of one kind."""
    return [write.record for write in owns(issued, Write) if isinstance(write.record, kind)]


def finish(play: Play) -> Finish:
    """How the run ended, once its agents have left."""
    (end,) = owns(play.did_all(), Finish)
    return end
