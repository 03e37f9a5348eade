"""What the first pass of a build leaves on disk: each unit's documents, compressed, and a record of each document.

A unit's documents are kept in parts of about `part_bytes`, the grain of all later passes. Files of unit N:

    N.zst     a zstd frame a part: its documents end to end
    N.rec     per part, records sorted by content hash (RECORD)
    N.bands   per record, its 32 MinHash band keys
    N.json    sealed card, written last: what is in the others, and what was skipped

`Spool` reads all units as one list of parts, through a table on disk: memory does not grow with the corpus.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from packtrain.core.errors import StoreDamaged
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.data.blocks import map_bytes
from packtrain.data.keys import U64
from packtrain.data.listing import Item
from packtrain.data.minhash import BANDS, band_keys
from packtrain.data.readers import Skips, read_item
from packtrain.data.signed import read_card, seal

RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u4"), ("offset", "<u4"), ("bytes", "<u4")])
"""128-bit content hash, place among the part's documents, and where its text is in the part."""
PART = np.dtype([
    ("unit", "<u4"), ("frame_at", "<u8"), ("frame_bytes", "<u4"), ("text_bytes", "<u4"), ("first", "<u8"),
    ("records", "<u4"), ("records_crc", "<u4"), ("bands_crc", "<u4"),
])
UNITS_A_FOLDER = 1000
PART_RECORDS_MAX = 1 << 16
"""Of a part; a record and its band keys take 284 bytes in memory, however short its text is."""
Records = npt.NDArray[np.void]


class PartCard(msgspec.Struct, frozen=True):
    frame_bytes: int
    text_bytes: int
    records: int
    records_crc: int
    bands_crc: int


class UnitCard(msgspec.Struct, frozen=True, kw_only=True):
    parts: tuple[PartCard, ...]
    skipped: int
    skipped_named: tuple[str, ...]


