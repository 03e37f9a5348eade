"""Several runs on one machine: what one keeps in memory is no room for the next."""

from __future__ import annotations

from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import BufferFolder, choose_buffer_folder
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.units import MIB
from tests.checkpoint.test_slots import Client
from tests.checkpoint.worlds import WRITER, make_run, tensor_of

STATE = [tensor_of("w", "uint8", (MIB - 4096,))]


class Run:
    """One that begins on this machine, its images of a megabyte."""

    def __init__(self, platform: FakePlatform, name: str) -> None:
        log = make_run(platform, name)
        log.begin(0, (WRITER,), "node")
        self.folder: BufferFolder = choose_buffer_folder(platform, name, MIB, WRITER, begun=(begun := log.begun()))
        self.saver = Saver(platform, self.folder, Client(), 1, WRITER, 60.0, begun)

    def remember(self, steps: int) -> list[bool]:
        """Whether each was taken."""
        return [self.saver.remember(step, STATE, {}) is not None for step in range(1, steps + 1)]


def machine(megabytes: float) -> FakePlatform:
    platform = FakePlatform(FakeDisk(capacity_bytes=round(megabytes * MIB)))
    platform.mkdir("/dev/shm")
    return platform


def test_a_run_that_comes_later_takes_less() -> None:
    """The first has copies in memory, the second too little room for them and says so, the third keeps not even its
    buffers there and says that; the first goes on as before."""
    platform = machine(8)
    first = Run(platform, "/a")
    assert first.folder.slots and first.remember(6) == [True] * 6
    second = Run(platform, "/b")
    assert not second.folder.slots and second.folder.path.startswith("/dev/shm/")
    assert "no copies in memory: 3 x 1.0 MiB is over half of the" in second.folder.no_slots
    for step in (1, 2):
        assert second.saver.save(step, STATE, {}) is not None
    third = Run(platform, "/c")
    assert third.folder.path == "/c/buffers" and "2 x 1.0 MiB is over half of the" in third.folder.fallback
    assert first.remember(6) == [True] * 6


def test_runs_that_begin_together() -> None:
    """Two that looked before either took anything fit; a third finds no room when it copies: it skips that, counts it
    and says why, and the others lose nothing."""
    platform = machine(6.5)
    first, second, third = (Run(platform, name) for name in ("/a", "/b", "/c"))
    assert all(run.folder.slots for run in (first, second, third))
    assert first.remember(4) == second.remember(4) == [True] * 4
    assert third.remember(2) == [False] * 2 and third.saver.forgot == 2 and "no room" in third.saver.skip_reason
    assert first.remember(4) == second.remember(4) == [True] * 4
