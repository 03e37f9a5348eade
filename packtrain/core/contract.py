"""The seam between any trainer and everything else. Standard library only; usable from a PyTorch job by copying names.

A job is a process: environment in; beats out; a checkpoint; an exit code. Nothing here imports a framework, and a
program may use one part and leave the rest. What the supervisor puts into the environment of each worker:

    variable              example               meaning
    PACKTRAIN_RUN         /data/runs/small      run folder; absent when the program is run by hand
    PACKTRAIN_ATTEMPT     7                     number of this start of all workers
    PACKTRAIN_RESTORE     41:9f86d08...         commit and digest to restore, chosen once for all ranks (a save; or the
                                                attempt's own `begin`, for what a program itself put into memory); or
    PACKTRAIN_FRESH       1                     start from nothing; `restore()` refuses when neither or both are set
    PACKTRAIN_CARRIER     /run/pt/carrier       unix stream of the process that carries checkpoints away
    PACKTRAIN_SOCKET      /run/pt/beats         unix datagram socket of the local agent, for beats
    PACKTRAIN_CONTROL     /run/pt/control.json  small file, replaced atomically: the order in force; stat it once a step
    PACKTRAIN_GRACE_S     60                    seconds from SIGTERM or "stop" to SIGKILL
    PACKTRAIN_GO_S        600                   seconds to wait for the word "go" before the first collective; absent:
                                                nobody gives it
    PACKTRAIN_FAULTS      /run/pt/faults-0.json where this process may be broken on purpose (breaking.py); else absent
    PACKTRAIN_NODE        node-17               name of this node
    PACKTRAIN_FAILURES    2                     attempts of this run that ended unasked so far, and
    PACKTRAIN_NODE_MINUTES  5400                the time its nodes were in use: how often to save
    PACKTRAIN_SPEC        3                     the spec of this attempt, one for all ranks: RUN/spec/0003.toml; absent:
                                                the newest
    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT   as torchrun sets them

Exit codes: 0 done, 75 restart me (also: stopped on request), 78 never restart (configuration). A whole client:

    place = contract.Place.from_env(os.environ)
    restore = contract.restore(os.environ)                   # None: fresh
    beats = contract.Beats(place.socket, place.attempt, place.rank)
    control = contract.Control(place.control, sigterm=True)
    ...each step:  beats.step_done(step);  order = contract.agree(all_reduce_max, control.poll())
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

# Relative, so that a copy of this folder works under any name.
from .errors import EXIT_AGAIN, EXIT_CONFIG, EXIT_DONE, BadValue, NeitherRestoreNorFresh, NoGo
from .offers import CarrierClient
from .wire import INT32_MAX, INT64_MAX, crc32c, is_count, json_object
from .words import (
    GO_ID,
    NO_ORDER,
    ORDER_LAG,
    Control,
    Order,
    Ready,
    Word,
    agree,
    goes_on,
    order_bytes,
    parse_order,
    parse_ready,
    ready_bytes,
)

__all__ = [
    "ATTEMPT", "CARRIER", "CONTROL", "EXIT_AGAIN", "EXIT_CONFIG", "EXIT_DONE", "FAILURES", "FAULTS", "FRESH", "GO_ID",
    "GO_S", "GRACE_S", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE", "NODE_MINUTES",
    "NO_ORDER", "ORDER_LAG", "PHASES", "RANK", "RESTORE", "RUN", "SOCKET", "SPEC", "WORLD_SIZE", "Beat", "Beats",
    "CarrierClient", "Control", "Order", "Place", "Ready", "Restore", "Word", "agree", "boot_ns", "crc32c",
    "order_bytes", "parse_beat", "parse_order", "parse_ready", "ready_bytes", "restore", "wait_for_go", "worker_env",
]

RUN = "PACKTRAIN_RUN"
ATTEMPT = "PACKTRAIN_ATTEMPT"
RESTORE = "PACKTRAIN_RESTORE"
FRESH = "PACKTRAIN_FRESH"
CARRIER = "PACKTRAIN_CARRIER"
SOCKET = "PACKTRAIN_SOCKET"
CONTROL = "PACKTRAIN_CONTROL"
FAULTS = "PACKTRAIN_FAULTS"
GRACE_S = "PACKTRAIN_GRACE_S"
GO_S = "PACKTRAIN_GO_S"
NODE = "PACKTRAIN_NODE"
FAILURES = "PACKTRAIN_FAILURES"
NODE_MINUTES = "PACKTRAIN_NODE_MINUTES"
SPEC = "PACKTRAIN_SPEC"
RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

PHASES = ("init", "compile", "restore", "data", "step", "rerun", "save", "eval", "pause", "other")
BEAT_BYTES_MAX = 4096
READY_AGAIN_NS = 500_000_000
GO_POLL_S = 0.02


def boot_ns() -> int:
    """Nanoseconds since boot, counting suspend."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


