"""The steps of `packtrain first-light`: a store of the standard library, a number of steps, a run, and what it gave.

The number of steps is chosen once, from the pace of a few real ones on this machine, and recorded in the run's spec
under `chosen`: what a person typed stays apart from it, so that the same command resumes.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
from collections.abc import Sequence

import msgspec

from packtrain.cli import folders, launch, spec
from packtrain.cli.bars import Bars
from packtrain.core import config
from packtrain.core.errors import EXIT_DONE, BadValue, PacktrainError
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.units import bytes_text, duration_text
from packtrain.data.build import BuildOptions, build
from packtrain.data.stdlib import standard_library
from packtrain.monitor import report
from packtrain.recipes.first_light import MINUTES_MAX
from packtrain.recipes.spec import RunSpec

STORE = "first-light"
AIM_PART = 0.8
"""Of `train.minutes_max`: evaluations, saves and a pace that sags still end before the run is cut off."""
TIMED_STEPS = 12
STEPS_MIN = 20


def first(run: str | None, new: bool, overrides: Sequence[str], profile_steps: int = 0) -> int:
    """Exit code. Whatever is done already is not done again."""
    platform = LocalPlatform()
    store = f"{folders.stores_folder()}/{STORE}"
    wanted = _configured(overrides, store)
    found = launch.find(run, new, wanted)
    if found is not None and launch.finished(platform, found, profile_steps):
        return _closing(platform, found)
    if not os.path.isfile(f"{store}/card.json"):
        _build_store(platform, store)
    if found is None:
        wanted = _configured(overrides, store)
        spec.check_data(wanted)
        name = launch.pick_name(run, new, wanted)
        found = launch.create(platform, name, _with_steps(platform, wanted, name))
    code = launch.stay(platform, found, profile_steps)
    return _closing(platform, found) if code == EXIT_DONE else code


def _configured(overrides: Sequence[str], store: str) -> RunSpec:
    """The recipe over the store, whose vocabulary is read once it is there. Raises BadValue beyond the promised time:
    the worker stops at `minutes_max`, however wrong the pace was that chose the steps."""
    built = os.path.isfile(f"{store}/card.json")
    base = spec.resolve("first-light", [], store if built else None)
    wanted = msgspec.structs.replace(spec.overridden(base, overrides), overrides=tuple(overrides))
    if not 0 < wanted.train.minutes_max <= MINUTES_MAX:
        raise BadValue(
            f"first-light trains for {MINUTES_MAX:g} minutes at most, {wanted.train.minutes_max:g} cannot be asked for",
            where="--set train.minutes_max",
            fix=f"packtrain train first-light --run longer --data {shlex.quote(store)} --set train.minutes_max=30 "
                "--set train.steps=10000",
        )
    return wanted


def _build_store(platform: Platform, store: str) -> None:
    sources = standard_library()
    print(f"text: {len(sources.files):,} sources of Python {sys.version.split()[0]}, {bytes_text(sources.bytes)}")
    if sources.installed_files:
        print(f"  {sources.installed_files:,} of them from installed packages: Python's own are under 8 MB here")
    with Bars() as bars:
        build(platform, sources.files, store, BuildOptions(), bars)


# --- how many steps ----------------------------------------------------------------------------------


def _with_steps(platform: Platform, wanted: RunSpec, name: str) -> RunSpec:
    """`train.steps` for the time the run may take, at this machine's pace, unless it was given."""
    if any(override.startswith("train.steps=") for override in wanted.overrides):
        return wanted
    print(f"timing {TIMED_STEPS} steps on this machine ...", flush=True)
    step_s = time_steps(platform, wanted, folders.named(name))
    steps = steps_for(step_s, AIM_PART * 60 * wanted.train.minutes_max)
    tokens_per_s = wanted.data.batch_rows * wanted.data.length / step_s
    print(f"  {step_s:.3f} s a step, {tokens_per_s:,.0f} tokens/s: {steps:,} steps in {duration_text(steps * step_s)}")
    chosen = (f"train.steps={steps}",)
    return msgspec.structs.replace(config.override(wanted, list(chosen)), chosen=chosen)


def steps_for(step_s: float, seconds: float) -> int:
    """As many steps as fit, a multiple of ten."""
    return max(STEPS_MIN, int(seconds / step_s) // 10 * 10)


def time_steps(platform: Platform, wanted: RunSpec, folder: str) -> float:
    """Seconds a step takes: the median of a few, by a process that trains as the worker does and keeps nothing.

    Its spec and output stay in the run's logs. Raises PacktrainError with the last line it printed, RunUnusable.
    """
    logs = f"{folder}/logs"
    path = f"{logs}/timing.toml"
    log = f"{logs}/timing-{platform.token(4)}.log"
    command = (sys.executable, "-P", "-m", "packtrain.train.timing", path, str(TIMED_STEPS))
    with launch.usable(folder):
        platform.mkdir(logs)
        platform.write_replacing(path, spec.text(wanted).encode())
        status = platform.spawn(command, launch.child_env(), log_path=log).wait()
        output = platform.read(log).decode(errors="replace")
    if status != 0:
        raise PacktrainError(
            f"timing a few steps failed: {(output.strip().splitlines() or ['no output'])[-1]}", where=log,
            fix="give the number of steps yourself: --set train.steps=500",
        )
    seconds = [float(line.split()[1]) for line in output.splitlines() if line.startswith("seconds ")]
    return statistics.median(seconds)


# --- what it gave ------------------------------------------------------------------------------------


def _closing(platform: Platform, run: launch.Run) -> int:
    sources = report.gather(platform, run.folder)
    lines = [*report.held_out(sources.facts, sources.cards or {}), "", *report.samples(sources.facts)]
    print("\n" + "\n".join(lines))
    print(f"\nrun folder: {run.folder}")
    print(f'next: packtrain sample {run.name} --prompt "def "')
    print(f"      packtrain report {run.name}")
    return EXIT_DONE
