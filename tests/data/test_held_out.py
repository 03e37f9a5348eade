"""Held-out batches score every token of every document exactly once, with context, and count its bytes exactly."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from packtrain.core.errors import CorpusMissing, StoreDamaged, TokenizerMismatch
from packtrain.data.config import DataConfig
from packtrain.data.loader import Batch, check_held_out, held_out_batches
from packtrain.data.store import Store
from packtrain.data.tokenizer import train_bpe
from tests.data.makers import BYTES, END, PLATFORM, source_text, write_store, write_token_store

LENGTHS = [1, 2, 15, 16, 17, 23, 24, 25, 31, 32, 33, 100, 5, 5, 5, 257, 64, 1]


def scored(batches: list[Batch]) -> np.ndarray:
    return np.concatenate([b.targets_BL[b.weights_BL > 0] for b in batches])


@pytest.mark.parametrize("length", [8, 16, 33, 512])
@pytest.mark.parametrize("rows", [1, 7])
def test_every_token_is_scored_once(tmp_path: pathlib.Path, length: int, rows: int) -> None:
    """The weighted targets, in order, are the documents' tokens, whatever the shape of the batches."""
    folder = write_token_store(tmp_path / "s", LENGTHS)
    batches = list(held_out_batches(folder, length, rows))
    store = Store(folder, PLATFORM)
    assert np.array_equal(scored(batches), store.read(0, len(store)))
    assert {b.tokens_BL.shape for b in batches} == {(rows, length)}
    assert sum(b.n_tokens for b in batches) == len(store)


def test_bytes_are_exact(tmp_path: pathlib.Path) -> None:
    """Bytes of the weighted targets add up to the bytes of the text, characters of several bytes included."""
    texts = [source_text(1, 20), "füße 山道 🐴\n".encode() * 9, b"x"]
    folder = write_store(tmp_path / "s", texts)
    assert sum(b.n_bytes for b in held_out_batches(folder, 32, 4)) == sum(map(len, texts)) == Store(folder).card.bytes


def test_windows_have_context(tmp_path: pathlib.Path) -> None:
    """In a document longer than a row, every target after the first row's is scored with at least half a row before
    it."""
    folder = write_token_store(tmp_path / "s", [300])
    tokens = Store(folder, PLATFORM).read(0, 300).astype(np.int64)
    seen = 0
    for batch in held_out_batches(folder, 32, 3):
        for row in range(3):
            weighted = np.flatnonzero(batch.weights_BL[row])
            for j in weighted:
                keys = np.arange(batch.starts_BL[row, j], batch.ends_BL[row, j])
                assert len(keys) == min(seen + 1, 32) or len(keys) > 16
                before = np.concatenate([[END], tokens])[seen + 1 - len(keys) : seen + 1]
                assert np.array_equal(batch.tokens_BL[row, keys], before)
                seen += 1
    assert seen == 300


def test_documents_do_not_see_each_other(tmp_path: pathlib.Path) -> None:
    """Each document in a shared row has its own interval and begins with the end-of-document token."""
    (batch,) = held_out_batches(write_store(tmp_path / "s", [b"abc", b"de"]), 16, 1)
    assert batch.tokens_BL[0, :7].tolist() == [END, *b"abc", END, *b"de"]
    assert batch.starts_BL[0, :7].tolist() == [0, 0, 0, 0, 4, 4, 4]
    assert not batch.weights_BL[0, 7:].any() and not batch.ends_BL[0, 7:].any()


def test_fewer_rows_are_spread(tmp_path: pathlib.Path) -> None:
    """With a bound on rows, so many are given, taken from all over the store; a bound above what there is changes
    nothing."""
    folder = write_token_store(tmp_path / "s", [31] * 100)
    batches = list(held_out_batches(folder, 32, 4, rows_max=10))
    assert sum(int((b.weights_BL.sum(axis=1) > 0).sum()) for b in batches) == 10
    store = Store(folder, PLATFORM)
    firsts = [b.targets_BL[r, 0] for b in batches for r in range(4) if b.weights_BL[r].any()]
    assert firsts == [int(store.read(31 * i, 31 * i + 1)[0]) for i in range(0, 100, 10)]
    assert len(list(held_out_batches(folder, 32, 4, rows_max=1000))) == 25


def test_an_empty_store_gives_no_batch(tmp_path: pathlib.Path) -> None:
    """A store without documents has no batches, and is no error."""
    assert list(held_out_batches(write_store(tmp_path / "s", []), 32, 4)) == []


def test_held_out_stores_are_checked_at_start(tmp_path: pathlib.Path) -> None:
    """A held-out store of another tokenizer, one that is not there and a damaged one are refused, whichever of several
    it is."""
    good = write_store(tmp_path / "good", [b"abc"])
    other = write_store(tmp_path / "other", [source_text(1, 20)], train_bpe([source_text(1, 20).decode()], 300))
    damaged = write_store(tmp_path / "damaged", [b"abcd"])
    (tmp_path / "damaged" / "checksums.bin").write_bytes(b"none")
    check_held_out(DataConfig(held_out=(good, good)), BYTES, PLATFORM)
    for folder, kind in ((other, TokenizerMismatch), (damaged, StoreDamaged), (str(tmp_path / "no"), CorpusMissing)):
        with pytest.raises(kind) as caught:
            check_held_out(DataConfig(held_out=(good, folder)), BYTES, PLATFORM)
        assert folder in caught.value.where
