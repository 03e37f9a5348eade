"""`packtrain stop|pause|resume|drain|cordon`: words for a run that lives on its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from packtrain.cli.options import Run

Node = Annotated[str, typer.Argument(metavar="NODE", help="Name of a node, as `packtrain ps` shows it.")]


def stop(run: Run) -> None:
    """Save and stop a run; said twice it is stopped at once."""
    asked = _ask(run, "status").get("stopping")
    _say(run, "stop", by="packtrain stop", at_once=bool(asked))


def pause(run: Run) -> None:
    """Let a run wait after the step it is at."""
    _say(run, "pause")


def resume(run: Run) -> None:
    """Let a run that was paused go on."""
    _say(run, "resume")


def drain(run: Run, node: Node) -> None:
    """Save, and go on without a node."""
    _say(run, "drain", node=node, by="packtrain drain")


def cordon(run: Run, node: Node) -> None:
    """Give a node no more work once it has none."""
    _say(run, "cordon", node=node, by="packtrain cordon")


def _say(run: str, op: str, **arguments: str | bool) -> None:
    typer.echo(_ask(run, op, **arguments).get("said") or f"{op}: told")


def _ask(run: str, op: str, **arguments: str | bool) -> dict[str, Any]:
    from packtrain.cli import folders
    from packtrain.cli.lives import lives
    from packtrain.core.platform import LocalPlatform
    from packtrain.supervise.console import ask

    platform = LocalPlatform()
    return ask(platform, lives(platform, folders.find_run(run)).coordinator, op, **arguments)
