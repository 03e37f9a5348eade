"""`packtrain data build` and `packtrain data show`: raw text to stores, and what is in a store."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Make stores of tokens from text, and look at them.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def build(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, or folders of text or source.")],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Where the stores go; an unfinished build goes on.")],
) -> None:
    """Make stores from text."""
