"""Second pass of a build: each part of the spool to token ids, and the parts' ids into stores."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from packtrain.core.errors import BadValue, StoreDamaged
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.data.dedup import Drops
from packtrain.data.holdout import Split
from packtrain.data.signed import read_card
from packtrain.data.spool import Spool, content_hash, numbered
from packtrain.data.store import token_dtype
from packtrain.data.tokenizer import Tokenizer, read_tokenizer

HEADER = struct.Struct("<IQQQI")
"""crc32c of what follows the crc, documents, tokens, bytes of text, bytes an id."""
BATCH_BYTES = 1 << 18
"""Text handed to the tokenizer at once: its answer takes about 100 bytes a token."""

Tokens = npt.NDArray[np.generic]


class EncodeTask(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    """The build's work folder."""
    part: int
    ranges: int
    lossless: bool


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """Whole documents: ids (each document's end included), ids per document, 16-byte content hashes, bytes of text."""

    tokens: Tokens
    lengths: npt.NDArray[np.uint32]
    hashes: bytes
    bytes: int


def encode_part(task: EncodeTask) -> int:
    """Write the ids of a part's documents that stay in training; -> text bytes. A part that is done is left as it
    is."""
    platform = LocalPlatform()
    done = numbered(os.path.join(task.folder, "tokens"), task.part, ".tok")
    if not platform.exists(done):
        platform.mkdir(os.path.dirname(done))
        tokenizer = read_tokenizer(platform, os.path.join(task.folder, "tokenizer.json"))
        encoded = encode(tokenizer, list(train_texts(platform, task.folder, task.part, task.ranges)), task.lossless)
        platform.write_replacing(done, pack(encoded))
    return int(Spool(os.path.join(task.folder, "spool")).table[task.part]["text_bytes"])


def train_texts(platform: Platform, folder: str, part: int, ranges: int) -> Iterator[bytes]:
    """A part's documents in reading order, without repeats and without those held out."""
    held = read_card(platform, os.path.join(folder, "split.json"), Split)[0].held
    left_out = {d.document for d in held if d.part == part}
    left_out.update(Drops(os.path.join(folder, f"drops-{ranges}"), ranges).of(part).tolist())
    spool = Spool(os.path.join(folder, "spool"))
    records = spool.records(part)
    texts = spool.texts(part)
    for r in records[np.argsort(records["document"])]:
        if int(r["document"]) not in left_out:
            yield texts[int(r["offset"]) : int(r["offset"]) + int(r["bytes"])]


def encode(tokenizer: Tokenizer, texts: Sequence[bytes], lossless: bool) -> Encoded:
    """Raises BadValue when `lossless` and a document's ids do not stand for exactly its bytes, or for other bytes."""
    arrays: list[Tokens] = []
    lengths: list[int] = []
    dtype = token_dtype(tokenizer.size)
    for batch in _batches(texts):
        for text, ids in zip(batch, tokenizer.encode_many([text.decode() for text in batch])):
            array = np.array([*ids, tokenizer.end_of_document], dtype=dtype)
            if lossless and not tokenizer.keeps(text, ids):
                raise _not_lossless(text)
            arrays.append(array)
            lengths.append(len(array))
    return Encoded(
        tokens=np.concatenate(arrays) if arrays else np.zeros(0, dtype),
        lengths=np.array(lengths, dtype="<u4"), hashes=b"".join(map(content_hash, texts)),
        bytes=sum(map(len, texts)),
    )


def _batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    n = 0
    for text in texts:
        batch.append(text)
        n += len(text)
        if n >= BATCH_BYTES:
            yield batch
            batch, n = [], 0
    if batch:
        yield batch


def _not_lossless(text: bytes) -> BadValue:
    return BadValue(
        "the tokenizer does not keep every byte of the text, so bits per byte would be wrong",
        where=f"the document that begins {text[:60]!r}",
        fix="use a byte-level tokenizer without normalizer, or accept it: --lossy",
    )


def pack(encoded: Encoded) -> bytes:
    head = (len(encoded.lengths), len(encoded.tokens), encoded.bytes, encoded.tokens.dtype.itemsize)
    body = encoded.lengths.tobytes() + encoded.hashes + encoded.tokens.tobytes()
    rest = HEADER.pack(0, *head)[4:] + body
    return struct.pack("<I", google_crc32c.value(rest)) + rest


def unpack(data: bytes, path: str) -> Encoded:
    """Raises StoreDamaged: the machine may have lost power, and what was written before need not be whole."""
    if len(data) < HEADER.size or google_crc32c.value(data[4:]) != struct.unpack_from("<I", data)[0]:
        raise StoreDamaged("a part of an unfinished build is damaged", where=path, fix="delete it and build again")
    _, documents, n, n_bytes, width = HEADER.unpack_from(data)
    at = HEADER.size
    lengths = np.frombuffer(data, "<u4", documents, at)
    at += 4 * documents
    tokens = np.frombuffer(data, f"<u{width}", n, at + 16 * documents)
    return Encoded(tokens=tokens, lengths=lengths, hashes=data[at : at + 16 * documents], bytes=n_bytes)
