"""Keyed pseudo-random numbers that are the same on every machine, forever.

NumPy promises no stable stream for `Generator.permutation`, and a run must draw the same batches after an upgrade, so
the three things needed are spelled out here: a 64-bit key from names, a 64-bit mixer, and a permutation.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15


def key64(seed: int, *names: str | int) -> int:
    """A 64-bit key from (seed, names): blake2b over their JSON text, so "a", 1 and "a1" stay apart."""
    text = json.dumps([seed, *names], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(x: U64) -> U64:
    """The finalizer of splitmix64, elementwise and wrapping: a bijection on 64-bit words. Source: Steele et al.
    2014."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream64(n: int, key: int) -> U64:
    """The first `n` words of splitmix64 started at `key`; all distinct."""
    return mix64(np.uint64(key) + np.arange(n, dtype=np.uint64) * np.uint64(GOLDEN))


def permutation(n: int, key: int) -> npt.NDArray[np.int64]:
    """A permutation of range(n): the order of `n` distinct keyed words, so ties cannot depend on the sorting method."""
    return np.argsort(stream64(n, key)).astype(np.int64)
