"""`packtrain first-light`: from nothing to a trained model on text that is already on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from packtrain.cli.options import Profile


def first_light(
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Create or resume this run.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Start another run: first-light-2, ...")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, as in model.layers=4.")
    ] = None,
    profile: Profile = 0,
) -> int:
    """Train a small model in about six minutes.

    It learns the source of Python's standard library, which is on this machine already. The same command resumes;
    Ctrl-C saves and stops. Exit codes: 0 done, 70 no progress, 75 stopped on request or try again, 78 configuration.
    """
    from packtrain.cli import extras

    extras.require("train")
    from packtrain.cli.first import first

    return first(run, new, overrides or [], profile)
