"""Near-duplicates are pairs that share more than half of their 8-line shingles, and hashing finds them."""

from __future__ import annotations

import numpy as np
import pytest

from packtrain.data.keys import GOLDEN, key64, mix64, stream64
from packtrain.data.minhash import BANDS, band_keys, near, shingles
from tests.data.makers import source_text


def lines(n: int, seed: int = 0) -> list[bytes]:
    return source_text(seed, n).splitlines()


def text(some: list[bytes]) -> bytes:
    return b"\n".join(some)


def test_shingles_are_runs_of_eight_lines() -> None:
    """A text of n distinct lines has n - 7 shingles; one of up to 8 lines has one, one of blank lines none."""
    assert [len(shingles(text(lines(n)))) for n in (100, 9, 8, 7, 1)] == [93, 2, 1, 1, 1]
    assert len(shingles(b"")) == len(shingles(b"\n  \n\t\n")) == 0
    assert len(shingles(text(lines(10) * 5))) == 10, "each is counted once"


def test_white_space_around_lines_does_not_count() -> None:
    """Indenting a text, ending its lines otherwise or adding blank lines leaves its shingles as they are."""
    base = lines(30)
    changed = b"\r\n\r\n".join(b"    " + line for line in base)
    assert np.array_equal(shingles(text(base)), shingles(changed))
    assert not np.array_equal(shingles(text(base)), shingles(text(base[::-1])))


def test_half_is_the_edge() -> None:
    """Sharing more than half of the union makes two texts near; exactly half does not."""
    whole = lines(47)  # 40 shingles
    for kept, expected in ((28, True), (27, False), (26, False)):  # 21, 20, 19 of 40 shared
        assert near(shingles(text(whole)), shingles(text(whole[:kept]))) is expected
    assert not near(shingles(b""), shingles(b"")) and not near(shingles(b""), shingles(text(whole)))


@pytest.mark.parametrize("shared", [0.52, 0.6, 0.9])
def test_near_pairs_share_a_key(shared: float) -> None:
    """Of 60 pairs that share this much, every one has a band key in common."""
    missed = 0
    for seed in range(60):
        n = 60
        common = round(2 * n * shared / (1 + shared))  # of n shingles each, so that the index is `shared`
        base = lines(n + 7, seed)
        other = base[: common + 7] + lines(n - common, seed + 10_000)
        a, b = shingles(text(base)), shingles(text(other))
        assert near(a, b)
        missed += not (band_keys(text(base)) == band_keys(text(other))).any()
    assert missed == 0


def test_other_texts_share_no_key() -> None:
    """Texts without a common shingle have no key in common; a text without lines has none at all."""
    keys = np.concatenate([band_keys(text(lines(40, seed))) for seed in range(200)])
    assert len(np.unique(keys)) == 200 * BANDS
    assert not band_keys(b"\n \n").any() and keys.all()


def test_long_texts_have_the_minima_of_all_their_shingles() -> None:
    """A text of many chunks of shingles has the keys that come of all its shingles at once."""
    base = text(lines(3000))
    minima = [int(mix64(shingles(base) ^ seed).min()) for seed in stream64(2 * BANDS, key64(0, "minhash"))]
    seeds = stream64(BANDS, key64(0, "bands"))
    first = mix64(np.array(minima[::2], dtype=np.uint64) ^ seeds)
    expected = mix64(first + np.array(minima[1::2], dtype=np.uint64) * np.uint64(GOLDEN))
    assert np.array_equal(band_keys(base), expected)
