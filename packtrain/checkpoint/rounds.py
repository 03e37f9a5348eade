"""Which step all writers of a world lend to other nodes: a round, agreed on without a message of its own.

What survives the loss of a node is a step that all writers hold, and of each node its peer as well. Were each to lend
its newest slot when the one before has arrived, slow nodes would lend other steps than quick ones. So all lend the same
step, the next only when that has ended everywhere, and until then the last one that all held stays in every node's own
memory and at its peer. How a round ended for a rank travels with its row of orders; a round begins at a step where all
ranks have read the same calls, so all decide alike.

A copy that did not arrive ends a round as well: it costs the protection of that node until the next one does, and of no
other. A writer that could not hold the step costs all of them that round. While one holds nothing in memory at all
there are no rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NEVER = -(2**31 - 1)
"""What a writer says of every round that holds nothing in memory at all."""


class Round(NamedTuple):
    step: int
    """All lend their slot of it. 0: no round."""
    before: int
    """Step of the last round that all writers held: it stays until this one has ended. 0: there was none yet."""


class Rounds:
    """One rank's view, the same on all. `every`: rounds begin at steps divisible by this; 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._last = Round(0, 0)

    def begins(self, step: int, ended: Sequence[int]) -> Round | None:
        """The round that begins with this step, if one does. `ended`: of each rank the step of the last round that has
        ended there, negative where the rank did not hold it. None while one has no memory tier: no step would be whole.
        """
        if not self._every or step % self._every or NEVER in ended:
            return None
        if any(abs(one) < self._last.step for one in ended):
            return None
        all_held = all(one == self._last.step for one in ended)
        self._last = Round(step, self._last.step if all_held else self._last.before)
        return self._last
