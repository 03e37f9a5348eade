"""The link between carriers: one asks, the other answers, over TCP that both ends encrypt with the run's certificate.

A frame, both ways:

    "PTL1"  u32 header bytes  u64 body bytes  u32 crc32c of the header     big endian, 20 bytes
    header  a JSON object; of a request `op` names what is asked, of a reply `error` says that it was refused
    body    in chunks of CHUNK_BYTES, the last one shorter; after each its crc32c as u32

The body is made, sent, checked and taken a chunk at a time, so bulk of any size needs one chunk of memory. The checksum
is taken where the bytes are read and checked where they arrived: whatever changed them between is found.
Blocking sockets, a thread for each connection; every wait has a bound. A connection that breaks, or whose frames are
none, is closed: who asked asks again over a new one, and what is asked must allow for that.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.core.errors import PacktrainError, PeerLost, error_named
from packtrain.core.pinned import Pinned
from packtrain.core.platform import Platform
from packtrain.core.transfer import Rate, Throttle, unlimited
from packtrain.core.units import NS
from packtrain.core.wire import json_object

MAGIC = b"PTL1"
HEADER_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 1 << 50
CHUNK_BYTES = 4 << 20
PIECE_BYTES = 1 << 18
"""What a capped sender sends at once."""
CONNECT_S = 10.0
"""To connect and to show the certificate, each side."""
STALL_S = 30.0
"""Without one byte moving, inside a frame."""
HEADER_S = 10.0
"""From the first byte of a frame to the end of its header."""
IDLE_S = 120.0
"""A connection on which nothing is asked is closed."""
REQUEST_S = 86_400.0
"""One request and its answer, at most."""
DRAIN_BYTES_MAX = 64 << 20
"""Of a body that nobody wanted; beyond that the connection is closed."""
CONNECTIONS_MAX = 1024
GREETING_MAX = 64
"""Connections that have not shown the certificate yet."""
ACCEPT_AGAIN_S = 0.1
STRANGER, CROWDED, MALFORMED, BROKEN = "stranger", "crowded", "malformed", "broken"
"""Why a connection was closed here."""
_PROLOGUE = struct.Struct(">4sIQI")
_CRC = struct.Struct(">I")

Read = Callable[[int, memoryview], None]
"""Fill the view with the bytes from that offset on, or raise OSError."""
Write = Callable[[int, memoryview], None]
"""Take the bytes that belong at that offset; the view is used again afterwards."""


class Body(NamedTuple):
    """Bulk to send: so many bytes, read a chunk at a time."""

    bytes: int
    read: Read


def body_of(data: bytes) -> Body:
    """Bytes at hand, as a body."""
    view = memoryview(data)

    def read(offset: int, chunk: memoryview) -> None:
        chunk[:] = view[offset : offset + len(chunk)]

    return Body(len(data), read)


class Reply(NamedTuple):
    header: dict[str, Any]
    body: Body | None = None


class Request:
    """What arrived, in the thread of its connection. The body waits on the wire until it is taken, once."""

    def __init__(self, stream: _Stream, header: dict[str, Any], size: int, end_ns: int) -> None:
        self.header = header
        self.bytes = size
        """Of the body."""
        self._stream, self._end_ns = stream, end_ns
        self._left = size

    def take(self, write: Write) -> None:
        """Hand the body to `write`, chunk by chunk, each checked. What `write` raises is raised once the rest is gone.

        Where the connection breaks, what is raised must pass through: it ends the conversation.
        """
        size, self._left = self._left, 0
        self._stream.receive_body(size, write, self._end_ns)

    def data(self, bytes_max: int) -> bytes:
        """The body in memory; one larger than `bytes_max` ends the conversation."""
        if self._left > bytes_max:
            raise _Lost(MALFORMED, f"a body of {self._left} bytes, where at most {bytes_max} make sense")
        data = bytearray(self._left)

        def write(offset: int, chunk: memoryview) -> None:
            data[offset : offset + len(chunk)] = chunk

        self.take(write)
        return bytes(data)

    def drain(self) -> None:
        """Read on to the end of a body that nobody took, so that the reply is heard."""
        if self._left > DRAIN_BYTES_MAX:
            raise _Lost(BROKEN, f"nobody wanted a body of {self._left} bytes")
        self.take(lambda offset, chunk: None)


Answer = Callable[[Request], Reply]
"""Runs in the thread of the connection, in bounded time. What it raises is the reply: it costs one request."""


class LinkServer:
    """Answers other carriers. `answers`: op -> who answers it; may grow before `start`.

    `pinned` None: a trusted network, plain TCP. `rate`: cap of each reply's body, bytes a second.
    """

    def __init__(
        self, platform: Platform, host: str, pinned: Pinned | None, answers: dict[str, Answer], rate: Rate = unlimited,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._platform, self._pinned, self._rate = platform, pinned, rate
        self._connections_max = connections_max
        self.answers = answers
        self.dropped: Counter[str] = Counter()
        """How many connections were closed, and why."""
        self._listener = platform.tcp_listener(host)
        self._lock = threading.Lock()
        self._greeting = 0
        self._open: set[socket.socket] = set()
        self._stopped = False
        bound_host, port, *_ = self._listener.getsockname()
        self.address = render_address(bound_host, port)

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True, name="link").start()

    def stop(self) -> None:
        """Close everything; answers under way find their connection gone."""
        with self._lock:
            self._stopped = True
            connections = list(self._open)
        for sock in (self._listener, *connections):
            with suppress(OSError):  # of the socket itself: TLS's own would pull the object from under its thread
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopped:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # stopped; or too many files are open here
                if not self._stopped:
                    self._platform.sleep(ACCEPT_AGAIN_S)
                continue
            if self._has_room():
                threading.Thread(target=self._converse, args=[sock], daemon=True, name="link").start()
            else:
                self._drop(CROWDED)
                sock.close()

    def _has_room(self) -> bool:
        with self._lock:
            room = self._greeting < GREETING_MAX and self._greeting + len(self._open) < self._connections_max
            self._greeting += room
        return room

    def _drop(self, kind: str) -> None:
        with self._lock:
            self.dropped[kind] += not self._stopped

    def _converse(self, sock: socket.socket) -> None:
        """In the thread of one connection, from the handshake to its end."""
        greeted = self._greeted(sock)
        if greeted is None:
            return
        try:
            stream = _Stream(self._platform, greeted, self._rate)
            while not self._stopped and self._answered(stream):
                pass
        finally:
            with self._lock:
                self._open.discard(greeted)
            greeted.close()

    def _greeted(self, sock: socket.socket) -> socket.socket | None:
        greeted = None
        try:
            sock.settimeout(CONNECT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeted = sock if self._pinned is None else self._pinned.wrap(sock, server_side=True)
        except OSError:
            self._drop(STRANGER)
            sock.close()
        with self._lock:
            self._greeting -= 1
            self._open |= {greeted} if greeted is not None else set()
        return greeted

    def _answered(self, stream: _Stream) -> bool:
        """One request and its reply; False: the connection is over."""
        try:
            head = stream.receive_header(IDLE_S, REQUEST_S)
            if head is None:
                return False
            request = Request(stream, *head)
            reply = self._reply(request)
            request.drain()
            stream.send(reply.header, reply.body, head.end_ns)
            return True
        except _Lost as lost:
            self._drop(lost.kind)
        except OSError:  # what was to be sent cannot be read
            self._drop(BROKEN)
        return False

    def _reply(self, request: Request) -> Reply:
        answer = self.answers.get(str(request.header.get("op")))
        if answer is None:
            return Reply({"error": PeerLost("nobody here answers this", where=self.address).as_dict()})
        try:
            return answer(request)
        except PacktrainError as error:
            return Reply({"error": error.as_dict()})
        except _Lost:
            raise
        except Exception as error:  # a fault of ours, or of a disk, must cost one request and not the carrier
            found = PeerLost(f"{type(error).__name__}: {error}", where=self.address, fix="please report this")
            return Reply({"error": found.as_dict()})


class LinkClient:
    """Asks one other carrier, from one thread. Connects when it must; after a failure the next call connects anew.

    `find` says where that carrier is now, `host:port`; it may raise PeerLost. `rate`: cap of what is sent.
    """

    def __init__(
        self, platform: Platform, find: Callable[[], str], pinned: Pinned | None, rate: Rate = unlimited
    ) -> None:
        self._platform, self._find, self._pinned, self._rate = platform, find, pinned, rate
        self._stream: _Stream | None = None
        self._address = ""

    def ask(
        self, header: dict[str, Any], body: Body | None = None, take: Callable[[int], Write] | None = None,
        *, timeout_s: float,
    ) -> dict[str, Any]:
        """The reply. `take` is told how many bytes come with it, and returns who takes them.

        Raises PeerLost where no whole reply comes in time, the error that the other side answered with, and what
        reading `body` or taking the reply raised.
        """
        end_ns = self._platform.boot_ns() + int(timeout_s * NS)
        try:
            reply = self._asked(header, body, take, end_ns)
        except BaseException as error:
            self.close()
            if not isinstance(error, _Lost):
                raise
            raise PeerLost(
                f"the carrier of another node does not answer: {error}", where=self._address,
                fix="nothing: it is asked again; where this stays, see its log (packtrain logs RUN carrier)",
            ) from error
        if "error" in reply:
            raise _error(reply["error"])
        return reply

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _asked(
        self, header: dict[str, Any], body: Body | None, take: Callable[[int], Write] | None, end_ns: int
    ) -> dict[str, Any]:
        if self._stream is None:
            self._stream = self._connected()
        self._stream.send(header, body, end_ns)
        left_s = max(0.0, (end_ns - self._platform.boot_ns()) / NS)
        head = self._stream.receive_header(left_s, left_s)
        if head is None:
            raise _Lost(BROKEN, "it hung up, or said nothing")
        reply, size, _ = head
        if size and take is None:
            raise _Lost(MALFORMED, f"a reply with {size} bytes that nobody asked for")
        if take is not None and "error" not in reply:
            self._stream.receive_body(size, take(size), end_ns)
        return reply

    def _connected(self) -> _Stream:
        self._address = self._find()
        try:
            sock = self._platform.tcp_connect(*parse_address(self._address), CONNECT_S)
            if self._pinned is not None:
                sock = self._pinned.wrap(sock, server_side=False)
        except OSError as error:
            raise _Lost(BROKEN, str(error)) from error
        return _Stream(self._platform, sock, self._rate)


# --- frames --------------------------------------------------------------------------------------------


class _Lost(Exception):
    """The conversation cannot go on: the connection broke, or what came is no frame."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class _Head(NamedTuple):
    header: dict[str, Any]
    body_bytes: int
    end_ns: int
    """When the whole exchange must be over."""


