"""Tokens a second and core of the packed, mixed loader, beside grain and a dataset in Megatron's manner.

Command:  make bench-data

All three read the same two stores of the same documents, mixed 3 to 1, and make the same batches: 64 rows of 2,048.
Each runs in this one process, on one core, in turns, timed by what it had of the core; medians are printed, and ratios,
which travel between machines.

- ours: tokens, targets, weights, positions, and the key interval of each query; checksums verified
- Megatron's manner: its index maps (document, sample, shuffle, blend) over an indexed binary file, written here after
  megatron/core/datasets/gpt_dataset.py and blended_dataset.py; tokens, labels, loss mask, positions. Documents run on
  across rows and no mask keeps them apart, which is its default
- grain: MapDataset over documents, shuffled and mixed, then the faster of its two ways to pack: concatenated and
  split, or first fit. Tokens, segments, positions. Optional; its absence is said

Then: batch 10**9 of a loader just opened against its batch 1.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from packtrain.core.platform import LocalPlatform
from packtrain.data.config import DataConfig, StoreUse
from packtrain.data.loader import Loader, open_loader
from packtrain.data.store import Store, StoreWriter
from packtrain.data.tokenizer import byte_tokenizer

ROWS, LENGTH = 64, 2048
WEIGHTS = (3.0, 1.0)
STORE_TOKENS = 16_000_000
MEAN_TOKENS = 700
TURNS, BATCHES = 9, 20
SEED = 5
FAR = 10**9


def build(folder: str, seed: int) -> str:
    """A store of random ids whose documents have lengths as texts have: most are short, some very long."""
    draw, platform, tokenizer = np.random.default_rng(seed), LocalPlatform(), byte_tokenizer()
    writer = StoreWriter(platform, folder, "<u2")
    while writer.tokens < STORE_TOKENS:
        lengths = np.minimum(draw.lognormal(np.log(MEAN_TOKENS) - 0.72, 1.2, 1000).astype(np.int64) + 2, 60_000)
        tokens = draw.integers(0, 256, lengths.sum(), dtype=np.uint16)
        tokens[lengths.cumsum() - 1] = tokenizer.end_of_document
        writer.append(tokens, lengths, draw.bytes(16 * len(lengths)), int(lengths.sum()))
    writer.finish(tokenizer.hash, tokenizer.size, tokenizer.end_of_document)
    platform.write_new(f"{folder}/tokenizer.json", tokenizer.text.encode())
    return folder


def ours(folders: list[str]) -> Loader:
    uses = tuple(StoreUse(path=path, weight=weight) for path, weight in zip(folders, WEIGHTS))
    return open_loader(DataConfig(stores=uses, batch_rows=ROWS, length=LENGTH), SEED, 384)


class MegatronManner:
    """Index maps of one epoch: shuffled documents, where each sample begins in them, shuffled samples."""

    def __init__(self, store: Store, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self._tokens, self._starts = store.read(0, len(store)), store.document_starts.astype(np.int64)
        self._documents = draw.permutation(len(self._starts) - 1)
        ends = np.diff(self._starts)[self._documents].cumsum()
        self.samples = (int(ends[-1]) - 1) // LENGTH
        at = np.arange(self.samples + 1) * LENGTH
        self._first = np.searchsorted(ends, at, "right")
        self._offset = at - np.where(self._first > 0, ends[self._first - 1], 0)
        self._shuffle = draw.permutation(self.samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        text = self._text(int(self._shuffle[index])).astype(np.int64)
        return {
            "tokens": text[:-1], "labels": text[1:], "loss_mask": np.ones(LENGTH, np.float32),
            "position_ids": np.arange(LENGTH),
        }

    def _text(self, sample: int) -> np.ndarray:
        first, last = int(self._first[sample]), int(self._first[sample + 1])
        begin, end = int(self._offset[sample]), int(self._offset[sample + 1]) + 1
        parts = []
        for n in range(first, last + 1):
            start, stop = self._starts[self._documents[n] : self._documents[n] + 2].tolist()
            parts.append(self._tokens[start + (begin if n == first else 0) : start + end if n == last else stop])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def megatron_batches(folders: list[str]) -> Iterator[Any]:
    """Blended by the greatest shortfall, as its helpers do, in index maps made beforehand."""
    datasets = [MegatronManner(Store(folder), SEED) for folder in folders]
    size = TURNS * BATCHES * ROWS * 2
    share, done = np.array(WEIGHTS) / sum(WEIGHTS), np.zeros(len(WEIGHTS), np.int64)
    which, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    for n in range(size):
        which[n] = k = int(np.argmax(share * (n + 1) - done))
        sample[n], done[k] = done[k], done[k] + 1
    n = 0
    while True:
        rows = [datasets[k][s % datasets[k].samples] for k, s in zip(which[n : n + ROWS], sample[n : n + ROWS])]
        yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        n = (n + ROWS) % (size - ROWS)


class Documents:
    """Random access to a store's documents, as grain wants its sources."""

    def __init__(self, folder: str) -> None:
        store = Store(folder)
        self._tokens, self._starts = store.read(0, len(store)), store.document_starts.astype(np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": self._tokens[self._starts[index] : self._starts[index + 1]].astype(np.int32)}


def grain_batches(folders: list[str], packed: str) -> Iterator[Any]:
    import grain
    from grain.experimental import ConcatThenSplitIterDataset, FirstFitPackIterDataset

    sources = [grain.MapDataset.source(Documents(folder)).shuffle(seed=SEED).repeat() for folder in folders]
    mixed = grain.MapDataset.mix(sources, weights=list(WEIGHTS)).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    if packed == "concatenated":
        rows = ConcatThenSplitIterDataset(mixed, length_struct={"tokens": LENGTH + 1})
    else:
        cut = mixed.map(lambda document: {"tokens": document["tokens"][: LENGTH + 1]})
        rows = FirstFitPackIterDataset(cut, length_struct={"tokens": LENGTH + 1}, num_packing_bins=ROWS)
    return iter(rows.batch(ROWS))


def contenders(folders: list[str]) -> dict[str, Callable[[], Any]]:
    loader, index = ours(folders), iter(range(10**9))
    megatron = megatron_batches(folders)
    found: dict[str, Callable[[], Any]] = {
        "ours": lambda: loader.batch(next(index)), "Megatron's manner": functools.partial(next, megatron),
    }
    try:
        import grain
    except ImportError:
        print("grain is not installed here, so it is left out: pip install grain")
        return found
    print(f"grain {grain.__version__}")
    for packed in ("concatenated", "first fit"):
        found[f"grain, {packed}"] = functools.partial(next, grain_batches(folders, packed))
    return found


def seconds(call: Callable[[], Any], times: int) -> float:
    """Of this process's own time on its core: what others take of it does not count."""
    begun_s = time.process_time()
    for _ in range(times):
        call()
    return time.process_time() - begun_s


def compare(folders: list[str]) -> None:
    made = contenders(folders)
    rates: dict[str, list[float]] = {name: [] for name in made}
    for call in made.values():
        seconds(call, 3)
    for _ in range(TURNS):
        for name, call in made.items():
            rates[name].append(ROWS * LENGTH * BATCHES / seconds(call, BATCHES))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        spread = f"min {min(values) / 1e6:.1f}   max {max(values) / 1e6:.1f}"
        print(f"{name:22s} {medians[name] / 1e6:7.1f}M tokens/s on one core   {spread}")
    best = max((name for name in medians if name != "ours"), key=medians.__getitem__)
    print(f"ratio {medians['ours'] / medians[best]:.2f} to the best of the others, {best}; goal: 2")


def seek(folders: list[str]) -> None:
    taken: dict[int, list[float]] = {1: [], FAR: []}
    for turn in range(2 * TURNS):
        for index in sorted(taken, reverse=bool(turn % 2)):
            loader = ours(folders)
            taken[index].append(seconds(functools.partial(loader.batch, index), 1))
    near, far = (statistics.median(values) for values in taken.values())
    print(f"first batch after opening: batch 1 in {near * 1e3:.2f} ms, batch 10**9 in {far * 1e3:.2f} ms: "
          f"ratio {far / near:.2f}")


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        folders = [build(f"{folder}/{n}", n) for n in range(len(WEIGHTS))]
        compare(folders)
        seek(folders)


if __name__ == "__main__":
    main()
