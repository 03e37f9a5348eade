"""What to do about a run on one node: a pure function of what is known and what just happened.

The policy of the foreground. An attempt is one worker with one carrier beside it.

    worker exits 0                      the run is done
    worker exits 75 after an order      stopped, as asked
    worker exits 75 because a last save found no home      stop: the same disk would refuse again
    worker exits 75 otherwise           begin another attempt at once
    worker exits 75 because a newer attempt began          stop: another command has this run
    its checkpoint is damaged           once more from the same, then from the save before it, and further back
    its slot in memory is damaged       another attempt at once, from disk
    the disk refuses its checkpoint     another attempt from the same, later and later; then stop
    the guard asks to go back           another attempt from the save before
    worker exits 78                     stop, and never begin again: a configuration does not heal
    anything else                       name the likely cause, begin another attempt at once
    beats overdue                       SIGKILL, then as above
    beats, but no step for long         SIGKILL, then as above
    carrier exits or hangs              another carrier (one_carrier.py), the worker is not touched
    asked to stop                       the word STOP, then SIGKILL once the grace is over; asked twice: SIGKILL at once

Progress is a completed step above the highest one known; after `attempts_without_progress` attempts in a row without it
the run stops; so it does after `ROLLBACKS_MAX` rollbacks without a step above the highest of all. Time in which nobody
looked (a suspended machine, a stopped foreground) counts against no deadline.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from packtrain.core.errors import (
    EXIT_AGAIN,
    EXIT_CONFIG,
    EXIT_DONE,
    CheckpointDamaged,
    CheckpointUnreadable,
    CommitStale,
    GuardRollback,
    NoProgress,
    PacktrainError,
    SaveFailed,
    SlotDamaged,
    StoppedOnRequest,
    WorkerCrashed,
    WorkerRefused,
    WorkerSilent,
)
from packtrain.core.units import NS
from packtrain.supervise import one_carrier
from packtrain.supervise.config import FIRST_BEAT_FACTOR, SuperviseConfig
from packtrain.supervise.one_carrier import Warn, pause_s, status_text

UNWATCHED_NS = 2 * NS
"""What lies between two looks beyond this counts for nothing: we were stopped, not the worker."""
UNREADABLE_MAX = 8
"""Attempts at a checkpoint that the disk refuses: their pauses make about a minute and a half."""
ROLLBACKS_MAX = 3
MEMORY_TRIES = 2
"""Attempts in a row without a new step after which memory is distrusted: the next one begins from disk."""
UNHURRIED = ("init", "compile", "restore", "save", "eval", "pause")
"""Phases in which no step is due."""


# --- what happened ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """The run is ours and its log is readable. `best_step`: the step of its restore point, 0 when it is new."""

    best_step: int


@dataclass(frozen=True)
class Began:
    """Worker and carrier of an attempt were started. `step`: what it restores, when that lies further back."""

    ns: int
    step: int | None = None
    held: int = -1
    """A step it takes from memory: completed before, whoever heard of it."""


@dataclass(frozen=True)
class Heard:
    """A beat, or a metric, that names the steps completed so far (-1: not known yet) and the phase."""

    ns: int
    step: int
    phase: str = "step"


@dataclass(frozen=True)
class Asked:
    """A person, or the machine, asks to stop. `by`: SIGINT, SIGTERM, SIGHUP."""

    ns: int
    by: str


@dataclass(frozen=True)
class WorkerEnded:
    """`status` as `Process.poll` gives it; `error`: the last error the worker journalled; `tail`: end of its log."""

    ns: int
    status: int
    error: PacktrainError | None = None
    tail: str = ""


@dataclass(frozen=True)
class Tick:
    ns: int


Event = Opened | Began | Heard | Asked | WorkerEnded | Tick | one_carrier.Event


# --- what to do ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """Commit a new attempt and start its processes. `back`: saves to go back from the one the log leads to. `memory`:
    it may begin from what is held in memory, where that is newer."""

    reason: str
    back: int = 0
    memory: bool = True


@dataclass(frozen=True)
class OrderStop:
    reason: str


@dataclass(frozen=True)
class Kill:
    """SIGKILL the worker."""

    reason: str


@dataclass(frozen=True)
class EndAttempt:
    """The worker is gone: put away what belonged to its attempt."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class Finish:
    """The last action: leave with this exit code. `error` is None when all is well."""

    exit_code: int
    reason: str
    error: PacktrainError | None = None


