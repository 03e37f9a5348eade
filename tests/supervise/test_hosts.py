"""How often each host was blamed, over all runs of a folder."""

from __future__ import annotations

import pytest

from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.supervise.hosts import Hosts


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


def test_a_file_that_cannot_be_read_is_none() -> None:
    """It only helps to choose."""
    platform, one = hosts()
    platform.write_new("/base/runs/hosts.json", b"[1, 2")
    assert one.blames() == {}
