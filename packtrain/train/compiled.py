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
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax
from jax._src import cache_key, compilation_cache, compiler, config
from jax._src.compilation_cache_interface import CacheInterface

from packtrain.core.platform import Platform

TRIED = ("0.10.2", "0.12.0.1")
BYTES_MAX = 4 << 30
"""Of all entries; the oldest go first."""
SUM_BYTES = 32


def folder_of(env: Mapping[str, str]) -> str:
    """Where programs are kept: as JAX was told, else with this user's caches."""
    base = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return env.get("JAX_COMPILATION_CACHE_DIR") or os.path.join(base, "packtrain", "compiled")


def keep(platform: Platform, env: Mapping[str, str], several: bool) -> str:
    """From now on programs are kept. A word for the log: where, or why not. `several`: there are other processes."""
    folder = folder_of(env)
    why = refused(platform, folder)
    if why:
        jax.config.update("jax_enable_compilation_cache", False)
        return f"compiled programs are not kept: {why}"
    if jax.__version__ not in TRIED and several:
        jax.config.update("jax_enable_compilation_cache", False)
        return f"compiled programs are not kept: not tried with jax {jax.__version__} and several processes"
    jax.config.update("jax_compilation_cache_dir", folder)
    if not env.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if jax.__version__ in TRIED:
        _mend(Kept(platform, folder), processor(platform))
    return f"compiled programs are kept in {folder}"


def refused(platform: Platform, folder: str) -> str:
    """Why what lies there may not be run; empty: it may."""
    try:
        platform.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return f"{folder} is not a folder of this user"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"{folder} is open to others, who could put programs there (chmod 700)"
    return ""


class Kept(CacheInterface):
    """Entries as files: the sum of what follows, then what follows."""

    def __init__(self, platform: Platform, folder: str, bytes_max: int = BYTES_MAX) -> None:
        self._platform, self._path, self._bytes_max = platform, pathlib.Path(folder), bytes_max

    def has(self, key: str) -> bool:
        return self._platform.exists(self._file(key))

    def get(self, key: str) -> bytes | None:
        """None for what is not there, or damaged: it is compiled anew."""
        try:
            data = self._platform.read(self._file(key))
        except OSError:
            return None
        value = data[SUM_BYTES:]
        return value if hashlib.sha256(value).digest() == data[:SUM_BYTES] else None

    def put(self, key: str, value: bytes) -> None:
        """A disk that refuses costs a compilation next time, nothing else."""
        with suppress(OSError):
            self._make_room(len(value))
            self._platform.write_replacing(self._file(key), hashlib.sha256(value).digest() + value)

    def _file(self, key: str) -> str:
        return f"{self._path}/{key}.program"

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


def processor(platform: Platform) -> str:
    """What code compiled here may rely on, as the kernel tells it of the first processor."""
    told = platform.read("/proc/cpuinfo").decode(errors="replace").partition("\n\n")[0]
    fixed = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(line for line in told.splitlines() if line.startswith(fixed))


def _mend(kept: Kept, here: str) -> None:
    compilation_cache._cache, compilation_cache._cache_initialized = kept, True
    cache_key._hash_accelerator_config = _hash_by(here)
    compiler._cache_write = _write_to(kept)
    compiler._get_cache_key = _keys_but_of_worlds()


def _hash_by(here: str) -> Any:
    hash_topology = cache_key._hash_accelerator_config

    def hash_accelerators(hash_obj: Any, devices: Any) -> None:
        if devices.flat[0].platform != "cpu":
            return hash_topology(hash_obj, devices)
        kinds = [device.device_kind for device in devices.flat]
        hash_obj.update(f"{kinds}\n{here}".encode())

    return hash_accelerators


def _keys_but_of_worlds() -> Any:
    key_of = compiler._get_cache_key

    def key(options: Any, backend: Any, computation: Any, devices: Any, *more: Any, **named: Any) -> Any:
        if backend.platform == "cpu" and devices.size > 1:
            return None
        return key_of(options, backend, computation, devices, *more, **named)

    return key


def _write_to(kept: Kept) -> Any:
    def write(key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Any = ()) -> None:
        least_s = config.persistent_cache_min_compile_time_secs.value
        if not callbacks and seconds >= least_s and not kept.has(key):
            compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))

    return write
