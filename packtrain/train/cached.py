"""Which worlds of a run have compiled programs on disk: notes beside these, written and read without JAX.

    KEY.program           a program: the sum of what follows, then what follows (compiled.py)
    KEY.NUMBER.note       it is of the world with this number
    NUMBER.note           nothing is kept of this world, and why

Whoever keeps a program, or loads one, notes for which world it did: one small file each, written whole, so that ranks
get in nobody's way and no file can damage another's word. A note that cannot be read, that is another user's, or whose
program is gone, says nothing.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import suppress

import msgspec

import packtrain
from packtrain.core.platform import Platform
from packtrain.train.sections import Sections

PROGRAM, NOTE = ".program", ".note"
NOTE_BYTES_MAX = 1 << 14
STEP = "jit_step-"
"""How the key of a training step begins: a world that has its step has what takes long."""
UNDECIDING = (
    "worlds", "minutes_max", "weights", "eval_every_steps", "eval_rows_max", "sample_prompts", "sample_tokens",
    "sample_temperature",
)
"""Of the train section, what the step does not depend on."""
NOT_ON_CPU = "on CPU what several devices run together is compiled at every start (docs/train.md)"


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What a program is made for. Other programs come of another spec; those of other code may be the same."""

    nodes: int
    ranks: int
    mesh: dict[str, int]
    spec: str
    """Digest of all that decides the step, the mesh included."""
    code: str = ""
    jax: str = ""

    @property
    def number(self) -> str:
        """The same for all code and every release of JAX: the newest note stands."""
        return hashlib.sha256(msgspec.json.encode((self.spec, self.nodes, self.ranks))).hexdigest()[:16]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """`program`: its key; empty: `why` there is none. `processor`: of the machine; what is kept of a CPU's is for that
    kind alone."""

    world: World
    platform: str
    processor: str
    made_s: float
    program: str = ""
    bytes: int = 0
    why: str = ""


def world_of(spec: Sections, nodes: int, ranks: int, code: str, jax: str) -> World:
    return World(nodes=nodes, ranks=ranks, mesh=mesh_of(spec, nodes), spec=digest(spec, nodes), code=code, jax=jax)


def mesh_of(spec: Sections, nodes: int) -> dict[str, int]:
    """As the spec has it; empty: every device on fsdp."""
    return spec.train.worlds.get(str(nodes), spec.train.mesh)


def digest(spec: Sections, nodes: int) -> str:
    """Of what decides the step of a world of so many nodes."""
    train = msgspec.structs.asdict(spec.train) | {"mesh": mesh_of(spec, nodes)}
    deciding = {key: value for key, value in train.items() if key not in UNDECIDING}
    data = (spec.data.batch_rows, spec.data.length, spec.data.objective)
    whole = (spec.seed, spec.model, spec.optim, spec.guard, deciding, data)
    return hashlib.sha256(msgspec.json.encode(whole, order="deterministic")).hexdigest()


def code_hash(platform: Platform) -> str:
    """SHA-256 over the package's own source: which code trained this."""
    root = os.path.dirname(os.path.abspath(packtrain.__file__))
    total = hashlib.sha256()
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            path = os.path.join(folder, name)
            total.update(f"{os.path.relpath(path, root)}\0".encode() + hashlib.sha256(platform.read(path)).digest())
    return total.hexdigest()


# --- the folder --------------------------------------------------------------------------------------


def folder_of(env: Mapping[str, str]) -> str:
    """Where programs are kept: as JAX was told, else with this user's caches."""
    base = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return env.get("JAX_COMPILATION_CACHE_DIR") or os.path.join(base, "packtrain", "compiled")


def refused(folder: str) -> str:
    """Why what lies there may not be run; empty: it may."""
    try:
        found = os.lstat(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return f"{folder} is not a folder of this user"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"{folder} is open to others, who could put programs there (chmod 700)"
    return ""


def processor(platform: Platform) -> str:
    """What code compiled here may rely on, as the kernel tells it of the first processor."""
    told = platform.read("/proc/cpuinfo").decode(errors="replace").partition("\n\n")[0]
    fixed = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(line for line in told.splitlines() if line.startswith(fixed))


def processor_mark(platform: Platform) -> str:
    return hashlib.sha256(processor(platform).encode()).hexdigest()[:16]


# --- notes -------------------------------------------------------------------------------------------


def write(platform: Platform, folder: str, note: Note) -> None:
    """In place of what was noted of the same program and world. A disk that refuses costs the note."""
    name = f"{note.program}.{note.world.number}" if note.program else note.world.number
    with suppress(OSError):
        platform.write_replacing(f"{folder}/{name}{NOTE}", msgspec.json.encode(note), durable=False)


def read(platform: Platform, folder: str) -> list[Note]:
    """Those that say something, the newest first. Raises OSError."""
    names = set(platform.listdir(folder))
    found = [_read(platform, f"{folder}/{name}") for name in names if name.endswith(NOTE)]
    told = [note for note in found if note and (not note.program or f"{note.program}{PROGRAM}" in names)]
    return sorted(told, key=lambda note: note.made_s, reverse=True)


def _read(platform: Platform, path: str) -> Note | None:
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        if os.lstat(path).st_uid == os.getuid():
            return msgspec.json.decode(platform.read(path, 0, NOTE_BYTES_MAX), type=Note)
    return None
