"""A run of several nodes on this machine: homes for its coordinator and its agents, and all of them started.

    <base>/job.json   what they run            <base>/c          home of the coordinator
                                               <base>/n0 ...     homes of the agents

`base` is a folder with a short path (sockets lie in it) that only this user can enter; `RUN/live.json` names it, and
the agents with their pids. All of them survive whoever started them, and each other; those that die are started again
by the others (revive.py). Whoever deletes `base` ends them all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from packtrain.core.errors import PacktrainError, RunUnusable
from packtrain.core.holder import holder_pid
from packtrain.core.pinned import KEY_FILE, make_pinned
from packtrain.core.platform import Platform, Process
from packtrain.core.units import NS
from packtrain.supervise.console import FINISH, OPERATOR
from packtrain.supervise.job import Job, read_job, run_id, write_job
from packtrain.supervise.keys import ADDRESS, allow, make_keys
from packtrain.supervise.sockets import LONGEST_NAME, PATH_BYTES_MAX, is_ours

LIVE, JOB = "live.json", "job.json"
LEAVE_S = 10.0
FREE_S = 60.0
"""How long the process of a coordinator may take to end after its last word: on a busy machine, with a disk that hangs.
"""
TELL_NS = 2 * NS
"""Longer than this nobody waits for it without a word."""
COORDINATOR = ("-P", "-m", "packtrain.supervise.coordinator")
AGENT = ("-P", "-m", "packtrain.supervise.agent")


class Live(msgspec.Struct, frozen=True):
    """Where a run lives on this machine."""

    run_folder: str
    base: str
    node: str
    """This machine."""
    agents: dict[str, int]
    """Name -> pid."""

    @property
    def coordinator(self) -> str:
        """Its home."""
        return f"{self.base}/c"

    @property
    def operator(self) -> str:
        return f"{self.coordinator}/{OPERATOR}"


class Finish(msgspec.Struct, frozen=True):
    """How a coordinator ended, in its home."""

    exit_code: int
    reason: str = ""
    error: dict[str, str] | None = None
    term: int = 0
    """In which it ended the run; 0: the run is not over, its coordinator could not go on."""


class _Job(msgspec.Struct):
    """What any version's job tells."""

    run_folder: str


def find(platform: Platform, run_folder: str) -> Live | None:
    """Where the run lives here, or lived last; None: nowhere that is still there, this user's and this run's."""
    try:
        live = msgspec.json.decode(platform.read(f"{run_folder}/{LIVE}", 0, 1 << 16), type=Live)
        here = live.node == platform.node() and platform.is_private(live.base)
        here = here and _is_home_of(platform, live.base, run_folder)
    except (OSError, msgspec.DecodeError):
        return None
    return msgspec.structs.replace(live, run_folder=run_folder) if here else None


def _is_home_of(platform: Platform, base: str, run_folder: str) -> bool:
    """Not where this folder is a copy of a run's, which that run's coordinator knows nothing of, or was moved while the
    run lived: its processes look for it under its old name. Raises OSError, msgspec.DecodeError."""
    named = msgspec.json.decode(platform.read(f"{base}/{JOB}"), type=_Job).run_folder
    return named == run_folder or os.path.samefile(named, run_folder)


def finish_of(platform: Platform, live: Live) -> Finish | None:
    """How its coordinator ended; None: it has not said that it did."""
    return finish_in(platform, live.coordinator)


def finish_in(platform: Platform, home: str) -> Finish | None:
    """The same, of the coordinator that lives in `home`."""
    try:
        return msgspec.json.decode(platform.read(f"{home}/{FINISH}", 0, 1 << 16), type=Finish)
    except (OSError, msgspec.DecodeError):
        return None


def agents_alive(platform: Platform, live: Live) -> list[str]:
    """Names of the agents that still run. A pid may have been given to another: its command line is looked at."""
    return [name for name, pid in live.agents.items() if f"{live.base}/{name}" in _command(platform, pid)]


def coordinator_alive(platform: Platform, live: Live) -> bool:
    """Whether the process that holds the run is its coordinator here. One that ended and was not waited for has no
    command line."""
    pid = holder_pid(platform, live.run_folder)
    return pid is not None and live.coordinator in _command(platform, pid)


def _command(platform: Platform, pid: int) -> list[str]:
    with suppress(OSError):
        return platform.read(f"/proc/{pid}/cmdline").decode(errors="replace").split("\0")
    return []


class Keeper:
    """Starts again what of a run died on this machine. `started`: the processes of this one."""

    def __init__(self, platform: Platform, live: Live, env: Mapping[str, str]) -> None:
        self.live = live
        self.started: dict[str, Process] = {}
        """By the names of their homes: `c` is the coordinator."""
        self._platform, self._env = platform, env

    @property
    def ended(self) -> bool:
        """Whether the coordinator that was started here is gone."""
        return "c" in self.started and self.started["c"].poll() is not None

    def coordinator(self, by: str = "") -> None:
        """The first, or another one after it was killed: it goes on from the log in its home. `by`: for the journal.
        Raises OSError."""
        home = self.live.coordinator
        with suppress(FileNotFoundError):
            self._platform.unlink(f"{home}/{FINISH}")
        self._start("c", (*COORDINATOR, *self._words("c"), *(("--by", by) if by else ())))

    def agents(self, names: Sequence[str] = ()) -> list[str]:
        """Those that died, or these, under their names and keys: their nodes come back as spares. Names of them."""
        alive = agents_alive(self._platform, self.live)
        dead = [name for name in names or self.live.agents if name not in alive]
        for name in dead:
            address = f"{self.live.coordinator}/{ADDRESS}"
            self._start(name, (*AGENT, *self._words(name), "--node", name, "--coordinator", address))
        agents = {name: self.started[name].pid for name in dead}
        self.live = msgspec.structs.replace(self.live, agents=self.live.agents | agents)
        return dead

    def write(self) -> None:
        """Where the run lives, into its folder. Raises RunUnusable."""
        _write(self._platform, self.live)

    def _words(self, name: str) -> tuple[str, ...]:
        return "--job", f"{self.live.base}/{JOB}", "--home", f"{self.live.base}/{name}", "--local"

    def _start(self, name: str, words: Sequence[str]) -> None:
        if name in self.started:
            self.started[name].poll()
        self.started[name] = self._platform.spawn(
            (sys.executable, *words), self._env, log_path=f"{self.live.base}/{name}/log", die_with_parent=False
        )


