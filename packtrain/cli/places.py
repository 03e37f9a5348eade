"""How a verb is told of a store: its address, and where the credentials are."""

from __future__ import annotations

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


def place(platform: Platform, url: str, endpoint: str, region: str, key_id: str, secret: str) -> Store:
    """The store there. Raises BadValue, StoreRefused."""
    from packtrain.core.stores import StoreConfig, open_store

    return open_store(platform, StoreConfig(url, endpoint, region, key_id, secret))
