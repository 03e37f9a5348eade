"""`packtrain doctor --run`: of which worlds of a run a compiled program is kept, which the next start loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packtrain.cli.checkup import FAIL, OK, WARN, Finding
from packtrain.core.errors import PacktrainError
from packtrain.core.platform import Platform
from packtrain.core.units import bytes_text, duration_text
from packtrain.train import cached
from packtrain.train.cached import Note
from packtrain.train.config import mesh_text
from packtrain.train.sections import Sections, load

COLD = "not compiled: its first start compiles"


class Here(NamedTuple):
    """What a program must have been made by, and for, to be loaded on this machine."""

    code: str
    jax: str
    processor: str
    now_s: float


def cached_findings(
    platform: Platform, run_folder: str, env: Mapping[str, str], devices: Callable[[], Finding]
) -> list[Finding]:
    """A line for each world of the spec in force, the largest first. `devices`: asks what this machine has, where no
    note tells what the run is trained on."""
    folder = cached.folder_of(env)
    try:
        spec = load(platform, run_folder)
        why = cached.refused(folder) if platform.exists(folder) else ""
        notes = cached.read(platform, folder) if platform.exists(folder) and not why else []
    except PacktrainError as error:
        return [Finding(FAIL, "compiled", error.what, error.fix)]
    except OSError as error:
        why = f"{folder}: {error.strerror}"
    if why:
        return [Finding(WARN, "compiled", f"every start compiles: {why}", "make it a folder of yours alone")]
    sizes = sorted((int(nodes) for nodes in spec.train.worlds), reverse=True) or [1]
    of_world = {nodes: _of_world(notes, spec, nodes) for nodes in sizes}
    on_cpu = _on_cpu([note for some in of_world.values() for note in some])
    if on_cpu is None and any(not of_world[nodes] and _several(spec, nodes) for nodes in sizes):
        on_cpu = " cpu " in f"{devices().found} "
    here = Here(cached.code_hash(platform), _jax(), cached.processor_mark(platform), platform.wall_s())
    return [_finding(spec, nodes, of_world[nodes], bool(on_cpu), here) for nodes in sizes]


def _of_world(notes: list[Note], spec: Sections, nodes: int) -> list[Note]:
    digest = cached.digest(spec, nodes)
    return [note for note in notes if note.world.nodes == nodes and note.world.spec == digest]


def _on_cpu(notes: list[Note]) -> bool | None:
    """None: nobody has told."""
    told = [note.platform for note in notes if note.platform]
    return told[0] == "cpu" if told else None


def _several(spec: Sections, nodes: int) -> bool:
    """Whether it is known to take more than one device."""
    return math.prod(cached.mesh_of(spec, nodes).values()) > 1


def _jax() -> str:
    with suppress(PackageNotFoundError):
        return version("jax")
    return ""


def _finding(spec: Sections, nodes: int, notes: list[Note], on_cpu: bool, here: Here) -> Finding:
    """`notes`: of this world, the newest first."""
    steps = [note for note in notes if note.program.startswith(cached.STEP)]
    best = next((note for note in steps if not _other(note, here)), steps[0] if steps else None)
    ranks = best.world.ranks if best else notes[0].world.ranks if notes else 0
    if best is None:
        never = next((note.why for note in notes if note.why), "")
        never = never or (cached.NOT_ON_CPU if on_cpu and _several(spec, nodes) else "")
        verdict, told = (OK, never) if never else (WARN, COLD)
    elif other := _other(best, here):
        verdict, told = WARN, f"{other}: its next start may compile"
    else:
        size = sum(note.bytes for note in notes if note.world == best.world)
        age = duration_text(max(0.0, here.now_s - best.made_s))
        verdict, told = OK, f"compiled ({bytes_text(size)}, {age} old)"
    return Finding(verdict, f"world {nodes}", f"{_shape(ranks, nodes, cached.mesh_of(spec, nodes))}: {told}")


def _shape(ranks: int, nodes: int, mesh: Mapping[str, int]) -> str:
    """`ranks` 0: not known."""
    world = f"{nodes}x{ranks // nodes}, " if ranks else ""
    return world + (mesh_text(mesh) if mesh else "every device on fsdp")


def _other(note: Note, here: Here) -> str:
    """What a program is of that this machine does not have; empty: nothing."""
    if note.platform == "cpu" and note.processor != here.processor:
        return "compiled for another processor"
    if note.world.jax != here.jax:
        return f"compiled with jax {note.world.jax}"
    return "" if note.world.code == here.code else "compiled by another version of Packtrain"
