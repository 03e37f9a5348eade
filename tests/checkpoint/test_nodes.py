"""Saves of a run over several nodes: one carrier publishes what all have written, and every worker hears of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.link import body_of
from packtrain.checkpoint.reader import checkpoint_bytes, open_checkpoint
from packtrain.checkpoint.saver import Saver, SaveResult
from packtrain.core.errors import PeerLost
from packtrain.core.pinned import Pinned, make_pinned
from tests.checkpoint.cable import Cable
from tests.checkpoint.nodes import LONG_S, Nodes
from tests.checkpoint.worlds import big_state, same_bits


@pytest.fixture
def nodes(tmp_path) -> Iterator[Nodes]:
    nodes = Nodes(str(tmp_path))
    yield nodes
    nodes.close()


def must_load(nodes: Nodes, commit: Commit) -> None:
    checkpoint = open_checkpoint(nodes.platform, nodes.folder, commit)
    assert checkpoint.verify() == []
    for piece in big_state(commit.attempt, commit.step, len(nodes.writers), None):
        assert same_bits(checkpoint.read(piece.spec.name), piece.array), commit


def published(nodes: Nodes) -> list[int]:
    """Steps that are published, each of which loads bit for bit."""
    saves = [commit for commit in nodes.log.all() if commit.kind == "save"]
    for commit in saves:
        must_load(nodes, commit)
    return [commit.step for commit in saves]


def test_all_nodes_make_one_checkpoint(nodes):
    """Parts written by three carriers are published once, and each worker is told the same record."""
    savers = nodes.savers()
    for step in (10, 20, 30):
        results = nodes.save(savers, step)
        assert {result.error for result in results.values()} == {None}
        assert {result.commit for result in results.values()} == {nodes.log.head()}
        size = checkpoint_bytes(nodes.platform, nodes.folder, nodes.log.restore_point())
        assert results[nodes.writers[0]].bytes == size, "the first rank's carrier publishes, and tells the whole size"
    assert published(nodes) == [10, 20, 30]


def all_published(nodes: Nodes, savers: dict[str, Saver], step: int) -> bool:
    return {result.error for result in nodes.save(savers, step).values()} == {None}


def ends(savers: dict[str, Saver]) -> list[SaveResult]:
    return [saver.wait_all(LONG_S)[-1] for saver in savers.values()]


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_disk_that_fails_on_one_node(nodes, node):
    """A write that fails on any node ends the try for all: all write again, into another folder."""
    nodes.nodes[node].platform.failures = 1
    assert all_published(nodes, nodes.savers(), 10)
    assert published(nodes) == [10] and nodes.log.last().folder == "step-00000010.a0001.t2"


def test_a_try_that_others_still_write_into_is_taken_away_later(nodes):
    """Where the folder of a failed try cannot be taken away, as another node still writes there, it goes later: when
    the save is published nothing else is left."""
    nodes.nodes[0].platform.stuck_folders = 2
    nodes.nodes[2].platform.failures = 2
    assert all_published(nodes, nodes.savers(), 10) and published(nodes) == [10]
    assert nodes.nodes[0].platform.stuck_folders == 0
    assert os.listdir(f"{nodes.folder}/checkpoints") == [nodes.log.last().folder]


def test_a_buffer_that_is_gone_fails_the_save_at_once(nodes):
    """Where a buffer on another node is gone no try would help: all are told, without waiting for the deadline."""
    savers = nodes.savers()
    nodes.nodes[2].platform.gate.clear()
    nodes.offer(savers, 10)
    nodes.nodes[2].platform.waiting.acquire()
    for name in os.listdir(f"{nodes.folder}/buffers"):
        if name.startswith("r00004"):
            os.unlink(f"{nodes.folder}/buffers/{name}")
    nodes.nodes[2].platform.gate.set()
    for result in ends(savers):
        assert "buffer cannot be read" in result.error["what"]
    assert all_published(nodes, nodes.savers(), 20) and published(nodes) == [20]


@pytest.mark.parametrize("node", [0, 1])
def test_a_disk_that_hangs_on_one_node(nodes, node):
    """A disk that hangs on any node fails the save everywhere at its deadline; when it comes back nothing of that save
    is published, and the next one is."""
    savers = nodes.savers()
    hung = nodes.nodes[node].platform
    hung.gate.clear()
    nodes.offer(savers, 10)
    hung.waiting.acquire()
    nodes.skip(LONG_S + 1)
    results = ends(savers)
    assert all(result.error for result in results)
    hung.gate.set()
    assert all_published(nodes, savers, 20) and published(nodes) == [20]


def test_a_writer_that_never_answers(nodes):
    """A save for which a writer of another node is missing fails everywhere at the deadline, by its name; the next one
    is published."""
    savers = nodes.savers()
    lazy = savers.pop("r00003")
    nodes.offer(savers, 10)
    while len(nodes.nodes[0].carrier._saves[10].parts) < len(savers):
        nodes.nodes[0].platform.sleep(0.01)
    nodes.skip(LONG_S + 1)
    assert {"no answer from r00003" in result.error["what"] for result in ends(savers)} == {True}
    savers["r00003"] = lazy
    assert all_published(nodes, savers, 20) and published(nodes) == [20]


@pytest.mark.parametrize("node", [0, 1])
def test_a_carrier_restarted_in_mid_save(nodes, node):
    """A carrier, the publishing one too, that ends while a node is writing and comes back gets what its workers offer
    again, and the save is published for all."""
    savers = nodes.savers()
    writing = nodes.nodes[2].platform
    writing.gate.clear()
    nodes.offer(savers, 10)
    writing.waiting.acquire()
    restarted = nodes.nodes[node]
    nodes.restart(restarted)
    again = {writer: nodes.saver(writer) for writer in nodes.writers if nodes.node_of(writer) is restarted}
    nodes.offer(again, 10)
    writing.gate.set()
    assert {result.error for result in ends(savers | again)} == {None}
    assert published(nodes) == [10]


def test_the_log_tells_where_nobody_does(nodes):
    """The carrier that publishes ends before the others have heard: they find the record in the log."""
    savers = nodes.savers()
    asked = nodes.nodes[1].carrier
    publishing = nodes.nodes[0]
    writing = nodes.nodes[2].platform
    writing.gate.clear()
    nodes.offer(savers, 10)
    writing.waiting.acquire()
    nodes.tell("n0", "127.0.0.1:9")
    cut = publishing.neighbours.server
    writing.gate.set()
    while nodes.log.head() == nodes.begin.number:
        publishing.platform.sleep(0.01)
    cut.stop()
    assert {result.commit for result in ends(savers)} == {nodes.log.head()}
    assert asked._latest == nodes.log.last() and published(nodes) == [10]


def test_cut_cables(nodes):
    """Links that are cut anywhere, again and again, cost time and no save."""
    cable = Cable(lambda: nodes.nodes[0].neighbours.server.address)
    nodes.closing.append(cable.close)
    nodes.tell("n0", cable.address)
    savers = nodes.savers()
    for step, after in enumerate((0, 700, 3_000, 6_000, 15_000)):
        cable.cut_after = after
        assert all_published(nodes, savers, step)
    assert cable.joined > 12 and published(nodes) == list(range(5))


def test_a_newer_attempt_stops_all(nodes):
    """After a newer `begin` every worker on every node is told to stop, and nothing is published."""
    savers = nodes.savers()
    nodes.log.begin(None, nodes.writers, "n0")
    for result in nodes.save(savers, 10).values():
        assert result.error["name"] == "commits.stale"
    assert published(nodes) == []


def test_a_carrier_of_an_older_attempt_is_told_to_stop(nodes):
    """A carrier of an older attempt that reaches the new one's learns that its workers are over."""
    saver = nodes.saver("r00002")
    step = big_state(1, 10, len(nodes.writers), "r00002")
    nodes.begin = nodes.log.begin(None, nodes.writers, "n0")
    nodes.restart(nodes.nodes[0])
    saver.save(10, step, {})
    (result,) = saver.wait_all(LONG_S)
    assert result.error["name"] == "commits.stale"


