"""What wakes a loop that waits, so that it need not look."""

from __future__ import annotations

import select
import signal
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from packtrain.core.fake import FakePlatform
from packtrain.core.platform import LocalPlatform
from packtrain.supervise.bell import Bell
from packtrain.supervise.errands import Errands
from tests.supervise.fake_agent import FakeLink, Node

LONG_S = 30.0
"""Where it rings it does at once; a test that is told nothing waits so long."""


@pytest.fixture
def bell() -> Iterator[Bell]:
    one = Bell()
    yield one
    one.close()


def rings(bell: Bell, seconds: float = LONG_S) -> bool:
    return bool(select.select([bell], [], [], seconds)[0])


def test_it_rings_until_it_is_hushed(bell: Bell) -> None:
    """However often it was rung: the one who rings never waits, and one hush is enough."""
    assert not rings(bell, 0.0)
    for _ in range(100_000):
        bell.ring()
    assert rings(bell, 0.0)
    bell.hush()
    assert not rings(bell, 0.0)
    bell.hush()
    bell.ring()
    assert rings(bell, 0.0)


def test_a_child_that_ends_rings(bell: Bell) -> None:
    """While it listens to signals; then as before, for whoever listened before."""
    before = signal.getsignal(signal.SIGCHLD)
    with bell.at_signals():
        child = subprocess.Popen(("sleep", "1000"))
        assert not rings(bell, 0.0)
        child.kill()
        assert rings(bell)
    child.wait()
    assert signal.getsignal(signal.SIGCHLD) == before and signal.set_wakeup_fd(-1) == -1


def test_children_start_with_the_signals_they_had(bell: Bell) -> None:
    """What the agent listens to is no business of a worker: it ignores and blocks nothing more than before."""
    with bell.at_signals():
        told = subprocess.run(("grep", "^Sig[BIC]", "/proc/self/status"), check=True, stdout=subprocess.PIPE).stdout
    masks = dict(line.split(b":\t") for line in told.splitlines())
    child = 1 << (signal.SIGCHLD - 1)
    assert not any(int(mask, 16) & child for mask in masks.values())


def test_an_errand_that_is_over_rings(bell: Bell) -> None:
    """So its result is told at the next look, and that comes at once."""
    errands, told = Errands(LocalPlatform(), bell.ring), []
    errands.start(0, 5.0, lambda: 7, told.append)
    assert rings(bell)
    errands.look(0)
    assert told == [7]


class Waiting(FakeLink):
    """Whether each wait found something that rang."""

    def __init__(self, platform: FakePlatform) -> None:
        super().__init__(platform)
        self.rang: list[bool] = []

    def wait(self, timeout_s: float, also: Iterable[Any] = ()) -> None:
        self.rang.append(any(isinstance(one, Bell) and rings(one, 0.0) for one in also))
        super().wait(timeout_s)


def test_an_agent_waits_for_its_bell_and_hushes_it(bell: Bell) -> None:
    """A ring ends one wait, and not those that follow."""
    node = Node()
    node.link = link = Waiting(node.platform)
    agent = node.incarnation(bell)
    node.requests.arrive(signal.SIGTERM)
    bell.ring()
    agent.run()
    assert link.rang[0] and len(link.rang) > 1 and not any(link.rang[1:])
