"""A save, handed to the carrier of this node: the client's end of `PACKTRAIN_CARRIER`. Standard library only."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any, Literal

# Relative, so that a copy of this folder works under any name.
from .errors import CarrierLost
from .wire import json_object

LINE_BYTES_MAX = 1 << 20
LOOK_S = 0.5
"""How often a client that waits for its carrier looks whether it is still the one."""


class CarrierClient:
    """Hands saves to the carrier: JSON lines over a unix stream, from one thread. No call waits past its deadline.

    An offer carries an `id` of the caller's. It is answered `accepted` or `busy` at once; each accepted offer has
    exactly one outcome later, a dict with that `id`. When the carrier dies, or another one listens at its path because
    it was given up, the outcome of what it had accepted says so under `error` (whether it was published is then not
    known), and the next offer connects anew. A message with an `op` of its own (retention) travels the same way.
    """

    def __init__(self, path: str, timeout_s: float = 10.0) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._listener: tuple[int, ...] = ()
        """Which socket the path led to when the connection was made."""
        self._partial = b""
        self._answers: dict[int, Literal["accepted", "busy"]] = {}
        self._open: set[int] = set()
        self._outcomes: list[dict[str, Any]] = []

    def offer(self, message: dict[str, Any]) -> Literal["accepted", "busy"]:
        """Raises CarrierLost when the carrier cannot be reached or does not answer within `timeout_s`."""
        ticket, deadline = message["id"], time.monotonic() + self._timeout_s
        assert type(ticket) is int and ticket not in self._open, f"offer id {ticket!r} is no new whole number"
        line = json.dumps({"op": "offer", **message}, separators=(",", ":")).encode() + b"\n"
        self._send(line, deadline)
        while (answer := self._answer(ticket)) is None:
            if self._socket is None:
                raise self._error("the carrier ended before it answered an offer")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._lose("the carrier hangs")
                raise self._error(f"the carrier did not answer an offer within {self._timeout_s} s")
            self._await(left_s)
        return answer

    @property
    def reachable(self) -> bool:
        """Whether an offer may get through: connected, or another carrier listens than the one that was lost."""
        return self._socket is not None or self._at_path() not in ((), self._listener)

    def tell(self, message: dict[str, Any]) -> bool:
        """Send a message with an `op` and an `id` that has an outcome and is not answered before; waits for nothing.

        False where it cannot be sent at once; when the carrier dies its outcome says so.
        """
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            if self._socket is None:
                self._connect(0.0)
        except OSError as error:
            return self._lose(str(error))
        assert self._socket is not None
        try:
            self._socket.settimeout(0.0)
            sent = self._socket.send(line)
        except BlockingIOError:
            return False
        except OSError as error:
            return self._lose(str(error))
        if sent < len(line):
            return self._lose("the carrier does not read")
        self._open.add(message["id"])
        return True

    def outcomes(self) -> list[dict[str, Any]]:
        """Outcomes that have arrived since the last call; does not wait."""
        while self._receive(0.0):
            pass
        self._notice_another()
        arrived, self._outcomes = self._outcomes, []
        return arrived

    def wait(self, ticket: int, timeout_s: float) -> dict[str, Any] | None:
        """The outcome of one offer, or None when `timeout_s` passed first. Other outcomes stay for `outcomes()`."""
        deadline = time.monotonic() + timeout_s
        while (outcome := self._pop(ticket)) is None:
            left_s = max(0.0, deadline - time.monotonic())
            self._await(left_s)
            if left_s == 0.0 or self._socket is None:
                return self._pop(ticket)
        return outcome

    def close(self) -> None:
        """Leave. What was accepted goes on without us."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _pop(self, ticket: int) -> dict[str, Any] | None:
        found = next((outcome for outcome in self._outcomes if outcome["id"] == ticket), None)
        if found is not None:
            self._outcomes.remove(found)
        return found

    def _send(self, line: bytes, deadline: float) -> None:
        try:
            if self._socket is None:
                self._connect(self._timeout_s)
            assert self._socket is not None
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket.sendall(line)
        except OSError as error:
            self._lose(str(error))
            raise self._error(f"an offer could not be sent: {error}") from error

    def _connect(self, timeout_s: float) -> None:
        self._partial, self._answers = b"", {}
        listener = self._at_path()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout_s)
        self._socket.connect(self._path)
        self._listener = listener

    def _at_path(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return found.st_dev, found.st_ino, found.st_ctime_ns

    def _await(self, timeout_s: float) -> None:
        """Read once; wakes to see whether this is still the carrier, for one in a dead file system never hangs up."""
        self._receive(min(timeout_s, LOOK_S))
        self._notice_another()

    def _notice_another(self) -> None:
        if self._socket is not None and self._at_path() not in ((), self._listener):
            self._lose("the carrier was given up, and another one took its place")

    def _answer(self, ticket: int) -> Literal["accepted", "busy"] | None:
        """An offer that was given up closed its connection, so no answer to it can come later."""
        return self._answers.pop(ticket, None)

    def _receive(self, timeout_s: float) -> bool:
        """Read once, waiting at most `timeout_s`; False when nothing came or the carrier is lost."""
        if self._socket is None:
            return False
        try:
            self._socket.settimeout(timeout_s)
            data = self._socket.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:
            return self._lose(str(error))
        if not data:
            return self._lose("the carrier closed the connection")
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LINE_BYTES_MAX:
            return self._lose("a line from the carrier has no end")
        return all(self._take(line) for line in lines)

    def _take(self, line: bytes) -> bool:
        message = json_object(line, LINE_BYTES_MAX)
        if message is None or type(message.get("id")) is not int:
            return self._lose("the carrier sent a line that is no message")
        ticket = message["id"]
        match message.get("re"):
            case "accepted":
                self._answers[ticket] = "accepted"
                self._open.add(ticket)
            case "busy":
                self._answers[ticket] = "busy"
            case "outcome":
                self._open.discard(ticket)
                self._outcomes.append(message)
        return True

    def _lose(self, reason: str) -> Literal[False]:
        """Close; what was accepted ends with an outcome that says the carrier was lost."""
        self.close()
        error = self._error(reason).as_dict()
        self._outcomes += [{"re": "outcome", "id": ticket, "error": error} for ticket in sorted(self._open)]
        self._open.clear()
        return False

    def _error(self, what: str) -> CarrierLost:
        return CarrierLost(what, where=self._path, fix="a new carrier is started by the agent; offer again")
