"""A world of real workers on pretended nodes, and what an agent of each would do for it: for tests.

Each node has a folder with its beat socket and control file, and `procs` workers. One carrier serves all of them.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from packtrain.checkpoint.commits import CommitLog
from packtrain.core.contract import GO_ID, Order, Place, Ready, Restore, Word, order_bytes, parse_ready, worker_env
from packtrain.core.platform import LocalPlatform, Process
from packtrain.train.seat import writer_name
from tests.train.lowering import QUICK_FLAGS
from tests.train.test_words import free_port

DEADLINE_S = 240
"""For whatever is waited for, on a machine many times too busy."""
LOOK_S = 0.02


@dataclass
class Node:
    """What an agent has in its hands."""

    folder: pathlib.Path
    inbox: socket.socket
    ready: dict[int, Ready] = field(default_factory=dict)

    def hear(self) -> None:
        """Keeps what ranks said they begin from; beats are dropped."""
        while True:
            try:
                said = parse_ready(self.inbox.recv(4097))
            except BlockingIOError:
                return
            if said is not None:
                self.ready[said.rank] = said


class World:
    """One attempt of one run. `flags`: of the compiler."""

    def __init__(self, run: str, home: pathlib.Path, nodes: int, procs: int = 1) -> None:
        self.platform, self.run, self.home = LocalPlatform(), run, home
        self.size = nodes * procs
        home.mkdir(parents=True)
        log = CommitLog(self.platform, f"{run}/commits")
        log.probe()
        self.begin = log.begin(None, tuple(writer_name(rank) for rank in range(self.size)), "n0")
        restored = log.restore_point()
        self.place = Place(
            run=run, attempt=self.begin.attempt, fresh=restored is None, carrier=f"{home}/carrier", grace_s=30.0,
            restore=Restore(restored.number, restored.digest) if restored else None, go_s=float(DEADLINE_S),
            world_size=self.size, local_world_size=procs, master_addr="127.0.0.1", master_port=free_port(),
        )
        self.nodes = [self._node(n) for n in range(nodes)]
        self.carrier = self._carrier()
        self.workers = [self._worker(rank, procs) for rank in range(self.size)]

    def _node(self, n: int) -> Node:
        folder = self.home / f"n{n}"
        folder.mkdir()
        inbox = self.platform.datagram_receiver(f"{folder}/beats")
        inbox.setblocking(False)
        return Node(folder, inbox)

    def _carrier(self) -> Process:
        words = ("--run", self.run, "--socket", self.place.carrier, "--begin", str(self.begin.number))
        command = (sys.executable, "-m", "packtrain.checkpoint.carrier", *words)
        return self.platform.spawn(command, dict(os.environ), log_path=f"{self.home}/carrier.log")

    def _worker(self, rank: int, procs: int) -> Process:
        folder = self.nodes[rank // procs].folder
        place = replace(
            self.place, rank=rank, local_rank=rank % procs, node=folder.name, socket=f"{folder}/beats",
            control=f"{folder}/control.json",
        )
        env = {
            **os.environ, **worker_env(place), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path.cwd()),
            "XLA_FLAGS": f"--xla_backend_optimization_level=0 {QUICK_FLAGS}",
        }
        return self.platform.spawn((sys.executable, "-m", "packtrain.train"), env, log_path=self._log(rank))

    def _log(self, rank: int) -> str:
        return f"{self.home}/{rank}.log"

    def said(self) -> str:
        """The end of every log."""
        logs = sorted(self.home.glob("*.log"))
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def until(self, seen: Callable[[], bool], what: str) -> None:
        end_ns = self.platform.boot_ns() + DEADLINE_S * 10**9
        while not seen():
            for node in self.nodes:
                node.hear()
            assert self.platform.boot_ns() < end_ns, f"waited for {what}\n{self.said()}"
            self.platform.sleep(LOOK_S)

    def ready(self) -> dict[int, dict[str, str]]:
        """What each rank begins from, once all have said it."""
        self.until(lambda: sum(len(node.ready) for node in self.nodes) == self.size, "all ranks to be ready")
        return {rank: said.facts for node in self.nodes for rank, said in node.ready.items()}

    def order(self, word: Word, id: int = GO_ID) -> None:
        for node in self.nodes:
            self.platform.write_replacing(f"{node.folder}/control.json", order_bytes(Order(id, word)))

    def go(self) -> dict[int, dict[str, str]]:
        facts = self.ready()
        self.order(Word.GO)
        return facts

    def ended(self) -> list[int]:
        """How the workers ended: waits for all."""
        self.until(lambda: all(worker.poll() is not None for worker in self.workers), "all workers to end")
        return [worker.wait() for worker in self.workers]  # type: ignore[misc]

    def close(self) -> None:
        """Nothing is left running."""
        for process in (*self.workers, self.carrier):
            process.send_signal(signal.SIGKILL)
            process.wait()
        for node in self.nodes:
            node.inbox.close()
