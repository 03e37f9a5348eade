"""`packtrain data build` and `packtrain data show`: raw text to stores, and what is in a store."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

app = typer.Typer(
    help="Make stores of tokens, and look at them.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def build(
    paths: Annotated[list[str], typer.Argument(
        metavar="PATH...", help="Folders of text or source, or files: text, .jsonl(.gz, .zst), .parquet."
    )],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Where the stores go; an unfinished build goes on.")],
    tokenizer: Annotated[str, typer.Option(help="bpe (trained on the text), byte, or a tokenizer.json.")] = "bpe",
    vocab: Annotated[int, typer.Option(help="Ids of a trained tokenizer.")] = 4096,
    field: Annotated[str, typer.Option(help="Where the text is in JSON lines and parquet.")] = "text",
    suffix: Annotated[
        list[str] | None, typer.Option(help="Which files of folders are text, as in --suffix .py; may be repeated.")
    ] = None,
    skip_max: Annotated[int, typer.Option(help="Corrupt files, lines or rows that may be left out, counted.")] = 0,
    held_out_fraction: Annotated[float, typer.Option(help="Part of the text that training never sees.")] = 0.05,
    held_out_bytes_max: Annotated[int, typer.Option(help="And at most this much of it.")] = 500_000,
    document_bytes_max: Annotated[int, typer.Option(help="Longer documents are cut.")] = 1 << 20,
    memory_bytes_max: Annotated[int, typer.Option(help="Of all processes together; 0: half of what is free.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes; 0: one a core.")] = 0,
    seed: Annotated[int, typer.Option(help="Draws the text that a tokenizer is trained on.")] = 0,
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow a tokenizer that loses bytes of the text.")] = False,
) -> None:
    """Make DIR/train, DIR/held_out and DIR/tokenizer.json from text. The same command resumes.

    Exit codes: 0 done, 75 stopped or out of space (go on with the same command), 78 input that cannot be read.
    """
    from packtrain.cli import extras, folders
    from packtrain.cli.bars import Bars
    from packtrain.core.platform import LocalPlatform

    extras.require("data")
    from packtrain.data.build import BuildOptions, build

    options = BuildOptions(
        tokenizer=tokenizer, vocab=vocab, field=field, suffixes=tuple(suffix or ()), skip_max=skip_max,
        held_out_fraction=held_out_fraction, held_out_bytes_max=held_out_bytes_max,
        document_bytes_max=document_bytes_max, memory_bytes_max=memory_bytes_max, workers=workers, seed=seed,
        lossless=not lossy,
    )
    platform = LocalPlatform()
    with Bars() as bars:
        build(platform, paths, out, options, bars)
    show_store(out)
    command = ["packtrain", "train", "first-light", "--run", folders.name_after(out), "--data", out]
    typer.echo(f"next: {shlex.join(command)}")


@app.command()
def show(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="What `data build` made, or one store in it.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every block and compare its checksum.")] = False,
) -> None:
    """Print what is in DIR: documents, bytes, tokens, tokenizer, hashes, the first words."""
    from packtrain.cli import extras

    extras.require("data")
    show_store(folder, verify)


def show_store(folder: str, verify: bool = False) -> None:
    from packtrain.core.platform import LocalPlatform
    from packtrain.data.show import show

    typer.echo(show(LocalPlatform(), folder, verify))
