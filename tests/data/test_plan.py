"""Draws are exact: counts per block, counting on over segments, and every epoch a permutation of all rows."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.errors import BadValue
from packtrain.data.keys import key64, permutation, stream64
from packtrain.data.plan import MIX_ROWS, Plan, Segment, Share, Shuffle, mixing_counts

SHARE = Share(store="s", packing="p", count=MIX_ROWS, rows=1000, windows=1000, rows_per_window=1)


def share(store: str, count: int, rows: int = 1000) -> Share:
    return Share(store=store, packing=store, count=count, rows=rows, windows=-(-rows // 7), rows_per_window=7)


def segment(from_index: int, *shares: Share, rows: int = 10, length: int = 64) -> Segment:
    return Segment(from_index=from_index, batch_rows=rows, length=length, objective="causal", shares=shares)


def test_keys_never_change() -> None:
    """The numbers behind every draw are these, on every machine and in every version."""
    assert key64(0, "mix", 0, 3) == 0x80C57E1A8B141E5D
    assert stream64(3, 7).tolist() == [1346066267577507604, 7191089600892374487, 309689372594955804]
    assert permutation(10, 7).tolist() == [2, 0, 9, 6, 8, 1, 5, 7, 4, 3]


def test_names_of_keys_stay_apart() -> None:
    """Keys of different names differ, also where their texts run together the same way."""
    names = [("a", 1), ("a1",), ("a", "1"), (1, "a"), ()]
    assert len({key64(0, *name) for name in names} | {key64(1)}) == len(names) + 1


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_counts_are_the_weights(weights: list[float]) -> None:
    """Counts add up to 2,048 and each is within one row of its exact share."""
    counts = mixing_counts(weights, [str(i) for i in range(len(weights))])
    assert sum(counts) == MIX_ROWS
    assert all(abs(c - w * MIX_ROWS / sum(weights)) < 1 for c, w in zip(counts, weights))


def test_a_weight_of_no_row_is_refused() -> None:
    """A weight that comes to no row in 2,048 is an error that names the store; twice that weight is not."""
    with pytest.raises(BadValue, match="no row in 2048") as caught:
        mixing_counts([1.0, 1e-4], ["big", "small"])
    assert "small" in caught.value.where
    assert mixing_counts([1.0, 4e-4], ["big", "small"]) == [2047, 1]


def located(shuffle: Shuffle, n: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(*(x.tolist() for x in shuffle.locate(n))))


def test_every_block_is_mixed_exactly() -> None:
    """Each block of 2,048 rows holds exactly its count of each store, in an order of its own."""
    plan = Plan(3, [segment(0, share("a", 1500), share("b", 500), share("c", 48))])
    orders = []
    for block in range(3):
        drawn = plan.nth(0, block * MIX_ROWS + np.arange(MIX_ROWS))[0].tolist()
        assert Counter(drawn) == {0: 1500, 1: 500, 2: 48}
        orders.append(drawn)
    assert orders[0] != orders[1] != orders[2]


def test_draws_count_on_over_segments() -> None:
    """Over segments with other weights, stores coming and going, each store's draws are 0, 1, 2, ... without gap."""
    segments = [
        segment(0, share("a", 1500), share("b", 548)),
        segment(300, share("b", 1024), share("c", 512), share("a", 512), rows=7),
        segment(1000, share("c", 2048)),
        segment(1010, share("a", 1), share("b", 2047), rows=16),
    ]
    plan = Plan(11, segments)
    ends = [300, 1000, 1010, 1400]
    drawn: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for number, (s, end) in enumerate(zip(segments, ends)):
        rows = np.arange((end - s.from_index) * s.batch_rows)
        for which, n in zip(*(x.tolist() for x in plan.nth(number, rows))):
            drawn[s.shares[which].store].append(n)
    assert all(draws == list(range(len(draws))) for draws in drawn.values())
    assert all(drawn.values())


def test_draws_count_on_in_tokens() -> None:
    """Where a later segment has longer rows, a store goes on behind the tokens it has given, not behind as many
    rows."""
    plan = Plan(0, [segment(0, SHARE, rows=10, length=64), segment(5, SHARE, rows=10, length=256)])
    assert plan.nth(1, np.arange(50))[1].min() == -(-50 * 64 // 256)


def test_segments_take_over_at_their_index() -> None:
    """The batch before a segment's first index still comes from the segment before."""
    plan = Plan(0, [segment(0, SHARE), segment(5, SHARE), segment(9, SHARE)])
    assert [plan.segment_at(i) for i in (0, 4, 5, 8, 9, 10**9)] == [0, 0, 1, 1, 2, 2]


@given(st.integers(1, 700), st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_is_a_permutation(rows: int, per_window: int, epoch: int) -> None:
    """Every epoch gives each row of each window exactly once, the short last window included."""
    its = Share(store="s", packing="p", count=1, rows=rows, windows=-(-rows // per_window), rows_per_window=per_window)
    shuffle = Shuffle(1, its)
    got = located(shuffle, epoch * rows + np.arange(rows))
    assert sorted(got) == [(r // per_window, r % per_window) for r in range(rows)]


def test_epochs_differ_in_both_levels() -> None:
    """A new epoch, another seed and another store each change the order of windows and of rows in a group."""

    def order(seed: int, store: str, epoch: int, windows: int = 128) -> list[tuple[int, int]]:
        per_window = 1280 // windows
        its = Share(store=store, packing="p", count=1, rows=1280, windows=windows, rows_per_window=per_window)
        shuffle = Shuffle(seed, its)
        return located(shuffle, epoch * 1280 + np.arange(1280))

    orders = [order(0, "s", 0), order(0, "s", 1), order(1, "s", 0), order(0, "t", 0)]
    inner = [order(0, "s", 0, 1), order(0, "s", 1, 1), order(1, "s", 0, 1), order(0, "t", 0, 1)]
    assert all(a != b for a, b in itertools.combinations(inner, 2))
    for a, b in itertools.combinations(orders, 2):
        assert a != b
        assert {w for w, _ in a[:640]} != {w for w, _ in b[:640]}
    assert len({w for w, _ in orders[0][:640]}) == 64, "64 windows are read together, no more"
    assert len({w for w, _ in orders[0][:64]}) > 20, "and their rows are mixed"


def test_the_hash_covers_everything() -> None:
    """Every field of a plan changes its hash."""
    base = segment(0, share("a", 2000), share("b", 48))
    changes = {"store": "x", "packing": "x", "count": 1, "rows": 1, "windows": 1, "rows_per_window": 1}
    others = [
        msgspec.structs.replace(base, batch_rows=11), msgspec.structs.replace(base, length=65),
        msgspec.structs.replace(base, objective="other"), msgspec.structs.replace(base, shares=base.shares[::-1]),
    ] + [
        msgspec.structs.replace(base, shares=(msgspec.structs.replace(base.shares[0], **{name: value}), base.shares[1]))
        for name, value in changes.items()
    ]
    plans = [Plan(0, [s]) for s in (base, *others)] + [Plan(1, [base]), Plan(0, [base, segment(5, SHARE)])]
    assert len({plan.hash for plan in plans}) == len(plans)
    assert Plan(0, [base]).hash == plans[0].hash
