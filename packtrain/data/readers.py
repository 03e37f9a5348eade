"""Documents out of files, as UTF-8 bytes; what cannot be read is refused with file and line or row, or counted.

Text (any source, `.txt`): a document is a file. JSON lines: a string field of each line. Parquet: a string column's
rows. `.gz` and `.zst` around the first two. A document longer than `piece_bytes` is cut near each multiple of it:
after the first newline that follows within 64 KiB, else between two characters; so the cuts are a function of the
file alone, and a big file can be read from any multiple.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec
import zstandard

from packtrain.core.errors import BadValue, CorruptInput
from packtrain.data.listing import Item

SLACK_BYTES = 1 << 16
LINE_BYTES_MAX = 1 << 24
"""A line of JSON longer than this is taken for damage: it would have to be held whole."""
READ_ERRORS = (OSError, EOFError, zlib.error, zstandard.ZstdError)
SKIPS_NAMED = 20


class Skips:
    """Counts what was skipped; one more than `allowed` raises CorruptInput. `named`: the first 20, for the card."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.count = 0
        self.named: list[str] = []

    def add(self, what: str, where: str) -> None:
        self.count += 1
        if self.count > self._allowed:
            passed = f" ({self._allowed} skipped before)" if self._allowed else ""
            raise CorruptInput(
                what + passed, where=where,
                fix="mend or leave out the input, or let it be skipped: skip_max (--skip-max N)",
            )
        if len(self.named) < SKIPS_NAMED:
            self.named.append(f"{where}: {what}")


def read_item(item: Item, field: str, piece_bytes: int, skips: Skips) -> Iterator[bytes]:
    """The documents of an item, none of them empty, each at most `piece_bytes` + 64 KiB. Raises CorruptInput,
    BadValue."""
    if item.kind == "parquet":
        texts = _parquet(item, field, skips)
    elif item.kind == "jsonl":
        texts = _json_lines(item, field, skips)
    else:
        yield from _text(item, piece_bytes, skips)
        return
    for text in texts:
        yield from text_pieces(io.BytesIO(text), piece_bytes)


# --- whole files --------------------------------------------------------------------------------------


def text_pieces(stream: BinaryIO, piece_bytes: int, first: int = 0, last: int = -1) -> Iterator[bytes]:
    """Pieces [first, last) of a text (last -1: to its end), cut near multiples of `piece_bytes`."""
    base, slack = first * piece_bytes, min(SLACK_BYTES, piece_bytes)
    if first:
        stream.seek(base)
        base += _cut(stream.read(slack))
        stream.seek(base)
    held = b""
    while first != last:
        first += 1
        at = first * piece_bytes - base
        wanted = at + slack - len(held)
        data = _read_fully(stream, wanted)
        held += data
        at += _cut(held[at : at + slack])
        if held[:at]:
            yield held[:at]
        base += at
        held = held[at:]
        if not held and len(data) < wanted:
            return


def _cut(slack: bytes) -> int:
    """Where to cut in the bytes after a multiple: behind the first newline, else before the first whole character."""
    newline = slack.find(b"\n")
    if newline >= 0:
        return newline + 1
    return next((i for i, byte in enumerate(slack[:4]) if byte & 0xC0 != 0x80), len(slack[:4]))


def _read_fully(stream: BinaryIO, n: int) -> bytes:
    parts = []
    while n > 0 and (part := stream.read(n)):
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def _text(item: Item, piece_bytes: int, skips: Skips) -> Iterator[bytes]:
    first, last = item.start // piece_bytes, -1 if item.stop < 0 else -(-item.stop // piece_bytes)
    offset = 0
    try:
        with open_stream(item.path) as stream:
            for piece in text_pieces(stream, piece_bytes, first, last):
                try:
                    piece.decode()
                except UnicodeDecodeError as error:
                    skips.add(f"not UTF-8 text: {error.reason}", _text_place(item, piece, error.start, offset))
                else:
                    yield piece
                offset += len(piece)
    except READ_ERRORS as error:
        skips.add(f"cannot be read: {_reason(error)}", item.path)


def _text_place(item: Item, piece: bytes, at: int, offset: int) -> str:
    if item.start == 0 and offset == 0:
        return f"{item.path}, line {piece.count(bytes([10]), 0, at) + 1}"
    return f"{item.path}, part of {len(piece)} bytes that begins {offset} bytes after {item.start}"


# --- JSON lines ---------------------------------------------------------------------------------------


