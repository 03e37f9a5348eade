"""A store holds what was written, and a single flipped byte anywhere in it is refused by the name of its file."""

from __future__ import annotations

import hashlib
import pathlib
import random
import shutil
from itertools import pairwise

import numpy as np
import pytest

from packtrain.core.errors import CorpusMissing, PacktrainError, StoreDamaged, TokenizerMismatch
from packtrain.data.blocks import BLOCK_BYTES
from packtrain.data.packing import Packing
from packtrain.data.store import Store, StoreWriter, token_dtype
from packtrain.data.tokenizer import FILE, load_tokenizer
from tests.data.makers import BYTES, END, PLATFORM, source_text, write_store, write_token_store

TEXTS = [source_text(i, 12) for i in range(40)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("store") / "s"
    write_store(folder, TEXTS)
    Packing(PLATFORM, Store(str(folder)), 64, "causal")
    return folder


def read_everything(folder: pathlib.Path) -> None:
    store = Store(str(folder))
    damage = store.verify()
    if damage:
        raise StoreDamaged(damage[0])
    packing = Packing(PLATFORM, store, 64, "causal")
    for row in range(packing.rows):
        packing.row(row // packing.rows_per_window, row % packing.rows_per_window)
    load_tokenizer(str(folder))


def test_what_was_written_is_read(store: pathlib.Path) -> None:
    """Documents come back whole, in order, each with its end; the card counts them; nothing is damaged."""
    opened = Store(str(store))
    starts = opened.document_starts.tolist()
    read = [opened.read(a, b).tolist() for a, b in pairwise(starts)]
    assert read == [[*text, END] for text in TEXTS]
    assert (opened.card.documents, opened.card.bytes) == (len(TEXTS), sum(map(len, TEXTS)))
    assert opened.card.tokens == len(opened) == opened.card.bytes + len(TEXTS)
    hashes = b"".join(hashlib.blake2b(text, digest_size=16).digest() for text in TEXTS)
    assert opened.card.documents_hash == hashlib.sha256(hashes).hexdigest()
    read_everything(store)


def test_pieces_written_do_not_show(tmp_path: pathlib.Path) -> None:
    """The files are the same however the documents were handed to the writer, over block edges too."""
    lengths = np.random.default_rng(0).integers(1, 4000, 700)
    whole = pathlib.Path(write_token_store(tmp_path / "a", lengths.tolist()))
    store = Store(str(whole))
    assert store.card.tokens * 2 > 2 * BLOCK_BYTES
    writer = StoreWriter(PLATFORM, str(tmp_path / "b"), "<u2")
    for part in np.array_split(np.arange(700), 9):
        first, last = int(store.document_starts[part[0]]), int(store.document_starts[part[-1] + 1])
        text_bytes = last - first - len(part)
        writer.append(store.read(first, last), lengths[part], bytes(16 * len(part)), text_bytes)
    writer.finish(BYTES.hash, BYTES.size, END)
    for name in ("tokens.bin", "documents.bin", "checksums.bin", "card.json"):
        assert (tmp_path / "b" / name).read_bytes() == (whole / name).read_bytes()


FILES = ("tokens.bin", "documents.bin", "checksums.bin", "card.json", "packing", FILE)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused(tmp_path: pathlib.Path, store: pathlib.Path, name: str) -> None:
    """A bit flipped in any file of a store, at 60 places and in each of its last 60 bytes, is refused by the file's
    name."""
    copy = shutil.copytree(store, tmp_path / "s")
    path = next((copy / name).iterdir()) if name == "packing" else copy / name
    data = path.read_bytes()
    chance = random.Random(name)
    for at in {*chance.sample(range(len(data)), min(60, len(data))), *range(len(data))[-60:]}:
        flipped = bytearray(data)
        flipped[at] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(PacktrainError) as caught:
            read_everything(copy)
        assert caught.value.exit_code == 78
        assert path.name in str(caught.value), at


@pytest.mark.parametrize("name", FILES[:4])
@pytest.mark.parametrize("change", ["shorter", "longer", "gone", "empty"])
def test_a_file_of_another_size_is_refused(tmp_path: pathlib.Path, store: pathlib.Path, name: str, change: str) -> None:
    """A file of a store that is cut, grown, emptied or gone is refused by name."""
    copy = tmp_path / "s"
    shutil.copytree(store, copy)
    data = (copy / name).read_bytes()
    if change == "gone":
        (copy / name).rename(tmp_path / "elsewhere")
    else:
        (copy / name).write_bytes({"shorter": data[:-1], "longer": data + b"\n", "empty": b""}[change])
    with pytest.raises((StoreDamaged, CorpusMissing)) as caught:
        read_everything(copy)
    assert name in str(caught.value) or (name, change) == ("card.json", "gone")


def test_damage_far_away_does_not_matter(tmp_path: pathlib.Path) -> None:
    """Blocks are checked when they are first read: damage in one block leaves the others usable, and verify finds
    it."""
    folder = write_token_store(tmp_path / "s", [1000] * 1200)
    path = tmp_path / "s" / "tokens.bin"
    data = bytearray(path.read_bytes())
    data[BLOCK_BYTES + 5] ^= 1
    path.write_bytes(data)
    store = Store(folder)
    assert len(store.read(0, BLOCK_BYTES // 2)) == BLOCK_BYTES // 2
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="block 1") as caught:
            store.read(BLOCK_BYTES // 2 - 1, BLOCK_BYTES // 2 + 1)
        assert str(path) in caught.value.where
    assert len(store.read(0, 10)) == 10
    assert [line for line in store.verify() if "block 1 " in line] == store.verify() != []
    with open(path, "r+b") as file:
        file.write(bytes([data[0] ^ 1]))
    assert len(store.verify()) == 2, "verify reads again what was good before"


def test_the_tokenizer_belongs_to_the_store(tmp_path: pathlib.Path, store: pathlib.Path) -> None:
    """Another valid tokenizer.json beside a store is refused; one in the folder above is found."""
    copy = tmp_path / "s"
    shutil.copytree(store, copy)
    (copy / FILE).rename(tmp_path / FILE)
    assert load_tokenizer(str(copy)).hash == BYTES.hash
    assert load_tokenizer(str(tmp_path)).hash == BYTES.hash
    (tmp_path / FILE).write_text(BYTES.text + "\n")
    with pytest.raises(TokenizerMismatch, match="made with tokenizer"):
        load_tokenizer(str(copy))
    (tmp_path / FILE).rename(tmp_path / "elsewhere")
    with pytest.raises(CorpusMissing, match="no tokenizer"):
        load_tokenizer(str(copy))


def test_ids_are_as_wide_as_they_must_be() -> None:
    """16 bits hold a vocabulary of 65,536 ids; one more takes 32."""
    assert (token_dtype(65_536), token_dtype(65_537)) == ("<u2", "<u4")


def test_wide_ids(tmp_path: pathlib.Path) -> None:
    """A store of 32-bit ids gives back ids above 65,535."""
    writer = StoreWriter(PLATFORM, str(tmp_path / "s"), token_dtype(100_000))
    ids = np.array([99_999, 3, 70_000])
    writer.append(ids, np.array([2, 1]), bytes(32), 9)
    writer.finish("h", 100_000, 3)
    store = Store(str(tmp_path / "s"))
    assert store.read(0, 3).tolist() == ids.tolist() and store.card.dtype == "<u4"
