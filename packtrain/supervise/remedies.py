"""What follows the end of an attempt: another one, from where, on which nodes; or the end of the run. Pure.

The order of remedies: again at once (most faults are transient), then without the node that was blamed twice in a row,
then from the save before. Diagnosis delays none of them.
"""

from __future__ import annotations

from packtrain.core.errors import (
    EXIT_AGAIN,
    EXIT_CONFIG,
    EXIT_DONE,
    CheckpointDamaged,
    CheckpointUnreadable,
    CommitStale,
    GuardRollback,
    NodeGone,
    NoProgress,
    PacktrainError,
    RanksDiffer,
    SaveFailed,
    SharedCause,
    SlotDamaged,
    StoppedOnRequest,
    WorkerCrashed,
    WorkerRefused,
    WorkerSilent,
    error_named,
)
from packtrain.core.records import AttemptEnded, ErrorSeen, NodeCordoned, NodeDrained, NodeSuspected, SharedCauseSeen
from packtrain.core.units import NS
from packtrain.supervise import causes
from packtrain.supervise.assign import spares
from packtrain.supervise.causes import Cause
from packtrain.supervise.events import Write
from packtrain.supervise.messages import Leave
from packtrain.supervise.state import LEAVING, WAITING, Run, Turn

PAUSE_S_MAX = 30
UNREADABLE_MAX = 8
"""Attempts at a checkpoint, or at a commit log, that the disk refuses: their pauses make about a minute and a half."""
ROLLBACKS_MAX = 3
MEMORY_TRIES = 2
"""Attempts in a row without a new step after which memory is distrusted: the next one begins from disk."""
DISTURBED_FACTOR = 10
"""Attempts in a row without a new step that a lost node ended are bounded by this times the bound of the others."""
BLAMES_MAX = 2
"""In a row, after which a node is replaced."""
CORDON_BLAMES = 4
"""Of one node, after which no attempt begins on it."""
CORDON_NS = 86400 * NS
CORDON_PART = 0.05
NOT_RESTORED = (CheckpointDamaged.name, CheckpointUnreadable.name)
NO_FRUIT_DUE = (*NOT_RESTORED, GuardRollback.name, SlotDamaged.name)
"""Ends that have bounds of their own and say nothing about progress."""
DISTURBED = ("lost", "agent", "launch", "asked", "hardware")
"""Kinds of ends that are not the program's."""
PLAIN_PROGRESS_S = 600.0
"""A program that tells no steps has got further when it lived for so long, or for `progress_s`."""


def pause_s(failures: int) -> int:
    """1, 2, 4 .. 30, from the first failure on."""
    return int(min(PAUSE_S_MAX, 1 << max(0, failures - 1)))


def conclude(turn: Turn) -> None:
    """The workers of an attempt are gone, and its carriers too."""
    found = causes.cause(turn.run, turn.ranks)
    found = _as_asked(turn.run, found)
    name = found.error.get("name", "") if found.kind == "again" else ""
    _count(turn, found, name)
    turn.own(Write(record=AttemptEnded(attempt=turn.run.attempt, exit_code=found.status, reason=found.reason)))
    _after(turn, found, name)


def _as_asked(run: Run, found: Cause) -> Cause:
    """Ranks that saved and ended as they were told: why they were, unless they say more themselves. Where the run goes
    on nothing was stopped, so nobody is told that."""
    if not run.purpose or found.kind != "again":
        return found
    if run.stopping:
        return found if found.error else found._replace(reason="stopped on request")
    as_told = found.error.get("name", StoppedOnRequest.name) == StoppedOnRequest.name
    return found._replace(reason=run.reason, error={}) if as_told else found


def _count(turn: Turn, found: Cause, name: str) -> None:
    run = turn.run
    further = progressed(turn)
    disturbed = found.kind in DISTURBED or bool(run.purpose)
    ours = not disturbed and name not in NO_FRUIT_DUE
    turn.set(
        best_step=max(run.best_step, run.attempt_step), highest_step=max(run.highest_step, run.attempt_step),
        fruitless=0 if further else run.fruitless + ours,
        disturbed=0 if further else run.disturbed + disturbed, mistaken=0 if further else run.mistaken,
        damaged=run.damaged + (name == CheckpointDamaged.name) if name in NOT_RESTORED else 0,
        unreadable=run.unreadable + (name == CheckpointUnreadable.name) if name in NOT_RESTORED else 0,
        rollbacks=0 if run.attempt_step > run.highest_step else run.rollbacks,
        differed=run.differed + 1 if found.kind == "differs" else 0,
        trouble=None, purpose="", kill_at_ns=0, back=0, memory=True, attempt_step=-1,
    )
    if further:
        for one, node in turn.nodes.items():
            if node.slot >= 0 and 0 < node.aside < run.attempt and one != found.node:
                turn.node(one, aside=0)


