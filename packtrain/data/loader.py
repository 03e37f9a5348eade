"""Batches: `Loader.batch(i)` is a function of (plan, seed, i), whoever asks and whatever was asked before.

A row is filled with pieces of documents. At a piece's position j: the target is the document's j-th token (after the
last one: end of document), the input is the token before it (before the first: end of document), the position is j,
and the query sees the keys [start of the piece, itself]. What is left of the last row is padding: weight 0 and an
empty interval.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtrain.core.errors import Contradiction, CorpusEmpty, StoreDamaged, TokenizerMismatch
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.data.config import DataConfig
from packtrain.data.packing import Packing
from packtrain.data.plan import Draws, Plan, Segment, Share, mixing_counts
from packtrain.data.store import Store
from packtrain.data.tokenizer import Tokenizer, check_vocab, load_tokenizer

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


GAP_ITEMS = 17 * 16
"""Between the arrays of a batch: 17 lines of the cache."""
BYTES_TOKENS = 16384
"""So many targets at a time are looked up for their bytes: what that takes stays in the cache."""


class Batch(NamedTuple):
    """B rows of L tokens. `starts`, `ends`: the key interval [start, end) each query may see (site "self").

    `n_tokens`: targets of weight above 0. `n_bytes`: bytes of text they stand for; the end of a document stands for
    none. `damaged`: what was wrong with each row that was passed over (all of it weight 0).
    """

    tokens_BL: I32
    targets_BL: I32
    weights_BL: F32
    positions_BL: I32
    starts_BL: I32
    ends_BL: I32
    n_bytes: int
    n_tokens: int
    damaged: tuple[str, ...] = ()


class Piece(NamedTuple):
    """Targets [start, start + n) of a store's tokens; the first `context` of them have weight 0."""

    start: int
    n: int
    context: int = 0


class _Rows:
    """A batch being filled: all padding at first."""

    def __init__(self, rows: int, length: int, end_of_document: int) -> None:
        self._end = end_of_document
        self.tokens = np.full((rows, length), end_of_document, np.int32)
        self.targets = self.tokens.copy()
        self.weights = np.zeros((rows, length), np.float32)
        self.positions, self.starts, self.ends = (np.zeros((rows, length), np.int32) for _ in range(3))
        self.damaged: list[str] = []

    def fill(self, row: int, store: Store, pieces: Sequence[Piece]) -> None:
        """Raises StoreDamaged before anything is written, so that a failed row stays padding."""
        read = [(piece, store.read(max(piece.start - 1, 0), piece.start + piece.n)) for piece in pieces]
        at = 0
        for piece, ids in read:
            stop = at + piece.n
            self.targets[row, at:stop] = ids[-piece.n :]
            self.tokens[row, at + (piece.start == 0) : stop] = ids[:-1]
            self.weights[row, at + piece.context : stop] = 1.0
            self.positions[row, at:stop] = np.arange(piece.n)
            self.starts[row, at:stop] = at
            self.ends[row, at:stop] = np.arange(at + 1, stop + 1)
            at = stop

    def batch(self, token_bytes: I32) -> Batch:
        weighted = self.targets[self.weights > 0]
        return Batch(
            self.tokens, self.targets, self.weights, self.positions, self.starts, self.ends,
            n_bytes=int(token_bytes[weighted].sum(dtype=np.int64)), n_tokens=len(weighted), damaged=tuple(self.damaged),
        )


def filled(
    views: Sequence[npt.NDArray[Any]], before: I32, lengths: npt.NDArray[np.int64], shape: tuple[int, int],
    token_bytes: I32,
) -> Batch:
    """A batch of full rows: the targets of each piece, one after the other, and the token before each piece."""
    # One block for all: an allocator that hands pages back and takes them anew costs more than filling them. The gaps
    # keep elements of one index from lying multiples of 4 KiB apart, where reading one waits for writing the other.
    size = math.prod(shape)
    block = np.empty((5, size + GAP_ITEMS), np.int32)
    tokens, targets, positions, starts, ends = (part[:size].reshape(shape) for part in block)
    np.concatenate(views, out=targets.reshape(-1), casting="unsafe")
    firsts = lengths.cumsum() - lengths
    tokens.reshape(-1)[1:] = targets.reshape(-1)[:-1]
    tokens.reshape(-1)[firsts] = before
    starts.reshape(-1)[:] = np.repeat((firsts % shape[1]).astype(np.int32), lengths)
    column = np.arange(shape[1], dtype=np.int32)
    positions[:] = column
    positions -= starts
    ends[:] = column + 1
    parts = targets.reshape(-1), range(0, targets.size, BYTES_TOKENS)
    n_bytes = sum(int(token_bytes.take(parts[0][at : at + BYTES_TOKENS]).sum(dtype=np.int64)) for at in parts[1])
    return Batch(
        tokens, targets, np.ones(shape, np.float32), positions, starts, ends, n_bytes=n_bytes, n_tokens=targets.size
    )


