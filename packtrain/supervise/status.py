"""What a coordinator answers to `status`: how the run stands, node by node."""

from __future__ import annotations

from typing import Any

from packtrain.supervise.assign import ranks_of
from packtrain.supervise.desk import Desk
from packtrain.supervise.job import Job
from packtrain.supervise.revive import AgentsHere
from packtrain.supervise.state import (
    BEGINNING,
    BRINGING,
    CLOSING,
    ENDING,
    FINISHED,
    LAUNCHING,
    LEAVING,
    RUNNING,
    WAITING,
    WRAPPING,
    Node,
    Run,
)

WORDS = {
    WAITING: "waiting", BEGINNING: "waiting", BRINGING: "waiting", LAUNCHING: "running", RUNNING: "running",
    ENDING: "waiting", WRAPPING: "waiting", CLOSING: "waiting", LEAVING: "ending", FINISHED: "ended",
}


def status(
    job: Job, term: int, desk: Desk, waits: str = "", agents: AgentsHere | None = None, elsewhere: str = ""
) -> dict[str, Any]:
    """`waits`: what is waited for beside the nodes. `agents`: those of this machine. `elsewhere`: where the log is, if
    not in its first place."""
    run, nodes = desk.state.run, desk.state.nodes
    steps = desk.steps
    return {
        "ok": True, "run": job.name, "term": term, "state": WORDS[run.stage], "stage": run.stage,
        "attempt": run.attempt, "step": max(run.attempt_step, min(steps.values(), default=-1), run.best_step),
        "paused": run.paused, "phase": desk.phase or ("step" if run.stage == RUNNING else "init"), "reason": run.reason,
        "stopping": run.stopping, "log": _log(desk, elsewhere), "waits": waits,
        "nodes": [_node(name, node, run, steps.get(name, -1), agents) for name, node in sorted(nodes.items())],
    }


def _node(name: str, node: Node, run: Run, step: int, agents: AgentsHere | None) -> dict[str, Any]:
    member = node.slot >= 0 and node.attempt == run.attempt and run.stage not in (WAITING, BEGINNING)
    ranks = list(ranks_of(node.slot, run.setup.procs)) if member else []
    word = f"{_word(node, member)}, suspect" if node.suspect else _word(node, member)
    return {
        "node": name, "host": node.host, "state": word, "ranks": ranks, "step": step,
        "restarts": agents.tries(name) if agents is not None else 0,
        "given_up": agents is not None and name in agents.given_up(),
    }


def _word(node: Node, member: bool) -> str:
    if not node.here:
        return "lost"
    if node.silent_ns:
        return "silent"
    if node.cordoned:
        return "cordoned"
    if node.draining:
        return "draining"
    return "running" if member else "ending" if node.attempt else "spare"


def _log(desk: Desk, elsewhere: str) -> str:
    if desk.trouble is not None:
        return f"decides nothing, its log cannot be written: {desk.trouble}"
    return f"its log is in its second place, {elsewhere}" if elsewhere else ""
