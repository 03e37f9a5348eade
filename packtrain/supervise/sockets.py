"""Sockets of one node: whose folder they may lie in, free names and ports, and the beats of workers.

A unix socket path has 107 bytes at most, so they lie in a short folder of this user's, not in the run folder. Beats
come from anybody who can reach the socket; the kernel says whose they are, and those of other users are dropped.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress

from packtrain.core.contract import Beat, Ready, parse_beat, parse_ready
from packtrain.core.errors import RunUnusable
from packtrain.core.platform import Platform

PATH_BYTES_MAX = 107
LONGEST_NAME = "control.json.new-0123456789abcdef"
BEATS_AT_ONCE_MAX = 256
_CREDENTIALS = struct.Struct("iII")


def is_ours(path: str) -> bool:
    """Whether `path` is a real folder, of this user and closed to all others: names in /tmp can be squatted."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700


def remove_socket(platform: Platform, path: str) -> None:
    """What a dead listener left: its name would refuse the next one."""
    with suppress(OSError):
        platform.unlink(path)


def free_port() -> int:
    """A port that nobody listens on just now; whoever takes it first has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.bind(("", 0))
        port: int = one.getsockname()[1]
    return port


class BeatSocket:
    """Receives the beats of one node's workers. Raises RunUnusable where the socket cannot be made."""

    def __init__(self, platform: Platform, path: str) -> None:
        self.path = path
        self.refused = 0
        """Datagrams of other users, or that are nothing a rank says."""
        try:
            self._socket = platform.datagram_receiver(path)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        except OSError as error:
            raise RunUnusable(
                f"the socket for beats cannot be made: {error}", where=path,
                fix="see that XDG_RUNTIME_DIR or /tmp is writable and not full; then run the same command",
            ) from error

    def fileno(self) -> int:
        """For who waits for other things as well."""
        return self._socket.fileno()

    def arrived(self) -> list[Beat | Ready]:
        """All that has arrived, at most `BEATS_AT_ONCE_MAX`."""
        said: list[Beat | Ready] = []
        for _ in range(BEATS_AT_ONCE_MAX):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(4097, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                break
            one = (parse_beat(data) or parse_ready(data)) if _sender(ancillary) == os.getuid() else None
            if one is None:
                self.refused += 1
            else:
                said.append(one)
        return said

    def close(self) -> None:
        self._socket.close()


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """The user the kernel saw sending, or None when it does not say."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            uid: int = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1]
            return uid
    return None
