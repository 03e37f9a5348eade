"""What the kernel says: a reader of its log that waits for nothing, for whoever looks for failing hardware in it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

KMSG = "/dev/kmsg"
RECORD_BYTES_MAX = 8192
AT_ONCE_MAX = 1000
"""Lines taken at one look; a kernel that says more is heard at the next."""


class KernelLog(ABC):
    """Open from now on: what was said before is not heard."""

    @abstractmethod
    def read(self) -> list[str]:
        """New lines, oldest first. What was overwritten before it was read is passed over. Raises OSError."""

    @abstractmethod
    def close(self) -> None: ...


class Kmsg(KernelLog):
    """The log of this machine. Raises OSError where it may not be read: in most containers, or where
    kernel.dmesg_restrict is set and this process may not (CAP_SYSLOG)."""

    def __init__(self) -> None:
        self._fd = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._fd, 0, os.SEEK_END)

    def read(self) -> list[str]:
        lines: list[str] = []
        for _ in range(AT_ONCE_MAX):
            try:
                record = os.read(self._fd, RECORD_BYTES_MAX)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten meanwhile: the next read is of what is left
            lines.append(message(record))
        return lines

    def close(self) -> None:
        os.close(self._fd)


def message(record: bytes) -> str:
    """The text of a record of /dev/kmsg: `priority,number,time,flags;text`, then lines of its own about the device.

    Source: Documentation/ABI/testing/dev-kmsg of Linux.
    """
    first = record.partition(b"\n")[0]
    return first.partition(b";")[2].decode(errors="replace")
