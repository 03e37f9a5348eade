"""This machine with a disk that is ill on purpose, while an order file (breaking.py) says so: for processes that write
where a run allows faults. Everything outside of one folder is well, and so are reads.
"""

from __future__ import annotations

import errno
import os

from packtrain.core.breaking import DISK_FULL, DISK_READ_ONLY, DISK_STALL, OrderFile
from packtrain.core.bulk import Image
from packtrain.core.platform import File, LocalPlatform

LOOK_S = 0.02
REFUSES = {DISK_FULL: errno.ENOSPC, DISK_READ_ONLY: errno.EROFS}


class SickPlatform(LocalPlatform):
    """`folder`: what lies on the disk. `order`: path of the file. While it is stalled whoever changes something waits;
    what is read-only refuses, and so does what is full, but for what frees room. Used by several threads."""

    def __init__(self, folder: str, order: str) -> None:
        self._folder, self._path = os.path.join(folder, ""), order

    def suffer(self, path: str, frees: bool = False) -> None:
        """Before a change at `path`, which `frees` room or may take some. Raises OSError."""
        order = OrderFile(self._path)  # of this call alone: calls come from many threads
        while path.startswith(self._folder) and self.boot_ns() < (fault := order.now()).until_ns:
            if fault.fault in REFUSES and not (frees and fault.fault == DISK_FULL):
                code = REFUSES[fault.fault]
                raise OSError(code, os.strerror(code), path)
            if fault.fault != DISK_STALL:
                return
            self.sleep(LOOK_S)

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        self.suffer(path)
        super().mkdir(path, mode)

    def mkdir_new(self, path: str) -> None:
        self.suffer(path)
        super().mkdir_new(path)

    def create(self, path: str, mode: int = 0o644) -> File:
        self.suffer(path)
        return _SickFile(self, path, super().create(path, mode))

    def reopen(self, path: str) -> File:
        self.suffer(path)
        return _SickFile(self, path, super().reopen(path))

    def create_image(self, path: str, size: int, mode: int = 0o644) -> Image:
        self.suffer(path)
        return _SickImage(self, path, super().create_image(path, size, mode))

    def link(self, source: str, target: str) -> None:
        self.suffer(target)
        super().link(source, target)

    def replace(self, source: str, target: str) -> None:
        self.suffer(target)
        super().replace(source, target)

    def unlink(self, path: str) -> None:
        self.suffer(path, frees=True)
        super().unlink(path)

    def rmdir(self, path: str) -> None:
        self.suffer(path, frees=True)
        super().rmdir(path)

    def fsync_dir(self, path: str) -> None:
        self.suffer(path)
        super().fsync_dir(path)

    def free_bytes(self, path: str) -> int:
        fault = OrderFile(self._path).now()
        full = fault.fault == DISK_FULL and self.boot_ns() < fault.until_ns and path.startswith(self._folder)
        return 0 if full else super().free_bytes(path)


class _SickImage(Image):
    def __init__(self, platform: SickPlatform, path: str, image: Image) -> None:
        self._platform, self._path, self._image = platform, path, image

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self._platform.suffer(self._path)
        self._image.write_at(offset, data)

    def fsync(self) -> None:
        self._platform.suffer(self._path)
        self._image.fsync()

    def close(self) -> None:
        self._image.close()


class _SickFile(_SickImage, File):
    def __init__(self, platform: SickPlatform, path: str, file: File) -> None:
        super().__init__(platform, path, file)
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        self._platform.suffer(self._path)
        self._file.write(data)
