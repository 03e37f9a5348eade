"""A batch is a function of (plan, seed, index): the same whoever asks, and over an epoch every token exactly once."""

from __future__ import annotations

import math
import pathlib
import sys
import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.errors import Contradiction, CorpusEmpty, CorpusMissing, StoreDamaged, TokenizerMismatch
from packtrain.data.config import DataConfig, StoreUse
from packtrain.data.loader import Batch, Loader, Prefetcher, open_loader
from packtrain.data.store import Store
from packtrain.data.tokenizer import train_bpe
from tests.data.makers import END, PLATFORM, VOCAB, loader_of, source_text, write_store, write_token_store

LENGTHS = [5, 1, 130, 64, 63, 65, 700, 2, 33, 12, 90, 41, 8, 300, 17, 1, 1, 256, 77]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_token_store(tmp_path_factory.mktemp("data") / "store", LENGTHS * 5)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, store: str) -> Callable[[], Loader]:
    """Opens two stores in a loader that has not been asked anything."""
    other = write_token_store(tmp_path_factory.mktemp("data") / "other", [40, 900, 3] * 9, seed=1)
    return lambda: loader_of([store, other], rows=8, length=64, weights=[3.0, 1.0])


@pytest.fixture(scope="module")
def two(fresh: Callable[[], Loader]) -> Loader:
    return fresh()


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b))


def test_an_epoch_is_an_exact_multiset(store: str) -> None:
    """The weighted targets of an epoch are the store's tokens, each exactly as often as the store holds it."""
    opened = Store(store, PLATFORM)
    rows = math.ceil(len(opened) / 64)
    loader = loader_of([store], rows=rows, length=64)
    for epoch in range(3):
        batch = loader.batch(epoch)
        assert batch.n_tokens == len(opened)
        targets = np.sort(batch.targets_BL[batch.weights_BL > 0])
        assert np.array_equal(targets, np.sort(opened.read(0, len(opened))))


def test_padding_is_one_row_at_most(store: str) -> None:
    """Padding, weight 0 with an empty interval, is less than one row of a whole epoch."""
    loader = loader_of([store], rows=math.ceil(sum(LENGTHS) * 5 / 64), length=64)
    batch = loader.batch(0)
    padding = batch.weights_BL == 0
    assert 0 < padding.sum() < 64 and padding.any(axis=1).sum() == 1
    assert not batch.starts_BL[padding].any() and not batch.ends_BL[padding].any()


def test_rows_say_what_the_store_says(store: str) -> None:
    """Inside a piece each input is the target before it, positions count from 0, and a query sees its piece up to
    itself.

    The first input is the token before in the store, or the end of a document at the very beginning; no piece crosses
    the end of a document.
    """
    tokens = Store(store, PLATFORM).read(0, sum(LENGTHS) * 5).astype(np.int64)
    before = np.concatenate([[END], tokens[:-1]])
    batch = loader_of([store], rows=32, length=64).batch(2)
    for row in range(32):
        starts = np.flatnonzero((batch.positions_BL[row] == 0) & (batch.weights_BL[row] > 0)).tolist()
        for a, b in pairwise([*starts, int(batch.weights_BL[row].sum())]):
            target, given_ = batch.targets_BL[row, a:b], batch.tokens_BL[row, a:b]
            assert END not in target[:-1]
            assert np.array_equal(given_[1:], target[:-1])
            places = np.flatnonzero(tokens[: len(tokens) - (b - a) + 1] == target[0])
            assert any(
                np.array_equal(tokens[p : p + b - a], target) and before[p] == given_[0] for p in places
            ), "the piece is not in the store"
            assert np.array_equal(batch.positions_BL[row, a:b], np.arange(b - a))
            assert (batch.starts_BL[row, a:b] == a).all()
            assert np.array_equal(batch.ends_BL[row, a:b], np.arange(a + 1, b + 1))


def test_documents_start_with_the_end_of_another(tmp_path: pathlib.Path) -> None:
    """A document of n tokens gives n + 1 targets: its tokens from the end-of-document token, and its own end from its
    last."""
    batch = loader_of([write_store(tmp_path / "s", [b"abc", b"de"])], rows=1, length=16).batch(0)
    assert batch.tokens_BL[0, :7].tolist() == [END, *b"abc", END, *b"de"]
    assert batch.targets_BL[0, :7].tolist() == [*b"abc", END, *b"de", END]
    assert batch.starts_BL[0, :8].tolist() == [0, 0, 0, 0, 4, 4, 4, 0]
    assert batch.ends_BL[0, :8].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert batch.weights_BL[0].sum() == batch.n_tokens == 7 and batch.n_bytes == 5