class Loader:
    """Batches of a plan over opened stores. `stores` and `packings` stand in the order of each segment's shares.

    A damaged row is an error; with `damaged_rows_max` above 0, that many keep their slot with weight 0 (listed in
    `damaged`).
    """

    def __init__(
        self, plan: Plan, sources: Sequence[Sequence[tuple[Store, Packing]]], tokenizer: Tokenizer,
        damaged_rows_max: int = 0,
    ) -> None:
        self._plan, self._sources = plan, sources
        self.tokenizer = tokenizer
        self._damaged_rows_max = damaged_rows_max
        self.damaged: dict[tuple[int, int], str] = {}
        """(data_index, row) -> what was wrong with it."""

    @property
    def plan_hash(self) -> str:
        return self._plan.hash

    def batch(self, data_index: int) -> Batch:
        """The global batch. Raises StoreDamaged."""
        return self.rows(data_index, slice(None))

    def rows(self, data_index: int, row_slice: slice) -> Batch:
        """These rows of the global batch, for one host. Raises StoreDamaged."""
        number = self._plan.segment_at(data_index)
        segment = self._plan.segments[number]
        rows = range(*row_slice.indices(segment.batch_rows))
        draws = self._plan.draws(data_index, rows)
        try:
            full = self._full(self._sources[number], draws, segment.length)
        except StoreDamaged:
            full = None  # some row of it: told, or passed over, where it is met again
        return full or self._one_by_one(number, draws, data_index, rows)

    def _full(self, sources: Sequence[tuple[Store, Packing]], draws: Draws, length: int) -> Batch | None:
        """All rows at once; None where one is not full, as the last of a store. Raises StoreDamaged."""
        drawn = list(zip(*(x.tolist() for x in draws)))
        rows = [sources[share][1].row(window, row) for share, window, row in drawn]
        pieces = np.concatenate(rows) if rows else np.zeros((0, 2), np.int64)
        if not rows or int(pieces[:, 1].sum()) != len(rows) * length:
            return None
        shares = np.repeat(draws.shares, [len(row) for row in rows])
        views, before = [np.zeros(0)] * len(pieces), np.full(len(pieces), self.tokenizer.end_of_document, np.int32)
        for share in set(draws.shares.tolist()):
            of_share = np.flatnonzero(shares == share)
            found, ids = sources[share][0].read_pieces(*pieces[of_share].T)
            for at, view in zip(of_share.tolist(), found):
                views[at] = view
            inside = pieces[of_share, 0] > 0
            before[of_share[inside]] = ids[inside]
        return filled(views, before, pieces[:, 1], (len(rows), length), self.tokenizer.token_bytes)

    def _one_by_one(self, number: int, draws: Draws, data_index: int, rows: range) -> Batch:
        """Row after row, the last of a store and damaged ones too."""
        length = self._plan.segments[number].length
        filling = _Rows(len(rows), length, self.tokenizer.end_of_document)
        for slot, (share, window, row) in enumerate(zip(*(x.tolist() for x in draws))):
            store, packing = self._sources[number][share]
            try:
                filling.fill(slot, store, [Piece(*piece) for piece in packing.row(window, row).tolist()])
            except StoreDamaged as error:
                filling.damaged.append(self._noted((data_index, rows[slot]), error))
        return filling.batch(self.tokenizer.token_bytes)

    def _noted(self, slot: tuple[int, int], error: StoreDamaged) -> str:
        self.damaged[slot] = f"{error.where}: {error.what}"
        if len(self.damaged) > self._damaged_rows_max:
            raise error
        return self.damaged[slot]


def open_loader(config: DataConfig, seed: int, vocab: int, platform: Platform | None = None) -> Loader:
    """Open a run's stores and make its plan of one segment.

    Raises CorpusMissing, CorpusEmpty, StoreDamaged, TokenizerMismatch (between stores, or with the model's `vocab`),
    BadValue (a weight that comes to no row), Contradiction (no store, or one twice).
    """
    platform = platform or LocalPlatform()
    if not config.stores:
        raise Contradiction(
            "there is no store to train on", where="data.stores", fix="make one with `packtrain data build`"
        )
    stores = [Store(use.path, platform) for use in config.stores]
    for store in stores:
        if not len(store):
            raise CorpusEmpty("the store holds no document", where=store.folder, fix="train on another store")
    tokenizer = _one_tokenizer(stores, platform)
    check_vocab(tokenizer, vocab)
    counts = mixing_counts([use.weight for use in config.stores], [use.path for use in config.stores])
    packings = [Packing(platform, store, config.length, config.objective) for store in stores]
    shares = tuple(
        Share(
            store=store.hash, packing=packing.hash, count=count, rows=packing.rows, windows=packing.windows,
            rows_per_window=packing.rows_per_window,
        )
        for store, packing, count in zip(stores, packings, counts)
    )
    segment = Segment(
        from_index=0, batch_rows=config.batch_rows, length=config.length, objective=config.objective, shares=shares
    )
    return Loader(Plan(seed, [segment]), [list(zip(stores, packings))], tokenizer, config.damaged_rows_max)