Action = Begin | OrderStop | Kill | EndAttempt | Finish | one_carrier.Action


@dataclass(frozen=True)
class State:
    """All the policy knows. Nanoseconds since boot."""

    config: SuperviseConfig
    best_step: int = 0
    """Highest completed step known before this attempt."""
    attempt_step: int = -1
    fruitless: int = 0
    highest_step: int = 0
    """Highest completed step ever known: `best_step` goes back with a rollback, this does not."""
    damaged: int = 0
    """Attempts that found their checkpoint damaged, since one that could restore."""
    unreadable: int = 0
    """Attempts whose checkpoint the disk refused, since one that could restore."""
    rollbacks: int = 0
    """Since a step above `highest_step`."""
    begin_ns: int = 0
    """When the next attempt may begin; 0: none waits."""
    running: bool = False
    stopping: str = ""
    """Who asked to stop; empty: nobody."""
    killed: str = ""
    """Why we killed the worker; empty: we did not."""
    kill_at_ns: int = 0
    """When the grace ends; 0: no order was given."""
    overdue_ns: int = 0
    """When silence becomes death."""
    stalled_ns: int = 0
    """When beats without a step become death; 0: not yet two steps."""
    looked_ns: int = 0
    carrier: one_carrier.State = one_carrier.State()
    finished: bool = False


Step = tuple[State, list[Action]]


def decide(state: State, event: Event) -> Step:
    """The whole policy. Pure: the same state and event always give the same answer."""
    if state.finished:
        return state, []
    match event:
        case Opened():
            carrier = one_carrier.State(overdue_s=state.config.carrier_overdue_s)
            state = replace(state, best_step=event.best_step, highest_step=event.best_step, carrier=carrier)
            return state, [Begin(reason="the run was asked for")]
        case Began():
            return _began(state, event), []
        case Heard():
            return _heard(state, event), []
        case Asked():
            return _asked(state, event)
        case WorkerEnded():
            return _worker_ended(state, event)
        case Tick():
            return _tick(state, event.ns)
        case one_carrier.Stands() | one_carrier.Gone() | one_carrier.GivenUpEnded():
            return _of_carrier(state, event)


def _began(state: State, event: Began) -> State:
    """After a rollback progress is counted from the older step."""
    ns = event.ns
    return replace(
        state, running=True, attempt_step=-1, killed="", kill_at_ns=0, looked_ns=ns,
        best_step=max(state.best_step, event.held) if event.step is None else event.step,
        highest_step=max(state.highest_step, event.held),
        overdue_ns=ns + round(FIRST_BEAT_FACTOR * state.config.beat_overdue_s * NS),
        carrier=one_carrier.began(state.carrier, ns), begin_ns=0, stalled_ns=0,
    )


def _heard(state: State, event: Heard) -> State:
    step = max(state.attempt_step, event.step)
    overdue_ns = event.ns + round(state.config.beat_overdue_s * NS)
    return replace(
        state, attempt_step=step, overdue_ns=overdue_ns if step >= 0 else max(state.overdue_ns, overdue_ns),
        stalled_ns=_stalled_ns(state, event),
    )


def _stalled_ns(state: State, event: Heard) -> int:
    """The count begins anew with each step, and does not begin before the first one of this attempt is over."""
    stepped = 0 <= state.attempt_step < event.step
    if state.config.progress_s and (stepped or (state.stalled_ns and event.phase in UNHURRIED)):
        return event.ns + round(state.config.progress_s * NS)
    return state.stalled_ns


