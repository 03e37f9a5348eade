"""`packtrain shape RECIPE`: what a model costs on a mesh, before there is one."""

from __future__ import annotations

from typing import Annotated

import typer

from packtrain.core.errors import BadValue, LayoutError

SIZE_MAX = 1_000_000
EXAMPLE = "for example --mesh fsdp=8,tensor=2"


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

    wanted = spec.resolve(recipe, [*(overrides or []), *mesh_settings(mesh)], None)
    extras.require("train")
    from packtrain.train.sections import Sections
    from packtrain.train.shape import Layout, describe

    sections = Sections(model=wanted.model, optim=wanted.optim, train=wanted.train, data=wanted.data)
    try:
        typer.echo(describe(Layout(sections), wanted.recipe))
    except LayoutError as error:
        error.where = "--mesh" if mesh and error.where == "train.mesh" else error.where
        raise


def mesh_settings(mesh: str) -> list[str]:
    """`fsdp=8,tensor=2` -> settings of `train.mesh`. Raises BadValue, naming the axis and what was given."""
    sizes: dict[str, int] = {}
    for part in mesh.split(",") if mesh else ():
        axis, size = _axis_size(part.strip())
        if axis in sizes:
            raise _bad(f"mesh axis {axis} is given twice: {sizes[axis]} and {size}", "give each axis once")
        sizes[axis] = size
    return [f"train.mesh={{{', '.join(f'{axis}={size}' for axis, size in sizes.items())}}}"] if sizes else []


def _axis_size(part: str) -> tuple[str, int]:
    import difflib
    import re

    from packtrain.train.config import MESH_AXES

    axis, equals, size = (piece.strip() for piece in part.partition("="))
    if not equals:
        raise _bad(f"{part!r} is not AXIS=SIZE", EXAMPLE)
    if axis not in MESH_AXES:
        near = difflib.get_close_matches(axis, MESH_AXES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise _bad(f"no mesh axis is called {axis!r}", f"{hint}allowed: {', '.join(MESH_AXES)}")
    if not re.fullmatch("[0-9]{1,12}", size) or not 0 < int(size) <= SIZE_MAX:  # int() alone takes 1_0 and other digits
        raise _bad(f"mesh axis {axis} is {size!r}; allowed: a whole number from 1 to {SIZE_MAX:,}", EXAMPLE)
    return axis, int(size)


def _bad(what: str, fix: str) -> BadValue:
    return BadValue(what, where="--mesh", fix=fix)
