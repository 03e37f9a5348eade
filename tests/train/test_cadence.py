"""When the next save is due: what a person pinned, or the optimum for the saves measured."""

from __future__ import annotations

from collections import deque

import pytest

from packtrain.checkpoint.interval import UNMEASURED_S, Cost, History, choose
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.journal import Journal, read_folder
from packtrain.core.records import IntervalChosen
from packtrain.core.units import NS
from packtrain.train.cadence import Cadence

NONE = History()


class Asked:
    """A cadence, its journal, and the costs it is shown."""

    def __init__(self, wanted, history=NONE, nodes=1):
        self.platform = FakePlatform(FakeDisk(), "a")
        self.platform.mkdir("/j")
        self.journal = Journal(self.platform, "/j", "trainer", 0)
        self.costs: deque[Cost] = deque(maxlen=8)
        self.cadence = Cadence(wanted, history, nodes, 0)

    def after(self, now_s, *costs):
        self.costs += costs
        return self.cadence.every_s(self.costs, round(now_s * NS), self.journal)

    def journalled(self):
        self.journal.flush()
        entries = read_folder(self.platform, "/j").entries
        return [entry.record for entry in entries if isinstance(entry.record, IntervalChosen)]


@pytest.mark.parametrize("pinned", [0.0, 30.0])
def test_a_pinned_interval_stays(pinned):
    """Whatever saves cost and however often attempts failed, a number given by a person is what counts."""
    asked = Asked(pinned, History(99, 1.0))
    assert asked.after(1.0, Cost(9.0, 9.0)) == pinned and asked.journalled() == []


def test_auto_is_the_optimum_of_what_was_measured():
    """Before a first save two minutes; then the optimum, with this attempt's own time as exposure, said once."""
    asked = Asked("auto", History(3, 86_400.0), nodes=4)
    assert asked.after(10.0) == UNMEASURED_S and asked.journalled() == []
    want = choose([Cost(0.5, 2.0)], History(3, 86_400.0 + 4 * 3600.0), 4)
    assert asked.after(3600.0, Cost(0.5, 2.0)) == want.every_s
    assert asked.after(9000.0) == want.every_s, "no new save, no new choice"
    assert asked.journalled() == [IntervalChosen(every_s=want.every_s, reason=want.reason)]


def test_small_changes_change_nothing():
    """A cost that moves the optimum by less than a tenth leaves the interval; one that moves it further is said."""
    asked = Asked("auto", History(50, 86_400.0))
    first = asked.after(60.0, *[Cost(0.5, 2.0)] * 8)
    assert asked.after(120.0, Cost(0.6, 2.0)) == first and len(asked.journalled()) == 1
    assert asked.after(180.0, *[Cost(2.0, 2.0)] * 8) > 1.5 * first and len(asked.journalled()) == 2
