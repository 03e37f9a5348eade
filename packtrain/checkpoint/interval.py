"""How long to train between two saves: the exact optimum for what a save costs and how often the machines fail. Pure.

A save stops training for `stall_s` (w) and is durable `write_s` (d) later. Failures come at random, one in M seconds on
average; each costs a restart of R and all that is not durable. Between two durable saves the first try needs tau + w
without a failure, and each later one R + d + tau + w, so a second of work takes, on average,

    M exp((R + d)/M) (exp((tau + w)/M) - 1) / tau      seconds; with d = 0 it is Daly's (2006) exact form.

R and d only scale it. Its minimum is at tau = M x with -log(1 - x) - x = w/M, that is tau = M (1 + W(-exp(-1 - w/M)));
for w << M nearly sqrt(2 w M), Young's. It has one minimum, so where a bound forbids that, the bound is best.
`d` has one other part: a save must be over before the next begins.

The rate of failures is unknown at first. Prior: a gamma distribution of shape 1.7 and rate 383 node-days, fitted to
rates published for large clusters (4.4 in 1,000 node-days on average); after x failures in n node-days the mean is
(1.7 + x) / (383 + n).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from packtrain.core.units import duration_text

PRIOR_FAILURES, PRIOR_NODE_S = 1.7, 383 * 86_400.0
UNMEASURED_S = 120.0
"""Until a first save was measured."""
EVERY_S_MIN, EVERY_S_MAX = 10.0, 3600.0
"""The latter for what no rate knows: a run that somebody deletes, an error in a program that was changed."""
RECENT = 8
"""Saves whose cost counts."""
SPACING = 1.25
"""Times the longest write: two saves at once help nobody."""


class Cost(NamedTuple):
    """Of one published save."""

    stall_s: float
    """Training stood still."""
    write_s: float
    """From then on until it was durable."""


class History(NamedTuple):
    """Of a run so far: attempts that ended unasked, and the time its nodes were in use."""

    failures: int = 0
    node_s: float = 0.0


class Interval(NamedTuple):
    every_s: float
    reason: str


def mean_between_failures_s(history: History, nodes: int) -> float:
    """Of `nodes` together, by the mean of the posterior rate."""
    return (PRIOR_NODE_S + history.node_s) / ((PRIOR_FAILURES + history.failures) * nodes)


def wall_per_work(every_s: float, stall_s: float, failing_s: float, restart_s: float, write_s: float) -> float:
    """Expected seconds for a second of work with a save every `every_s` seconds of it; `failing_s`: M. At least 1."""
    growth = math.expm1((every_s + stall_s) / failing_s)
    return failing_s * math.exp((restart_s + write_s) / failing_s) * growth / every_s


def optimum_s(stall_s: float, failing_s: float) -> float:
    """Where `wall_per_work` is least. 0 for a save that costs nothing; never more than `failing_s`."""
    if stall_s <= 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(100):  # bisection: the left side grows from 0 without bound
        x = (low + high) / 2
        if x == 1.0 or -math.log1p(-x) - x > stall_s / failing_s:
            high = x
        else:
            low = x
    return failing_s * (low + high) / 2


def _brief(seconds: float) -> str:
    return duration_text(seconds) if seconds >= 1 else f"{seconds:.2g} s"


def choose(costs: Collection[Cost], history: History, nodes: int) -> Interval:
    """The interval for these measured saves (the recent ones) on `nodes`, and why, in words."""
    if not costs:
        return Interval(UNMEASURED_S, "no save was measured yet")
    stall_s = sum(cost.stall_s for cost in costs) / len(costs)
    write_s = max(cost.write_s for cost in costs)
    failing_s = mean_between_failures_s(history, nodes)
    best_s = optimum_s(stall_s, failing_s)
    why = (
        f"a save stops training for {_brief(stall_s)}, and a failure is expected every "
        f"{duration_text(failing_s)} ({history.failures} in {history.node_s / 86_400:.1f} node-days so far): "
        f"the optimum is {duration_text(best_s)}"
    )
    low_s = max(EVERY_S_MIN, SPACING * write_s)
    if best_s < low_s:
        limit = f"a write takes {_brief(write_s)}" if low_s > EVERY_S_MIN else "not more often"
        return Interval(low_s, f"{why}; {limit}, so every {duration_text(low_s)}")
    high_s = max(low_s, EVERY_S_MAX)
    if best_s > high_s:
        return Interval(high_s, f"{why}; not less often than every {duration_text(high_s)}")
    return Interval(best_s, why)
