"""Where an agent stands: the files of its home, and its node's carrier asked for something."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.core.platform import Platform
from packtrain.core.wire import json_object

CONNECT_S = 1.0
ANSWER_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where an agent stands."""

    node: str
    home: str
    host: str
    incarnation: str
    run: str
    """Id of the run (job.run_id)."""

    @property
    def mark(self) -> str:
        return f"{self.run}/{self.node}/{self.incarnation}"

    @property
    def beats(self) -> str:
        return f"{self.home}/beats"

    @property
    def carrier(self) -> str:
        return f"{self.home}/carrier"

    @property
    def carrier_address(self) -> str:
        """File in which the carrier says where others reach it."""
        return f"{self.carrier}.address"

    @property
    def control(self) -> str:
        return f"{self.home}/control.json"

    @property
    def peers(self) -> str:
        return f"{self.home}/peers.json"

    @property
    def disk_faults(self) -> str:
        """What this node's carrier is told to suffer of the run's disk."""
        return f"{self.home}/faults-disk.json"

    def faults(self, rank: int) -> str:
        """What a worker of this node is told to suffer."""
        return f"{self.home}/faults-{rank}.json"

    def ask_carrier(self, platform: Platform, request: str) -> str:
        """Send one line, wait for what comes of it: one line. May hang; raises OSError."""
        sock = platform.stream_connect(self.carrier, CONNECT_S)
        try:
            sock.settimeout(None)
            sock.sendall(request.encode() + b"\n")
            received = b""
            while len(received) <= ANSWER_BYTES_MAX and (data := sock.recv(1 << 16)):
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    answer = json_object(line, ANSWER_BYTES_MAX)
                    if answer is not None and answer.get("re") != "accepted":
                        return line.decode()
        finally:
            sock.close()
        raise OSError("the carrier closed the connection, or said a line without end")
