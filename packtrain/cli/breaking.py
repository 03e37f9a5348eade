"""`packtrain break`: something of a run that lives on its own broken on purpose, where its spec allows that."""

from __future__ import annotations

from typing import Annotated

import typer

from packtrain.cli.options import Run

Fault = Annotated[str, typer.Argument(metavar="FAULT", help="What to break; a wrong word is answered with all.")]


def break_(
    run: Run,
    fault: Fault,
    node: Annotated[str, typer.Option("--node", metavar="N", help="Where: a node of `packtrain ps`.")] = "",
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", min=0, help="Whose worker, or whose node.", show_default="last")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--for", metavar="SECONDS", min=0.0, show_default="the fault's own", help="So long.")
    ] = 0.0,
    factor: Annotated[
        float, typer.Option("--factor", metavar="X", min=0.0, show_default="1/0.7", help="slow: so many times as long.")
    ] = 0.0,
) -> None:
    """Break something of a run on purpose, to see it heal.

    Only where the run was started with supervise.allow_faults=true. Each is in the run's journal before it is done;
    `packtrain report` shows them.
    """
    from packtrain.cli import folders
    from packtrain.cli.lives import lives
    from packtrain.core.platform import LocalPlatform
    from packtrain.supervise.console import ask

    platform = LocalPlatform()
    live = lives(platform, folders.find_run(run))
    whom = {"node": node, "rank": -1 if rank is None else rank}
    answer = ask(platform, live.coordinator, "break", fault=fault, **whom, seconds=seconds, factor=factor)
    typer.echo(answer.get("said"))
