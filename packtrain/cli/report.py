"""`packtrain report RUN`: what happened, as a short text."""

from __future__ import annotations

from typing import Annotated

import typer


def report(run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")]) -> None:
    """Tell what happened in a run.

    Outcome, bits per byte beside xz, speed, attempts, seconds by phase, saves, trouble, samples.
    """
    from packtrain.cli import folders
    from packtrain.core.platform import LocalPlatform
    from packtrain.monitor import report as monitor

    typer.echo(monitor.report(LocalPlatform(), folders.find_run(run)), nl=False)
