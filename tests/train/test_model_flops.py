"""FLOPs by mask area, against counting pairs one by one."""

from __future__ import annotations

import jax
import msgspec
import numpy as np
import pytest

from packtrain.train.attention import interval_mask, windowed
from packtrain.train.flops import mask_area, matmul_parameters, measure_peak, step_flops
from packtrain.train.state import count_parameters
from tests.train.tiny import MODEL, packed_rows


@pytest.mark.parametrize("window", [0, 1, 5])
def test_area_counts_live_pairs(window: int) -> None:
    """The area is the number of True entries of the mask the attention reference builds."""
    rows = packed_rows(5)
    model = msgspec.structs.replace(MODEL, window=window)
    mask = interval_mask(*windowed(rows.starts_BL, rows.ends_BL, window), 16)
    assert mask_area(model, rows) == int(np.asarray(mask).sum())


def test_empty_and_inverted_intervals_have_no_area() -> None:
    """Padding rows cost nothing."""
    rows = packed_rows(5)
    assert mask_area(MODEL, rows._replace(ends_BL=rows.starts_BL)) == 0
    assert mask_area(MODEL, rows._replace(ends_BL=rows.starts_BL - 3)) == 0


def test_step_flops_by_hand() -> None:
    """One layer after another: 6 per matmul parameter and token, 12 per head size and live pair."""
    rows = packed_rows(1)
    per_layer = 16 * 8 * 4 * 2 + 16 * 4 * 4 * 2 + 3 * 16 * 24
    parameters = 2 * per_layer + 128 * 16
    assert matmul_parameters(MODEL) == parameters
    area = int((rows.ends_BL - rows.starts_BL).sum())
    assert step_flops(MODEL, rows) == 6 * parameters * 8 * 16 + 12 * 4 * (2 * 8 * area)


def test_the_embedding_counts_once() -> None:
    """Looking a row up is no matmul: tied and untied models do the same work, with other parameter counts."""
    untied = msgspec.structs.replace(MODEL, tied=False)
    assert matmul_parameters(untied) == matmul_parameters(MODEL)
    assert count_parameters(untied) == count_parameters(MODEL) + 128 * 16


def test_peak_is_the_best_try_of_all_devices_together() -> None:
    """With a clock that says 1 s, 0.5 s, 2 s, ... the rate is that of the fastest, all devices' products added."""
    ticks = iter(np.cumsum([0, 5, 0, 1.0, 0, 0.5, 0, 2, 0, 3]) * 1e9)
    rate = measure_peak(jax.devices()[:2], lambda: int(next(ticks)), size=64)
    assert rate == 2 * 2 * 64**3 / 0.5