@settings(max_examples=25)
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=6))
def test_order_of_asking_does_not_matter(fresh: Callable[[], Loader], two: Loader, indices: list[int]) -> None:
    """batch(i) is the same from a loader that has answered anything else before and from one just opened."""
    seen = [two.batch(i) for i in indices]
    assert all(same(fresh().batch(i), batch) for i, batch in zip(indices, seen))


def test_threads_do_not_disturb_each_other(fresh: Callable[[], Loader], two: Loader) -> None:
    """Two threads that ask one loader for different batches get what each would get alone."""
    alone = {i: fresh().batch(i) for i in range(0, 4000, 100)}
    wrong: list[int] = []

    def ask(indices: list[int]) -> None:
        wrong.extend(i for i in indices if not same(two.batch(i), alone[i]))

    threads = [threading.Thread(target=ask, args=(order,)) for order in (list(alone), list(alone)[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("hosts", [1, 2, 4, 3])
def test_hosts_see_one_global_batch(two: Loader, hosts: int) -> None:
    """The rows that 1, 2, 4 (and unevenly 3) hosts load for themselves are the global batch, counts included."""
    for index in (0, 77):
        whole = two.batch(index)
        edges = [8 * h // hosts for h in range(hosts + 1)]
        parts = [two.rows(index, slice(a, b)) for a, b in pairwise(edges)]
        assert all(np.array_equal(np.concatenate([p[f] for p in parts]), whole[f]) for f in range(6))
        assert sum(p.n_bytes for p in parts) == whole.n_bytes
        assert sum(p.n_tokens for p in parts) == whole.n_tokens


def calls_of(work: Callable[[], object]) -> int:
    """Python and C calls made by `work`."""
    count = 0

    def on_event(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_seeking_far_costs_nothing(store: str, two: Loader) -> None:
    """A loader just opened makes batch 10**9 with as many calls as batch 1, give or take the rows' numbers of
    pieces."""
    counts = []
    for index in (1, 10**9):
        fresh = loader_of([store], rows=8, length=64)
        counts.append(calls_of(lambda index=index, fresh=fresh: fresh.batch(index)))
    assert counts[1] < 2 * counts[0]


def test_seed_and_plan_change_the_batch(store: str) -> None:
    """Another seed gives other batches and another plan hash; the same gives the same, also after opening anew."""
    first, again, other = (loader_of([store], rows=8, length=64, seed=seed) for seed in (0, 0, 1))
    assert first.plan_hash == again.plan_hash != other.plan_hash
    assert same(first.batch(3), again.batch(3)) and not same(first.batch(3), other.batch(3))


def damage(store: str, block: int = 0) -> None:
    path = pathlib.Path(store) / "tokens.bin"
    data = bytearray(path.read_bytes())
    data[block * (1 << 20) + 17] ^= 4
    path.write_bytes(data)


def test_damage_is_an_error(tmp_path: pathlib.Path) -> None:
    """A batch that needs a damaged block is refused, naming file and block."""
    store = write_token_store(tmp_path / "s", LENGTHS)
    loader = loader_of([store], rows=4, length=64)
    damage(store)
    with pytest.raises(StoreDamaged, match=r"block 0") as caught:
        loader.batch(0)
    assert "tokens.bin" in caught.value.where


def test_allowed_damage_keeps_its_slot(tmp_path: pathlib.Path) -> None:
    """Under an allowance a damaged row keeps its place with weight 0 while the others stay; over it, damage is an
    error."""
    # At 32 bits a window is two blocks: rows of its first half are filled up from the second, which is damaged.
    store = write_token_store(tmp_path / "s", [800] * 330 + [100] * 2600 + [900] * 600, dtype="<u4")
    whole = loader_of([store], rows=64, length=900).batch(0)
    damage(store, block=1)
    loader = loader_of([store], rows=64, length=900, damaged_rows_max=64)
    batch = loader.batch(0)
    lost = sorted(row for _, row in loader.damaged)
    assert 0 < len(lost) < 64 and not batch.weights_BL[lost].any() and not batch.ends_BL[lost].any()
    kept = [row for row in range(64) if row not in lost]
    assert all(np.array_equal(batch[f][kept], whole[f][kept]) for f in range(6))
    assert batch.n_tokens == whole.n_tokens - 900 * len(lost)
    assert not whole.damaged and len(batch.damaged) == len(lost) and "tokens.bin" in batch.damaged[0]
    assert same(loader.batch(0), batch)
    with pytest.raises(StoreDamaged):
        loader_of([store], rows=64, length=900, damaged_rows_max=len(lost) - 1).batch(0)


def test_stores_of_one_run_share_a_tokenizer(tmp_path: pathlib.Path, store: str) -> None:
    """Two stores made with different tokenizers are refused, naming both."""
    texts = [source_text(i, 30) for i in range(3)]
    other = write_store(tmp_path / "other", texts, train_bpe((t.decode() for t in texts), 300))
    with pytest.raises(TokenizerMismatch, match="different tokenizers") as caught:
        loader_of([store, other], rows=4, length=64)
    assert store in caught.value.where and other in caught.value.where


def test_bad_runs_are_refused(tmp_path: pathlib.Path, store: str) -> None:
    """No store, one that is not there, an empty one, one named twice and a wrong vocabulary each end in their own
    error."""
    with pytest.raises(Contradiction, match="no store"):
        loader_of([], rows=4, length=64)
    with pytest.raises(CorpusMissing, match="no store here"):
        loader_of([str(tmp_path / "nothing")], rows=4, length=64)
    with pytest.raises(Contradiction, match="twice"):
        loader_of([store, store], rows=4, length=64)
    with pytest.raises(CorpusEmpty, match="no document"):
        loader_of([write_store(tmp_path / "empty", [])], rows=4, length=64)
    with pytest.raises(TokenizerMismatch, match="the model has 256"):
        open_loader(DataConfig(stores=(StoreUse(path=store),)), 0, 256)


def test_prefetched_is_loaded(two: Loader) -> None:
    """Batches come out of the prefetcher as the loader makes them: forwards, again, backwards and after a jump."""
    feed = Prefetcher(two, 5, 3)
    for index in (5, 6, 7, 7, 3, 4, 10**6, 0):
        assert same(feed.get(index), two.batch(index))
    feed.close()
    feed.close()
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]


def test_prefetcher_loads_one_hosts_rows(two: Loader) -> None:
    """With a row slice, the prefetcher gives that host's rows."""
    feed = Prefetcher(two, 0, 2, slice(2, 6))
    assert same(feed.get(0), two.rows(0, slice(2, 6)))
    feed.close()


def test_prefetcher_stays_within_its_depth(two: Loader) -> None:
    """Unasked, `depth` batches are made ahead of the one asked for last, each once, and never one more."""

    class Counting(Loader):
        made: list[int] = []
        too_far: list[int] = []
        asked = -1
        changed = threading.Condition()

        def rows(self, data_index: int, row_slice: slice) -> Batch:
            with self.changed:
                self.made.append(data_index)
                self.too_far += [data_index] * (data_index > self.asked + 3)
                self.changed.notify_all()
            return super().rows(data_index, row_slice)

    loader = Counting(two._plan, two._sources, two.tokenizer)
    feed = Prefetcher(loader, 0, 3)
    for index in range(60):
        with loader.changed:
            loader.changed.wait_for(lambda index=index: index + 2 in loader.made)
            loader.asked = index
        feed.get(index)
    feed.close()
    assert loader.too_far == []
    assert sorted(set(loader.made)) == loader.made


def test_prefetcher_hands_on_errors(tmp_path: pathlib.Path) -> None:
    """What goes wrong in the background is raised by the get it concerns, and closing afterwards still works."""
    store = write_token_store(tmp_path / "s", LENGTHS)
    loader = loader_of([store], rows=4, length=64)
    damage(store)
    feed = Prefetcher(loader, 0, 2)
    for index in (0, 1, 0):
        with pytest.raises(StoreDamaged):
            feed.get(index)
    feed.close()


def test_vocabulary_must_hold_the_tokenizer(store: str) -> None:
    """A model's vocabulary smaller than the padded tokenizer, or no multiple of 128, is refused; a larger multiple is
    not."""
    from packtrain.data.tokenizer import check_vocab

    tokenizer = loader_of([store], rows=4, length=64).tokenizer
    for wrong in (VOCAB - 128, VOCAB - 1, VOCAB + 1, 0):
        with pytest.raises(TokenizerMismatch, match="vocabulary"):
            check_vocab(tokenizer, wrong)
    for right in (VOCAB, VOCAB + 128):
        check_vocab(tokenizer, right)


def test_full_rows_at_once_are_what_they_are_one_by_one(store: str) -> None:
    """A batch with a row that is not full is filled row by row, any other in one go: an epoch as one batch, which has
    the store's short last row, has the bits of the same rows asked for one at a time, in every field."""
    rows = math.ceil(len(Store(store, PLATFORM)) / 64)
    whole, single = loader_of([store], rows=rows, length=64).batch(2), loader_of([store], rows=1, length=64)
    alone = [single.batch(2 * rows + row) for row in range(rows)]
    assert sum(row.n_tokens < 64 for row in alone) == 1
    for name in Batch._fields[:6]:
        mine, wanted = np.concatenate([getattr(row, name) for row in alone]), getattr(whole, name)
        assert mine.dtype == wanted.dtype and np.array_equal(mine, wanted), name
    assert (whole.n_bytes, whole.n_tokens) == tuple(map(sum, zip(*(row[6:8] for row in alone))))
