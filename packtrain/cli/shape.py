"""`packtrain shape RECIPE`: what a model costs on a mesh, before there is one."""

from __future__ import annotations

from typing import Annotated

import typer


def shape(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="first-light, or rung:SIZE, from 10m to 64b.")],
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="AXIS=SIZE,...", help="As in fsdp=8,tensor=2; default: one device.")
    ] = "",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, as in model.layers=12.")
    ] = None,
) -> None:
    """Print parameters, memory on each device, bytes sent in a step and FLOPs a token, by arithmetic.

    Nothing is allocated, compiled or run, so any size can be asked for.
    """
    from packtrain.cli import extras, spec

    wanted = spec.resolve(recipe, overrides or [], None)
    if mesh:
        wanted = spec.overridden(wanted, [f"train.mesh={{{mesh}}}"])
    extras.require("train")
    from packtrain.train.sections import Sections
    from packtrain.train.shape import Layout, describe

    sections = Sections(model=wanted.model, optim=wanted.optim, train=wanted.train, data=wanted.data)
    typer.echo(describe(Layout(sections), wanted.recipe))
