"""The socket on which a person's commands reach the coordinator: a line of JSON, a line of JSON in answer.

It lies in the coordinator's home, which only its user can enter; there is no other proof of who asks. Nothing here
waits: a client that is slow is heard at a later look, one that says too much or nothing, or has hung up, is dropped.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from packtrain.core.platform import Platform
from packtrain.core.units import NS
from packtrain.core.wire import json_object
from packtrain.supervise.console import OPERATOR
from packtrain.supervise.sockets import remove_socket

LINE_BYTES_MAX = 64 << 10
CLIENTS_MAX = 32
PATIENCE_NS = 5 * NS
Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Operator:
    """Listens in `home`. `answer`: what is said to a request. Raises OSError where it cannot listen."""

    def __init__(self, platform: Platform, home: str, answer: Answer) -> None:
        self._platform, self._answer = platform, answer
        self.path = f"{home}/{OPERATOR}"
        remove_socket(platform, self.path)
        self._listener = platform.stream_listener(self.path)
        self._listener.setblocking(False)
        self._clients: dict[socket.socket, tuple[int, bytes]] = {}
        """Client -> (since when, what it has said)."""

    def sockets(self) -> list[socket.socket]:
        """What to wait for."""
        return [self._listener, *self._clients]

    def look(self) -> None:
        """Take who is new, answer who has asked, drop who is slow."""
        with suppress(OSError):
            while len(self._clients) < CLIENTS_MAX:
                client, _ = self._listener.accept()
                client.setblocking(False)
                self._clients[client] = (self._platform.boot_ns(), b"")
        for client in list(self._clients):
            self._hear(client)

    def _hear(self, client: socket.socket) -> None:
        since, said = self._clients[client]
        try:
            more = client.recv(LINE_BYTES_MAX)
        except BlockingIOError:
            if self._platform.boot_ns() - since > PATIENCE_NS:
                self._drop(client)
            return
        except OSError:
            more = b""
        said += more
        if b"\n" in said:
            self._reply(client, said.partition(b"\n")[0])
        elif not more or len(said) > LINE_BYTES_MAX:
            self._drop(client)
        else:
            self._clients[client] = (since, said)

    def _reply(self, client: socket.socket, line: bytes) -> None:
        """Of who has hung up no word is taken: it has told its person that nobody answered. An answer that does not fit
        into the socket's buffer is one that nobody waits for."""
        if _hung_up(client):
            self._drop(client)
            return
        request = json_object(line, LINE_BYTES_MAX)
        answer = refused("this is no request") if request is None else self._answer(request)
        with suppress(OSError):
            client.settimeout(0.5)
            client.sendall(msgspec.json.encode(answer) + b"\n")
        self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        del self._clients[client]
        client.close()

    def close(self, remove: bool = True) -> None:
        """`remove`: the socket's name, too; not where another one may listen under it now."""
        for client in list(self._clients):
            self._drop(client)
        self._listener.close()
        if remove:
            remove_socket(self._platform, self.path)


def _hung_up(client: socket.socket) -> bool:
    """Whether a client whose request was read has closed its end."""
    try:
        return not client.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def refused(what: str, where: str = "") -> dict[str, Any]:
    """The answer to what cannot be done."""
    error = {"name": "usage", "what": what, "where": where, "fix": "packtrain ps shows the run and its nodes"}
    return {"ok": False, "error": error}
