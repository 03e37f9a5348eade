"""`packtrain train RECIPE`: create or resume a run and stay with it."""

from __future__ import annotations

import os
from typing import Annotated, Any

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
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", help="So many nodes, here.", show_default="one process")
    ] = 0,
    spares: Annotated[int, typer.Option("--spares", metavar="K", help="Nodes that wait for one to fail.")] = 0,
    procs: Annotated[int, typer.Option("--procs-per-node", metavar="P", help="Workers of a node.")] = 1,
    profile: Profile = 0,
) -> int:
    """Train RECIPE. The same command resumes; Ctrl-C saves and stops.

    The run goes on where its terminal is lost: the same command watches it again. With --nodes Ctrl-C asks whether to
    stop it or to leave.

    Exit codes: 0 done, 70 no progress, 75 stopped on request or try again, 78 configuration.
    """
    from packtrain.cli import extras, launch, spec

    begin = [f"train.weights={os.path.abspath(weights)}"] if weights else []
    wanted = spec.resolve(recipe, [*begin, *(overrides or [])], data)
    if extras.missing("train"):
        typer.echo(spec.text(wanted))
        extras.require("train")
    return launch.launch(run, new, wanted, profile, _world(nodes, spares, procs))


def _world(nodes: int, spares: int, procs: int) -> Any:
    """What was asked for; None: one process. Raises UsageError."""
    from packtrain.cli.world import World
    from packtrain.core.errors import UsageError

    if nodes == 0 and spares == 0 and procs == 1:
        return None
    if nodes < 1 or spares < 0 or procs < 1:
        raise UsageError(
            f"--nodes {nodes} --spares {spares} --procs-per-node {procs} cannot be", where="--nodes, --spares",
            fix="give --nodes 1 or more; spares and processes go with it",
        )
    return World(nodes, spares, procs)
