"""Which mirror has which checkpoints, and when the next one is due there. What decides is pure.

    RUN/mirrors/<name>.json     State: what was brought to the mirror.

One file a mirror, replaced whole by the process that brought a checkpoint there. It is a note for people and for the
cadence; the mirror itself says what it has. Where the file is lost, or is of another place, a checkpoint is due at
once, and the copy finds what is there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence

import msgspec

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import Mirror
from packtrain.core.platform import Platform

FOLDER = "mirrors"
BYTES_MAX = 1 << 20
HELD_MAX = 1000
"""Of more checkpoints on one mirror the oldest are forgotten here; the mirror keeps them."""
RETRY_S_MIN = 30.0
RETRY_S_MAX = 3600.0


class Held(msgspec.Struct, frozen=True):
    """A checkpoint that was brought to a mirror and read back from there."""

    commit: int
    step: int
    folder: str
    began_s: float
    """Wall clock, when the copy began: the cadence counts from there."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """mirrors/<name>.json."""

    name: str
    place: str
    held: tuple[Held, ...] = ()
    """In the order they were brought, the latest last."""
    begun: int = 0
    """Number of the commit whose copy began to arrive and is not whole; 0: none."""
    locks: bool | None = None
    """Whether the place was seen to enforce object lock; None: not asked, or it could not be told."""


def read_state(platform: Platform, run_folder: str, name: str, place: str = "") -> State:
    """What is noted of a mirror; a new State where that is nothing, is damaged, or (`place` given) is of elsewhere."""
    fresh = State(name=name, place=place)
    try:
        state = msgspec.json.decode(platform.read(_path(run_folder, name), 0, BYTES_MAX), type=State)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return fresh
    return state if state.name == name and place in ("", state.place) else fresh


def write_state(platform: Platform, run_folder: str, state: State) -> None:
    platform.mkdir(f"{run_folder}/{FOLDER}")
    kept = msgspec.structs.replace(state, held=state.held[-HELD_MAX:])
    platform.write_replacing(_path(run_folder, state.name), msgspec.json.encode(kept))


def noted_states(platform: Platform, run_folder: str) -> list[State]:
    """Of all mirrors that anything was ever brought to, or tried to be."""
    folder = f"{run_folder}/{FOLDER}"
    names = platform.listdir(folder) if platform.exists(folder) else []
    return [read_state(platform, run_folder, name[:-5]) for name in sorted(names) if name.endswith(".json")]


def holders(states: Iterable[State]) -> dict[int, tuple[str, ...]]:
    """Number of the commit -> names of the mirrors that have its checkpoint."""
    found: dict[int, tuple[str, ...]] = {}
    for state in states:
        for held in state.held:
            found[held.commit] = (*found.get(held.commit, ()), state.name)
    return found


def others(mirrors: Sequence[Mirror], run_folder: str) -> tuple[Mirror, ...]:
    """Without the run itself: a run that goes on where its mirror was has a spec that still names it."""
    own = os.path.realpath(run_folder)
    return tuple(mirror for mirror in mirrors if os.path.realpath(mirror.place.removeprefix("file://")) != own)


def due_in_s(mirror: Mirror, state: State, commit: Commit, now_s: float) -> float:
    """Seconds until `commit` is to be brought to the mirror; inf: it is there. A clock that was set back waits for
    nothing."""
    if not state.held:
        return 0.0
    last = state.held[-1]
    if last.commit == commit.number:
        return math.inf
    passed_s = now_s - last.began_s
    return max(0.0, mirror.every_s - passed_s) if passed_s >= 0 else 0.0


def retry_s(failures: int) -> float:
    """Pause after so many failures in a row, one at least."""
    return min(RETRY_S_MAX, RETRY_S_MIN * 2.0 ** min(failures - 1, 20))


def with_held(state: State, commit: Commit, began_s: float) -> State:
    """`commit` was brought there."""
    before = tuple(held for held in state.held if held.commit != commit.number)
    held = Held(commit.number, commit.step, commit.folder, began_s)
    return msgspec.structs.replace(state, held=(*before, held), begun=0)


def _path(run_folder: str, name: str) -> str:
    return f"{run_folder}/{FOLDER}/{name}.json"
