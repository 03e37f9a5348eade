"""Between `packtrain run -- CMD` and a run: find or create its folder, start what keeps it alive, stay with it."""

from __future__ import annotations

import os
import shlex
import shutil
import tomllib
from collections.abc import Sequence

from packtrain.cli import folders, launch, world
from packtrain.cli.following import Following
from packtrain.cli.version import version
from packtrain.core import config
from packtrain.core.errors import EXIT_DONE, SpecDiffers, UsageError
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.units import NS, duration_text
from packtrain.monitor.fold import Facts
from packtrain.monitor.report import counted, gather
from packtrain.recipes.program import KIND, ProgramSpec
from packtrain.supervise.job import Job
from packtrain.supervise.local import Live
from packtrain.supervise.warm import argv_for

SECTION = "supervise."
INTERPRETERS = ("python", "python3", "bash", "sh")
"""A run is named after their script."""


def resolve(
    command: Sequence[str], nodes: int, procs: int, spares: int, preload: Sequence[str], overrides: Sequence[str]
) -> ProgramSpec:
    """Raises UsageError for a command that is not there or cannot be preloaded for, or a key of another section;
    UnknownKey, BadValue."""
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"there is no command {command[0]!r}", where="packtrain run -- CMD",
            fix="give its path, or put it into PATH; a script of yours is `python SCRIPT`, or executable and ./SCRIPT",
        )
    for override in overrides:
        if not override.startswith(SECTION):
            raise UsageError(
                f"{override.partition('=')[0]} cannot be set", where=f"--set {override}",
                fix=f"a program has the section `supervise` only, as in {SECTION}progress_s=300",
            )
    if preload and warm_argv(command) is None:
        raise UsageError(
            f"nothing can be preloaded for {shlex.join(command)[:200]}", where="--preload",
            fix="the command must be `python SCRIPT ...` or `python -m MODULE ...`, without options but -P and -u",
        )
    spec = ProgramSpec(
        command=tuple(command), folder=os.getcwd(), nodes=nodes, procs_per_node=procs, spares=spares,
        preload=tuple(preload), overrides=tuple(overrides),
    )
    return config.override(spec, list(overrides))


def warm_argv(command: Sequence[str]) -> tuple[str, ...] | None:
    """What a standby would become; None: it cannot become this command."""
    job = Job(name="", run_folder="", worker=tuple(command), carrier=(), version="", env=dict(os.environ), plain=True)
    return argv_for(job)[1]


def default_name(command: Sequence[str]) -> str:
    """That of the program without its ending: of the script where the command is an interpreter's."""
    words = [os.path.basename(word) for word in command]
    first = next((word for word in words[1:] if word == "-c" or not word.startswith("-")), "-c")
    stem = os.path.splitext(first if words[0] in INTERPRETERS and first != "-c" else words[0])[0]
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem).lstrip("._-")
    return name[:80] or KIND


def is_program(platform: Platform, folder: str) -> bool:
    """Whether a run folder is that of a program."""
    try:
        return tomllib.loads(platform.read(f"{folder}/{folders.SPEC}").decode()).get("kind") == KIND
    except (OSError, ValueError):
        return False


def read(platform: Platform, folder: str) -> ProgramSpec:
    """The recorded spec. Raises UsageError where that run is no program's."""
    path = f"{folder}/{folders.SPEC}"
    if not is_program(platform, folder):
        name = os.path.basename(folder)
        raise UsageError(
            f"run {name!r} trains a recipe", where=path, fix="choose another name with --run, or resume it with "
            f"`packtrain train RECIPE --run {name}`",
        )
    return config.decode(platform.read(path), ProgramSpec, path)


def compare(recorded: ProgramSpec, wanted: ProgramSpec, name: str, path: str) -> None:
    """Raises SpecDiffers, with what was asked for otherwise than now."""
    old, new = _asked(recorded), _asked(wanted)
    lines = [f"\n    {key}: {old[key]} -> {new[key]}" for key in old if old[key] != new[key]]
    if lines:
        raise SpecDiffers(
            f"run {name!r} was made by another command (recorded -> asked for now):{''.join(lines)}", where=path,
            fix=f"add --new to start another run, or resume this one: {command_line(recorded, name)}",
        )


def _asked(spec: ProgramSpec) -> dict[str, str]:
    return {
        "command": shlex.join(spec.command), "folder": spec.folder, "--nodes": str(spec.nodes),
        "--procs-per-node": str(spec.procs_per_node), "--spares": str(spec.spares),
        "--preload": " ".join(spec.preload) or "nothing", "--set": " ".join(spec.overrides) or "nothing",
    }


def command_line(spec: ProgramSpec, name: str) -> str:
    """The command that made a run, as a person would type it again."""
    counts = ("--nodes", spec.nodes, 1), ("--procs-per-node", spec.procs_per_node, 1), ("--spares", spec.spares, 0)
    options = [part for key, value, usual in counts if value != usual for part in (key, str(value))]
    options += [part for module in spec.preload for part in ("--preload", module)]
    options += [part for override in spec.overrides for part in ("--set", override)]
    there = f"cd {shlex.quote(spec.folder)} && " if spec.folder != os.getcwd() else ""
    return there + shlex.join(["packtrain", "run", "--run", name, *options, "--", *spec.command])


def start(name: str | None, new: bool, wanted: ProgramSpec) -> int:
    """Create or resume the run and stay with it; the exit code."""
    platform, chosen = LocalPlatform(), name or default_name(wanted.command)
    chosen = folders.free_name(chosen) if new else chosen
    folder = folders.named(chosen)
    path = f"{folder}/{folders.SPEC}"
    made = not folders.is_run(folder) and launch.write_spec(platform, folder, config.encode(wanted))
    recorded = wanted if made else read(platform, folder)
    compare(recorded, wanted, chosen, path)
    if not made and gather(platform, folder).facts.state == "done":
        print(f"run {chosen!r} is finished; --new starts another\n  packtrain report {chosen}")
        return EXIT_DONE
    code = world.stay_with(platform, job_of(chosen, folder, recorded), Following(platform, folder), launch.child_env())
    facts = gather(platform, folder).facts
    if facts.state == "done":  # and not left to itself
        print(closing(facts, folder))
    return code


def job_of(name: str, folder: str, spec: ProgramSpec) -> Job:
    """What coordinator and agents are given. The program gets the environment of whoever asked, as it is."""
    env = dict(os.environ)
    env.setdefault("PYTHONUNBUFFERED", "1")  # what it prints is a sign of life, and is shown
    return Job(
        name=name, run_folder=folder, worker=spec.command, carrier=(), env=env, cwd=spec.folder, version=version(),
        supervise=spec.supervise, nodes=spec.nodes, procs=spec.procs_per_node, spares=spec.spares, plain=True,
        preload=spec.preload,
    )


def rejoin(platform: Platform, live: Live) -> int:
    """Watch one that lives already."""
    return world.rejoin_with(platform, live, Following(platform, live.run_folder), launch.child_env())


def closing(facts: Facts, folder: str) -> str:
    wall_s = sum(attempt.wall_ns for attempt in facts.attempts) / NS
    return f"done: {counted(len(facts.attempts), 'attempt')}, {duration_text(wall_s)}; run folder: {folder}"