class _Stream:
    """Frames over one connection; used by one thread. Raises _Lost."""

    def __init__(self, platform: Platform, sock: socket.socket, rate: Rate) -> None:
        self._platform, self._sock, self._rate = platform, sock, rate

    def close(self) -> None:
        self._sock.close()

    def send(self, header: dict[str, Any], body: Body | None, end_ns: int) -> None:
        data = json.dumps(header, separators=(",", ":")).encode()
        if len(data) > HEADER_BYTES_MAX:
            raise _Lost(MALFORMED, f"a header of {len(data)} bytes is too long")
        size = body.bytes if body is not None else 0
        self._send(memoryview(_PROLOGUE.pack(MAGIC, len(data), size, fmt.crc32c(data)) + data), end_ns)
        if body is not None and size:
            self._send_body(body, end_ns)

    def _send_body(self, body: Body, end_ns: int) -> None:
        throttle = Throttle(self._platform, self._rate, lambda: self._limit(end_ns))
        buffer = memoryview(bytearray(min(CHUNK_BYTES, body.bytes)))
        for offset in range(0, body.bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, body.bytes - offset)]
            body.read(offset, chunk)
            crc = _sum(chunk)
            for at in range(0, len(chunk), PIECE_BYTES):
                piece = chunk[at : at + PIECE_BYTES]
                throttle.take(len(piece))
                self._send(piece, end_ns)
            self._send(memoryview(_CRC.pack(crc)), end_ns)

    def receive_header(self, idle_s: float, whole_s: float) -> _Head | None:
        """The next frame up to its body; None: the other side has left between frames, or asked nothing."""
        begin_ns = self._platform.boot_ns()
        prologue = memoryview(bytearray(_PROLOGUE.size))
        try:
            self._limit(begin_ns + int(idle_s * NS), idle_s)
            n = self._sock.recv_into(prologue)
        except TimeoutError:
            return None
        except OSError as error:
            raise _Lost(BROKEN, str(error)) from error
        if n == 0:
            return None
        now_ns = self._platform.boot_ns()
        end_ns = now_ns + int(HEADER_S * NS)
        self._fill(prologue[n:], end_ns)
        magic, size, body_bytes, crc = _PROLOGUE.unpack(prologue)
        if magic != MAGIC or size > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
            raise _Lost(MALFORMED, "this is no frame")
        data = bytearray(size)
        self._fill(memoryview(data), end_ns)
        header = json_object(bytes(data), HEADER_BYTES_MAX) if fmt.crc32c(bytes(data)) == crc else None
        if header is None:
            raise _Lost(MALFORMED, "a header that is damaged or no JSON object")
        return _Head(header, body_bytes, begin_ns + int(whole_s * NS))

    def receive_body(self, size: int, write: Write, end_ns: int) -> None:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, size)))
        crc = memoryview(bytearray(_CRC.size))
        for offset in range(0, size, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, size - offset)]
            self._fill(chunk, end_ns)
            self._fill(crc, end_ns)
            if _CRC.unpack(crc) != (_sum(chunk),):
                raise _Lost(MALFORMED, f"bytes {offset} to {offset + len(chunk)} were changed on the way")
            try:
                write(offset, chunk)
            except Exception:
                self._skip(size - offset - len(chunk), end_ns)
                raise

    def _skip(self, size: int, end_ns: int) -> None:
        """The rest of a body that could not be taken: read, so that a reply is heard."""
        if size > DRAIN_BYTES_MAX:
            raise _Lost(BROKEN, f"a body could not be taken, and {size} bytes of it were to come")
        self.receive_body(size, lambda offset, chunk: None, end_ns)

    def _send(self, data: memoryview, end_ns: int) -> None:
        while data:
            self._limit(end_ns)
            try:
                data = data[self._sock.send(data) :]
            except OSError as error:
                raise _Lost(BROKEN, str(error)) from error

    def _fill(self, view: memoryview, end_ns: int) -> None:
        while view:
            self._limit(end_ns)
            try:
                n = self._sock.recv_into(view)
            except OSError as error:
                raise _Lost(BROKEN, str(error)) from error
            if n == 0:
                raise _Lost(BROKEN, "it hung up")
            view = view[n:]

    def _limit(self, end_ns: int, stall_s: float = STALL_S) -> None:
        """Of the next wait."""
        left_s = (end_ns - self._platform.boot_ns()) / NS
        if left_s <= 0:
            raise _Lost(BROKEN, "no time left")
        self._sock.settimeout(min(left_s, stall_s))