def _one_tokenizer(stores: Sequence[Store], platform: Platform) -> Tokenizer:
    first = stores[0]
    for store in stores[1:]:
        if store.card.tokenizer_hash != first.card.tokenizer_hash:
            raise TokenizerMismatch(
                "two stores of one run were made with different tokenizers", where=f"{first.folder}, {store.folder}",
                fix="build both with the same tokenizer.json (`packtrain data build --tokenizer FILE`)",
            )
        if any(store.hash == other.hash for other in stores if other is not store):
            raise Contradiction(
                "one store is used twice", where=f"data.stores: {store.folder}", fix="name it once and raise its weight"
            )
    return load_tokenizer(first.folder, platform)


def check_held_out(config: DataConfig, tokenizer: Tokenizer, platform: Platform | None = None) -> None:
    """Open every held-out store: bits per byte of ids that mean other text would look plausible and be wrong.

    Raises CorpusMissing, StoreDamaged, TokenizerMismatch.
    """
    platform = platform or LocalPlatform()
    for folder in config.held_out:
        if Store(folder, platform).card.tokenizer_hash != tokenizer.hash:
            raise TokenizerMismatch(
                "a held-out store was made with another tokenizer than the training stores",
                where=f"data.held_out: {folder}",
                fix="build it with the run's tokenizer.json (`packtrain data build --tokenizer FILE`)",
            )
        load_tokenizer(folder, platform)


class Prefetcher:
    """Makes batches ahead in a background thread. What goes wrong there is raised by the `get` it concerns.

    `get` may go back or jump; batches of the old place are dropped. `row_slice`: one host's rows instead of the
    global batch.
    """

    def __init__(self, loader: Loader, first_index: int, depth: int, row_slice: slice = slice(None)) -> None:
        self._loader, self._depth, self._row_slice = loader, max(1, depth), row_slice
        self._next = first_index
        self._ready: dict[int, Batch | BaseException] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def get(self, data_index: int) -> Batch:
        """The batch; waits for it. Raises what making it raised."""
        with self._changed:
            assert not self._closed, "the prefetcher is closed"
            self._next = data_index
            self._ready = {i: b for i, b in self._ready.items() if self._wanted(i)}
            self._changed.notify_all()
            self._changed.wait_for(lambda: data_index in self._ready)
            result = self._ready.pop(data_index)
            self._next = data_index + 1
            self._changed.notify_all()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Stop the thread; at most the batch in hand is finished first. Closing twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _wanted(self, index: int) -> bool:
        return self._next <= index < self._next + self._depth

    def _missing(self) -> int | None:
        return next((i for i in range(self._next, self._next + self._depth) if i not in self._ready), None)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._missing() is not None)
                if self._closed:
                    return
                index = self._missing()
            assert index is not None
            result = self._make(index)
            with self._changed:
                if self._wanted(index):
                    self._ready[index] = result
                self._changed.notify_all()

    def _make(self, index: int) -> Batch | BaseException:
        try:
            return self._loader.rows(index, self._row_slice)
        except Exception as error:  # handed to whoever asks for this batch
            return error


def held_out_batches(
    store_folder: str, length: int, rows: int, rows_max: int = 0, platform: Platform | None = None
) -> Iterator[Batch]:
    """Every token of every document as a target of weight 1 exactly once; the last batch is padded with weight 0.

    A document longer than a row is scored half a row at a time, each window reaching back a full row, so that every
    target but the first half row's has at least half a row of context. `rows_max` above 0: that many rows, spread
    over the store. Raises CorpusMissing, StoreDamaged, TokenizerMismatch.
    """
    platform = platform or LocalPlatform()
    store = Store(store_folder, platform)
    tokenizer = load_tokenizer(store_folder, platform)
    layout = _held_out_rows(store.document_starts.tolist(), length)
    if 0 < rows_max < len(layout):
        layout = [layout[i * len(layout) // rows_max] for i in range(rows_max)]
    for first in range(0, len(layout), rows):
        filling = _Rows(rows, length, tokenizer.end_of_document)
        for slot, pieces in enumerate(layout[first : first + rows]):
            filling.fill(slot, store, pieces)
        yield filling.batch(tokenizer.token_bytes)


def _held_out_rows(starts: Sequence[int], length: int) -> list[list[Piece]]:
    """Windows of all documents, put into rows in their order; a row is closed by the first window it has no room
    for."""
    rows: list[list[Piece]] = []
    room = 0
    for start, stop in pairwise(starts):
        for piece in _windows(start, stop, length):
            if piece.n > room:
                rows.append([])
                room = length
            rows[-1].append(piece)
            room -= piece.n
    return rows


def _windows(start: int, stop: int, length: int) -> Iterator[Piece]:
    yield Piece(start, min(length, stop - start))
    scored = start + length
    while scored < stop:
        end = min(scored + length // 2, stop)
        first = end - length
        yield Piece(first, length, context=scored - first)
        scored = end
