"""What carries messages between agents and their coordinator: TCP with CURVE (pyzmq), each node known by its key.

    Listener    the coordinator's end: who said it (proved by the key, not by what is said), and what
    Caller      an agent's end

Nothing here blocks. What cannot be sent is counted and dropped, what is no message, or comes from somebody else than it
says, is dropped and counted by cause: delivery.py repeats what matters. Strangers do not get past the handshake: the
folder of allowed keys is asked for each (ZAP, rfc.zeromq.org/spec/27), and read anew when it has changed.
Connections that die without a word are noticed by heartbeats and made again, later and later up to `RECONNECT_MS_MAX`.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from packtrain.core.errors import RunUnusable
from packtrain.core.platform import Platform
from packtrain.core.units import NS
from packtrain.supervise.keys import ALLOWED, Address, read_allowed, read_keys
from packtrain.supervise.messages import FromAgent, FromCoordinator

VERSION = b"\x01"
"""First byte of a message: another one is of a version that is not understood."""
MESSAGE_BYTES_MAX = 1 << 20
QUEUED_MAX = 1000
"""Messages, for each connection and way."""
AT_ONCE_MAX = 1000
"""Messages taken at one look."""
HEARTBEAT_MS, HEARTBEAT_LATE_MS = 2000, 6000
RECONNECT_MS, RECONNECT_MS_MAX = 100, 5000
HANDSHAKE_MS = 10_000
BACKLOG = 4096
LINGER_MS = 500
"""A last message may leave for so long."""
ALLOWED_AGE_NS = NS
"""How long a revoked node may still be heard. Also how coarse the times of a file system may be."""
ZAP = "inproc://zeromq.zap.01"
UNSENT, STRANGER, MALFORMED, OTHER_VERSION, IMPOSTOR = "unsent", "stranger", "malformed", "other version", "impostor"

_encode = msgspec.msgpack.Encoder().encode
_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator).decode


class Arrived(NamedTuple):
    """`peer`: where to answer, until its connection ends. `node`: whose key it is."""

    peer: bytes
    node: str
    message: FromAgent


def pack(message: FromAgent | FromCoordinator) -> bytes:
    return VERSION + _encode(message)


def _unpack(data: bytes, decode: Callable[[bytes], Any], dropped: Counter[str]) -> Any:
    """The message, or None: then why is counted."""
    if data[:1] != VERSION:
        dropped[OTHER_VERSION] += 1
        return None
    try:
        return decode(data[1:])
    except (msgspec.DecodeError, RecursionError):
        dropped[MALFORMED] += 1
        return None


def _bounded(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    for option, value in (
        (zmq.SNDHWM, QUEUED_MAX), (zmq.RCVHWM, QUEUED_MAX), (zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_LATE_MS),
        (zmq.HEARTBEAT_TTL, HEARTBEAT_LATE_MS), (zmq.HANDSHAKE_IVL, HANDSHAKE_MS), (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX), (zmq.BACKLOG, BACKLOG), (zmq.LINGER, LINGER_MS),
    ):
        socket.setsockopt(option, value)
    return socket


class _Ends:
    """What both ends have: sockets that are waited for, together with descriptors of others."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.dropped: Counter[str] = Counter()
        """Messages, by cause."""
        self._shared = context is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = context or zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def wait(self, timeout_s: float, also: Iterable[Any] = ()) -> None:
        """Until something arrived here or at one of `also` (descriptors or sockets), or `timeout_s` passed."""
        poller = zmq.Poller()
        for one in (*self._sockets, *also):
            poller.register(one, zmq.POLLIN)
        with suppress(InterruptedError):
            poller.poll(max(0, round(timeout_s * 1000)))

    def _send(self, socket: zmq.Socket[bytes], *frames: bytes) -> bool:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
            return True
        except zmq.ZMQError:
            self.dropped[UNSENT] += 1
            return False

    def _frames(self, socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
        try:
            return socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return None

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        if not self._shared:
            self._context.term()


class Listener(_Ends):
    """The coordinator's end. `where`: tcp://host:port, port 0 for any that is free. Raises RunUnusable, BadValue."""

    def __init__(self, platform: Platform, home: str, where: str) -> None:
        super().__init__()
        self._platform, self._home = platform, home
        public, secret = read_keys(platform, home)
        self._allowed: dict[str, str] = {}
        self._nodes: set[str] = set()
        self._looked_ns = self._changed_ns = 0
        self._modified_s = -1.0
        _open_files()
        self._doorkeeper = self._context.socket(zmq.REP)
        self._doorkeeper.bind(ZAP)
        self._router = _bounded(self._context.socket(zmq.ROUTER))
        self._sockets = [self._doorkeeper, self._router]
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.curve_server, self._router.curve_secretkey = True, secret.encode()
        self._router.zap_domain = b"packtrain"
        self._bind(where)
        bound = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.address = Address(address=bound.rstrip(b"\0").decode(), server_key=public)

    def _bind(self, where: str) -> None:
        try:
            self._router.bind(where.removesuffix(":0") + ":*" if where.endswith(":0") else where)
        except zmq.ZMQError as error:
            self.close()
            raise RunUnusable(
                f"nobody can listen there: {error}", where=where,
                fix="choose another address or port, or stop what listens there",
            ) from error

    def receive(self) -> list[Arrived]:
        """What has arrived, at most `AT_ONCE_MAX`; strangers are answered on the way."""
        self._keep_door()
        self._look_at_allowed()
        arrived = []
        for _ in range(AT_ONCE_MAX):
            frames = self._frames(self._router)
            if frames is None:
                break
            one = self._one(frames)
            if one is not None:
                arrived.append(one)
        return arrived

    def _one(self, frames: list[zmq.Frame]) -> Arrived | None:
        if len(frames) != 2:
            self.dropped[MALFORMED] += 1
            return None
        node = str(frames[1].get("User-Id"))
        if node not in self._nodes:
            self.dropped[STRANGER] += 1
            return None
        message = _unpack(frames[1].bytes, _from_agent, self.dropped)
        if message is not None and message.node != node:
            self.dropped[IMPOSTOR] += 1
            return None
        return None if message is None else Arrived(frames[0].bytes, node, message)

    def send(self, peer: bytes, message: FromCoordinator) -> bool:
        """False when it was dropped: no such connection, or it takes no more."""
        return self._send(self._router, peer, pack(message))

    def _keep_door(self) -> None:
        """Answer those who knock: 200 with the name of the node, or 400."""
        while (frames := self._frames(self._doorkeeper)) is not None:
            asked = [frame.bytes for frame in frames]
            self._look_at_allowed(now=True)
            node = self._allowed.get(z85.encode(asked[6]).decode(), "") if len(asked) == 7 else ""
            self.dropped[STRANGER] += not node
            code, text = (b"200", b"welcome") if node else (b"400", b"this key is not allowed here")
            answer = (b"1.0", asked[1] if len(asked) > 1 else b"", code, text, node.encode(), b"")
            self._send(self._doorkeeper, *answer)

    def _look_at_allowed(self, now: bool = False) -> None:
        """Read the folder where it has changed since it was read. What cannot be read is as it was."""
        ns = self._platform.boot_ns()
        if not now and ns - self._looked_ns < ALLOWED_AGE_NS:
            return
        self._looked_ns = ns
        with suppress(OSError):
            modified_s = self._platform.modified_s(f"{self._home}/{ALLOWED}")
            if modified_s != self._modified_s:
                self._changed_ns = ns
            if ns - self._changed_ns <= ALLOWED_AGE_NS:
                self._allowed = read_allowed(self._platform, self._home)
                self._nodes, self._modified_s = set(self._allowed.values()), modified_s


def _open_files() -> None:
    """As many connections as this machine lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard)) if soft != hard else None


class Caller(_Ends):
    """An agent's end; many of one process may share a context. Raises RunUnusable, BadValue."""

    def __init__(
        self, platform: Platform, home: str, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        super().__init__(context)
        self._keys = read_keys(platform, home)

    def call(self, address: Address) -> None:
        """From now on to this coordinator, on a new connection. What was on its way on the old one may be lost."""
        for old in self._sockets:
            old.close(0)
        socket = _bounded(self._context.socket(zmq.DEALER))
        self._sockets = [socket]
        public, secret = self._keys
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a connection that is not there
        socket.curve_publickey, socket.curve_secretkey = public.encode(), secret.encode()
        try:
            socket.curve_serverkey = address.server_key.encode()
            socket.connect(address.address)
        except zmq.ZMQError:
            socket.close(0)
            self._sockets = []

    def send(self, message: FromAgent) -> bool:
        """False when it was dropped: there is no connection, or it takes no more."""
        return bool(self._sockets) and self._send(self._sockets[0], pack(message))

    def receive(self) -> list[FromCoordinator]:
        """What has arrived, at most `AT_ONCE_MAX`."""
        arrived: list[FromCoordinator] = []
        for _ in range(AT_ONCE_MAX if self._sockets else 0):
            frames = self._frames(self._sockets[0])
            if frames is None:
                break
            message = _unpack(b"".join(frame.bytes for frame in frames), _from_coordinator, self.dropped)
            if message is not None:
                arrived.append(message)
        return arrived
