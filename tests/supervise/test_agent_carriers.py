"""Two real agents with real carriers that find each other, and a coordinator that the test plays."""

from __future__ import annotations

import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.pinned import KEY_FILE, make_pinned
from packtrain.supervise.messages import CarrierUp, EndAttempt, Launch, Peers, RankEnded
from tests.checkpoint.worlds import big_state, judge, same_bits
from tests.supervise.agents import PLATFORM, Scene, scene, script

CARRIER = (sys.executable, "-P", "-m", "packtrain.checkpoint.carrier")
SAVES = (
    "from packtrain.checkpoint.saver import Saver\n"
    "from packtrain.core.platform import LocalPlatform\n"
    "from tests.checkpoint.worlds import big_state\n"
    "writer, platform = f'r{place.rank:05d}', LocalPlatform()\n"
    "client = contract.CarrierClient(place.carrier)\n"
    "saver = Saver(platform, f'{place.run}/buffers', client, place.attempt, writer, 30.0)\n"
    "for _ in range(600):\n"
    "  saver.save(10, big_state(place.attempt, 10, 2, writer), {'data_index': 10})\n"
    "  if any(result.commit for result in saver.wait_all(30.0)): sys.exit(0)\n"
    "  platform.sleep(0.05)\n"
    "sys.exit(1)\n"
)


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder whose path leaves room for sockets, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="a", dir="/tmp") as folder:
        yield pathlib.Path(folder)


def all_see(scenes: list[Scene], seen: Callable[[Scene], object], what: str) -> None:
    """Each node's part of the coordinator looks on, until each has seen that."""
    for one in scenes:
        others = [other for other in scenes if other is not one]
        one.until(lambda: ([other.coordinator.look() for other in others], seen(one))[1], what)  # noqa: B023


def test_a_save_of_two_nodes_is_published(base: pathlib.Path) -> None:
    """Each carrier says where it listens; once both are introduced, one save of a writer on each node is published
    whole, and both writers hear of it; then both carriers go."""
    run = base / "run"
    with (
        scene(base / "0", script(SAVES), run=run, node="n0", carrier=CARRIER, nodes=2) as first,
        scene(base / "1", script(SAVES), run=run, node="n1", carrier=CARRIER, nodes=2) as second,
    ):
        scenes = [first, second]
        (run / "commits").mkdir()
        begin = CommitLog(PLATFORM, f"{run}/commits").begin(0, writers=("r00000", "r00001"), node="n0")
        make_pinned(PLATFORM, f"{first.node_home}/{KEY_FILE}")
        shutil.copy(f"{first.node_home}/{KEY_FILE}", f"{second.node_home}/{KEY_FILE}")
        for rank, one in enumerate(scenes):
            one.joined()
            one.coordinator.ask(1, Launch(
                attempt=1, begin=begin.number, ranks=(rank,), world_size=2, master="127.0.0.1:29500"
            ))
        all_see(scenes, lambda one: one.coordinator.of(CarrierUp), "a carrier that listens")
        addresses = {one.node: one.coordinator.of(CarrierUp)[0].address for one in scenes}
        for one in scenes:
            one.coordinator.ask(2, Peers(attempt=1, addresses=addresses))
        all_see(scenes, lambda one: one.coordinator.of(RankEnded), "the end of a worker")
        assert [[end.status for end in one.coordinator.of(RankEnded)] for one in scenes] == [[0], [0]]
        (save,) = [one for one in judge(PLATFORM, str(run), load=False) if one.kind == "save"]
        checkpoint = open_checkpoint(PLATFORM, str(run), save)
        assert save.step == 10 and checkpoint.verify() == []
        for piece in big_state(1, 10, 2, None):
            assert same_bits(checkpoint.read(piece.spec.name), piece.array)
        for one in scenes:
            one.coordinator.ask(3, EndAttempt(attempt=1))
        all_see(scenes, lambda one: not one.alive(), "that nothing is left")
