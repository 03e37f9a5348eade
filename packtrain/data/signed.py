"""JSON cards that carry their own SHA-256, so that a flipped byte is refused and one hash names what a card covers."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from packtrain.core.errors import StoreDamaged
from packtrain.core.platform import Platform

T = TypeVar("T", bound=msgspec.Struct)

MARK = b',\n  "sha256": "'
TAIL = b'"\n}\n'


def seal(card: msgspec.Struct) -> bytes:
    """The card as indented JSON whose last field is the SHA-256 of every byte before that field."""
    text = msgspec.json.format(msgspec.json.encode(card), indent=2)
    body = text.rstrip()[:-1].rstrip()
    return body + MARK + hashlib.sha256(body).hexdigest().encode() + TAIL


def seal_hash(data: bytes, path: str) -> str:
    """The hash a sealed card carries. Raises StoreDamaged naming `path` where a single byte differs from what was
    sealed."""
    body, mark, tail = data.rpartition(MARK)
    digest = hashlib.sha256(body).hexdigest()
    if not mark or tail != digest.encode() + TAIL:
        raise StoreDamaged(
            "the card's bytes do not match the hash inside it", where=path,
            fix="restore the folder from a copy, or build it again with `packtrain data build`",
        )
    return digest


def read_card(platform: Platform, path: str, cls: type[T]) -> tuple[T, str]:
    """The checked card at `path` and its hash. Raises StoreDamaged; OSError where it cannot be read."""
    data = platform.read(path)
    digest = seal_hash(data, path)
    fields = msgspec.json.decode(data)
    fields.pop("sha256")
    try:
        return msgspec.convert(fields, cls, strict=True), digest
    except msgspec.ValidationError as error:
        raise StoreDamaged(
            f"the card is not one this version reads: {error}", where=path,
            fix="build it again with `packtrain data build`",
        ) from error
