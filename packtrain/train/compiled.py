"""Compiled programs kept on disk, for all processes of this user: a restart loads what the last attempt compiled.

What is loaded is run, so the folder must be this user's and closed to all others; otherwise nothing is kept, and the
log says why. JAX's own cache is mended with private names, tried with the versions in TRIED (others get none for a
world of several processes on CPU, and JAX's own for one process):

- on CPU what several devices run together is never kept. A loaded program has lost the order of its collectives: two
  that do not need each other run at once, in another order on each rank, and gloo aborts ("op.preamble.length <=
  op.nbytes"). Measured with jax 0.10.2, two ranks, 128 wide: 6 aborts in 300 steps loaded, none in 600 compiled;
- what a rank runs alone is found whichever rank of whichever world it was: the key holds its devices and the features
  of this processor; and each rank writes, not only process 0;
- an entry appears whole, is checked by its sum when read, and the folder has a bound.

For which world each is, is noted beside it (cached.py).
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax
from jax._src import cache_key, compilation_cache, compiler, config
from jax._src.compilation_cache_interface import CacheInterface

from packtrain.core.platform import Platform
from packtrain.train import cached
from packtrain.train.cached import NOT_ON_CPU, PROGRAM, Note, World

TRIED = ("0.10.2", "0.12.0.1")
BYTES_MAX = 4 << 30
"""Of all entries; the oldest go first."""
SUM_BYTES = 32


def keep(platform: Platform, env: Mapping[str, str], several: bool, world: World | None = None) -> str:
    """From now on programs are kept. A word for the log: where, or why not. `several`: there are other processes;
    `world`: the one they are noted for."""
    folder = cached.folder_of(env)
    notes = Notes(platform, folder, world)
    why = refused(platform, folder)
    if why:
        jax.config.update("jax_enable_compilation_cache", False)
        return f"compiled programs are not kept: {why}"
    if jax.__version__ not in TRIED and several:
        jax.config.update("jax_enable_compilation_cache", False)
        untried = f"not tried with jax {jax.__version__} and several processes"
        notes.never(untried)
        return f"compiled programs are not kept: {untried}"
    jax.config.update("jax_compilation_cache_dir", folder)
    if not env.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if jax.__version__ in TRIED:
        _mend(Kept(platform, folder, notes=notes), cached.processor(platform), notes)
    else:
        notes.never(f"jax {jax.__version__} keeps its programs itself, and does not say for which world")
    return f"compiled programs are kept in {folder}"


def refused(platform: Platform, folder: str) -> str:
    """Why what lies there may not be run; empty: it may. Made where it is not there."""
    try:
        platform.mkdir(folder, 0o700)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return cached.refused(folder)


class Notes:
    """For which world this process keeps and loads programs. `world` None: for none that is noted."""

    def __init__(self, platform: Platform, folder: str, world: World | None) -> None:
        self._platform, self._folder, self._world = platform, folder, world
        self._said = ""
        """Why nothing is kept, once it is told."""

    def kept(self, key: str, size: int, made_s: float) -> None:
        """A program of this world is there: `size` bytes, made at that date."""
        self._write(jax.default_backend(), made_s, program=key, bytes=size)

    def never(self, why: str, platform: str = "") -> None:
        if why != self._said:
            self._said = why
            self._write(platform, self._platform.wall_s(), why=why)

    def _write(self, platform: str, made_s: float, **what: Any) -> None:
        if self._world is not None:
            mark = cached.processor_mark(self._platform)
            note = Note(world=self._world, platform=platform, processor=mark, made_s=made_s, **what)
            cached.write(self._platform, self._folder, note)


class Kept(CacheInterface):
    """Entries as files: the sum of what follows, then what follows."""

    def __init__(
        self, platform: Platform, folder: str, bytes_max: int = BYTES_MAX, notes: Notes | None = None
    ) -> None:
        self._platform, self._path, self._bytes_max = platform, pathlib.Path(folder), bytes_max
        self._notes = notes or Notes(platform, folder, None)

    def has(self, key: str) -> bool:
        return self._platform.exists(self._file(key))

    def get(self, key: str) -> bytes | None:
        """None for what is not there, or damaged: it is compiled anew."""
        try:
            data = self._platform.read(self._file(key))
        except OSError:
            return None
        value = data[SUM_BYTES:]
        if hashlib.sha256(value).digest() != data[:SUM_BYTES]:
            return None
        with suppress(OSError):
            self._notes.kept(key, len(data), self._platform.modified_s(self._file(key)))
        return value

    def put(self, key: str, value: bytes) -> None:
        """A disk that refuses costs a compilation next time, nothing else."""
        with suppress(OSError):
            self._make_room(len(value))
            self._platform.write_replacing(self._file(key), hashlib.sha256(value).digest() + value)
            self._notes.kept(key, SUM_BYTES + len(value), self._platform.wall_s())

    def _file(self, key: str) -> str:
        return f"{self._path}/{key}{PROGRAM}"

    def _make_room(self, more: int) -> None:
        dated = []
        for path in (f"{self._path}/{name}" for name in self._platform.listdir(str(self._path))):
            with suppress(FileNotFoundError):  # another rank's, renamed or removed just now
                dated.append((self._platform.modified_s(path), self._platform.size(path), path))
        dated.sort()
        total = sum(size for _, size, _ in dated) + more
        for _, size, path in dated:
            if total <= self._bytes_max:
                return
            with suppress(FileNotFoundError):
                self._platform.unlink(path)
            total -= size


def _mend(kept: Kept, here: str, notes: Notes) -> None:
    compilation_cache._cache, compilation_cache._cache_initialized = kept, True
    cache_key._hash_accelerator_config = _hash_by(here)
    compiler._cache_write = _write_to(kept)
    compiler._get_cache_key = _keys_but_of_worlds(lambda: notes.never(NOT_ON_CPU, "cpu"))


def _hash_by(here: str) -> Any:
    hash_topology = cache_key._hash_accelerator_config

    def hash_accelerators(hash_obj: Any, devices: Any) -> None:
        if devices.flat[0].platform != "cpu":
            return hash_topology(hash_obj, devices)
        kinds = [device.device_kind for device in devices.flat]
        hash_obj.update(f"{kinds}\n{here}".encode())

    return hash_accelerators


def _keys_but_of_worlds(tell: Callable[[], None]) -> Any:
    key_of = compiler._get_cache_key

    def key(options: Any, backend: Any, computation: Any, devices: Any, *more: Any, **named: Any) -> Any:
        if backend.platform == "cpu" and devices.size > 1:
            tell()
            return None
        return key_of(options, backend, computation, devices, *more, **named)

    return key


def _write_to(kept: Kept) -> Any:
    def write(key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Any = ()) -> None:
        least_s = config.persistent_cache_min_compile_time_secs.value
        if not callbacks and seconds >= least_s and not kept.has(key):
            compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))

    return write
