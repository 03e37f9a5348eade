"""How a verb is told of a store: its address, and where the credentials are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from packtrain.core.platform import Platform
    from packtrain.core.stores import Store

REFERENCE = "env:NAME or file:PATH; default: what the machine offers."
Endpoint = Annotated[
    str, typer.Option("--endpoint", metavar="URL", help="http(s)://HOST:PORT of a store that is not its inventor's.")
]
Region = Annotated[str, typer.Option("--region", help="Region of an S3 bucket.")]
KeyId = Annotated[str, typer.Option("--key-id", metavar="REF", help=f"Access key id: {REFERENCE}")]
Secret = Annotated[str, typer.Option("--secret", metavar="REF", help=f"Secret key: {REFERENCE}")]

RateOption = Annotated[str, typer.Option("--rate", metavar="AMOUNT/s", help="At most so much, as in 200MB/s.")]


def place(platform: Platform, url: str, endpoint: str, region: str, key_id: str, secret: str) -> Store:
    """The store there. Raises BadValue, StoreRefused."""
    from packtrain.core.stores import StoreConfig, open_store

    return open_store(platform, StoreConfig(url, endpoint, region, key_id, secret))


def rate_of(text: str) -> float:
    """`200MB/s` -> 2e8 bytes a second; "" is no limit. Raises UsageError, for a bare number too: 200 is not 200 MB."""
    from packtrain.core.errors import UsageError
    from packtrain.core.units import parse_bytes

    found = None if text.isdecimal() or not text else parse_bytes(text.removesuffix("/s"))
    if text and not found:
        raise UsageError(f"{text!r} is no rate", where="--rate", fix="write 200MB/s or 1.5GiB/s")
    return found or math.inf
