"""Asks a node's carrier how it stands, about once a second, and waits for nothing: its answers over a unix stream come
also when the run's disk is dead. Those that were given up are killed here, and looked after until they have ended.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from packtrain.core.platform import Platform, Process
from packtrain.core.units import NS
from packtrain.core.wire import is_count, json_object
from packtrain.supervise.one_carrier import Event, GivenUpEnded, Hung, Stands
from packtrain.supervise.sockets import remove_socket

ASK_NS = NS
CONNECT_S = 0.1
ANSWER_BYTES_MAX = 1 << 20
HOMES_MAX = 64
COUNT_MAX = 1 << 20


class CarrierWatch:
    """Of the carriers of one node, which listen at `path` one after the other. `kill`: ends one with what it started.
    """

    def __init__(self, platform: Platform, path: str, kill: Callable[[Process], None]) -> None:
        self._platform, self._path, self._kill = platform, path, kill
        self._socket: socket.socket | None = None
        self._received = b""
        self._asked_ns = 0
        """When the question was put that has no answer yet, or the last one."""
        self._waits = False
        self._given_up: list[Process] = []

    def look(self) -> list[Event]:
        """What has been heard since the last look. Asks again when it is time, and never twice without an answer."""
        ended = [process for process in self._given_up if process.poll() is not None]
        self._given_up = [process for process in self._given_up if process not in ended]
        heard = self._hear() if self._waits else None
        now_ns = self._platform.boot_ns()
        if not self._waits and now_ns - self._asked_ns >= ASK_NS:
            self._ask(now_ns)
        return [*(GivenUpEnded() for _ in ended), *([heard] if heard is not None else [])]

    def give_up(self, process: Process) -> None:
        """Kill it; it may hang in the kernel for as long as a disk does, so nobody waits. Its name is free then."""
        self._kill(process)
        self._given_up.append(process)
        remove_socket(self._platform, self._path)
        self.drop()

    def left(self) -> list[Process]:
        """Those that were given up and have not ended."""
        return [process for process in self._given_up if process.poll() is None]

    def drop(self) -> None:
        """Leave the connection: the next question goes to whoever listens then."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._received, self._waits = None, b"", False

    def _ask(self, now_ns: int) -> None:
        self._asked_ns = now_ns
        try:
            if self._socket is None:
                self._socket = self._platform.stream_connect(self._path, CONNECT_S)
                self._socket.setblocking(False)
            self._socket.sendall(b'{"op":"stand","id":1}\n')
            self._waits = True
        except OSError:
            self.drop()  # it does not listen yet, or any more

    def _hear(self) -> Stands | None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._received += data
        if not data or len(self._received) > ANSWER_BYTES_MAX:
            self.drop()
            return None
        line, whole, self._received = self._received.partition(b"\n")
        if not whole:
            self._received = line
            return None
        self._waits = False
        return parse_stands(line, self._platform.boot_ns())


def parse_stands(line: bytes, now_ns: int) -> Stands | None:
    """What a carrier says of itself; None for anything else."""
    fields = json_object(line, ANSWER_BYTES_MAX)
    if fields is None or fields.get("re") != "stands" or not is_count(fields.get("saves"), COUNT_MAX):
        return None
    hung, quarantine = fields.get("hung"), fields.get("quarantine")
    if not isinstance(hung, list) or not isinstance(quarantine, list) or len(hung) + len(quarantine) > HOMES_MAX:
        return None
    homes = [_hung(one) for one in hung]
    if not all(isinstance(path, str) for path in quarantine) or None in homes:
        return None
    return Stands(now_ns, fields["saves"], tuple(home for home in homes if home is not None), tuple(quarantine))


def _hung(one: Any) -> Hung | None:
    if not isinstance(one, dict):
        return None
    path, threads, seconds = one.get("path"), one.get("threads"), one.get("s")
    if not isinstance(path, str) or not isinstance(threads, int) or not is_count(threads, COUNT_MAX):
        return None
    if not isinstance(seconds, int | float):
        return None
    return Hung(path, threads, float(seconds))
