"""Coordinator and agents of a run, which live on their own on this machine, and a view of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from packtrain.cli import spec
from packtrain.cli.ending import complain
from packtrain.cli.progress import watching
from packtrain.cli.watch import DETACHED, View, Watch, told_end
from packtrain.core.errors import CoordinatorGone, PacktrainError, RunHeld, error_named
from packtrain.core.holder import WAIT, hold, holder_text, seems_held
from packtrain.core.platform import Platform
from packtrain.monitor.report import counted
from packtrain.recipes.spec import RunSpec
from packtrain.supervise import local
from packtrain.supervise.console import ask
from packtrain.supervise.job import Job, read_job
from packtrain.supervise.requests import listening

WORLDS = ("-P", "-m", "packtrain.train.worlds")
LAUNCHER = "launcher"
"""Lock of whoever starts a run's processes, in its folder."""
START_S = 20.0
"""How long a coordinator that holds the run may take to answer."""


class World(NamedTuple):
    """What was asked for: nodes of a full world, nodes that wait, processes of a node."""

    nodes: int
    spares: int
    procs: int


def table(platform: Platform, wanted: RunSpec, folder: str, world: World, env: dict[str, str]) -> RunSpec:
    """The spec with its table of worlds, made by a process that knows what divides. A table that a person gave stands.

    Its input and output stay in the run's logs. Raises LayoutError and what else that process refuses with.
    """
    if any(override.startswith("train.worlds") for override in wanted.overrides):
        return wanted
    logs = f"{folder}/logs"
    path, log = f"{logs}/worlds.toml", f"{logs}/worlds-{platform.token(4)}.log"
    platform.mkdir(logs)
    platform.write_replacing(path, spec.text(wanted).encode())
    command = (sys.executable, *WORLDS, path, "--nodes", str(world.nodes), "--procs", str(world.procs))
    platform.spawn(command, env, log_path=log).wait()
    worlds, left_out = _told(platform, log)
    for nodes, why in left_out.items():
        print(f"with {counted(int(nodes), 'node')} this run could not go on: {why}")
    return msgspec.structs.replace(wanted, train=msgspec.structs.replace(wanted.train, worlds=worlds))


def _told(platform: Platform, log: str) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    output = platform.read(log).decode(errors="replace")
    said: dict[str, Any] = {}
    with suppress(ValueError, IndexError):
        said = json.loads(output.strip().splitlines()[-1])
    if "error" in said:
        raise error_named(**said["error"])
    if "worlds" not in said:
        last = (output.strip().splitlines() or ["no output"])[-1]
        raise PacktrainError(f"which worlds this run can have was not found out: {last}", where=log, fix="see that log")
    return said["worlds"], said["left_out"]


def record(platform: Platform, newest: str, current: RunSpec) -> int:
    """Write the spec, which was made from the one at the path `newest`, as the next one of that run, unless both say
    the same; the number of the newest. Raises RunHeld where somebody else wrote the next one meanwhile; OSError."""
    number = int(os.path.basename(newest).removesuffix(".toml"))
    if spec.read(newest) == current:
        return number
    path = f"{os.path.dirname(newest)}/{number + 1:04d}.toml"
    if not spec.write(platform, path, spec.text(current).encode()):
        raise RunHeld("another command changed this run just now", where=path, fix="give the same command again")
    return number + 1


def alive(platform: Platform, folder: str, start_s: float = START_S) -> local.Live | None:
    """Where this run lives on this machine now; None: it does not. `start_s`: what a coordinator that has just begun
    gets to answer. Raises RunHeld where somebody else runs it."""
    live = local.find(platform, folder)
    if live is not None and _answers(platform, live, start_s):
        return live
    if seems_held(platform, folder):
        raise RunHeld(f"the run is held by {holder_text(platform, folder)}", where=folder, fix=WAIT)
    return live if live is not None and local.agents_alive(platform, live) else None