def progressed(turn: Turn) -> bool:
    """Whether this attempt got further than those before it."""
    return turn.run.attempt_step > turn.run.best_step or _outlived(turn)


def _outlived(turn: Turn) -> bool:
    """Without beats: it lived long enough to have got further."""
    run = turn.run
    life_s = run.setup.supervise.progress_s or PLAIN_PROGRESS_S
    return run.setup.plain and run.attempt_step < 0 and turn.ns - run.began_ns >= life_s * NS


def _after(turn: Turn, found: Cause, name: str) -> None:
    run = turn.run
    if found.kind == "done":
        return finish(turn, EXIT_DONE, "done")
    if found.kind == "config":
        error = found.error or WorkerRefused(found.reason, where="a worker", fix="see its log").as_dict()
        return finish(turn, EXIT_CONFIG, found.reason, error)
    if run.stopping:
        return finish(turn, EXIT_AGAIN, found.reason, stopped(found))
    if name in (SaveFailed.name, CommitStale.name) or run.unreadable >= UNREADABLE_MAX:
        return finish(turn, EXIT_AGAIN, found.reason, found.error)
    if run.differed >= BLAMES_MAX:
        return finish(turn, EXIT_CONFIG, found.reason, _told(turn, found).as_dict())
    _blame(turn, found)
    if run.disturbed >= DISTURBED_FACTOR * run.setup.supervise.attempts_without_progress:
        return _no_progress(turn, f"{run.disturbed} attempts in a row lost a node before a new step", found)
    _another(turn, found, name)


def _another(turn: Turn, found: Cause, name: str) -> None:
    """The next attempt: at once, after a pause, or from the save before the one the log leads to."""
    run = turn.run
    if found.kind not in ("asked",) and not (found.kind == "again" and not found.error):
        warn(turn, _told(turn, found))
    if name == CheckpointUnreadable.name:
        return begin_again(turn, found.reason, pause=pause_s(run.unreadable))
    stuck = run.fruitless >= run.setup.supervise.attempts_without_progress
    back = name == GuardRollback.name or run.damaged >= 2
    if stuck and (run.rollbacks or not run.best_step):
        return _no_progress(turn, f"{run.fruitless} attempts in a row completed no new step", found)
    if not back and not stuck:
        memory = name != SlotDamaged.name and run.fruitless < MEMORY_TRIES
        return begin_again(turn, found.reason, memory=memory)
    if run.rollbacks < ROLLBACKS_MAX:
        turn.set(rollbacks=run.rollbacks + 1, fruitless=0)
        return begin_again(turn, found.reason, back=1)
    _no_progress(turn, f"{ROLLBACKS_MAX} rollbacks led to no step above {run.highest_step}", found)


def begin_again(turn: Turn, reason: str, *, pause: int = 0, back: int = 0, memory: bool = True) -> None:
    turn.set(reason=reason, back=back, memory=memory, begin_ns=turn.ns + pause * NS if pause else 0)
    turn.new_ranks({})
    turn.enter(WAITING)


def _no_progress(turn: Turn, what: str, found: Cause) -> None:
    error = NoProgress(
        f"{what}; the last one: {found.reason}",
        where=found.error.get("where") or f"after step {turn.run.best_step}",
        fix="read the workers' logs; the same command tries again from the last published step",
    )
    finish(turn, error.exit_code, "no progress", error.as_dict())


def _told(turn: Turn, found: Cause) -> PacktrainError:
    """The end of an attempt as an error that people read."""
    if found.error:
        return error_named(**found.error)
    where = f"after step {turn.run.best_step}" + (f", node {found.node}" if found.node else "")
    kinds: dict[str, type[PacktrainError]] = {
        "silent": WorkerSilent, "stalled": WorkerSilent, "idle": WorkerSilent, "grace": WorkerSilent,
        "apart": WorkerSilent, "late": WorkerSilent, "lost": NodeGone, "agent": NodeGone, "launch": NodeGone,
        "hardware": NodeGone,
        "differs": RanksDiffer,
    }
    fix = "nothing: it starts again"
    if found.kind == "differs":
        fix = "bring the same code and the same version to every node; then give the same command"
    return kinds.get(found.kind, WorkerCrashed)(f"an attempt ended: {found.reason}", where=where, fix=fix)


