"""What to do about a node's carrier: a pure function of what is known and what just happened.

    it exits, or cannot be started      another one on the same socket, later and later
    it answers nothing for `carrier_overdue_s`      given up: SIGKILL, and another one; nobody waits for its end
    a thread of it hangs for so long, or HUNG_MAX do      given up; the next one keeps off the homes they hang in
    a home answers the next one         taken back

A carrier whose threads hang is given up once for each home: from then on that home is in quarantine, and what hangs
there is bounded by the carrier itself (checkpoint/homes.py). It is not given up for them while it writes a save, up to
`SAVING_FACTOR` times as long, nor while a last save is waited for; nor where too many that were killed have not ended:
those hang inside the kernel, and another would only join them. Time in which nobody looked counts for nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from packtrain.core.errors import CarrierHung
from packtrain.core.units import NS
from packtrain.supervise.config import FIRST_BEAT_FACTOR

LIVED_NS = 60 * NS
"""A carrier that lived so long did not end because of how it was started."""
PAUSE_S_MAX = 30
HUNG_MAX = 4
"""Threads that hang in one home, where its carrier tries nothing more (checkpoint/homes.py)."""
SAVING_FACTOR = 10
UNDEAD_MAX = 3
"""Carriers that were killed and have not ended: with so many no other is started."""


# --- what happened ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hung:
    """A home in which threads of the carrier hang; `seconds`: since the time of the first was over."""

    path: str
    threads: int
    seconds: float


@dataclass(frozen=True)
class Stands:
    """The carrier answered. `saves`: under way. `quarantine`: homes it keeps off that have not answered it yet."""

    ns: int
    saves: int = 0
    hung: tuple[Hung, ...] = ()
    quarantine: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gone:
    """It exited, or could not be started."""

    ns: int
    status: int


@dataclass(frozen=True)
class GivenUpEnded:
    """One that was given up has ended at last."""


Event = Stands | Gone | GivenUpEnded


# --- what to do ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Another carrier of the same attempt, which keeps off those homes."""

    reason: str
    quarantine: tuple[str, ...] = ()


@dataclass(frozen=True)
class GiveUp:
    """SIGKILL it and wait for nothing; its socket's name goes to the next one."""

    reason: str
    quarantine: tuple[str, ...]
    error: CarrierHung
    """What is told of it."""


@dataclass(frozen=True)
class TakenBack:
    """A home answers again."""

    path: str


Action = Start | GiveUp | TakenBack


@dataclass(frozen=True)
class State:
    """All that is known of the carrier. Nanoseconds since boot."""

    overdue_s: float = 30.0
    began_ns: int = 0
    again_ns: int = 0
    """When the next one may start; 0: one is running."""
    overdue_ns: int = 0
    """When its silence is too long."""
    failures: int = 0
    """In a row, of carriers that did not live long."""
    hung: tuple[str, ...] = ()
    """Where its threads hung when it answered last."""
    quarantine: tuple[str, ...] = ()
    undead: int = 0


Step = tuple[State, list[Action]]


def began(state: State, ns: int) -> State:
    """An attempt began with a carrier of its own."""
    return replace(_started(state, ns), failures=0)


def _started(state: State, ns: int) -> State:
    """An interpreter starts slowly on a busy machine."""
    first_ns = round(FIRST_BEAT_FACTOR * state.overdue_s * NS)
    return replace(state, began_ns=ns, again_ns=0, overdue_ns=ns + first_ns, hung=())


def tick(state: State, ns: int, unwatched_ns: int = 0) -> Step:
    """Time has passed, `unwatched_ns` of it while nobody looked."""
    state = replace(state, overdue_ns=state.overdue_ns + unwatched_ns)
    if state.again_ns:
        if ns < state.again_ns or state.undead >= UNDEAD_MAX:
            return state, []
        return _started(state, ns), [Start(reason="the one before is gone", quarantine=state.quarantine)]
    if ns >= state.overdue_ns:
        return _give_up(state, ns, f"answered nothing for {state.overdue_s:g} s (supervise.carrier_overdue_s)")
    return state, []


def happened(state: State, event: Event, stopping: bool = False) -> Step:
    """`stopping`: a person asked to stop, and the worker's last save is waited for."""
    match event:
        case Gone():
            return _gone(state, event)
        case Stands():
            return _stands(state, event, stopping)
        case GivenUpEnded():
            return replace(state, undead=max(0, state.undead - 1)), []


def pause_s(failures: int) -> int:
    """Before the next try after so many in a row that failed: 0, 1, 2, 4 .. 30 s."""
    return min(PAUSE_S_MAX, 2 ** (failures - 1)) if failures else 0


def _gone(state: State, event: Gone) -> Step:
    return _put_off(state, event.ns)[0], []


def _put_off(state: State, ns: int) -> tuple[State, int]:
    """Until when the next one waits, and how long that is."""
    failures = 0 if ns - state.began_ns > LIVED_NS else state.failures
    wait_s = pause_s(failures)
    return replace(state, again_ns=ns + wait_s * NS, failures=failures + 1), wait_s


def _stands(state: State, event: Stands, stopping: bool) -> Step:
    if state.again_ns:
        return state, []  # of one that is gone meanwhile
    back = [path for path in state.quarantine if path not in event.quarantine]
    state = replace(
        state, overdue_ns=event.ns + round(state.overdue_s * NS), hung=tuple(one.path for one in event.hung),
        quarantine=tuple(path for path in state.quarantine if path not in back),
    )
    actions: list[Action] = [TakenBack(path=path) for path in back]
    why = "" if stopping else _why_give_up(state, event)
    if not why:
        return state, actions
    state, more = _give_up(state, event.ns, why)
    return state, actions + more


def _why_give_up(state: State, event: Stands) -> str:
    """Threads that hang in homes which are not in quarantine; empty: the carrier stays."""
    patience_s = state.overdue_s * (SAVING_FACTOR if event.saves else 1)
    for one in event.hung:
        late = one.seconds >= patience_s or (one.threads >= HUNG_MAX and not event.saves)
        if late and one.path not in state.quarantine and state.undead + 1 < UNDEAD_MAX:
            threads = "a thread" if one.threads == 1 else f"{one.threads} threads"
            return f"has {threads} that hung in {one.path} for {one.seconds:.0f} s"
    return ""


def _give_up(state: State, ns: int, why: str) -> Step:
    paths = tuple(dict.fromkeys((*state.quarantine, *state.hung)))
    state, wait_s = _put_off(state, ns)
    state = replace(state, quarantine=paths, undead=state.undead + 1)
    return state, [GiveUp(reason=why, quarantine=paths, error=_hung_error(state, why, wait_s))]


def _hung_error(state: State, why: str, wait_s: int) -> CarrierHung:
    then = f"another one starts in {wait_s} s"
    if state.undead >= UNDEAD_MAX:
        then = f"{state.undead} that were killed have not ended, so another one starts when one of them has"
    homes = ", ".join(state.quarantine)
    left = f"; it keeps off {homes} until that answers, where it has another home" if homes else ""
    return CarrierHung(
        f"the carrier {why}: it was killed, and {then}{left}; the worker goes on",
        where=homes or "carrier of this node",
        fix="see whether the disks of the run and of checkpoint.fallback answer (ls, df, dmesg), and the carrier's log "
        "beside the worker's; a save under way is offered again",
    )


def status_text(status: int) -> str:
    """`-9` -> `killed by SIGKILL`; `1` -> `exit code 1`."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