def _sum(chunk: memoryview) -> int:
    return fmt.crc32c(np.frombuffer(chunk, np.uint8))


def _error(told: object) -> PacktrainError:
    """The error that a reply tells of, whatever it holds."""
    fields = told if isinstance(told, dict) else {}
    return error_named(*(str(fields.get(key, "")) for key in ("name", "what", "where", "fix")))


# --- addresses -----------------------------------------------------------------------------------------


def render_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Raises OSError for anything but `host:port`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise OSError(f"{address!r} is no host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def address_of(platform: Platform, peers: str, node: str) -> str:
    """Where the carrier of `node` is, by the file `peers` (JSON, node -> host:port), read anew each time: it is
    replaced whenever a carrier somewhere was. Raises PeerLost."""
    who = f"the carrier of node {node} is"
    known = known_peers(platform, peers, who)
    if node not in known:
        raise _nowhere(who, peers, "that node is not in it")
    return known[node]


def known_peers(platform: Platform, peers: str, who: str = "the other carriers are") -> dict[str, str]:
    """Node -> host:port, of the carriers that are up. Raises PeerLost."""
    try:
        return msgspec.json.decode(platform.read(peers), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _nowhere(who, peers, str(error)) from error


def _nowhere(who: str, peers: str, why: str) -> PeerLost:
    return PeerLost(
        f"nobody knows where {who}: {why}", where=peers,
        fix="nothing: the agents write this file when that carrier is up; it is read again",
    )


def write_address(platform: Platform, socket_path: str, address: str) -> None:
    """Tell the agent where others reach this carrier: `<socket>.address`."""
    platform.write_replacing(f"{socket_path}.address", msgspec.json.encode({"address": address}))