def _json_lines(item: Item, field: str, skips: Skips) -> Iterator[bytes]:
    line_type = msgspec.defstruct("Line", [("text", str)], rename={"text": field})
    decoder = msgspec.json.Decoder(line_type)
    try:
        with open_stream(item.path) as stream:
            for number, line in _lines(stream, item):
                try:
                    if len(line) > LINE_BYTES_MAX:
                        raise msgspec.DecodeError(f"the line is longer than {LINE_BYTES_MAX} bytes")
                    text = decoder.decode(line).text  # type: ignore[attr-defined]
                except msgspec.MsgspecError as error:
                    skips.add(f"not an object with a string {field!r}: {error}", _line_place(item, number))
                else:
                    yield text.encode()
    except READ_ERRORS as error:
        skips.add(f"cannot be read: {_reason(error)}", item.path)


def _lines(stream: BinaryIO, item: Item) -> Iterator[tuple[int, bytes]]:
    """Lines that start in the item's part, numbered from its first; a longer one than allowed comes cut to that
    length + 1."""
    at = item.start
    if at:
        stream.seek(at - 1)
        at += len(stream.readline()) - 1
    number = 0
    while item.stop < 0 or at < item.stop:
        line = stream.readline(LINE_BYTES_MAX + 1)
        if not line:
            return
        at += len(line)
        rest = line
        while not rest.endswith(b"\n") and (rest := stream.readline(LINE_BYTES_MAX)):
            at += len(rest)
        number += 1
        if line.strip():
            yield number, line


def _line_place(item: Item, number: int) -> str:
    """File and line; where the part began inside the file, the lines before it are counted now."""
    if item.start:
        with open(item.path, "rb") as file:
            number += _newlines(file, item.start)
    return f"{item.path}, line {number}"


def _newlines(file: BinaryIO, n: int) -> int:
    """Lines that start before byte `n`."""
    count, last = 0, b"\n"
    while n > 0 and (part := file.read(min(n, 1 << 20))):
        count += part.count(b"\n")
        n -= len(part)
        last = part
    return count + (not last.endswith(b"\n"))


# --- parquet ------------------------------------------------------------------------------------------


def _parquet(item: Item, field: str, skips: Skips) -> Iterator[bytes]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without these two the whole row group is held: they may be gigabytes.
        bounded = {"pre_buffer": False, "buffer_size": 1 << 20}
        file = pyarrow.parquet.ParquetFile(item.path, page_checksum_verification=True, **bounded)
    except (pyarrow.ArrowException, OSError) as error:
        skips.add(f"cannot be read: {_reason(error)}", item.path)
        return
    with file:
        _check_column(file, field, item.path)
        stop = file.num_row_groups if item.stop < 0 else item.stop
        for group in range(item.start, stop):
            yield from _row_group(file, group, field, item.path, skips)


def _check_column(file: Any, field: str, path: str) -> None:
    import pyarrow

    schema = file.schema_arrow
    kinds = {name: schema.field(name).type for name in schema.names}
    texts = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    usable = [name for name, kind in kinds.items() if any(is_text(kind) for is_text in texts)]
    if field not in usable:
        raise BadValue(
            f"there is no column of strings called {field!r}", where=path,
            fix=f"name one of its columns of strings (--field): {', '.join(usable) or 'it has none'}",
        )


def _row_group(file: Any, group: int, field: str, path: str, skips: Skips) -> Iterator[bytes]:
    import pyarrow

    row = 0
    try:
        for batch in file.iter_batches(256, row_groups=[group], columns=[field], use_threads=False):
            # As bytes: one row that is not UTF-8 must not take the others of its batch with it.
            for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                row += 1
                reason = _not_text(text)
                if reason:
                    skips.add(reason, f"{path}, row group {group}, row {row}")
                else:
                    yield text
    except (pyarrow.ArrowException, OSError) as error:
        skips.add(f"cannot be read after row {row}: {_reason(error)}", f"{path}, row group {group}")


def _not_text(text: bytes | None) -> str:
    if text is None:
        return "the text is null"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 text: {error.reason}"
    return ""


# --- compression --------------------------------------------------------------------------------------


def open_stream(path: str) -> BinaryIO:
    """The file's bytes, decompressed by its suffix. Reading damage raises one of READ_ERRORS."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstdStream(path), 1 << 20)
    return open(path, "rb")


class _ZstdStream(io.RawIOBase):
    """All frames of a file. The library's own stream ends quietly where a file is cut off; this one raises EOFError."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")
        self._frame: Any = None
        self._held = memoryview(b"")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            data = self._rest or self._file.read(1 << 17)
            if not data:
                if self._frame is not None:
                    raise EOFError("the compressed file is cut off")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._held = memoryview(self._frame.decompress(data))
            self._rest = b""
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        n = min(len(buffer), len(self._held))
        buffer[:n] = self._held[:n]
        self._held = self._held[n:]
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
