"""How often each host was blamed, over all runs of a folder."""

from __future__ import annotations

from typing import Any

import pytest

from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.records import NodeSuspected
from packtrain.supervise.hosts import BLAME, Blames, Hosts
from packtrain.supervise.messages import HardwareSeen
from packtrain.supervise.papers import Papers
from tests.checkpoint.worlds import RUN
from tests.supervise.led import Run


def hosts() -> tuple[FakePlatform, Hosts]:
    platform = FakePlatform(FakeDisk())
    platform.mkdir("/base/runs/one")
    return platform, Hosts(platform, "/base/runs/one")


def test_blames_are_remembered_for_the_next_run() -> None:
    """Each blame counts, in whatever run of the folder it was."""
    platform, one = hosts()
    for host in ("10.0.0.7", "10.0.0.7", "gpu-3"):
        one.blame(host)
    assert Hosts(platform, "/base/runs/two").blames() == {"10.0.0.7": 2, "gpu-3": 1}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", ""])
def test_this_machine_alone_is_no_lemon(host: str) -> None:
    """Nodes of one machine share its name: a run that was broken there must not cost the next one a node. What an older
    version wrote down does not count either."""
    platform, one = hosts()
    one.blame(host)
    assert one.blames() == {}
    platform.write_new("/base/runs/hosts.json", b'{"127.0.0.1": 6, "gpu-3": 1}')
    assert one.blames() == {"gpu-3": 1}


def test_blames_that_come_at_once_all_count() -> None:
    """The file is written by one errand at a time: who is blamed meanwhile waits for the next."""
    platform, one = hosts()
    papers = Papers(platform, "/base/runs/one")
    blames = Blames(one, papers)
    for host in ("gpu-1", "gpu-2", "gpu-2"):
        blames.add(host)
    assert papers.flush(1.0, BLAME) and one.blames() == {"gpu-1": 1, "gpu-2": 2}


def test_only_blame_makes_a_lemon() -> None:
    """A node's hardware is told of, again and again, and its one rank crashes once: its host was blamed once."""
    run = Run()

    def life(attempt: int) -> Any:
        for n in range(5):
            run.nodes[-1].tell(HardwareSeen(verdict="tell", what=f"Xid {n}", where="0000:01:00", text="the line"))
            yield
        return 1 if attempt == 1 else 0, None

    run.lives = life
    assert run.command().exit_code == 0
    told = run.records(NodeSuspected)
    assert [one.blamed for one in told].count(False) == 10 and [one.blamed for one in told].count(True) == 1
    assert Hosts(run.platform, RUN).blames() == {"h": 1}


def test_a_file_that_cannot_be_read_is_none() -> None:
    """It only helps to choose."""
    platform, one = hosts()
    platform.write_new("/base/runs/hosts.json", b"[1, 2")
    assert one.blames() == {}
