"""Why an attempt ended: the first thing that is not the consequence of another. Pure."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from packtrain.core.errors import EXIT_AGAIN, EXIT_CONFIG, EXIT_DONE
from packtrain.core.units import NS
from packtrain.supervise.one_carrier import status_text
from packtrain.supervise.state import Node, Rank, Run

CONSEQUENCES = ("world.broken", "world.not_formed", "world.no_go")
"""Errors of a rank that say: look at who ended first."""
COLLAPSE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|heartbeat|coordination service|connectfullmesh|socket closed"
    r"|nccl.*(abort|remote)|peer (is )?(gone|lost|died)", re.IGNORECASE,
)
"""Last words of a rank whose peer died, of any program. Source: torch, gloo, NCCL and JAX at a SIGKILL of a peer."""
LEFT = (EXIT_DONE, EXIT_AGAIN, -signal.SIGTERM, 128 + signal.SIGTERM)
"""How a program ends that was sent SIGTERM; the last is a shell's."""
LIKELY = {
    signal.SIGKILL: "when nobody killed it, the kernel was out of memory (see dmesg)",
    signal.SIGBUS: "often a memory-mapped file on a full disk or /dev/shm",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGILL: "native code built for another processor",
}
TAKEN = re.compile(r"address already in use|errno 98", re.IGNORECASE)
SHARED_NS = 60 * NS
SHARED_NODES_MIN = 3
SHARED_PART = 0.2
SMALL = 16
"""Below so many nodes a cause is shared only when all show it."""


class Cause(NamedTuple):
    """`kind`: done, config, again (exit 75), crash, or that of a `Trouble`. `node`: to blame for it, or empty."""

    kind: str
    status: int
    reason: str
    node: str = ""
    error: dict[str, str] = {}
    tail: str = ""


def cause(run: Run, ranks: Mapping[int, Rank]) -> Cause:
    """Of an attempt whose workers are gone."""
    if was_asked(run) and ranks:
        ranks = {number: rank for number, rank in ranks.items() if not left_as_asked(rank)}
        if not ranks:
            return Cause("again", EXIT_AGAIN, "stopped on request")
    if ranks and all(rank.status == EXIT_DONE for rank in ranks.values()):
        return Cause("done", EXIT_DONE, "done")
    ended = sorted((rank for rank in ranks.values() if rank.status is not None), key=_precedence)
    refused = next((rank for rank in ended if rank.status == EXIT_CONFIG), None)
    if refused is not None:
        return _of_rank(refused)
    if run.trouble is not None:
        status = EXIT_AGAIN if run.trouble.kind == "asked" else -9
        return Cause(run.trouble.kind, status, run.trouble.reason, run.trouble.node)
    if ended and not is_consequence(ended[0]):
        return _of_rank(ended[0])
    gone = next((rank for rank in ranks.values() if rank.trouble in ("lost", "agent")), None)
    if gone is not None:
        return Cause("lost", -9, f"node {gone.node} is gone", gone.node)
    return _of_rank(ended[0], blamed=False) if ended else Cause("lost", -9, "no worker was left")


def was_asked(run: Run) -> bool:
    """Whether a program that knows no words was told to save and stop, by SIGTERM alone."""
    return run.setup.plain and bool(run.purpose)


def left_as_asked(rank: Rank) -> bool:
    """Whether a program that got SIGTERM ended by it, with it or without a complaint: none of them says "done"."""
    return rank.status in LEFT or (rank.status is not None and is_consequence(rank))


def _precedence(rank: Rank) -> tuple[bool, bool, bool, int]:
    """Those that we killed or that followed others last, then those that ended well, then by who ended first."""
    plain = rank.status == EXIT_AGAIN and not rank.error
    return (rank.killed or is_consequence(rank), rank.status == EXIT_DONE, plain, rank.order)


def is_consequence(rank: Rank) -> bool:
    if rank.error:
        return rank.error.get("name") in CONSEQUENCES
    return rank.status not in (EXIT_DONE, EXIT_CONFIG, EXIT_AGAIN) and bool(COLLAPSE.search(rank.tail[-2000:]))


def _of_rank(rank: Rank, blamed: bool = True) -> Cause:
    assert rank.status is not None
    told = rank.error.get("what", "")
    if rank.status == EXIT_CONFIG:
        return Cause("config", rank.status, told or "a worker refused its configuration", "", rank.error, rank.tail)
    if rank.status == EXIT_AGAIN:
        return Cause("again", rank.status, told or "a worker asked to be started again", "", rank.error, rank.tail)
    reason = diagnose(rank.status, rank.tail)
    if rank.status == EXIT_DONE:
        reason = "some workers were done and others were not"
    node = rank.node if blamed and rank.status != EXIT_DONE and not TAKEN.search(rank.tail[-2000:]) else ""
    return Cause("crash", rank.status, reason, node, rank.error, rank.tail)


def diagnose(status: int, tail: str) -> str:
    """One line: how it ended, the likely cause, the last line of its log (hostile text: only what prints is kept)."""
    likely = LIKELY.get(signal.Signals(-status)) if -status in set(signal.Signals) else None
    return "; ".join(part for part in (status_text(status), likely, _last_line(tail)) if part)


def _last_line(tail: str) -> str:
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return "".join(c for c in lines[-1] if c.isprintable())[:300] if lines else ""


def symptom(rank: Rank) -> str:
    """In one word, for comparing nodes; empty: it says nothing of its node."""
    if rank.killed or is_consequence(rank) or rank.status in (EXIT_DONE, EXIT_CONFIG):
        return ""
    return rank.error.get("name", "") if rank.status == EXIT_AGAIN else status_text(rank.status or 0)


def shared(nodes: Mapping[str, Node], kind: str, world: int, ns: int) -> list[str]:
    """The nodes of a world that show one symptom at once, where they are too many for it to be theirs."""
    showing = sorted(
        name for name, node in nodes.items()
        if kind and node.slot >= 0 and node.symptom == kind and ns - node.symptom_ns <= SHARED_NS
    )
    least = max(SHARED_NODES_MIN, world if world < SMALL else SHARED_PART * world)
    return showing if len(showing) >= least else []


def odd_one(stacks: Mapping[int, str]) -> int | None:
    """The one rank whose stack differs from that of most others; None: there is no such rank."""
    shapes = {rank: _shape(text) for rank, text in stacks.items() if text}
    counts = Counter(shapes.values())
    if len(shapes) < 3 or not counts:
        return None
    usual, most = counts.most_common(1)[0]
    odd = [rank for rank, shape in shapes.items() if shape != usual]
    return odd[0] if len(odd) == 1 and most == len(shapes) - 1 else None


def _shape(text: str) -> str:
    """A stack without what differs from process to process: addresses, ids, numbers of threads."""
    return re.sub(r"0x[0-9a-fA-F]+|\b\d{3,}\b", "#", text)


def difference(facts: Mapping[int, Mapping[str, str]]) -> tuple[int, str] | None:
    """The first rank that is not of one mind with most others, and how, in words; None: all agree."""
    for key in sorted({key for told in facts.values() for key in told}):
        usual, most = Counter(told.get(key, "") for told in facts.values()).most_common(1)[0]
        odd = [rank for rank in sorted(facts) if facts[rank].get(key, "") != usual]
        if odd:
            has = facts[odd[0]].get(key, "") or "nothing"
            return odd[0], f"rank {odd[0]} differs in {key}: {has[:80]}, {most} others have {usual[:80] or 'nothing'}"
    return None
