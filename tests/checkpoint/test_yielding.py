"""How a copy gives way to a run that trains."""

from __future__ import annotations

import math

from packtrain.checkpoint.yielding import SHARE_MIN, UNCAPPED_BYTES_PER_S, Share, Yielding
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.journal import Journal
from packtrain.core.records import StepDone
from tests.checkpoint.worlds import RUN


def test_a_copy_gives_way() -> None:
    """Steps that take longer halve the rate down to a floor, steps as before give it back; where steps stay slow at the
    floor, the copy is not to blame and speeds up again."""
    share = Share([1.0] * 8)
    share.heard([1.2] * 3)
    assert share.share == 1.0
    share.heard([1.2])
    assert share.share == 0.5
    for _ in range(9):
        share.heard([1.0] * 4)
    assert share.share == 1.0
    for _ in range(6):
        share.heard([2.0] * 4)
    assert share.share == SHARE_MIN
    share.heard([2.0] * 4)
    share.heard([2.0] * 4)
    assert share.share > SHARE_MIN


def test_steps_are_read_from_the_journal() -> None:
    """The rate follows what rank 0 writes down while the copy goes on; without anybody who trains it is the cap."""
    platform = FakePlatform(FakeDisk())
    assert Yielding(platform, RUN, math.inf)() == math.inf
    journal = Journal(platform, f"{RUN}/journal", "trainer", 0)

    def steps(first: int, seconds: float) -> None:
        for step in range(first, first + 8):
            journal.write(StepDone(
                step=step, loss=1.0, bits_per_byte=1.0, grad_norm=1.0, learning_rate=1.0, tokens=1, seconds=seconds,
                mfu=0.0,
            ))
        journal.flush()
        platform.sleep(3)

    steps(0, 1.0)
    capped, free = Yielding(platform, RUN, 1e6), Yielding(platform, RUN, math.inf)
    steps(8, 1.0)
    assert (capped(), free()) == (1e6, math.inf)
    steps(16, 3.0)
    assert (capped(), free()) == (5e5, UNCAPPED_BYTES_PER_S / 2)
    steps(24, 1.0)
    assert capped() == 7.5e5
