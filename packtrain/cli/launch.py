"""Between a configuration and a run: find or create its folder, then start what keeps it alive, and stay with it."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from packtrain.checkpoint.asked import wished
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.where import require_outside
from packtrain.cli import folders, spec
from packtrain.cli.ending import complain
from packtrain.cli.version import version
from packtrain.cli.world import World, record, table
from packtrain.cli.world import stay as stay_in_world
from packtrain.core.errors import EXIT_DONE, CommitUnknown, RunUnusable
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.monitor.fold import Facts
from packtrain.monitor.report import bits_text, counted, gather, store_name
from packtrain.recipes.spec import RunSpec
from packtrain.supervise.job import Job
from packtrain.supervise.mirrors import check_places, shortfall
from packtrain.train.sections import newest_spec

WORKER = ("-P", "-m", "packtrain.train")
CARRIER = ("-P", "-m", "packtrain.checkpoint.carrier")
"""-P: a file in the person's folder must not stand in for a module of ours."""
PRELOAD = ("packtrain.train.assemble",)
"""Most of a worker's start; no device is touched by it."""


@dataclass(frozen=True)
class Run:
    """A run folder with its spec. `resumed`: it was there before this command."""

    name: str
    folder: str
    spec: RunSpec
    resumed: bool


def launch(
    name: str | None, new: bool, wanted: RunSpec, profile_steps: int = 0, world: World | None = None
) -> int:
    """Create or resume the run and stay with it; the exit code. Raises RunMoved where it goes on elsewhere."""
    platform = LocalPlatform()
    run = find(name, new, wanted)
    if run is None:
        spec.check_data(wanted)
        chosen = pick_name(name, new, wanted)
        check_places(platform, wanted.checkpoint.mirrors, folders.named(chosen))
        run = create(platform, chosen, _with_worlds(platform, wanted, folders.named(chosen), world))
    if run.resumed:
        require_here(platform, run.folder)
    if run.resumed and finished(platform, run, profile_steps):
        return EXIT_DONE
    code = stay(platform, run, profile_steps, world)
    facts = gather(platform, run.folder).facts
    if code == EXIT_DONE and facts.state == "done":  # and not left to itself
        print(closing(facts, run.folder))
        print(f'next: packtrain sample {run.name} --prompt "def "\n      packtrain report {run.name}')
    return code


def _with_worlds(platform: Platform, wanted: RunSpec, folder: str, world: World | None) -> RunSpec:
    if world is None:
        return wanted
    with usable(folder):
        return table(platform, wanted, folder, world, child_env())


def closing(facts: Facts, folder: str) -> str:
    """What a run came to, in one line: steps, bits per byte of each held-out store, its folder."""
    figures = [f"{bits_text(record)} on {store_name(record.store)}" for record in facts.final_evals()]
    held_out = f", held out {', '.join(figures)}" if figures else ""
    return f"done: {facts.step:,} steps{held_out}; run folder: {folder}"


def default_name(wanted: RunSpec) -> str:
    return wanted.recipe.replace(":", "-")


def pick_name(name: str | None, new: bool, wanted: RunSpec) -> str:
    chosen = name or default_name(wanted)
    return folders.free_name(chosen) if new else chosen


def find(name: str | None, new: bool, wanted: RunSpec) -> Run | None:
    """The run this command resumes; None: it makes a new one. Raises SpecDiffers."""
    chosen = name or default_name(wanted)
    folder = folders.named(chosen)
    if new or not folders.is_run(folder):
        return None
    path = f"{folder}/{folders.SPEC}"
    recorded = spec.read(path)
    spec.compare(recorded, wanted, chosen, path)
    return Run(chosen, folder, recorded, resumed=True)


def create(platform: Platform, name: str, wanted: RunSpec) -> Run:
    """Make the run folder. Of two commands that create one run at once, one wins and the other resumes it.

    Raises RunUnusable where nothing can be written, CommitsUnfit where hard links are refused, SpecDiffers, and
    Contradiction where saves would fall back into the run folder.
    """
    folder = folders.named(name)
    require_outside(wanted.checkpoint.fallback, folder)
    if write_spec(platform, folder, spec.text(wanted).encode()):
        return Run(name, folder, wanted, resumed=False)
    path = f"{folder}/{folders.SPEC}"
    recorded = spec.read(path)
    spec.compare(recorded, wanted, name, path)
    return Run(name, folder, recorded, resumed=True)


