"""`packtrain report RUN`: what happened, as a short text."""

from __future__ import annotations

import typer

from packtrain.cli.options import Json, Run


def report(run: Run, as_json: Json = False) -> None:
    """Tell what happened in a run.

    Outcome, bits per byte beside xz, speed, attempts, recoveries part by part, seconds by phase, saves, trouble,
    samples. As JSON: how it stands, and its recoveries.
    """
    from packtrain.cli import folders
    from packtrain.core.platform import LocalPlatform
    from packtrain.monitor import report as monitor

    tell = monitor.as_json if as_json else monitor.report
    typer.echo(tell(LocalPlatform(), folders.find_run(run)), nl=False)
