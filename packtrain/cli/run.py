"""`packtrain run -- CMD ...`: keep any program alive."""

from __future__ import annotations

from typing import Annotated

import typer

PASS_ON = {"allow_interspersed_args": False}
"""What follows the first word of the command belongs to it, options too."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="Any command, as you would type it, behind --.")],
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="So many nodes, here.")] = 1,
    procs: Annotated[int, typer.Option("--procs-per-node", metavar="P", min=1, help="Processes of a node.")] = 1,
    spares: Annotated[int, typer.Option("--spares", metavar="K", min=0, help="Nodes that wait for one to fail.")] = 0,
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Create or resume this run (default: after CMD).")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start another run: NAME-2, NAME-3, ...")] = False,
    preload: Annotated[
        list[str] | None, typer.Option("--preload", metavar="MODULE", help="Keep processes warm that have imported it.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As in supervise.progress_s=300.")
    ] = None,
) -> int:
    """Keep any command alive, unchanged.

    Each process is told its rank as torchrun, JAX and MPI do. When one dies or hangs all are started again: the
    program goes on from its own checkpoint. Ctrl-C sends SIGTERM.

    Exit codes: 0 done, 70 no progress, 75 stopped on request or try again, 78 a process said never to try again.
    """
    from packtrain.cli import program

    wanted = program.resolve(command, nodes, procs, spares, preload or [], overrides or [])
    return program.start(name, new, wanted)
