"""When the next save is due by time: as the person said, or the optimum for what saves have cost so far."""

from __future__ import annotations

from collections import deque
from typing import Literal

from packtrain.checkpoint.interval import UNMEASURED_S, Cost, History, choose
from packtrain.core.journal import Journal
from packtrain.core.records import IntervalChosen
from packtrain.core.units import NS

CHANGE_MIN = 0.1
"""An interval that differs by less than this part stays: the measurements differ by more from save to save."""


class Cadence:
    """Of one attempt; rank 0 asks it. `history`: of the run before this attempt, which began at `began_ns`."""

    def __init__(self, wanted: float | Literal["auto"], history: History, nodes: int, began_ns: int) -> None:
        self._auto = wanted == "auto"
        self._every_s = UNMEASURED_S if wanted == "auto" else wanted
        self._history, self._nodes, self._began_ns = history, nodes, began_ns
        self._seen: Cost | None = None

    def every_s(self, costs: deque[Cost], now_ns: int, journal: Journal) -> float:
        """Seconds from the beginning of one save to the next; 0: never by time. `costs`: of this attempt's last saves.
        """
        if self._auto and costs and costs[-1] is not self._seen:
            self._seen = costs[-1]
            node_s = self._history.node_s + self._nodes * (now_ns - self._began_ns) / NS
            chosen = choose(costs, self._history._replace(node_s=node_s), self._nodes)
            if abs(chosen.every_s - self._every_s) > CHANGE_MIN * self._every_s:
                self._every_s = chosen.every_s
                journal.write(IntervalChosen(every_s=chosen.every_s, reason=chosen.reason))
        return self._every_s
