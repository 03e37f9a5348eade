"""A run over several nodes in one process: a carrier each, in a thread, over loopback; writers with savers."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import msgspec

from packtrain.checkpoint.carrier import Carrier, open_carrier
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.neighbours import Neighbours
from packtrain.checkpoint.saver import Saver, SaveResult
from packtrain.core.bulk import Image
from packtrain.core.contract import CarrierClient
from packtrain.core.pinned import make_pinned
from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from tests.checkpoint.worlds import big_state, make_run

LONG_S = 60.0
"""Never waited out: the outcome comes first, or `Nodes.skip` lets it pass at once."""


class NodePlatform(LocalPlatform):
    """One node of several on this machine, whose clock can be put forward and whose disk fails or hangs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.skipped_ns = 0
        self.failures = 0
        """Images that cannot be made, from now on."""
        self.stuck_folders = 0
        """Folders that are never empty when they are to go, from now on."""
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Semaphore(0)

    def create_image(self, path: str, size: int, mode: int = 0o644) -> Image:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EIO, "this disk is ill", path)
        if not self.gate.is_set():
            self.waiting.release()
            self.gate.wait()
        return super().create_image(path, size, mode)

    def rmdir(self, path: str) -> None:
        if self.stuck_folders:
            self.stuck_folders -= 1
            raise OSError(errno.ENOTEMPTY, "somebody writes here", path)
        super().rmdir(path)

    def node(self) -> str:
        return self.name

    def boot_ns(self) -> int:
        return super().boot_ns() + self.skipped_ns


class Node:
    """One node: where its carrier is, and how it is ended."""

    def __init__(self, name: str, platform: NodePlatform) -> None:
        self.name, self.platform = name, platform
        self.carrier: Carrier
        self.neighbours: Neighbours
        self.socket = ""
        self.end: Callable[[], None]


class Nodes:
    """A run with a begun attempt, `count` nodes with `each` writers; n0 publishes."""

    def __init__(self, folder: str, count: int = 3, each: int = 2, config: CheckpointConfig | None = None) -> None:
        self.folder, self.config, self.each = folder, config, each
        self.platform = NodePlatform("test")
        self.log = make_run(self.platform, folder)
        self.writers = [f"r{i:05d}" for i in range(count * each)]
        self.begin = self.log.begin(0, self.writers, "n0")
        make_pinned(self.platform, f"{folder}/run.pem")
        self.peers = f"{folder}/peers"
        self.addresses: dict[str, str] = {}
        self.closing: list[Callable[[], object]] = []
        self._started = 0
        self.nodes = [Node(f"n{i}", NodePlatform(f"n{i}")) for i in range(count)]
        for node in self.nodes:
            self.start(node)

    def start(self, node: Node) -> None:
        """A carrier there, in place of the one before; the agents tell all where it is."""
        self._started += 1
        node.socket = f"{self.folder}/{node.name}.{self._started}"
        node.neighbours = Neighbours(node.platform, self.peers, "127.0.0.1", trusted=False)
        carrier = node.carrier = open_carrier(
            node.platform, self.folder, node.socket, self.begin.number, self.config, (), node.neighbours
        )
        thread = threading.Thread(target=carrier.serve)
        thread.start()

        def end() -> None:
            for _ in range(2):
                carrier.stop()
            thread.join()

        node.end = end
        self.tell(node.name, self.platform.read_json(f"{node.socket}.address")["address"])

    def tell(self, name: str, address: str) -> None:
        self.addresses[name] = address
        self.platform.write_replacing(self.peers, msgspec.json.encode(self.addresses))

    def node_of(self, writer: str) -> Node:
        return self.nodes[int(writer[1:]) // self.each]

    def saver(self, writer: str, deadline_s: float = LONG_S) -> Saver:
        client = CarrierClient(self.node_of(writer).socket, LONG_S)
        self.closing.append(client.close)
        return Saver(self.platform, f"{self.folder}/buffers", client, self.begin.attempt, writer, deadline_s)

    def savers(self, deadline_s: float = LONG_S) -> dict[str, Saver]:
        return {writer: self.saver(writer, deadline_s) for writer in self.writers}

    def offer(self, savers: dict[str, Saver], step: int) -> None:
        """Each writer hands over its share of the state of that step."""
        for writer, saver in savers.items():
            pieces = big_state(self.begin.attempt, step, len(self.writers), writer)
            assert saver.save(step, pieces, {"data_index": step}) is not None, saver.skip_reason

    def save(self, savers: dict[str, Saver], step: int) -> dict[str, SaveResult]:
        """A save by all, and how it ended for each."""
        self.offer(savers, step)
        return {writer: saver.wait_all(LONG_S)[-1] for writer, saver in savers.items()}

    def restart(self, node: Node) -> None:
        """The carrier ends at once, whatever it does, and another takes its place."""
        node.end()
        self.start(node)

    def skip(self, seconds: float) -> None:
        """So much time passes on every node; each loop is woken and sees it."""
        for node in self.nodes:
            node.platform.skipped_ns += int(seconds * NS)
            node.carrier.hurry()

    def close(self) -> None:
        for close in self.closing:
            close()
        for node in self.nodes:
            node.platform.gate.set()
            node.end()