def _answers(platform: Platform, live: local.Live, start_s: float) -> bool:
    end_ns = platform.boot_ns() + round(start_s * 1e9)
    while True:
        with suppress(CoordinatorGone):
            ask(platform, live.coordinator, "status")
            return True
        if not seems_held(platform, live.run_folder) or platform.boot_ns() > end_ns:
            return False
        platform.sleep(0.1)


def stay(platform: Platform, job: Job, steps: int, minutes_max: float, opening: str, asks: bool) -> int:
    """Start the run, or find it alive, and stay with it; the exit code, with how it ended said. `opening`: said of one
    that is started; `asks`: what Ctrl-C means is asked, where there is a terminal."""
    with watching(job.name, steps, minutes_max) as view, listening() as requests:
        keeper = _keeper(platform, job, view, job.env, opening)
        finish = Watch(platform, keeper, view).run(requests, asks and terminal())
    return ended(platform, keeper.live, finish, job.name)


def stay_with(platform: Platform, job: Job, view: View, env: Mapping[str, str]) -> int:
    """The same for a program of anybody, whose environment (`job.env`) is not that of what keeps it alive (`env`)."""
    opening = f"{job.name}: {counted(job.nodes, 'node')}, {counted(job.spares, 'spare')}, in {job.run_folder}"
    with listening() as requests:
        keeper = _keeper(platform, job, view, env, opening)
        finish = Watch(platform, keeper, view).run(requests, terminal())
    return ended(platform, keeper.live, finish, job.name)


def rejoin_with(platform: Platform, live: local.Live, view: View, env: Mapping[str, str]) -> int:
    """Watch a program that lives already."""
    with listening() as requests:
        finish = Watch(platform, local.Keeper(platform, live, env), view).run(requests, terminal())
    return ended(platform, live, finish, os.path.basename(live.run_folder))


def rejoin(platform: Platform, live: local.Live, steps: int, minutes_max: float) -> int:
    """Watch a run that lives already, with the job it was started with."""
    job = read_job(platform, f"{live.base}/{local.JOB}")
    with watching(job.name, steps, minutes_max) as view, listening() as requests:
        finish = Watch(platform, local.Keeper(platform, live, job.env), view).run(requests, terminal())
    return ended(platform, live, finish, job.name)


def _keeper(platform: Platform, job: Job, view: View, env: Mapping[str, str], opening: str) -> local.Keeper:
    """Of two commands that start one run at once, one is told to come again."""
    with _launching(platform, job.run_folder):
        live = alive(platform, job.run_folder)
        if live is not None:
            view.say(f"{job.name} runs already; watching it")
            return local.Keeper(platform, live, env)
        view.say(opening)
        return local.start(platform, job, env)


@contextmanager
def _launching(platform: Platform, run_folder: str) -> Iterator[None]:
    """Raises RunHeld, OSError."""
    name = os.path.basename(run_folder)
    lock = hold(platform, run_folder, name, fix="give the command again in a moment", file=LAUNCHER)
    try:
        yield
    finally:
        lock.release()


def terminal() -> bool:
    """Whether a person can be asked."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def ended(platform: Platform, live: local.Live, finish: local.Finish, name: str) -> int:
    """The exit code, with the end said and put away."""
    if finish.reason == DETACHED:
        print(f"detached: {name} goes on; `packtrain attach {name}` watches it, `packtrain stop {name}` stops it")
        return finish.exit_code
    _put_away(platform, live)
    error = told_end(finish)
    if error is not None:
        complain(error.render())
    return finish.exit_code


def _put_away(platform: Platform, live: local.Live) -> None:
    """What the run leaves on this machine outside its folder; unless somebody starts it again just now."""
    local.wait_until_free(platform, live, print)
    with suppress(RunHeld):
        try:
            with _launching(platform, live.run_folder):
                local.clean(platform, local.find(platform, live.run_folder) or live)
        except OSError:  # the folder of the run is gone, so nobody starts it
            local.clean(platform, live)
