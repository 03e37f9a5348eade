"""Bytes that cross a seam: a checksum and a bounded reading of JSON from whoever sent it. Standard library only."""

from __future__ import annotations

import json
import struct
from typing import Any

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1


def _crc_tables() -> tuple[tuple[int, ...], ...]:
    """Eight tables for slicing by 8, of the Castagnoli polynomial (reflected)."""
    first = list(range(256))
    for _ in range(8):
        first = [(c >> 1) ^ (0x82F63B78 if c & 1 else 0) for c in first]
    tables = [first]
    for _ in range(7):
        tables.append([first[c & 255] ^ (c >> 8) for c in tables[-1]])
    return tuple(tuple(table) for table in tables)


_CRC = _crc_tables()


def crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    """CRC-32C of `data`, continuing from `crc`. Source: RFC 3720 B.4; slicing as in Kounavis and Berry, 2005."""
    t0, t1, t2, t3, t4, t5, t6, t7 = _CRC
    view = memoryview(data).cast("B")
    whole = len(view) & ~7
    crc ^= 0xFFFFFFFF
    for a, b in struct.iter_unpack("<II", view[:whole]):
        a ^= crc
        crc = (
            t7[a & 255] ^ t6[a >> 8 & 255] ^ t5[a >> 16 & 255] ^ t4[a >> 24]
            ^ t3[b & 255] ^ t2[b >> 8 & 255] ^ t1[b >> 16 & 255] ^ t0[b >> 24]
        )
    for byte in view[whole:]:
        crc = t0[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def json_object(data: bytes, bytes_max: int) -> dict[str, Any] | None:
    """The JSON object that `data` is, or None for anything else: too long, no UTF-8, not JSON, nested too deep."""
    if len(data) > bytes_max:
        return None
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def checked_line(fields: dict[str, Any]) -> bytes:
    """What an order file holds: one line of JSON whose last field is the crc32c of what stands before `,"crc":`."""
    body = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    return b'%s,"crc":%d}\n' % (body, crc32c(body))


def checked_object(data: bytes, bytes_max: int) -> dict[str, Any] | None:
    """The object in such a line, or None when anything about it is damaged."""
    body, separator, _ = data.rpartition(b',"crc":')
    fields = json_object(data, bytes_max)
    return fields if fields is not None and separator and fields.get("crc") == crc32c(body) else None


def is_count(value: object, most: int) -> bool:
    """Whether `value` is an int (no bool) from 0 to `most`."""
    return type(value) is int and 0 <= value <= most
