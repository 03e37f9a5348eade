"""`packtrain ckpt import`: a run that begins with foreign weights; another name of `packtrain train --from`."""

from __future__ import annotations

from typing import Annotated

import typer


def import_(
    weights: Annotated[str, typer.Argument(metavar="DIR", help="A model as Hugging Face keeps it.")],
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="What to train it with.")],
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Name of the run (default: RECIPE).")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, as in train.steps=100.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DIR", help="What `packtrain data build --out DIR` made.")
    ] = None,
) -> int:
    """Train RECIPE from the weights in DIR. The same as `packtrain train RECIPE --from DIR`."""
    from packtrain.cli.train import train

    return train(recipe, run=run, overrides=overrides, data=data, weights=weights)