def _asked(state: State, event: Asked) -> Step:
    if not state.running:
        return _finish(state, _stopped(f"{event.by} before an attempt began"))
    if state.stopping:
        reason = f"asked twice to stop ({event.by})"
        return replace(state, killed=state.killed or reason), [Kill(reason=reason)]
    kill_at_ns = event.ns + round(state.config.grace_s * NS)
    return replace(state, stopping=event.by, kill_at_ns=kill_at_ns), [OrderStop(reason=event.by)]


def _tick(state: State, ns: int) -> Step:
    unwatched_ns = max(0, ns - state.looked_ns - UNWATCHED_NS)
    state = replace(
        state, looked_ns=ns, overdue_ns=state.overdue_ns + unwatched_ns,
        kill_at_ns=state.kill_at_ns and state.kill_at_ns + unwatched_ns,
        stalled_ns=state.stalled_ns and state.stalled_ns + unwatched_ns,
    )
    if not state.running:
        due = state.begin_ns and ns >= state.begin_ns
        return (replace(state, begin_ns=0), [Begin(reason="the pause is over")]) if due else (state, [])
    carrier, of_carrier = one_carrier.tick(state.carrier, ns, unwatched_ns)
    state, actions = replace(state, carrier=carrier), list[Action](of_carrier)
    why = "" if state.killed else _why_kill(state, ns)
    if why:
        state = replace(state, killed=why)
        actions.append(Kill(reason=why))
    return state, actions


def _why_kill(state: State, ns: int) -> str:
    if state.kill_at_ns and ns >= state.kill_at_ns:
        return f"not stopped {state.config.grace_s:g} s after it was asked to (supervise.grace_s)"
    if ns >= state.overdue_ns:
        return f"silent for {state.config.beat_overdue_s:g} s (supervise.beat_overdue_s)"
    if state.stalled_ns and ns >= state.stalled_ns:
        return f"beats, but no step for {state.config.progress_s:g} s (supervise.progress_s)"
    return ""


def _of_carrier(state: State, event: one_carrier.Event) -> Step:
    """Between attempts there is none that matters; those given up end whenever they do."""
    if not state.running and not isinstance(event, one_carrier.GivenUpEnded):
        return state, []
    carrier, actions = one_carrier.happened(state.carrier, event, stopping=bool(state.stopping))
    return replace(state, carrier=carrier), list(actions)


# --- the end of an attempt -------------------------------------------------------------------------


NOT_RESTORED = (CheckpointDamaged.name, CheckpointUnreadable.name)
NO_FRUIT_DUE = (*NOT_RESTORED, GuardRollback.name, SlotDamaged.name)
"""Ends that have bounds of their own and say nothing about progress."""


def _error_name(event: WorkerEnded) -> str:
    """Why the worker asks to be started again; empty: it does not, or does not say."""
    return event.error.name if event.status == EXIT_AGAIN and event.error is not None else ""


def _worker_ended(state: State, event: WorkerEnded) -> Step:
    progressed = state.attempt_step > state.best_step
    name = _error_name(event)
    state = replace(
        state, running=False, best_step=max(state.best_step, state.attempt_step),
        highest_step=max(state.highest_step, state.attempt_step),
        fruitless=0 if progressed else state.fruitless + (name not in NO_FRUIT_DUE),
        damaged=state.damaged + (name == CheckpointDamaged.name) if name in NOT_RESTORED else 0,
        unreadable=state.unreadable + (name == CheckpointUnreadable.name) if name in NOT_RESTORED else 0,
        rollbacks=0 if state.attempt_step > state.highest_step else state.rollbacks,
    )
    reason = _reason(state, event)
    state, actions = _after(state, event, reason)
    return state, [EndAttempt(exit_code=event.status, reason=reason), *actions]


def _reason(state: State, event: WorkerEnded) -> str:
    if state.killed:
        return state.killed
    match event.status:
        case 0:
            return "done"
        case 75 if state.stopping:
            return "stopped on request"
        case 75:
            return event.error.what if event.error else "the worker asked to be started again"
        case 78:
            return event.error.what if event.error else "the worker refused its configuration"
    return diagnose(event.status, event.tail)


