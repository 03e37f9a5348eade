"""`packtrain report RUN`: what happened, as a short text."""

from __future__ import annotations

from typing import Annotated

import typer


def report(run: Annotated[str, typer.Argument(help="Name or folder of a run.")]) -> None:
    """Tell what happened in RUN: outcome, bits per byte beside xz, attempts, seconds, saves, trouble, samples."""
    from packtrain.cli import folders
    from packtrain.core.platform import LocalPlatform
    from packtrain.monitor import report as monitor

    typer.echo(monitor.report(LocalPlatform(), folders.find_run(run)), nl=False)
