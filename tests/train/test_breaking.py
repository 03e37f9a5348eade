"""A worker that is broken on purpose: a step that is not finite, once, in the program that is shipped."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import numpy as np
import pytest

from packtrain.core.breaking import NAN, Fault, Faults, fault_bytes
from packtrain.core.contract import Place
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import GuardVerdict
from packtrain.data.loader import Batch
from packtrain.train.breaking import BrokenFeed, breakable, without_weights
from tests.train import rig


class Ordered(BrokenFeed):
    """A feed whose process is ordered to break when it fetches batch `at`."""

    def __init__(self, path: pathlib.Path, at: int) -> None:
        super().__init__(rig.Feed(), Faults(str(path)))
        self._path, self._at, self.armed = path, at, False

    def get(self, index: int) -> Batch:
        if self.armed and index == self._at and not self._path.exists():
            LocalPlatform().write_replacing(str(self._path), fault_bytes(Fault(1, NAN)))
        return super().get(index)


@pytest.mark.parametrize("at", [0, 3, rig.SPEC.train.steps - 1])
def test_nan_on_purpose_is_rerun_and_leaves_no_trace_in_the_state(tmp_path: pathlib.Path, at: int) -> None:
    """The guard finds one step not finite, runs its batch again, uses that, and says that the hardware is suspect: the
    final bits are those of a quiet run."""
    quiet, broken = rig.fresh_folder(tmp_path, "quiet"), rig.fresh_folder(tmp_path, "broken")
    feed = Ordered(tmp_path / "faults", at)
    assert rig.bits(rig.Attempt(broken, feed=feed).run()) == rig.bits(rig.Attempt(quiet).run())
    assert [(v.step, v.reason, v.rerun, v.policy) for v in rig.records(broken, GuardVerdict)] == [
        (at + 1, "non_finite", "clean", "used")
    ]


def test_only_the_weights_are_none(tmp_path: pathlib.Path) -> None:
    """The batch itself is not touched, and its next fetch is as it was."""
    batch = rig.Feed().get(2)
    spoilt = without_weights(batch)
    assert np.isnan(spoilt.weights_BL).all() and np.isfinite(batch.weights_BL).all()
    assert spoilt.tokens_BL is batch.tokens_BL


def test_nobody_looks_where_nobody_may_break(tmp_path: pathlib.Path) -> None:
    """Without a file to look at the feed is the feed itself."""
    feed = rig.Feed()
    assert breakable(feed, Place()) is feed
    assert isinstance(breakable(feed, replace(Place(), faults=str(tmp_path / "faults"))), BrokenFeed)
