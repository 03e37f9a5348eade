"""The clients of a carrier, workers and whoever plans retention: what they say, and how they are answered.

The wire: lines of JSON, both ways. A client sends

    {"op":"offer","id":7,"attempt":3,"step":1200,"writer":"r00000","buffer":"/dev/shm/.../r00000.a0003.0.g0",
     "bytes":4096,"deadline_s":300.0,"tensors":[TensorSpec...],"boxes":[PlacedBox...],
     "data_index":1200,"plan_hash":"..","seed":0,"code_hash":"..","meta":{}}      types: checkpoint/format.py
    {"op":"retain","id":8,"grace_s":3600.0,"actions":[{"action":"purge","folder":"step-...","reason":"..."}...]}
    {"op":"stand","id":9}
    {"op":"lend","id":10,"attempt":3,"step":1200,"writer":"r00000","image":"/dev/shm/.../r00000.a0003.2.g0","of":8}
    {"op":"fetch","id":11,"writers":{"r00003":"n2"},"deadline_s":600.0}

and is answered at once (but `lend` and `fetch`), then (but `stand`) once more when it is over:

    {"re":"accepted","id":7}    or    {"re":"busy","id":7}            busy: nothing was taken, offer it again later
    {"re":"outcome","id":7,"ok":true,"step":1200,"commit":41,"bytes":4096,"write_s":0.8}
    {"re":"outcome","id":7,"ok":false,"step":1200,"stop":false,"error":{"name":..,"what":..,"where":..,"fix":..}}
    {"re":"outcome","id":8,"ok":true,"done":[{"action":..,"folder":..,"reason":..,"error":null}...]}
    {"re":"outcome","id":10,"ok":true,"step":1200,"peer":"n1","seconds":2.5}
    {"re":"outcome","id":11,"ok":true,"fetched":4096}
    {"re":"stands","id":9,"saves":1,"hung":[{"path":"/run","threads":1,"s":71.5}...],"quarantine":["/scratch/run"...]}

`stands`: saves under way, homes in which threads of this process hang and for how long, homes it leaves alone because
threads of the carrier before it hung there (`--quarantine PATH`) and that have not answered yet (homes.py).

`stop` true: a newer attempt began, or a later step is published; this worker is over. A line that is no such message
closes its connection. What a client had accepted goes on when it leaves, and a client that offers the same buffer for
the same step again (it lost its connection) gets the outcome of the save under way.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.fetching import Fetch
from packtrain.checkpoint.format import PlacedBox, TensorSpec
from packtrain.checkpoint.lending import Lend
from packtrain.checkpoint.retention import Action
from packtrain.core.errors import CommitStale, PacktrainError

LINE_BYTES_MAX = 64 << 20
UNSENT_BYTES_MAX = 1 << 20


class Offer(msgspec.Struct, frozen=True, tag_field="op", tag="offer"):
    id: int
    attempt: int
    step: int
    writer: str
    buffer: str
    bytes: int
    deadline_s: float
    tensors: tuple[TensorSpec, ...]
    boxes: tuple[PlacedBox, ...]
    data_index: int = 0
    plan_hash: str = ""
    seed: int = 0
    code_hash: str = ""
    meta: dict[str, Any] = {}


class Retain(msgspec.Struct, frozen=True, tag_field="op", tag="retain"):
    id: int
    actions: tuple[Action, ...]
    grace_s: float


class Stand(msgspec.Struct, frozen=True, tag_field="op", tag="stand"):
    id: int


decode = msgspec.json.Decoder(Offer | Retain | Stand | Lend | Fetch).decode
"""A line of a client; raises msgspec.MsgspecError, UnicodeDecodeError or RecursionError."""
_encode = msgspec.json.Encoder().encode


class Client:
    """One connection: lines in, lines out, neither without bound."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.open = True
        self._received = bytearray()
        self._unsent = bytearray()

    def receive(self) -> list[bytes]:
        """Whole lines that arrived; closes on end of stream, on errors, and on a line without end."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self._received += data
        *lines, rest = bytes(self._received).split(b"\n") if b"\n" in data else [bytes(self._received)]
        self._received = bytearray(rest)
        if not data or len(rest) > LINE_BYTES_MAX:
            self.open = False
        return lines

    def send(self, message: dict[str, Any]) -> None:
        self._unsent += _encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what goes without waiting; a client that does not read is dropped."""
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            self.open = self.open and len(self._unsent) <= UNSENT_BYTES_MAX
        except OSError:
            self.open = False

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)


def accept_offer(client: Client, offer: Offer) -> None:
    client.send({"re": "accepted", "id": offer.id})


def success(ticket: int, commit: Commit, size: int, write_s: float) -> dict[str, Any]:
    return {
        "re": "outcome", "id": ticket, "ok": True, "step": commit.step, "commit": commit.number, "bytes": size,
        "write_s": write_s,
    }


def failure(ticket: int, step: int, error: PacktrainError) -> dict[str, Any]:
    return {
        "re": "outcome", "id": ticket, "ok": False, "step": step, "stop": isinstance(error, CommitStale),
        "error": error.as_dict(),
    }