# --- environment -------------------------------------------------------------------------------------


class Restore(NamedTuple):
    """What to restore: the number of a save and the digest of its manifest, or of a `begin` and that of its `memory`.
    """

    commit: int
    digest: str


@dataclass(frozen=True)
class Place:
    """Where this process stands: the environment, parsed. Defaults are those of a program run by hand."""

    run: str = ""
    attempt: int = 0
    restore: Restore | None = None
    fresh: bool = False
    carrier: str = ""
    socket: str = ""
    control: str = ""
    faults: str = ""
    """Where this process is told what to suffer on purpose (breaking.py); empty: nothing ever."""
    grace_s: float = 60.0
    go_s: float = 0.0
    """0: nobody says "go", and nothing is waited for."""
    node: str = ""
    failures: int = 0
    node_minutes: int = 0
    spec: int = 0
    """Number of the run's spec that this attempt has; 0: the newest."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0

    @staticmethod
    def from_env(env: Mapping[str, str]) -> Place:
        """Raises BadValue naming the variable that cannot be read."""
        return Place(
            run=env.get(RUN, ""), attempt=_integer(env, ATTEMPT, 0),
            restore=_restore_value(env), fresh=_fresh_value(env), carrier=env.get(CARRIER, ""),
            socket=env.get(SOCKET, ""), control=env.get(CONTROL, ""),
            faults=env.get(FAULTS, ""),
            grace_s=_seconds(env, GRACE_S, 60.0), go_s=_seconds(env, GO_S, 1.0) if env.get(GO_S) else 0.0,
            node=env.get(NODE, ""),
            failures=_integer(env, FAILURES, 0), node_minutes=_integer(env, NODE_MINUTES, 0),
            spec=_integer(env, SPEC, 0),
            rank=_integer(env, RANK, 0), world_size=_integer(env, WORLD_SIZE, 1),
            local_rank=_integer(env, LOCAL_RANK, 0), local_world_size=_integer(env, LOCAL_WORLD_SIZE, 1),
            master_addr=env.get(MASTER_ADDR, ""), master_port=_integer(env, MASTER_PORT, 0),
        )


def worker_env(place: Place) -> dict[str, str]:
    """The variables that make `Place.from_env` return `place`; those that say nothing are left out."""
    values = {
        RUN: place.run, ATTEMPT: str(place.attempt),
        RESTORE: f"{place.restore.commit}:{place.restore.digest}" if place.restore else "",
        FRESH: "1" if place.fresh else "", CARRIER: place.carrier, SOCKET: place.socket, CONTROL: place.control,
        FAULTS: place.faults,
        GRACE_S: repr(place.grace_s), GO_S: repr(place.go_s) if place.go_s else "", NODE: place.node,
        FAILURES: str(place.failures), NODE_MINUTES: str(place.node_minutes),
        SPEC: str(place.spec) if place.spec else "", RANK: str(place.rank),
        WORLD_SIZE: str(place.world_size), LOCAL_RANK: str(place.local_rank),
        LOCAL_WORLD_SIZE: str(place.local_world_size),
        MASTER_ADDR: place.master_addr, MASTER_PORT: str(place.master_port) if place.master_port else "",
    }
    return {name: value for name, value in values.items() if value}


def restore(env: Mapping[str, str]) -> Restore | None:
    """What to restore, or None for a fresh start. Raises NeitherRestoreNorFresh when neither or both are asked for."""
    chosen, fresh = _restore_value(env), _fresh_value(env)
    if (chosen is None) != fresh:
        said = f"both {RESTORE} and {FRESH} are" if fresh else f"neither {RESTORE} nor {FRESH} is"
        raise NeitherRestoreNorFresh(
            f"{said} set, and nothing starts from random by accident",
            where="environment", fix=f"set exactly one: {RESTORE}=<commit>:<digest>, or {FRESH}=1",
        )
    return chosen


def _restore_value(env: Mapping[str, str]) -> Restore | None:
    text = env.get(RESTORE, "")
    if not text:
        return None
    number, _, digest = text.partition(":")
    plain = text.isascii() and number.isdigit() and digest.isalnum() and len(number) <= 18 and len(digest) <= 256
    if not plain or int(number) == 0:
        raise _bad(RESTORE, text, "<commit>:<digest>, a commit number above 0 and letters and digits")
    return Restore(int(number), digest)


def _fresh_value(env: Mapping[str, str]) -> bool:
    text = env.get(FRESH, "")
    if text not in ("", "0", "1"):
        raise _bad(FRESH, text, "1 or nothing")
    return text == "1"


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= INT32_MAX):
        raise _bad(name, text, f"a whole number from 0 to {INT32_MAX}")
    return int(text)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "") or repr(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise _bad(name, text, "seconds above zero")
    return value


def _bad(name: str, text: str, allowed: str) -> BadValue:
    return BadValue(f"{name} is {text[:200]!r}, not {allowed}", where=f"environment: {name}", fix=f"set {allowed}")


# --- beats -------------------------------------------------------------------------------------------


class Beat(NamedTuple):
    """One beat as received. Of two beats of one process, the one with the higher `seq` is later in all its fields."""

    seq: int
    attempt: int
    rank: int
    pid: int
    phase: str
    step: int
    """Batches consumed so far; -1: not known yet."""
    ns: dict[str, int]
    """Cumulative nanoseconds per phase; phases that took none may be absent."""


class _State(NamedTuple):
    phase: str
    step: int
    ns: tuple[int, ...]
    """Per phase, up to `since_ns`."""
    since_ns: int
    changing: bool = False

    def at(self, now_ns: int) -> tuple[int, ...]:
        here = PHASES.index(self.phase)
        return tuple(ns + (now_ns - self.since_ns if i == here else 0) for i, ns in enumerate(self.ns))


class _Sender:
    """A datagram socket that never blocks and never fails; each thread has its own, so no count is shared."""

    def __init__(self, path: str | None) -> None:
        self.lost = 0
        self._path = path
        self._socket: socket.socket | None = None
        if path:
            with suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)

    def send(self, data: bytes) -> None:
        if not self._path:
            return
        try:
            if self._socket is None:
                raise OSError("no socket could be made")
            self._socket.sendto(data, self._path)
        except OSError:
            self.lost += 1

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class Beats:
    """Says where the time goes: a beat at each phase change and step end, repeated each second by a thread.

    The loop and the thread share one immutable tuple and no lock. The loop marks the tuple as changing, takes the
    sequence number and the time, and swaps in the next; the thread drops what it computed when the tuple was marked
    or another by then. So sequence, time and content of all beats have one order, and their sum is the time since
    construction, to the nanosecond. Without `socket_path` (run by hand) everything works and nothing is sent.
    """

    def __init__(
        self, socket_path: str | None, attempt: int = 0, rank: int = 0, *,
        clock: Callable[[], int] = boot_ns, repeat_s: float = 1.0,
    ) -> None:
        self._who = {"attempt": attempt, "rank": rank, "pid": os.getpid()}
        self._clock = clock
        self._repeat_s = repeat_s
        self._seq = itertools.count(1)
        self._state = _State("init", -1, (0,) * len(PHASES), clock())
        self._ours, self._threads = _Sender(socket_path), _Sender(socket_path)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="packtrain-beats", daemon=True)
        self._advance("init", -1)
        if socket_path:
            self._thread.start()

    @property
    def lost(self) -> int:
        """Beats that could not be sent."""
        return self._ours.lost + self._threads.lost

    @property
    def phase(self) -> str:
        return self._state.phase

    def enter(self, phase: str, step: int | None = None) -> None:
        """From now on time belongs to `phase`. Called by the loop's thread only."""
        self._advance(phase, self._state.step if step is None else step)

    def step_done(self, step: int) -> None:
        """`step`: batches consumed so far. The phase goes on."""
        self._advance(self._state.phase, step)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Time inside belongs to `phase`, then again to the phase before it."""
        before = self._state.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def totals(self) -> dict[str, int]:
        """Cumulative nanoseconds per phase, all phases; the sum is the time since construction."""
        state = self._state
        return dict(zip(PHASES, state.at(self._clock()), strict=True))

    def close(self) -> None:
        """Send a last beat and end the thread."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._advance(self._state.phase, self._state.step)
        self._ours.close()
        self._threads.close()

    def _advance(self, phase: str, step: int) -> None:
        assert phase in PHASES, phase
        old = self._state
        self._state = old._replace(changing=True)
        seq, now_ns = next(self._seq), self._clock()
        self._state = state = _State(phase, step, old.at(now_ns), now_ns)
        self._ours.send(self._datagram(seq, state, now_ns))

    def _repeat(self) -> None:
        while not self._closing.wait(self._repeat_s):
            for _ in range(3):
                if self._repeat_once():
                    break

    def _repeat_once(self) -> bool:
        """False when the loop moved meanwhile (it has sent a beat itself then)."""
        state = self._state
        seq, now_ns = next(self._seq), self._clock()
        if state.changing or state is not self._state:
            return False
        self._threads.send(self._datagram(seq, state, now_ns))
        return True

    def _datagram(self, seq: int, state: _State, now_ns: int) -> bytes:
        ns = {phase: n for phase, n in zip(PHASES, state.at(now_ns), strict=True) if n}
        beat = {"seq": seq, **self._who, "phase": state.phase, "step": state.step, "ns": ns}
        return json.dumps(beat, separators=(",", ":")).encode()


