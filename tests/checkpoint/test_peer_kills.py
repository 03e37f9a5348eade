"""Real kill -9 of carriers and workers of three nodes, and nodes whose memory is gone: the last copy is always there.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest

from packtrain.checkpoint.slots import held_in, memory_folder, peer_folder
from tests.checkpoint.peer_runs import NODES, PEER, PeerRun, kill_and_go_on
from tests.checkpoint.test_kills import Children, children, memory  # noqa: F401


@pytest.fixture
def run(memory: str, children: Children, memory_disk: None) -> Iterator[PeerRun]:  # noqa: F811
    made = PeerRun(memory, children)
    made.start()
    try:
        yield made
    finally:
        made.end()
        made.remove()


def test_a_node_is_lost_while_something_is_killed(run: PeerRun) -> None:
    """Five times: in the middle of the copies a sender, a holder, or both are killed, then a node is lost with all its
    memory. What the next attempt begins from is the step that all had copied, or the one under way, bit for bit."""
    rng = random.Random(11)
    for _ in range(5):
        kill_and_go_on(run, rng)


def test_a_flipped_byte_where_it_was_kept(run: PeerRun) -> None:
    """Damage in what the peer of a lost node kept: the fetch names it, and nothing begins from it again."""
    run.workers()
    run.copied(run.first)
    run.lose("n1")
    run.end()
    [kept] = held_in(run.platform, peer_folder(run.folder, PEER["n1"]))
    with open(kept.image, "r+b") as file:
        file.seek(kept.slot.bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 16]))
    with pytest.raises(AssertionError, match=r"checkpoint.slot_damaged.*block 0 of r00001"):
        run.go_on()
    assert not held_in(run.platform, memory_folder(run.folder, "n1"))
    assert "r00001" not in {one.writer for one in run.helds()}


def test_nothing_is_left(run: PeerRun) -> None:
    """When the run is done, nothing that was kept for others stays on any node."""
    run.workers()
    run.copied(run.first)
    for node in NODES:
        run.kill(run.worker(node))
    assert all(held_in(run.platform, peer_folder(run.folder, node)) for node in NODES)
    for node in NODES:
        run.children.signal(run.carriers[node], signal.SIGUSR1)
        run.children.signal(run.carriers[node], signal.SIGTERM)
        run.heard(f"{run.carriers[node]} exit 0")
    assert not any(run.platform.exists(peer_folder(run.folder, node)) for node in NODES)
