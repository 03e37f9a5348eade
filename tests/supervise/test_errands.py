"""Calls that may hang are never waited for."""

from __future__ import annotations

import threading

from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from packtrain.supervise.errands import OPEN_MAX, Errands


def test_each_errand_is_told_of_once() -> None:
    """What it gives, what it raises, None when it is late; a late one that comes back is not told of again."""
    platform, told = LocalPlatform(), []
    errands, hung = Errands(platform), threading.Event()
    errands.start(0, 5.0, lambda: 7, told.append)
    errands.start(0, 5.0, lambda: 1 // 0, told.append)
    errands.start(0, 5.0, hung.wait, told.append)
    for _ in range(500):
        errands.look(4 * NS)
        if len(told) == 2:
            break
        platform.sleep(0.01)
    assert {type(one) for one in told} == {int, ZeroDivisionError}
    errands.look(5 * NS)
    assert told[2:] == [None]
    hung.set()
    platform.sleep(0.05)
    errands.look(6 * NS)
    assert len(told) == 3


def test_errands_that_hang_are_bounded() -> None:
    """Beyond `OPEN_MAX` that hang the next is told of as late at once; when they come back there is room again."""
    platform, told = LocalPlatform(), []
    errands, hung = Errands(platform), threading.Event()
    for _ in range(OPEN_MAX + 1):
        errands.start(0, 1.0, hung.wait, told.append)
    assert told == [None]
    errands.look(2 * NS)
    errands.start(2 * NS, 1.0, hung.wait, told.append)
    assert told == [None] * (OPEN_MAX + 2), "all were told of as late, and hang on"
    hung.set()
    for _ in range(500):
        errands.look(3 * NS)
        if not errands.start(3 * NS, 1.0, lambda: 7, told.append) and 7 in told:
            break
        platform.sleep(0.01)
    assert 7 in told
