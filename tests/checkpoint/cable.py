"""A cable between two carriers that a test can cut, hold, or make lie: a TCP proxy on loopback."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

Tamper = Callable[[bytes], bytes]


class Cable:
    """Passes bytes on between whoever connects to `address` and `target()`, until it is cut or told otherwise."""

    def __init__(self, target: Callable[[], str]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.tamper: Tamper = lambda data: data
        """What becomes of bytes on their way to `target`."""
        self.joined = 0
        """Connections made so far."""
        self.cut_after = -1
        """Cut everything once this many more bytes were passed on; -1: never."""
        self.refuses = False
        """Whether new connections are closed at once."""
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._forward: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ends = True
        self._waker.send(b"!")
        self._thread.join()
        for sock in (self._listener, self._woken, self._waker):
            sock.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ends:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._join()
                elif key.fileobj in self._pairs:
                    self._pass(key.fileobj)
        self._cut()

    def _join(self) -> None:
        near, _ = self._listener.accept()
        host, _, port = self._target().rpartition(":")
        try:
            if self.refuses:
                raise ConnectionRefusedError
            far = socket.create_connection((host, int(port)))
        except OSError:
            near.close()
            return
        self.joined += 1
        self._forward.add(near)
        self._pairs |= {near: far, far: near}
        for sock in (near, far):
            self._selector.register(sock, selectors.EVENT_READ)

    def _pass(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 16)
            if data and sock in self._forward:
                data = self.tamper(data)
            if self.cut_after >= 0:
                data = data[: self.cut_after]
                self.cut_after -= len(data)
            self._pairs[sock].sendall(data)
        except OSError:
            data = b""
        if self.cut_after == 0:
            self.cut_after = -1
            self._cut()
        elif not data:
            self._unjoin(sock)

    def _cut(self) -> None:
        for sock in list(self._forward):
            self._unjoin(sock)

    def _unjoin(self, sock: socket.socket) -> None:
        for one in (sock, self._pairs[sock]):
            with contextlib.suppress(KeyError):
                self._selector.unregister(one)
            self._pairs.pop(one)
            self._forward.discard(one)
            one.close()