def stopped(found: Cause | None = None) -> dict[str, str]:
    """The error of a run that ends because somebody asked for it."""
    if found is not None and found.kind == "again" and found.error:
        return found.error
    clean = found is None or found.kind in ("again", "asked")
    what = "stopped on request" if clean else f"stopped on request, but not cleanly: {found and found.reason}"
    return StoppedOnRequest(what, fix="the same command goes on from the last published step").as_dict()


def warn(turn: Turn, error: PacktrainError) -> None:
    """Something went wrong and the run goes on."""
    seen = ErrorSeen(severity="warning", name=error.name, what=error.what, where=error.where, fix=error.fix)
    turn.own(Write(record=seen))


def finish(turn: Turn, exit_code: int, reason: str, error: dict[str, str] | None = None) -> None:
    """The run is over: every agent leaves, then the coordinator."""
    turn.set(exit_code=exit_code, reason=reason, error=error or {})
    for name, node in turn.nodes.items():
        if node.here:
            turn.do(name, Leave(reason=reason))
    turn.say(f"the run ends with {exit_code}: {reason}")
    turn.enter(LEAVING)


# --- whose fault it was ------------------------------------------------------------------------------


def _blame(turn: Turn, found: Cause) -> None:
    """Count it against a node, unless many show the same at once."""
    if not found.node or found.kind == "asked" or found.node not in turn.nodes:
        turn.set(blamed="", blamed_in_row=0)
        return
    node = turn.nodes[found.node]
    together = causes.shared(turn.nodes, node.symptom, turn.run.world, turn.ns)
    if together and found.kind != "stalled":  # all of a world stand still when one does, and that one was found
        return _shared(turn, node.symptom, together)
    in_row = turn.run.blamed_in_row + 1 if turn.run.blamed == found.node else 1
    turn.set(blamed=found.node, blamed_in_row=in_row)
    turn.node(found.node, blames=node.blames + 1)
    done = _replace(turn, found.node, BLAMES_MAX if found.kind == "differs" else in_row)
    turn.own(Write(record=NodeSuspected(node=found.node, reason=found.reason, in_row=in_row, done=done)))


def _shared(turn: Turn, symptom: str, nodes: list[str]) -> None:
    turn.set(blamed="", blamed_in_row=0, shared_ns=turn.ns + causes.SHARED_NS)
    tell_shared(turn, symptom, nodes)


def tell_shared(turn: Turn, symptom: str, nodes: list[str]) -> None:
    turn.own(Write(record=SharedCauseSeen(symptom=symptom, nodes=nodes)))
    warn(turn, SharedCause(
        f"{len(nodes)} nodes show the same at once ({symptom}): no node is blamed, and saves wait until it is over",
        where=", ".join(nodes[:8]), fix="look at what they share: storage, network, power, a change that was just made",
    ))


def _replace(turn: Turn, name: str, in_row: int) -> str:
    """What follows a blame, in words."""
    if turn.nodes[name].blames >= CORDON_BLAMES and may_cordon(turn):
        cordon(turn, name, "blamed too often")
        return "it is cordoned"
    if in_row < BLAMES_MAX:  # most faults are transient; another version of the code is not
        return "another attempt at once"
    turn.node(name, aside=turn.run.attempt)
    return "it is replaced" if spares(turn.run.setup, turn.nodes) else "no spare is there: it goes on"


def drained(turn: Turn, name: str, by: str) -> None:
    """No attempt begins on it; said once."""
    node = turn.nodes[name]
    if not node.draining:
        turn.own(Write(record=NodeDrained(node=name, by=by, in_world=node.slot >= 0)))
    turn.node(name, draining=by)


def may_cordon(turn: Turn) -> bool:
    """Without a person asking: one node, or 5% of them, in 24 h; and only where the run can go on without it.

    By the clock of the run: every event has it, and nobody can set it.
    """
    return len(_recent(turn)) < max(1, int(CORDON_PART * len(turn.nodes))) and bool(spares(turn.run.setup, turn.nodes))


def cordon(turn: Turn, name: str, by: str) -> None:
    """Without a person asking; where `may_cordon`."""
    turn.set(cordons_ns=(*_recent(turn), turn.ns))
    turn.node(name, cordoned=by)
    turn.own(Write(record=NodeCordoned(node=name, by=by)))


def _recent(turn: Turn) -> tuple[int, ...]:
    return tuple(ns for ns in turn.run.cordons_ns if turn.ns - ns < CORDON_NS)
