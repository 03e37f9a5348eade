"""Where a run allows faults: batches as they are, and before each what this process is ordered to suffer.

`nan` is a batch whose weights are none, once: the guard sees a step that is not finite, runs the batch again, and uses
that. The program under test is the shipped one.
"""

from __future__ import annotations

import numpy as np

from packtrain.core.breaking import NAN, Faults
from packtrain.core.contract import Place
from packtrain.data.loader import Batch
from packtrain.train.loop import Feed


class BrokenFeed:
    """`feed`, with `faults` looked at before each batch, so once a call of the step."""

    def __init__(self, feed: Feed, faults: Faults) -> None:
        self._feed, self._faults = feed, faults

    def get(self, index: int) -> Batch:
        batch = self._feed.get(index)
        return without_weights(batch) if self._faults.step() == NAN else batch


def without_weights(batch: Batch) -> Batch:
    """The same with NaN for every weight."""
    return batch._replace(weights_BL=np.full_like(batch.weights_BL, np.nan))


def breakable(feed: Feed, place: Place) -> Feed:
    """`feed` itself where nobody may break this process."""
    return BrokenFeed(feed, Faults(place.faults)) if place.faults else feed