def test_another_key_is_another_run(nodes):
    """A carrier with another certificate is not heard: its node's part is missing, and the save fails by its name."""
    make_pinned(nodes.platform, f"{nodes.folder}/other.pem")
    nodes.nodes[1].neighbours._pinned = Pinned(f"{nodes.folder}/other.pem")
    savers = nodes.savers()
    nodes.offer(savers, 10)
    stranger = nodes.nodes[0].neighbours.server
    while not stranger.dropped["stranger"] or len(nodes.nodes[0].carrier._saves[10].parts) < 4:
        nodes.platform.sleep(0.01)
    nodes.skip(LONG_S + 1)
    for writer, saver in savers.items():
        assert saver.wait_all(LONG_S)[-1].error, writer
    assert published(nodes) == []


def test_a_home_to_fall_back_to_is_everybodys(tmp_path):
    """Where the run's own disk fails on one node, all write to the next home, and the record names it."""
    for name in ("run", "scratch"):
        (tmp_path / name).mkdir()
    nodes = Nodes(str(tmp_path / "run"), config=CheckpointConfig(fallback=(str(tmp_path / "scratch"),)))
    nodes.nodes[1].platform.failures = 3
    try:
        assert all_published(nodes, nodes.savers(), 10)
        assert nodes.log.last().place.startswith(str(tmp_path / "scratch")) and published(nodes) == [10]
    finally:
        nodes.close()


@pytest.mark.parametrize(
    "header", [{}, {"attempt": "x"}, {"writers": ["r99999"]}, {"begin": "other"}, {"attempt": 9}, {"step": -1}]
)
def test_reports_that_make_no_sense_are_refused(nodes, header):
    """A carrier that reports nonsense gets an error, and the others their checkpoint."""
    good = {
        "op": "part", "attempt": 1, "begin": nodes.begin.nonce, "node": "n1", "boot": "b", "began_ns": 0, "round": "x",
        "step": 10, "left_s": 9.0, "writers": ["r00002"],
    }
    client = nodes.nodes[1].neighbours.client("n0")
    nodes.closing.append(client.close)
    with pytest.raises(PeerLost):
        client.ask(good | header if header else {"op": "part"}, timeout_s=LONG_S)
    assert client.ask(good, timeout_s=LONG_S)["do"] == "tell"
    with pytest.raises(PeerLost):
        client.ask(good, body_of(b"[3]"), timeout_s=LONG_S)
    assert all_published(nodes, nodes.savers(), 10) and published(nodes) == [10]


def test_alone_there_is_no_link(tmp_path):
    """A run of one node listens nowhere and reports to nobody: its saves go as they did."""
    nodes = Nodes(str(tmp_path), count=1)
    try:
        assert all_published(nodes, nodes.savers(), 10)
        assert not nodes.nodes[0].carrier._ends._ends and published(nodes) == [10]
    finally:
        nodes.close()
