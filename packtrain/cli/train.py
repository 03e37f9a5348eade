"""`packtrain train RECIPE`: create or resume a run and stay with it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from packtrain.cli.options import Profile


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="first-light, or rung:SIZE, from 10m to 64b.")],
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Create or resume this run (default: RECIPE).")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start another run: NAME-2, NAME-3, ...")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, as in model.layers=12.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DIR", help="What `packtrain data build --out DIR` made.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--from", metavar="DIR", help="Begin with the model in DIR, as Hugging Face keeps it.")
    ] = None,
    profile: Profile = 0,
) -> int:
    """Train RECIPE. The same command resumes; Ctrl-C saves and stops.

    Exit codes: 0 done, 70 no progress, 75 stopped on request or try again, 78 configuration.
    """
    from packtrain.cli import extras, launch, spec

    begin = [f"train.weights={os.path.abspath(weights)}"] if weights else []
    wanted = spec.resolve(recipe, [*begin, *(overrides or [])], data)
    if extras.missing("train"):
        typer.echo(spec.text(wanted))
        extras.require("train")
    return launch.launch(run, new, wanted, profile)
