"""Numbers for people."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.units import bytes_text, count_text, duration_text, parse_bytes


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1023.7, "1.0 KiB"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1048575, "1.0 MiB"),
     (5 << 40, "5.0 TiB"), (-2048, "-2.0 KiB"), (5000 << 40, "5000.0 TiB")],
)
def test_bytes(n: float, text: str) -> None:
    """Bytes are shown in the largest binary unit that leaves at least one."""
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0"), (12, "12"), (1.5, "1.5"), (999, "999"), (999.7, "1k"), (4_200_000, "4.2M"), (999_999, "1M"),
     (64e9, "64B"), (5e15, "5000T"), (-1500, "-1.5k")],
)
def test_counts(n: float, text: str) -> None:
    """Counts are shown with three digits and never in the notation of a calculator."""
    assert count_text(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (9.94, "9.9s"), (9.97, "10s"), (59.4, "59s"), (59.7, "1m00s"), (3599.6, "1h00m"), (3725, "1h02m"),
     (47 * 3600, "47h00m"), (50 * 3600, "2d02h")],
)
def test_durations(seconds: float, text: str) -> None:
    """Durations carry into the next unit where they round to it."""
    assert duration_text(seconds) == text


@given(st.floats(0, 1e18))
def test_no_value_breaks_the_form(n: float) -> None:
    """Whatever the value, the text has one of the documented forms."""
    assert re.fullmatch(r"\d+(\.\d)? (B|[KMGT]iB)", bytes_text(n))
    assert re.fullmatch(r"\d+(\.\d+)?(e-\d+)?[kMBT]?", count_text(n))
    assert re.fullmatch(r"\d+(\.\d)?s|\d+m\d\ds|\d+h\d\dm|\d+d\d\dh", duration_text(n))


def test_amounts_are_read_as_people_write_them() -> None:
    """Decimal units count by thousands, binary ones by 1,024, a bare number is bytes; anything else is no amount."""
    texts = {"200MB": 200_000_000, "1.5 GiB": 3 << 29, "4096": 4096, "7kB": 7000, "2T": 2_000_000_000_000, "3B": 3}
    assert {text: parse_bytes(text) for text in texts} == texts
    assert [parse_bytes(text) for text in ("", "MB", "-1", "1e9", "5 mb", "5MBs", "inf")] == [None] * 7