def write_spec(platform: Platform, folder: str, data: bytes) -> bool:
    """Make a run folder by its first spec; False: somebody else just did. Raises RunUnusable, CommitsUnfit."""
    path = f"{folder}/{folders.SPEC}"
    with usable(folder):
        platform.mkdir(os.path.dirname(path))
        return spec.write(platform, path, data)


@contextmanager
def usable(folder: str) -> Iterator[None]:
    """What the machine refuses while a run folder is written is RunUnusable, with the file it is about."""
    try:
        yield
    except OSError as error:
        raise RunUnusable(
            f"the run folder cannot be written: {error.strerror or error}", where=str(error.filename or folder),
            fix="free space or mend its permissions (see `packtrain doctor`), or set PACKTRAIN_HOME to another folder; "
                "then give the same command",
        ) from error


def require_here(platform: Platform, folder: str) -> None:
    """Raises RunMoved where the log is closed. One that cannot be read is told by the attempt that needs it."""
    with suppress(CommitUnknown):
        if platform.is_dir(f"{folder}/commits"):
            CommitLog(platform, f"{folder}/commits").require_open()


def finished(platform: Platform, run: Run, profile_steps: int = 0) -> bool:
    """Whether the run is done already; says so, and that nothing is traced where that was asked for.

    A run that somebody asked to go back (`packtrain ckpt restore`) is not done.
    """
    facts = gather(platform, run.folder).facts
    if facts.done is None or wished(platform, run.folder, CommitLog(platform, f"{run.folder}/commits")) is not None:
        return False
    print(f"run {run.name!r} is finished, at step {facts.done.step}; --new starts another")
    if profile_steps:
        print("  --profile traced nothing: no step is left")
    print(f"  packtrain report {run.name}")
    _tell_shortfall(platform, run.folder)
    return True


def _tell_shortfall(platform: Platform, folder: str) -> None:
    """What the end of the run said of its last checkpoint, if that is still so."""
    for told in shortfall(platform, folder, spec.read(newest_spec(platform, folder)).checkpoint):
        complain(f"warning: {told.render()}")


def stay(platform: Platform, run: Run, profile_steps: int = 0, world: World | None = None) -> int:
    """Start it, or find it alive, and stay with it until it ends; say how it ended.

    `world` None: one process, and Ctrl-C means save and stop. What is traced is an argument of the worker, not of the
    spec: it belongs to this command and changes no result.
    """
    newest = newest_spec(platform, run.folder)
    current = spec.read(newest)
    check_places(platform, current.checkpoint.mirrors, run.folder)
    require_outside(current.checkpoint.fallback, run.folder)
    current = _with_worlds(platform, current, run.folder, world)  # anew where it is another number of nodes now
    with usable(run.folder):
        number = record(platform, newest, current)
    traced = ("--profile", str(profile_steps)) if profile_steps else ()
    nodes, spares, procs = world or World(1, 0, 1)
    job = Job(
        name=run.name, run_folder=run.folder, worker=(sys.executable, *WORKER, run.folder, *traced),
        carrier=(sys.executable, *CARRIER), version=version(), env=child_env(), spec=number,
        supervise=current.supervise, checkpoint=without_itself(current.checkpoint, os.path.realpath(run.folder)),
        nodes=nodes, spares=spares, procs=procs, worlds=current.train.worlds if world else {}, preload=PRELOAD,
    )
    opening = f"{'resuming' if run.resumed else 'new run'} {run.name} in {run.folder}"
    opening += f": {counted(nodes, 'node')}, {counted(spares, 'spare')}" if world else ""
    return stay_in_world(
        platform, job, current.train.steps, current.train.minutes_max, opening, asks=world is not None
    )


def without_itself(config: CheckpointConfig, folder: str) -> CheckpointConfig:
    """Without a mirror that is this very folder: one that was promoted is still named in the spec it was copied with.
    """
    others = [one for one in config.mirrors if os.path.realpath(one.place.removeprefix("file://")) != folder]
    return msgspec.structs.replace(config, mirrors=tuple(others))


def child_env() -> dict[str, str]:
    """This environment, in which workers find the same packtrain: one that is not installed is found by its folder.

    Also asks glibc for huge pages: XLA's CPU buffers come and go each step, and faulting them in by 4 KiB took up to
    a fifth of the processor. What the person has set for glibc stands.
    """
    env = dict(os.environ, PYTHONUNBUFFERED="1")
    env.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if home not in sysconfig.get_paths().values():
        env["PYTHONPATH"] = os.pathsep.join(path for path in (home, env.get("PYTHONPATH")) if path)
    return env
