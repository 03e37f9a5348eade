"""A real file system that passes everything on to a folder, and is as ill as a test wants it: FUSE, by mfusepy.

    python -m tests.soak.passthrough FOLDER MOUNTPOINT ILLNESS_FILE

ILLNESS_FILE is read at every change of a file: `well`; `hang`: until it says otherwise; `slow SECONDS`: so long for
each; `flap N`: every N-th one fails with EIO. Needs root, /dev/fuse and libfuse.
"""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import sys
from typing import Any

import mfusepy

from packtrain.core.platform import LocalPlatform

LOOK_S = 0.02
STAT = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid")
ROOM = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize", "f_namemax")


class Passthrough(mfusepy.Operations):
    """Each call in a thread of libfuse's own, so what hangs holds up nothing else."""

    use_ns = True

    def __init__(self, folder: str, illness: pathlib.Path) -> None:
        self._folder, self._illness = folder, illness
        self._platform, self._changes = LocalPlatform(), itertools.count(1)

    def _at(self, path: str) -> str:
        return self._folder + path

    def _suffer(self) -> None:
        while (now := self._illness.read_text().split()) == ["hang"]:
            self._platform.sleep(LOOK_S)
        if now[0] == "slow":
            self._platform.sleep(float(now[1]))
        if now[0] == "flap" and next(self._changes) % int(now[1]) == 0:
            print("refused", flush=True)
            raise mfusepy.FuseOSError(errno.EIO)

    # --- looks ---

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path))
        ns = {"st_atime": found.st_atime_ns, "st_ctime": found.st_ctime_ns, "st_mtime": found.st_mtime_ns}
        return {name: getattr(found, name) for name in STAT} | ns

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in ROOM}

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~os.O_DIRECT)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    # --- changes ---

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._suffer()
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._suffer()
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path), length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._suffer()
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._suffer()
        return 0

    def link(self, target: str, source: str) -> int:
        self._suffer()
        os.link(self._at(source), self._at(target))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._at(old), self._at(new))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._suffer()
        os.mkdir(self._at(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0


def main(folder: str, mountpoint: str, illness: str) -> None:
    mfusepy.FUSE(Passthrough(folder, pathlib.Path(illness)), mountpoint, foreground=True, nothreads=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
