"""The interval between saves: against numerical minimisation, closed forms in their limits, and a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.interval import (
    EVERY_S_MAX,
    EVERY_S_MIN,
    SPACING,
    UNMEASURED_S,
    Cost,
    History,
    choose,
    mean_between_failures_s,
    optimum_s,
    wall_per_work,
)
from packtrain.core.config import decode, override
from packtrain.core.errors import BadValue, Contradiction

positive = st.floats(-3, 8).map(lambda exponent: 10.0**exponent)


@given(st.floats(-7, 3), positive)
def test_the_optimum_is_the_closed_form(exponent: float, failing_s: float) -> None:
    """For a stall from a ten-millionth of M to a thousand times M it is M (1 + W(-exp(-1 - w/M))), within 1e-6 (the
    closed form itself loses digits near its branch point; measured 4e-9 at most)."""
    stall_s = 10**exponent * failing_s
    closed = failing_s * (1 + lambertw(-math.exp(-1 - stall_s / failing_s)).real)
    assert optimum_s(stall_s, failing_s) == pytest.approx(closed, rel=1e-6)


@given(st.floats(-4, 1), positive, st.floats(0, 3), st.floats(0, 3))
def test_the_optimum_is_the_numerical_minimum(exponent: float, failing_s: float, restart: float, write: float) -> None:
    """No interval gives less wall time for a second of work, whatever restart and write take: those move the cost and
    not its place."""
    stall_s, rest = 10**exponent * failing_s, (restart * failing_s, write * failing_s)
    best_s = optimum_s(stall_s, failing_s)

    def cost(log_s: float) -> float:
        return wall_per_work(math.exp(log_s), stall_s, failing_s, *rest)

    found = minimize_scalar(cost, bounds=(math.log(best_s) - 5, math.log(best_s) + 3), method="bounded")
    assert cost(math.log(best_s)) <= found.fun * (1 + 1e-12)
    assert found.x == pytest.approx(math.log(best_s), abs=1e-2)


def test_limits() -> None:
    """For short stalls it is Young's sqrt(2 w M), then Daly's series; a stall far above M gives M; none gives 0."""
    failing_s = 1e6
    for stall_s in (1e-3, 1.0):
        assert optimum_s(stall_s, failing_s) == pytest.approx(math.sqrt(2 * stall_s * failing_s), rel=1e-3)
    root = math.sqrt(1e4 / (2 * failing_s))
    daly = math.sqrt(2 * 1e4 * failing_s) * (1 + root / 3 + root**2 / 9) - 1e4
    assert optimum_s(1e4, failing_s) == pytest.approx(daly, rel=1e-4)
    assert optimum_s(100 * failing_s, failing_s) == pytest.approx(failing_s, rel=1e-9)
    assert optimum_s(0.0, failing_s) == 0.0


def simulated(every_s: float, stall_s: float, failing_s: float, restart_s: float, write_s: float, seed: int) -> float:
    """Wall time for a second of work, failures drawn; the model of the docstring, event by event."""
    rng = np.random.Generator(np.random.PCG64(seed))
    wall = work = 0.0
    need = every_s + stall_s  # from one durable save to the next
    for _ in range(20_000):
        gap = rng.exponential(failing_s)
        left = need
        while gap < left:
            wall += gap
            gap, left = rng.exponential(failing_s), restart_s + write_s + need
        wall, work = wall + left, work + every_s
    return wall / work


@pytest.mark.parametrize("seed", [1, 2])
def test_the_formula_is_what_happens(seed: int) -> None:
    """Drawn failures give the expected wall time within 3% (measured 1%), and more of it on both sides of the
    optimum."""
    stall_s, failing_s, rest = 20.0, 1000.0, (60.0, 30.0)
    best_s = optimum_s(stall_s, failing_s)
    costs = [simulated(factor * best_s, stall_s, failing_s, *rest, seed) for factor in (0.3, 1.0, 3.0)]
    assert costs[1] == pytest.approx(wall_per_work(best_s, stall_s, failing_s, *rest), rel=0.03)
    assert costs[1] < min(costs[0], costs[2])


histories = st.builds(History, st.integers(0, 1000), st.floats(0, 1e11))
costs = st.lists(st.builds(Cost, st.floats(0, 1e4), st.floats(0, 1e5)), min_size=1, max_size=8)


@given(costs, histories, st.integers(1, 100_000))
def test_the_interval_is_within_its_bounds(measured: list[Cost], history: History, nodes: int) -> None:
    """Never more often than saves can be written with room to spare, or 10 s; else at most an hour; finite, with a
    reason that names the failures."""
    chosen = choose(measured, history, nodes)
    low_s = max(EVERY_S_MIN, SPACING * max(cost.write_s for cost in measured))
    assert low_s <= chosen.every_s <= max(low_s, EVERY_S_MAX) and math.isfinite(chosen.every_s)
    assert f"{history.failures} in " in chosen.reason


@given(costs, histories, st.integers(1, 10_000))
def test_the_interval_goes_the_right_way(measured: list[Cost], history: History, nodes: int) -> None:
    """More failures, or more nodes, never save less often; longer stalls never more often; a quiet day never more
    often."""
    now_s = choose(measured, history, nodes).every_s
    assert choose(measured, history._replace(failures=history.failures + 1), nodes).every_s <= now_s
    assert choose(measured, history, 2 * nodes).every_s <= now_s
    assert choose(measured, history._replace(node_s=history.node_s + 86_400), nodes).every_s >= now_s
    longer = [Cost(2 * cost.stall_s, cost.write_s) for cost in measured]
    assert choose(longer, history, nodes).every_s >= now_s


def test_the_rate_begins_at_the_prior_and_ends_at_the_data() -> None:
    """Without a history a node fails 4.4 times in 1,000 days; after 100 failures in 10 node-days, every 333,876 s (393
    days over 101.7); after a million in 100,000 as often as seen, within 0.4%."""
    day_s = 86_400.0
    assert 1000 * day_s / mean_between_failures_s(History(), 1) == pytest.approx(4.438642, abs=1e-6)
    assert mean_between_failures_s(History(100, 10 * day_s), 1) == pytest.approx(333_876.106, abs=1e-3)
    assert mean_between_failures_s(History(100, 10 * day_s), 512) == pytest.approx(652.1017699, abs=1e-6)
    assert mean_between_failures_s(History(10**6, 1e5 * day_s), 1) == pytest.approx(0.1 * day_s, rel=0.004)


def test_reasons_say_what_limits() -> None:
    """The words tell stall, rate and optimum, and which bound made it another one."""
    assert choose([], History(), 1) == (UNMEASURED_S, "no save was measured yet")
    plain = choose([Cost(0.5, 2.0)], History(2, 86_400.0 * 3), 64)
    assert "stops training for 0.5 s, " in plain.reason and "(2 in 3.0 node-days so far)" in plain.reason
    assert "a write takes 5m00s" in choose([Cost(0.0, 300.0)], History(), 1).reason
    assert "not more often" in choose([Cost(0.0, 0.1)], History(), 1).reason
    assert "not less often than every 1h00m" in choose([Cost(60.0, 0.1)], History(), 1).reason


def test_the_setting() -> None:
    """`every_s` is a number, which a person pins, or auto; nothing else, and no negative number."""
    assert decode(b"", CheckpointConfig).every_s == 120.0
    assert decode(b'every_s = "auto"', CheckpointConfig).every_s == "auto"
    assert override(CheckpointConfig(), ["every_s=auto"]).every_s == "auto"
    assert override(CheckpointConfig(every_s="auto"), ["every_s=30"]).every_s == 30
    with pytest.raises(BadValue, match="auto"):
        decode(b'every_s = "often"', CheckpointConfig)
    with pytest.raises(Contradiction):
        CheckpointConfig(every_s=-1.0)
