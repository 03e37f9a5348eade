"""Near-duplicates: documents that share more than half of their 8-line shingles (Jaccard index above 1/2).

Found by MinHash (Broder 1997) with a fixed seed: 64 minima in 32 bands of 2, so that a pair at exactly 1/2 shares no
band with probability (1 - 1/4)**32 = 0.0001; every pair that shares one is then verified on the shingles themselves.
Lines are compared without the white space around them and blank ones are left out; a document of fewer than 8 lines
is one shingle.
"""

from __future__ import annotations

import hashlib

import numpy as np

from packtrain.data.keys import GOLDEN, U64, key64, mix64, stream64

SHINGLE_LINES = 8
BANDS, BAND_ROWS = 32, 2
CHUNK = 1024

_SEEDS = stream64(BANDS * BAND_ROWS, key64(0, "minhash"))
_BAND_SEEDS = stream64(BANDS, key64(0, "bands"))


def shingles(text: bytes) -> U64:
    """The distinct shingles of a document as sorted 64-bit hashes; none for a document of blank lines."""
    digests = [hashlib.blake2b(line, digest_size=8).digest() for raw in text.split(b"\n") if (line := raw.strip())]
    lines = np.frombuffer(b"".join(digests), dtype="<u8")
    width = min(SHINGLE_LINES, len(lines))
    hashes = np.zeros(len(lines) - width + 1 if width else 0, dtype=np.uint64)
    for i in range(width):
        hashes = hashes * np.uint64(GOLDEN) + lines[i : i + len(hashes)]
    return np.unique(mix64(hashes))


def band_keys(text: bytes) -> U64:
    """[32] keys; two documents are candidates when a key is equal. All 0 for a document without shingles: never one."""
    hashes = shingles(text)
    if not len(hashes):
        return np.zeros(BANDS, dtype=np.uint64)
    minima = np.full(len(_SEEDS), np.iinfo(np.uint64).max, dtype=np.uint64)
    for first in range(0, len(hashes), CHUNK):
        minima = np.minimum(minima, mix64(hashes[None, first : first + CHUNK] ^ _SEEDS[:, None]).min(axis=1))
    pairs = minima.reshape(BANDS, BAND_ROWS)
    return np.maximum(mix64(mix64(pairs[:, 0] ^ _BAND_SEEDS) + pairs[:, 1] * np.uint64(GOLDEN)), np.uint64(1))


def near(a: U64, b: U64) -> bool:
    """Whether two sets of shingles share more than half of their union."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return 2 * common > len(a) + len(b) - common
