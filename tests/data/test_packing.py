"""Rows are full, every token stands in exactly one of them, and documents are cut no more than that takes."""

from __future__ import annotations

import itertools
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.errors import BadValue
from packtrain.data.packing import WINDOW_TOKENS, Packing, pack_window
from packtrain.data.store import Store
from tests.data.makers import PLATFORM, write_token_store


def rows_of(pieces: list[tuple[int, int, int]], row: int) -> list[list[tuple[int, int, int]]]:
    """Deal pieces into rows in their order, by size alone."""
    rows: list[list[tuple[int, int, int]]] = [[]]
    for piece in pieces:
        if sum(n for _, _, n in rows[-1]) == row:
            rows.append([])
        rows[-1].append(piece)
        assert sum(n for _, _, n in rows[-1]) <= row, "a piece crosses the edge of a row"
    return rows


@given(st.lists(st.integers(1, 90), max_size=60), st.integers(8, 40))
def test_window_is_packed_exactly(lengths: list[int], row: int) -> None:
    """Every token of every run is in exactly one piece, and every row but the last is exactly full."""
    pieces, cuts = pack_window(lengths, row)
    assert sorted((run, at + i) for run, at, n in pieces for i in range(n)) == [
        (run, i) for run, n in enumerate(lengths) for i in range(n)
    ]
    rows = rows_of(pieces, row)
    assert all(sum(n for _, _, n in pieces) == row for pieces in rows[:-1])
    assert cuts == len(pieces) - len(lengths)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_documents_are_cut_only_to_fill_a_row(lengths: list[int]) -> None:
    """Runs that fit a row are cut at most once per row, and not at all where they fill rows by themselves."""
    _, cuts = pack_window(lengths, 40)
    assert cuts <= -(-sum(lengths) // 40)
    assert pack_window([10, 20, 30, 20, 40], 40)[1] == 0


def opened(folder: str, length: int) -> tuple[Store, Packing]:
    store = Store(folder, PLATFORM)
    return store, Packing(PLATFORM, store, length, "causal")


def all_pieces(packing: Packing) -> list[list[tuple[int, int]]]:
    per_window = packing.rows_per_window
    found = (packing.row(r // per_window, r % per_window) for r in range(packing.rows))
    return [[(start, n) for start, n in row.tolist()] for row in found]


@pytest.mark.parametrize("length", [100, 4096])
def test_store_is_packed_exactly(tmp_path: pathlib.Path, length: int) -> None:
    """Over several windows of a store, every token is in exactly one row, no piece leaves its document or its
    window."""
    random = np.random.default_rng(5)
    lengths = random.integers(1, 9000, 300)
    store, packing = opened(write_token_store(tmp_path / "s", lengths.tolist()), length)
    assert packing.windows >= 3
    rows = all_pieces(packing)
    assert [sum(n for _, n in row) for row in rows[:-1]] == [length] * (len(rows) - 1)
    pieces = sorted(itertools.chain(*rows))
    assert pieces[0][0] == 0 and sum(n for _, n in pieces) == len(store)
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(pieces))
    edges = np.unique(np.concatenate([store.document_starts, np.arange(0, len(store), packing.window_tokens)]))
    first, last = (np.searchsorted(edges, [a + shift * (n - 1) for a, n in pieces], "right") for shift in (0, 1))
    assert (first == last).all()


def test_windows_are_worth_a_remote_read(tmp_path: pathlib.Path) -> None:
    """The rows of a window come out of one run of at least 2**19 tokens (1 MiB at 16 bits), exactly its share of
    rows."""
    _, packing = opened(write_token_store(tmp_path / "s", [70_000] * 20), 1000)
    assert packing.window_tokens >= WINDOW_TOKENS and packing.window_tokens == packing.rows_per_window * 1000
    for window in range(packing.windows - 1):
        for row in range(packing.rows_per_window):
            for start, n in packing.row(window, row):
                assert window * packing.window_tokens <= start
                assert start + n <= (window + 1) * packing.window_tokens


def test_packing_is_kept(tmp_path: pathlib.Path) -> None:
    """A packing is computed once and read back afterwards, with the same hash and rows; another length is another
    file."""
    folder = write_token_store(tmp_path / "s", [300, 20, 77, 5])
    _, first = opened(folder, 64)
    written = pathlib.Path(first.path).stat().st_ino
    _, again = opened(folder, 64)
    assert pathlib.Path(again.path).stat().st_ino == written
    assert (again.hash, all_pieces(again)) == (first.hash, all_pieces(first))
    _, other = opened(folder, 65)
    assert other.path != first.path and other.hash != first.hash
    assert len(list((tmp_path / "s" / "packing").iterdir())) == 2


def test_packing_without_a_place(tmp_path: pathlib.Path) -> None:
    """Where the packing cannot be written, the error names the path and what to do."""
    folder = write_token_store(tmp_path / "s", [300, 20])
    (tmp_path / "s" / "packing").write_text("a file where the folder should be")
    with pytest.raises(BadValue, match=r"packing[^\n]*cannot be written"):
        opened(folder, 64)
