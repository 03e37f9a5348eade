"""Whatever held a coordinator up: it hears all that has arrived before it concludes anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.units import NS
from packtrain.supervise.coordinator import CROWD, GATHER_S, READS_MAX, Coordinator
from packtrain.supervise.keys import Address
from packtrain.supervise.link import AT_ONCE_MAX, Arrived, Read
from packtrain.supervise.messages import FromCoordinator, Hello, Pulse, Welcome
from tests.checkpoint.worlds import make_run
from tests.supervise.led import HOME, JOB


class Enough(Exception):
    """The test has seen what it came for."""


class Backlog:
    """A link on which `pieces` have arrived, for `looks`; of each piece `dropped` messages more."""

    address = Address(address="tcp://c:1", server_key="k")

    def __init__(self, platform: FakePlatform, pieces: Iterable[list[Arrived]], looks: int, dropped: int) -> None:
        self._platform, self._pieces, self._looks, self._dropped = platform, iter(pieces), looks, dropped
        self.read = 0
        self.sent: list[FromCoordinator] = []
        self.waited_s: list[float] = []
        """When each wait began."""

    def wait(self, timeout_s: float, also: Iterable[Any] = ()) -> None:
        self.waited_s.append(self._platform.boot_ns() / NS)
        if len(self.waited_s) > self._looks:
            raise Enough

    def receive(self) -> Read:
        self.read += 1
        arrived = next(self._pieces, [])
        return Read(arrived, len(arrived) + self._dropped if arrived else 0)

    def send(self, peer: bytes, message: FromCoordinator) -> bool:
        self.sent.append(message)
        return True

    def close(self) -> None: ...


def pulse(node: str) -> Arrived:
    return Arrived(node.encode(), node, Pulse(node=node, agent="z", attempt=0, step=-1))


PULSES = [pulse("n9")] * AT_ONCE_MAX
HELLO = [Arrived(b"p", "n0", Hello(node="n0", agent="a", boot_id="b", term=0, attempt=0, version="1"))]


def looked(pieces: Iterable[list[Arrived]], looks: int = 1, dropped: int = 0) -> Backlog:
    platform = FakePlatform(FakeDisk(), "host")
    link = Backlog(platform, pieces, looks, dropped)
    make_run(platform)
    platform.mkdir(HOME)
    coordinator = Coordinator(JOB, platform, HOME, link)
    with pytest.raises(Enough):
        coordinator.run()
    coordinator.close()
    return link


def test_who_spoke_behind_many_others_is_heard_at_the_same_look() -> None:
    """Five looks' worth of messages have come while it was held up: the last of them is answered at the first look."""
    link = looked([PULSES, PULSES, PULSES, PULSES, HELLO])
    assert [type(one) for one in link.sent] == [Welcome] and link.read == 5


def test_what_is_dropped_does_not_end_the_reading() -> None:
    """A message that is none, in a full piece: what lies behind it is heard at the same look."""
    link = looked([PULSES[1:], PULSES[1:], HELLO], dropped=1)
    assert [type(one) for one in link.sent] == [Welcome] and link.read == 3


def test_a_flood_does_not_keep_it_from_looking() -> None:
    """Messages that never end are taken in so many pieces, and then it goes on."""
    assert looked(PULSES for _ in range(10 * READS_MAX)).read == READS_MAX


@pytest.mark.parametrize(("nodes", "gathered"), [(CROWD - 1, False), (CROWD, True)])
def test_of_a_crowd_news_is_gathered(nodes: int, gathered: bool) -> None:
    """A word of one node leads to the next look at once, unless there are so many that another is on its way."""
    link = looked([[pulse(f"n{n}") for n in range(nodes)], *[[]] * (nodes // AT_ONCE_MAX), HELLO, []], looks=2)
    assert (link.waited_s[2] - link.waited_s[1] >= GATHER_S) == gathered
