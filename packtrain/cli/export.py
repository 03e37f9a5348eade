"""`packtrain export RUN --hf DIR`: a run's weights as Hugging Face keeps them."""

from __future__ import annotations

from typing import Annotated

import typer

from packtrain.cli.options import SAVE_HELP


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")],
    out: Annotated[str, typer.Option("--hf", metavar="DIR", help="A new folder for config.json and safetensors.")],
    step: Annotated[
        str | None, typer.Option("--step", metavar="STEP", help=f"{SAVE_HELP} Default: what a restart would read.")
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Round the weights to bf16: half the size.")] = False,
) -> None:
    """Write a run's weights for `transformers` and whatever reads its files.

    Llama's shape; Mistral's with a window, Qwen3's with norms of q and k. `packtrain train RECIPE --from DIR` reads it.
    """
    from packtrain.checkpoint.interop import hf
    from packtrain.checkpoint.reader import open_checkpoint
    from packtrain.cli import extras, folders, spec
    from packtrain.cli.published import named
    from packtrain.core.platform import LocalPlatform

    platform, folder = LocalPlatform(), folders.find_run(run)
    of = spec.read(f"{folder}/{folders.SPEC}")
    checkpoint = open_checkpoint(platform, folder, named(platform, folder, step))
    extras.require("data")
    from packtrain.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(of.data.stores[0].path)
    files = {"tokenizer.json": tokenizer.text.encode()}
    names = hf.export(platform, checkpoint, of.model, out, tokenizer.size, of.data.length, files, bf16)
    typer.echo(f"step {checkpoint.manifest.step} of {run}: {', '.join(names)} in {out}")