def start(platform: Platform, job: Job, env: Mapping[str, str]) -> Keeper:
    """Coordinator and agents of a run that nobody runs. Raises RunUnusable."""
    base = _base(platform, job.run_folder, env)
    names = [f"n{n}" for n in range(job.nodes + job.spares)]
    try:
        for name in ("c", *names):
            platform.mkdir(f"{base}/{name}", 0o700)
    except OSError as error:
        raise unusable(error, base) from error
    write_job(platform, f"{base}/{JOB}", msgspec.structs.replace(job, second_log=_second_log(platform, job)))
    make_keys(platform, f"{base}/c")
    make_pinned(platform, f"{base}/c/{KEY_FILE}")
    pinned = platform.read(f"{base}/c/{KEY_FILE}")
    for name in names:
        platform.write_new(f"{base}/{name}/{KEY_FILE}", pinned, 0o600)
        allow(platform, f"{base}/c", name, make_keys(platform, f"{base}/{name}"))
    keeper = Keeper(platform, Live(job.run_folder, base, platform.node(), {}), env)
    keeper.coordinator()
    keeper.agents(names)
    keeper.write()
    return keeper


def _second_log(platform: Platform, job: Job) -> str:
    """Of this start alone: what an earlier one left there is of another run, or of one that is over."""
    folder = job.supervise.second_log
    return f"{folder}/{run_id(job.run_folder)}-{platform.token(6)}" if folder else ""


def _write(platform: Platform, live: Live) -> None:
    try:
        platform.write_replacing(f"{live.run_folder}/{LIVE}", msgspec.json.encode(live) + b"\n")
    except OSError as error:
        raise unusable(error, live.run_folder) from error


def wait_until_free(platform: Platform, live: Live, say: Callable[[str], None]) -> None:
    """Until the process of the coordinator is over. One that said how the run ended, or cleared its home away, holds
    the run a little longer, and refuses it to the next command. Where that is long, `say` is told."""
    begun_ns, told = platform.boot_ns(), False
    while coordinator_alive(platform, live):
        waited_ns = platform.boot_ns() - begun_ns
        if waited_ns >= round(FREE_S * NS):
            say("its coordinator has not ended: the run cannot be started again before it has")
            return
        if waited_ns >= TELL_NS and not told:
            say(f"the run is over; waiting for its coordinator to end, process {holder_pid(platform, live.run_folder)}"
                f" (a busy machine, or a disk that hangs): {FREE_S:g} s at most")
            told = True
        platform.sleep(0.02)


def clean(platform: Platform, live: Live) -> None:
    """What a run that has ended leaves on this machine outside its folder. Its agents, told to leave, may first: while
    one of them lives everything stays."""
    give_up_ns = platform.boot_ns() + round(LEAVE_S * NS)
    while agents_alive(platform, live):
        if platform.boot_ns() > give_up_ns:
            return
        platform.sleep(0.05)
    with suppress(OSError):
        platform.unlink(f"{live.run_folder}/{LIVE}")
    with suppress(PacktrainError):
        second = read_job(platform, f"{live.base}/{JOB}").second_log
        _remove(platform, second) if second else None
    _remove(platform, live.base)


def _remove(platform: Platform, folder: str) -> None:
    with suppress(OSError):
        for name in platform.listdir(folder):
            path = f"{folder}/{name}"
            if platform.is_dir(path) and not os.path.islink(path):
                _remove(platform, path)
            else:
                with suppress(OSError):
                    platform.unlink(path)
        platform.rmdir(folder)


def _base(platform: Platform, run_folder: str, env: Mapping[str, str]) -> str:
    """An empty folder of this run that only this user can enter. Raises RunUnusable."""
    for path in _candidates(platform, run_folder, env):
        if len(f"{path}/n000/{LONGEST_NAME}") > PATH_BYTES_MAX:
            continue
        if is_ours(path):
            _remove(platform, path)
        with suppress(OSError):
            platform.mkdir(path, 0o700)
        if is_ours(path) and _is_empty(platform, path):
            return path
    raise RunUnusable(
        "no folder for sockets that only this user can reach", where="XDG_RUNTIME_DIR, /tmp",
        fix="make one of them writable, with a path shorter than 50 bytes",
    )


def _is_empty(platform: Platform, folder: str) -> bool:
    with suppress(OSError):
        return not platform.listdir(folder)
    return False


def _candidates(platform: Platform, run_folder: str, env: Mapping[str, str]) -> Iterator[str]:
    for base in (env.get("XDG_RUNTIME_DIR"), "/tmp"):
        if base and os.path.isdir(base):
            yield f"{base}/pt-{run_id(run_folder)}"
            yield f"{base}/pt-{platform.token(6)}"


def unusable(error: OSError, where: str) -> RunUnusable:
    return RunUnusable(
        f"the processes of a run cannot be started: {error.strerror or error}", where=str(error.filename or where),
        fix="see that the folder is there, writable and not full; then give the same command",
    )
