"""Fake children and fake unix sockets, driven by virtual time."""

from __future__ import annotations

import errno
import signal
import socket
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from packtrain.core.fake_disk import FileNode, os_error
from packtrain.core.fake_schedule import FakeCrash
from packtrain.core.platform import Process
from packtrain.core.units import NS

if TYPE_CHECKING:
    from packtrain.core.fake import FakePlatform

DATAGRAMS_QUEUED_MAX = 10
"""What a Linux unix datagram socket holds before a sender gets EAGAIN (net.unix.max_dgram_qlen)."""

Life = Generator[float, None, int | None]
Program = Callable[["FakeProcess"], "int | Life | None"]


class FakeProcess(Process):
    """A child of a `FakePlatform`, scripted by a program.

    The program is called once with this process. It returns an exit code (ended at once), None (lives until a signal or
    `exit`), or is a generator that yields the seconds it sleeps and returns its exit code. Signals in `catches` are put
    into `signals` and wake a sleeping generator; any other ends it.
    """

    def __init__(self, parent: FakePlatform, own: FakePlatform, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.pid = 1000 + own.serial
        self.argv, self.env = list(argv), dict(env)
        self.platform = own
        """The process's own door; dead when the process is."""
        self.catches: set[int] = set()
        self.signals: list[int] = []
        self.log_path: str | None = None
        self._parent = parent
        self._code: int | None = None
        self._life: Life | None = None
        self._wake = 0

    def start(self, program: Program) -> None:
        try:
            result = program(self)
        except FakeCrash:
            self.exit(-signal.SIGKILL)
            return
        if isinstance(result, int):
            self.exit(result)
        elif result is not None:
            self._life = result
            self._resume(self._wake)

    def print(self, text: str) -> None:
        """Append to the log the parent asked for."""
        if self.log_path is not None and self._code is None:
            disk = self.platform.disk
            disk.append(disk.find_file(self.log_path), text.encode(), self.log_path)

    def exit(self, code: int) -> None:
        """End with `code` (negative: the signal); the first end counts."""
        if self._code is None:
            self._code = code
            self._life = None
            self.platform.kill()

    def poll(self) -> int | None:
        self._parent.step("poll", str(self.pid))
        return self._code

    def wait(self, timeout_s: float | None = None) -> int | None:
        self._parent.step("wait", str(self.pid))
        self._parent.until(lambda: self._code is not None, timeout_s)
        return self._code

    def send_signal(self, signum: int) -> None:
        self._parent.step("signal", str(self.pid))
        self.receive(signum)

    def receive(self, signum: int) -> None:
        """What the kernel does with a signal for this process."""
        if self._code is not None:
            return
        if signum not in self.catches or signum == signal.SIGKILL:
            self.exit(-signum)
            return
        self.signals.append(signum)
        if self._life is not None:
            self._resume(self._wake)

    def _resume(self, wake: int) -> None:
        if self._life is None or wake != self._wake:
            return
        self._wake += 1
        try:
            seconds = next(self._life)
        except StopIteration as end:
            self.exit(end.value or 0)
        except FakeCrash:
            self.exit(-signal.SIGKILL)
        else:
            clock, token = self.platform.disk.clock, self._wake
            clock.at(clock.now_ns + int(seconds * NS), lambda: self._resume(token))


class FakeSocket(socket.socket):
    """The part of a unix socket's interface that Packtrain uses, without a descriptor (`fileno()` is -1)."""

    def __init__(self, platform: FakePlatform, path: str, kind: str) -> None:
        self._platform, self._path, self._kind = platform, path, kind
        self._inbox: deque[bytes] = deque()
        self._waiting: deque[FakeSocket] = deque()
        self._peer: FakeSocket | None = None
        self._ended = self._shut = False
        self._timeout_s: float | None = None
        platform.sockets.append(self)

    # The timeout, as in `socket`: None blocks, 0 never blocks.
    def settimeout(self, value: float | None) -> None:
        self._timeout_s = value

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def fileno(self) -> int:
        return -1

    def getsockname(self) -> str:
        return self._path

    def bind_to(self, node: FileNode) -> None:
        node.listener = self

    def close(self) -> None:
        self._ended = True
        if self._peer is not None:
            self._peer._shut = True
        for waiting in self._waiting:
            waiting.close()

    @property
    def ended(self) -> bool:
        return self._ended

    def _open(self) -> None:
        if self._ended:
            raise os_error(errno.EBADF, self._path)

    def _await(self, ready: Callable[[], bool]) -> None:
        """BlockingIOError or TimeoutError, as `socket` raises them, when not ready in time."""
        if ready():
            return
        if self._timeout_s == 0:
            raise os_error(errno.EAGAIN, self._path)
        self._platform.until(ready, self._timeout_s)
        self._open()
        if not ready():
            raise TimeoutError("timed out")

    # --- a stream's listener ---

    def accept(self) -> tuple[socket.socket, Any]:
        self._platform.step("accept", self._path)
        self._open()
        self._await(lambda: bool(self._waiting) or self._ended)
        return self._waiting.popleft(), ""

    def join(self, client: FakeSocket) -> None:
        """A client connects: its other end waits here to be accepted."""
        server = FakeSocket(self._platform, self._path, "stream")
        server._peer, client._peer = client, server
        self._waiting.append(server)

    # --- bytes and datagrams ---

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        self._platform.step("recv", self._path)
        self._open()
        self._await(lambda: bool(self._inbox) or self._shut or self._ended)
        if not self._inbox:
            return b""
        data = self._inbox.popleft()
        if self._kind == "stream" and len(data) > bufsize:
            self._inbox.appendleft(data[bufsize:])
        return data[:bufsize]

    def send(self, data: Any, flags: int = 0) -> int:
        self.sendall(data)
        return len(data)

    def sendall(self, data: Any, flags: int = 0) -> None:
        message = bytes(data)
        self._platform.step(
            "send", self._path, lambda: self._deliver(message), lambda share: self._tear(message, share)
        )

    def _deliver(self, message: bytes) -> None:
        self._open()
        if self._peer is None or self._peer._ended or self._shut:
            raise os_error(errno.EPIPE, self._path)
        if message:
            self._peer._inbox.append(message)

    def _tear(self, message: bytes, share: float) -> None:
        """The other side gets the first part and then the end of the stream."""
        self._deliver(message[: int(len(message) * share)])
        self.close()

    def put(self, message: bytes) -> None:
        """A datagram arrives; EAGAIN when the queue is full."""
        if len(self._inbox) >= DATAGRAMS_QUEUED_MAX:
            raise os_error(errno.EAGAIN, self._path)
        self._inbox.append(message)