class ReadTask(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    unit: int
    items: tuple[Item, ...]
    field: str
    piece_bytes: int
    part_bytes: int
    skip_max: int


def numbered(folder: str, number: int, suffix: str) -> str:
    """The path of numbered file, a thousand to a folder."""
    return os.path.join(folder, f"{number // UNITS_A_FOLDER:06d}", f"{number:09d}{suffix}")


def content_hash(text: bytes) -> bytes:
    """16 bytes that name a document's text."""
    return hashlib.blake2b(text, digest_size=16).digest()


def read_unit(task: ReadTask) -> UnitCard:
    """Read a unit's documents into the spool; a unit that is there already is left as it is. Raises CorruptInput."""
    platform = LocalPlatform()
    done = numbered(task.folder, task.unit, ".json")
    if platform.exists(done):
        return read_card(platform, done, UnitCard)[0]
    platform.mkdir(os.path.dirname(done))
    skips = Skips(task.skip_max)
    suffixes = (".zst", ".rec", ".bands")
    paths = [numbered(task.folder, task.unit, suffix) for suffix in suffixes]
    temps = [f"{path}.new-{platform.token()}" for path in paths]
    files = [platform.create(temp) for temp in temps]
    parts = []
    documents = (d for item in task.items for d in read_item(item, task.field, task.piece_bytes, skips))
    for texts in parts_of(documents, task.part_bytes):
        frame = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(b"".join(texts))
        records, bands = (array.tobytes() for array in _records(texts))
        for file, data in zip(files, (frame, records, bands)):
            file.write(data)
        crcs = google_crc32c.value(records), google_crc32c.value(bands)
        parts.append(PartCard(len(frame), sum(map(len, texts)), len(texts), *crcs))
    for file, temp, path in zip(files, temps, paths):
        file.fsync()
        file.close()
        platform.replace(temp, path)
    card = UnitCard(parts=tuple(parts), skipped=skips.count, skipped_named=tuple(skips.named))
    platform.write_replacing(done, seal(card))
    return card


def parts_of(documents: Iterable[bytes], part_bytes: int) -> Iterator[list[bytes]]:
    """Documents dealt into parts of at most so many bytes, or of one document, and of a bounded number of records."""
    held: list[bytes] = []
    n = 0
    for document in documents:
        if held and (n + len(document) > part_bytes or len(held) == PART_RECORDS_MAX):
            yield held
            held, n = [], 0
        held.append(document)
        n += len(document)
    if held:
        yield held


def _records(texts: Sequence[bytes]) -> tuple[Records, U64]:
    """Records and band keys of a part, in order of content hash (and of document where two are equal)."""
    records = np.zeros(len(texts), dtype=RECORD)
    hashes = np.frombuffer(b"".join(content_hash(t) for t in texts), dtype=">u8").reshape(-1, 2)
    sizes = np.array([len(t) for t in texts])
    records["high"], records["low"] = hashes[:, 0], hashes[:, 1]
    records["document"] = np.arange(len(texts))
    records["bytes"] = sizes
    records["offset"] = np.cumsum(sizes) - sizes
    order = np.lexsort((records["document"], records["low"], records["high"]))
    bands = np.stack([band_keys(t) for t in texts])
    return records[order], bands[order]


class Spool:
    """All parts of a finished first pass, numbered through. In memory: what is asked for; the table is mapped.

    What is read is checked: text by zstd, records and band keys by their crc32c. Raises StoreDamaged.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.table = map_bytes(os.path.join(folder, "parts")).view(PART)

    def __len__(self) -> int:
        return len(self.table)

    def records(self, part: int) -> Records:
        """The part's records in order of content hash."""
        return self._rows(part, ".rec", RECORD, "records_crc")

    def bands(self, part: int) -> U64:
        """[records, 32], in the order of `records`."""
        return self._rows(part, ".bands", np.dtype(("<u8", BANDS)), "bands_crc").reshape(-1, BANDS)

    def texts(self, part: int) -> bytes:
        """The part's documents end to end, in their order."""
        entry = self.table[part]
        at, n = int(entry["frame_at"]), int(entry["frame_bytes"])
        frame = self._read(part, ".zst", at, n)
        try:
            return zstandard.ZstdDecompressor().decompress(frame, max_output_size=int(entry["text_bytes"]))
        except zstandard.ZstdError as error:
            raise self._damaged(part, ".zst", str(error)) from error

    def _rows(self, part: int, suffix: str, dtype: np.dtype, crc: str) -> npt.NDArray:
        entry = self.table[part]
        at, n = (int(entry[name]) * dtype.itemsize for name in ("first", "records"))
        data = self._read(part, suffix, at, n)
        if google_crc32c.value(data) != int(entry[crc]):
            raise self._damaged(part, suffix, "its checksum is wrong")
        return np.frombuffer(data, dtype.base)

    def _damaged(self, part: int, suffix: str, what: str) -> StoreDamaged:
        unit = int(self.table[part]["unit"])
        return StoreDamaged(
            f"the unfinished build is damaged: {what}", where=numbered(self._folder, unit, suffix),
            fix="remove the .building- folder and build again",
        )

    def _read(self, part: int, suffix: str, at: int, n: int) -> bytes:
        with open(numbered(self._folder, int(self.table[part]["unit"]), suffix), "rb") as file:
            file.seek(at)
            return file.read(n)


def write_parts_table(platform: Platform, folder: str, cards: Iterable[UnitCard]) -> None:
    """The table of parts, from the units' cards in their order. Streams; replaces what an earlier try left."""
    temp = os.path.join(folder, f"parts.new-{platform.token()}")
    with platform.create(temp) as file:
        for unit, card in enumerate(cards):
            entries = np.zeros(len(card.parts), dtype=PART)
            entries["unit"] = unit
            for name in PartCard.__struct_fields__:
                entries[name] = [getattr(part, name) for part in card.parts]
            entries["frame_at"] = np.cumsum(entries["frame_bytes"], dtype=np.uint64) - entries["frame_bytes"]
            entries["first"] = np.cumsum(entries["records"], dtype=np.uint64) - entries["records"]
            file.write(entries.tobytes())
        file.fsync()
    platform.replace(temp, os.path.join(folder, "parts"))
