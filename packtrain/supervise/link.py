"""What carries messages between agents and their coordinator: TCP with CURVE (pyzmq), each node known by its key.

    Listener    the coordinator's end: who said it (proved by the key, not by what is said), and what
    Caller      an agent's end

Nothing here blocks. What cannot be sent is counted and dropped, what is no message, or comes from somebody else than it
says, is dropped and counted by cause: delivery.py repeats what matters. Strangers do not get past the handshake: the
folder of allowed keys is asked for each (ZAP, rfc.zeromq.org/spec/27), and read anew when it has changed.
Connections that end are made again, later and later up to `RECONNECT_MS_MAX`. One that dies without a word is noticed
by the agent, which hears its coordinator every two seconds (delivery.py) and calls anew; the coordinator's end of it is
taken away by TCP. Heartbeats of ZMQ are off: beside pulses they say nothing new, and they were half of all frames.
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

from packtrain.core.errors import RunUnusable, TooFewFiles
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
KEEPALIVE_S, KEEPALIVE_EACH_S, KEEPALIVE_MAX = 30, 10, 3
"""TCP asks a peer that said nothing for so long whether it is there, again each ten seconds, and gives it up then."""
UNACKNOWLEDGED_MS = 60_000
"""TCP gives up a peer that took nothing for so long."""
RECONNECT_MS, RECONNECT_MS_MAX = 100, 5000
HANDSHAKE_MS = 30_000
"""Thousands may be at the door at once."""
BACKLOG = 4096
LINGER_MS = 500
"""A last message may leave for so long."""
ALLOWED_AGE_NS = NS
"""How long a revoked node may still be heard. Also how coarse the times of a file system may be."""
READ_NS = NS // 5
"""How often the folder is read while it may have changed without a trace, for the sake of strangers who knock."""
SPARE_FILES = 256
"""What a coordinator has open beside its connections, and more."""
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


class Read(NamedTuple):
    """`taken`: messages that left the socket, those that were dropped among them."""

    arrived: list[Arrived]
    taken: int


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
        (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S), (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_EACH_S),
        (zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_MAX), (zmq.TCP_MAXRT, UNACKNOWLEDGED_MS),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS), (zmq.RECONNECT_IVL, RECONNECT_MS),
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
    """The coordinator's end, for `nodes` of them. `where`: tcp://host:port, port 0 for any that is free.

    Raises RunUnusable, BadValue, TooFewFiles.
    """

    def __init__(self, platform: Platform, home: str, where: str, nodes: int = 0) -> None:
        open_files(nodes)
        super().__init__()
        self._platform = platform
        public, secret = read_keys(platform, home)
        self._guests = Guests(platform, home)
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

    def receive(self) -> Read:
        """What has arrived, of `AT_ONCE_MAX` messages at most; strangers are answered on the way."""
        self._keep_door()
        self._guests.look(self._platform.boot_ns())
        arrived, taken = list[Arrived](), 0
        with suppress(zmq.ZMQError):
            while taken < AT_ONCE_MAX:
                peer = self._router.recv(zmq.NOBLOCK)
                taken += 1
                frame = self._router.recv(zmq.NOBLOCK, copy=False)
                if frame.more:
                    self._drop_rest()
                elif (one := self._one(peer, frame)) is not None:
                    arrived.append(one)
        return Read(arrived, taken)

    def _one(self, peer: bytes, frame: zmq.Frame) -> Arrived | None:
        node = str(frame.get("User-Id"))
        if node not in self._guests.nodes:
            self.dropped[STRANGER] += 1
            return None
        message = _unpack(frame.bytes, _from_agent, self.dropped)
        if message is not None and message.node != node:
            self.dropped[IMPOSTOR] += 1
            return None
        return None if message is None else Arrived(peer, node, message)

    def _drop_rest(self) -> None:
        """A message has two frames; the rest of this one is thrown away."""
        self.dropped[MALFORMED] += 1
        while self._router.recv(zmq.NOBLOCK, copy=False).more:
            continue

    def send(self, peer: bytes, message: FromCoordinator) -> bool:
        """False when it was dropped: no such connection, or it takes no more."""
        return self._send(self._router, peer, pack(message))

    def _keep_door(self) -> None:
        """Answer those who knock: 200 with the name of the node, or 400."""
        while (frames := self._frames(self._doorkeeper)) is not None:
            asked = [frame.bytes for frame in frames]
            key = z85.encode(asked[6]).decode() if len(asked) == 7 else ""
            node = self._guests.name(key, self._platform.boot_ns())
            self.dropped[STRANGER] += not node
            code, text = (b"200", b"welcome") if node else (b"400", b"this key is not allowed here")
            answer = (b"1.0", asked[1] if len(asked) > 1 else b"", code, text, node.encode(), b"")
            self._send(self._doorkeeper, *answer)


class Guests:
    """Who may come in: the folder of allowed keys, as it was at most `ALLOWED_AGE_NS` ago. Of 12,500 nodes a reading
    takes a good part of a second, so it is read where it has changed and not for each who knocks."""

    def __init__(self, platform: Platform, home: str) -> None:
        self.nodes: set[str] = set()
        """Names of all."""
        self._platform, self._folder, self._home = platform, f"{home}/{ALLOWED}", home
        self._names: dict[str, str] = {}
        """Key -> name."""
        self._looked_ns = self._changed_ns = self._read_ns = 0
        self._modified_s = -1.0

    def name(self, key: str, ns: int) -> str:
        """Of the node with this key; empty: it may not come in."""
        if key not in self._names:
            self._look(ns)
        return self._names.get(key, "")

    def look(self, ns: int) -> None:
        """Once in `ALLOWED_AGE_NS`, however often it is called."""
        if ns - self._looked_ns >= ALLOWED_AGE_NS:
            self._look(ns)

    def _look(self, ns: int) -> None:
        """Read what has changed, and once more when the change is old enough: another one in the same tick of the file
        system's clock shows nowhere. What cannot be read is as it was."""
        self._looked_ns = ns
        with suppress(OSError):
            modified_s = self._platform.modified_s(self._folder)
            if modified_s != self._modified_s:
                self._changed_ns = ns
            elif self._read_ns - self._changed_ns > ALLOWED_AGE_NS or ns - self._read_ns < READ_NS:
                return
            self._names = read_allowed(self._platform, self._home)
            self.nodes, self._modified_s, self._read_ns = set(self._names.values()), modified_s, ns


def open_files(connections: int) -> int:
    """How many files this process may have open now: as many as the machine lets it have. Raises TooFewFiles."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < connections + SPARE_FILES:
        raise TooFewFiles(
            f"{connections} nodes need a connection each, and this process may have {allowed} files open",
            where="RLIMIT_NOFILE (ulimit -Hn)",
            fix=f"raise the hard limit to {connections + SPARE_FILES} or more where it runs: LimitNOFILE of "
                "its service, or nofile in /etc/security/limits.conf",
        )
    return allowed


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
