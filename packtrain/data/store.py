"""A store: token ids of whole documents in one flat file, an index of documents, checksums and a card.

    tokens.bin      little-endian uint16 (uint32 where the vocabulary needs it); each document is its tokens, then the
                    end-of-document token, and nothing in between
    documents.bin   uint64: where each document starts, and the total at the end
    checksums.bin   uint32: crc32c of each 1 MiB block of tokens.bin, then of documents.bin
    card.json       counts and hashes, sealed with its own SHA-256 (`signed.py`). It holds the SHA-256 of checksums.bin,
                    so this one hash names every byte of the store
    packing/        computed from the documents' lengths when a run first needs it (`packing.py`)
"""

from __future__ import annotations

import hashlib
import os

import msgspec
import numpy as np
import numpy.typing as npt

from packtrain.core.errors import CorpusMissing, StoreDamaged
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.data.blocks import BlockFile, BlockWriter
from packtrain.data.signed import read_card, seal

CARD, TOKENS, DOCUMENTS, CHECKSUMS = "card.json", "tokens.bin", "documents.bin", "checksums.bin"


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a store holds. `bytes`: UTF-8 bytes of the documents' text; `tokens` counts one end of document each."""

    format: int = 1
    documents: int
    bytes: int
    tokens: int
    dtype: str
    tokenizer_hash: str
    tokenizer_size: int
    end_of_document: int
    documents_hash: str
    """SHA-256 over the content hashes of the documents in their order: the text, whatever tokenizer was used."""
    checksums_sha256: str
    xz_files_bits_per_byte: float | None = None
    """`xz -9e` on each document by itself, over all bytes (held-out stores only)."""
    xz_stream_bits_per_byte: float | None = None
    """`xz -9e` on all documents as one stream."""


def token_dtype(size: int) -> str:
    """The narrowest type that holds every id of a tokenizer with `size` ids."""
    return "<u2" if size <= 1 << 16 else "<u4"


class Store:
    """A store opened for reading. Raises CorpusMissing where there is none and StoreDamaged, naming file and block."""

    def __init__(self, folder: str, platform: Platform | None = None) -> None:
        self.folder = folder
        platform = platform or LocalPlatform()
        path = os.path.join(folder, CARD)
        if not platform.exists(path):
            raise CorpusMissing(
                "there is no store here", where=folder, fix="make one with `packtrain data build PATH... --out DIR`"
            )
        self.card, self.hash = read_card(platform, path, Card)
        for name in (TOKENS, DOCUMENTS, CHECKSUMS):
            if not platform.exists(os.path.join(folder, name)):
                raise StoreDamaged(f"{name} is missing", where=folder, fix="restore it from a copy, or build again")
        crcs, n_blocks = self._checksums(platform)
        self._tokens = BlockFile(os.path.join(folder, TOKENS), self.card.dtype, self.card.tokens, crcs[:n_blocks])
        self._documents = BlockFile(os.path.join(folder, DOCUMENTS), "<u8", self.card.documents + 1, crcs[n_blocks:])

    def _checksums(self, platform: Platform) -> tuple[npt.NDArray[np.uint32], int]:
        path = os.path.join(self.folder, CHECKSUMS)
        data = platform.read(path)
        if hashlib.sha256(data).hexdigest() != self.card.checksums_sha256:
            raise StoreDamaged("the checksums do not match the card", where=path, fix="restore the file from a copy")
        token_bytes = self.card.tokens * np.dtype(self.card.dtype).itemsize
        return np.frombuffer(data, dtype="<u4"), -(-token_bytes // (1 << 20))

    def __len__(self) -> int:
        return self.card.tokens

    def read(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Token ids [start, stop) as a read-only view of the file. Raises StoreDamaged."""
        return self._tokens.read(start, stop)

    def read_pieces(
        self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> tuple[list[npt.NDArray[np.generic]], npt.NDArray[np.generic]]:
        """Token ids [start, start + length) of each piece as views, and the id before each (of a piece at 0, its own
        first). Raises StoreDamaged."""
        before = np.maximum(starts - 1, 0)
        tokens = self._tokens.checked(before, starts + lengths)
        stops = (starts + lengths).tolist()
        return [tokens[start:stop] for start, stop in zip(starts.tolist(), stops)], tokens[before]

    @property
    def document_starts(self) -> npt.NDArray[np.uint64]:
        """Where each document starts, and the total at the end: [documents + 1]. Raises StoreDamaged."""
        return self._documents.read(0, len(self._documents)).view(np.uint64)

    def verify(self) -> list[str]:
        """Read every block of the store; one line for each that is damaged."""
        return self._tokens.verify() + self._documents.verify()


class StoreWriter:
    """Writes a new store piece by piece in bounded memory; `finish` makes it exist by writing the card last."""

    def __init__(self, platform: Platform, folder: str, dtype: str) -> None:
        platform.mkdir(folder)
        self._platform, self._folder, self._dtype = platform, folder, dtype
        self._tokens = BlockWriter(platform, os.path.join(folder, TOKENS))
        self._documents = BlockWriter(platform, os.path.join(folder, DOCUMENTS))
        self._hash = hashlib.sha256()
        self.tokens = self.documents = self.bytes = 0

    def append(
        self, tokens: npt.NDArray[np.generic], lengths: npt.NDArray[np.integer], hashes: bytes, n_bytes: int
    ) -> None:
        """Whole documents: their tokens with each end of document, tokens per document, 16-byte content hashes, text
        bytes."""
        assert len(tokens) == int(lengths.sum()) and len(hashes) == 16 * len(lengths)
        self._tokens.write(tokens.astype(self._dtype, copy=False))
        ends = self.tokens + np.cumsum(lengths, dtype=np.uint64)
        self._documents.write((ends - lengths.astype(np.uint64)).astype("<u8"))
        self._hash.update(hashes)
        self.tokens += len(tokens)
        self.documents += len(lengths)
        self.bytes += n_bytes

    def finish(self, tokenizer_hash: str, size: int, end: int, xz: tuple[float, float] | None = None) -> Card:
        self._documents.write(np.array([self.tokens], dtype="<u8"))
        checksums = np.concatenate([self._tokens.finish(), self._documents.finish()]).astype("<u4").tobytes()
        self._platform.write_new(os.path.join(self._folder, CHECKSUMS), checksums)
        card = Card(
            documents=self.documents, bytes=self.bytes, tokens=self.tokens, dtype=self._dtype,
            tokenizer_hash=tokenizer_hash, tokenizer_size=size, end_of_document=end,
            documents_hash=self._hash.hexdigest(),
            checksums_sha256=hashlib.sha256(checksums).hexdigest(),
            xz_files_bits_per_byte=xz[0] if xz else None, xz_stream_bits_per_byte=xz[1] if xz else None,
        )
        self._platform.write_new(os.path.join(self._folder, CARD), seal(card))
        self._platform.fsync_dir(self._folder)
        return card
