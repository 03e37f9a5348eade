"""Faults that a person has done to a run that allows it (`supervise.allow_faults`): which there are, whom they strike,
and why one is refused. Pure; breaking.py does them.

Each is written into the journal before it is done, so a report shows what was broken on purpose.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from packtrain.core.errors import FaultsForbidden, PacktrainError, UsageError
from packtrain.core.records import FaultInjected
from packtrain.supervise.events import BreakAsked, Die, Write
from packtrain.supervise.messages import Break
from packtrain.supervise.state import LAUNCHING, RUNNING, Node, Rank, Run, Turn

SIGNAL, WORKER, AGENT, CARRIER, DISK, CHECKPOINT, LINK, COORDINATOR = (
    "signal", "worker", "agent", "carrier", "disk", "checkpoint", "link", "coordinator"
)
OF_RANKS = (SIGNAL, WORKER)
OF_ATTEMPTS = (*OF_RANKS, CARRIER)
SECONDS_MAX, FACTOR_MAX = 3600.0, 100.0


class Kind(NamedTuple):
    """`by`: who does it. `seconds`, `factor`: where a person names none; 0: it has none."""

    by: str
    what: str
    seconds: float = 0.0
    factor: float = 0.0


KINDS = {
    "kill": Kind(SIGNAL, "SIGKILL to a worker"),
    "stop": Kind(SIGNAL, "SIGSTOP to a worker, and nothing more"),
    "segfault": Kind(SIGNAL, "SIGSEGV to a worker"),
    "hang": Kind(WORKER, "a worker holds its interpreter lock for good"),
    "slow": Kind(WORKER, "each step of a worker takes so many times as long", seconds=60.0, factor=1 / 0.7),
    "oom": Kind(WORKER, "a worker asks for more memory than there is"),
    "exit-1": Kind(WORKER, "a worker exits with 1"),
    "exit-75": Kind(WORKER, "a worker exits with 75, start me again"),
    "exit-78": Kind(WORKER, "a worker exits with 78, never again"),
    "nan": Kind(WORKER, "one step of a worker is not finite, once"),
    "disk-full": Kind(DISK, "the run's disk is full for a carrier", seconds=30.0),
    "disk-read-only": Kind(DISK, "the run's disk is read-only for a carrier", seconds=30.0),
    "disk-stall": Kind(DISK, "the run's disk hangs under a carrier", seconds=30.0),
    "corrupt": Kind(CHECKPOINT, "a bit of the newest checkpoint is another one"),
    "delete": Kind(CHECKPOINT, "the folder of the newest checkpoint is taken away"),
    "cut": Kind(LINK, "an agent hears and says nothing", seconds=30.0),
    "flap": Kind(LINK, "an agent hears and says nothing every other second", seconds=10.0),
    "kill-agent": Kind(AGENT, "SIGKILL to an agent"),
    "kill-carrier": Kind(CARRIER, "SIGKILL to a carrier"),
    "kill-coordinator": Kind(COORDINATOR, "SIGKILL to the coordinator"),
}


class Known(Protocol):
    """A state, or a turn."""

    @property
    def run(self) -> Run: ...

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    @property
    def ranks(self) -> Mapping[int, Rank]: ...


def refusal(known: Known, asked: BreakAsked) -> PacktrainError | None:
    """Why it is not done; None: it is."""
    if not known.run.setup.supervise.allow_faults:
        return FaultsForbidden(
            "this run does not allow that anything of it is broken on purpose", where="supervise.allow_faults",
            fix="start it with --set supervise.allow_faults=true; a run that matters should not have it",
        )
    why = _senseless(asked) or _out_of_reach(known, asked)
    return UsageError(why, where=f"packtrain break {asked.fault}", fix="packtrain ps shows the run") if why else None


def _senseless(asked: BreakAsked) -> str:
    kind = KINDS.get(asked.fault)
    if kind is None:
        near = difflib.get_close_matches(asked.fault, KINDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"no such fault: {asked.fault}; {hint}there are {', '.join(KINDS)}"
    if asked.seconds and not (kind.seconds and 0 < asked.seconds <= SECONDS_MAX):
        return f"{asked.fault} lasts no time" if not kind.seconds else f"--for takes up to {SECONDS_MAX:g} s"
    if asked.factor and not (kind.factor and 1 < asked.factor <= FACTOR_MAX):
        return f"{asked.fault} has no factor" if not kind.factor else f"--factor takes 1 to {FACTOR_MAX:g}"
    if asked.rank >= 0 and kind.by in (CHECKPOINT, COORDINATOR):
        return f"{asked.fault} strikes no rank"
    return ""


def _out_of_reach(known: Known, asked: BreakAsked) -> str:
    kind, run = KINDS[asked.fault], known.run
    if kind.by == WORKER and run.setup.plain:
        can = ", ".join(name for name, one in KINDS.items() if one.by == SIGNAL)
        return f"{asked.fault} needs a program that takes part, and this one knows nothing of us; a signal does {can}"
    if kind.by == COORDINATOR:
        return ""
    if kind.by in OF_ATTEMPTS and run.stage not in (LAUNCHING, RUNNING):
        return f"nothing runs now (the run is {run.stage})"
    if asked.rank >= 0 and asked.rank not in known.ranks:
        return f"no such rank: {asked.rank}; there are {len(known.ranks)}"
    node, rank = struck(known, asked)
    if node not in known.nodes:
        return f"no such node: {node or '(none named)'}; there are {', '.join(sorted(known.nodes))}"
    if asked.node and node != asked.node:
        return f"rank {asked.rank} runs on {node}, not on {asked.node}"
    if kind.by in OF_RANKS and rank < 0:
        return f"no rank runs on {node}"
    return "" if known.nodes[node].here else f"node {node} is lost"


def struck(known: Known, asked: BreakAsked) -> tuple[str, int]:
    """(node, rank): those named, or the last rank; a node alone is its first rank. Rank -1: no rank is struck."""
    of_rank = KINDS[asked.fault].by in OF_RANKS
    mine = sorted(number for number, rank in known.ranks.items() if not asked.node or rank.node == asked.node)
    number = asked.rank if asked.rank >= 0 else (mine[0] if asked.node else mine[-1]) if mine else -1
    node = known.ranks[number].node if asked.rank >= 0 or (mine and not asked.node) else asked.node
    return node, number if of_rank else -1


def told(known: Known, asked: BreakAsked) -> str:
    """What is done, in words."""
    kind, (node, rank) = KINDS[asked.fault], struck(known, asked)
    whom = f"rank {rank} on {node}" if rank >= 0 else f"node {node}" if kind.by != COORDINATOR else ""
    last = f"for {asked.seconds or kind.seconds:g} s" if kind.seconds else ""
    return ", ".join(part for part in (f"{asked.fault}: {kind.what}", whom, last) if part)


def broken(turn: Turn, asked: BreakAsked) -> None:
    """Written down, then done. What has become impossible meanwhile is not."""
    if refusal(turn, asked) is not None:
        return
    kind, (node, rank) = KINDS[asked.fault], struck(turn, asked)
    seconds, factor = asked.seconds or kind.seconds, asked.factor or kind.factor
    ours = kind.by == COORDINATOR
    turn.own(Write(record=FaultInjected(
        fault=asked.fault, attempt=turn.run.attempt, node="" if ours else node, rank=rank, seconds=seconds,
        factor=factor, by=asked.by,
    )))
    if ours:
        turn.own(Die())
    else:
        turn.do(node, Break(
            attempt=turn.run.attempt, fault=asked.fault, rank=rank, seconds=seconds, factor=factor
        ))