def _after(state: State, event: WorkerEnded, reason: str) -> Step:
    if event.status == EXIT_DONE:
        return _finish(state, Finish(exit_code=EXIT_DONE, reason="done"))
    if event.status == EXIT_CONFIG:
        error = event.error or WorkerRefused(reason, where="the worker", fix=_last_line(event.tail) or "see its log")
        return _finish(state, Finish(exit_code=EXIT_CONFIG, reason=reason, error=error))
    if state.stopping:
        return _finish(state, _stopped(reason, event))
    if event.error is not None and _ends_the_run(state, _error_name(event)):
        return _finish(state, Finish(exit_code=EXIT_AGAIN, reason=reason, error=event.error))
    if state.fruitless >= state.config.attempts_without_progress:
        error = NoProgress(
            f"{state.fruitless} attempts in a row completed no new step; the last one: {reason}",
            where=f"after step {state.best_step}",
            fix="read the worker's log; the same command tries again from the last published step",
        )
        return _finish(state, Finish(exit_code=error.exit_code, reason="no progress", error=error))
    return _another(state, event, reason)


def _ends_the_run(state: State, name: str) -> bool:
    """Ends that the next attempt would only repeat, or that leave the run to somebody else."""
    return name in (SaveFailed.name, CommitStale.name) or state.unreadable >= UNREADABLE_MAX


def _another(state: State, event: WorkerEnded, reason: str) -> Step:
    """The next attempt: at once, after a pause, or from the save before the one the log leads to."""
    asked_back = _error_name(event) == GuardRollback.name
    warn = Warn(error=event.error if asked_back and event.error is not None else _crash(state, reason))
    if _error_name(event) == CheckpointUnreadable.name:
        return replace(state, begin_ns=event.ns + pause_s(state.unreadable) * NS), [warn]
    if not asked_back and state.damaged < 2:
        memory = _error_name(event) != SlotDamaged.name and state.fruitless < MEMORY_TRIES
        return state, [warn, Begin(reason=reason, memory=memory)]
    if state.rollbacks < ROLLBACKS_MAX:
        return replace(state, rollbacks=state.rollbacks + 1), [warn, Begin(reason=reason, back=1)]
    error = NoProgress(
        f"{ROLLBACKS_MAX} rollbacks led to no step above {state.highest_step}; the last attempt: {reason}",
        where=event.error.where if event.error else "", fix=event.error.fix if event.error else "",
    )
    return _finish(state, Finish(exit_code=error.exit_code, reason="no progress", error=error))


def _crash(state: State, reason: str) -> PacktrainError:
    kind = WorkerSilent if state.killed else WorkerCrashed
    return kind(f"the worker ended: {reason}", where=f"after step {state.best_step}", fix="nothing: it starts again")


def _stopped(reason: str, event: WorkerEnded | None = None) -> Finish:
    clean = event is None or event.status == EXIT_AGAIN
    what = "stopped on request" if clean else f"stopped on request, but not cleanly: {reason}"
    error = StoppedOnRequest(what, fix="the same command goes on from the last published step")
    if clean and event is not None and event.error is not None:
        return Finish(exit_code=EXIT_AGAIN, reason=reason, error=event.error)
    return Finish(exit_code=EXIT_AGAIN, reason=reason, error=error)


def _finish(state: State, finish: Finish) -> Step:
    return replace(state, finished=True), [finish]


# --- causes ----------------------------------------------------------------------------------------

LIKELY = {
    signal.SIGKILL: "when nobody killed it, the kernel was out of memory (see dmesg)",
    signal.SIGBUS: "often a memory-mapped file on a full disk or /dev/shm",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGILL: "native code built for another processor",
}


def diagnose(status: int, tail: str) -> str:
    """One line: how it ended, the likely cause, the last line of its log (hostile text: only what prints is kept)."""
    likely = LIKELY.get(signal.Signals(-status)) if -status in set(signal.Signals) else None
    return "; ".join(part for part in (status_text(status), likely, _last_line(tail)) if part)


def _last_line(tail: str) -> str:
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return "".join(c for c in lines[-1] if c.isprintable())[:300] if lines else ""
