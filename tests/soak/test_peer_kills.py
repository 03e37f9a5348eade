"""Nodes lost while their copies are under way, again and again."""

from __future__ import annotations

import random

import pytest

from tests.checkpoint.peer_runs import PeerRun, kill_and_go_on
from tests.checkpoint.test_kills import Children, children, memory  # noqa: F401
from tests.checkpoint.test_peer_kills import run  # noqa: F401

ROUNDS = 20

pytestmark = pytest.mark.soak


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_lost_nodes(run: PeerRun, seed: int) -> None:  # noqa: F811
    """A hundred attempts in five runs: with sender, holder or both killed at drawn moments, each next attempt begins
    from the step that all had copied, or the one under way, bit for bit."""
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        kill_and_go_on(run, rng)