def parse_beat(data: bytes) -> Beat | None:
    """The beat in a datagram, or None for anything else: size, types, phases and ranges are checked.

    Keys of later versions are ignored.
    """
    fields = json_object(data, BEAT_BYTES_MAX)
    if fields is None:
        return None
    bounds = {"seq": INT64_MAX, "attempt": INT32_MAX, "rank": INT32_MAX, "pid": INT32_MAX}
    if not all(is_count(fields.get(key), most) for key, most in bounds.items()):
        return None
    phase, step, ns = fields.get("phase"), fields.get("step"), fields.get("ns")
    if phase not in PHASES or not (is_count(step, INT64_MAX) or (type(step) is int and step == -1)):
        return None
    if not isinstance(ns, dict) or not all(key in PHASES and is_count(n, INT64_MAX) for key, n in ns.items()):
        return None
    return Beat(fields["seq"], fields["attempt"], fields["rank"], fields["pid"], fields["phase"], fields["step"], ns)


# --- ready, and go -----------------------------------------------------------------------------------


def wait_for_go(
    place: Place, control: Control, facts: Mapping[str, str], asked: Callable[[], bool] = lambda: False, *,
    clock: Callable[[], int] = boot_ns, sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Before the first collective: say what this rank begins from until the world may go. False: it is to stop.

    Collectives do not check that ranks agree: one that is a step apart trains on, and no error is raised anywhere.
    `asked`: whether this process was asked to stop by other ways. Returns at once where nobody gives the word (by hand,
    or for a program that never waits). Raises NoGo after `place.go_s`.
    """
    sender, goes = _Sender(place.socket or None), None if place.go_s else True
    datagram = ready_bytes(Ready(place.attempt, place.rank, os.getpid(), dict(facts)))
    say_ns, give_up_ns = clock(), clock() + round(place.go_s * 1e9)
    while goes is None and (goes := goes_on(control.poll() or NO_ORDER, asked())) is None:
        if clock() >= give_up_ns:
            raise _no_go(place)
        if clock() >= say_ns:
            say_ns += READY_AGAIN_NS
            sender.send(datagram)
        sleep(GO_POLL_S)
    sender.close()
    return goes


def _no_go(place: Place) -> NoGo:
    return NoGo(
        f"nobody said go within {place.go_s:g} s of this rank being ready", where=f"rank {place.rank} on {place.node}",
        fix="see what the other ranks wait for, in their logs; supervise.go_s is how long they may take",
    )
