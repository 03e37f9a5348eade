"""A coordinator that kills itself (SIGKILL) at the NTH batch of decisions that it writes down:

    python -m tests.soak.dying NTH WHEN FILE <arguments of a coordinator>

WHEN: `before` anything of the batch is written, when half of it is (`torn`), or `after` it is durable and before
anything of it has left. FILE then holds the segment as a replay has to read it; empty: nothing of this coordinator
counts.
"""

from __future__ import annotations

import os
import signal
import sys

from packtrain.core.platform import File, LocalPlatform
from packtrain.supervise.coordinator import main
from packtrain.supervise.log_homes import DECISIONS


class Segment(File):
    """Of the log of decisions; `platform` says which write is the last."""

    def __init__(self, file: File, platform: Mortal) -> None:
        self._file, self._platform = file, platform

    def write(self, data: bytes | memoryview) -> None:
        self._platform.writes(self._file, bytes(data))

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self._file.write_at(offset, data)

    def fsync(self) -> None:
        self._file.fsync()
        self._platform.wrote()

    def close(self) -> None:
        self._file.close()


class Mortal(LocalPlatform):
    """This machine, as seen by a process that dies at its `nth` batch."""

    def __init__(self, nth: int, when: str, path: str) -> None:
        self._left, self._when, self._path = nth, when, path
        self._counts = b""

    def create(self, path: str, mode: int = 0o644) -> File:
        file = super().create(path, mode)
        return Segment(file, self) if f"/{DECISIONS}/" in path else file

    def writes(self, file: File, data: bytes) -> None:
        self._left -= 1
        if not self._left and self._when == "before":
            self._die()
        if not self._left and self._when == "torn":
            file.write(data[: len(data) // 2])
            self._die()
        file.write(data)
        self._counts += data

    def wrote(self) -> None:
        if not self._left:
            self._die()

    def _die(self) -> None:
        self.write_new(self._path, self._counts)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    nth, when, path = sys.argv[1:4]
    sys.exit(main(sys.argv[4:], Mortal(int(nth), when, path)))
