"""`packtrain report RUN`: what happened, as a short text."""

from __future__ import annotations

import typer

from packtrain.cli.options import Json, Run


def report(run: Run, as_json: Json = False) -> None:
    """Tell what happened in a run.

    Outcome, bits per byte beside xz, speed, attempts, recoveries part by part, seconds by phase, saves and which of
    them are kept, trouble, samples. As JSON: how it stands, and its recoveries.
    """
    from packtrain.cli import folders
    from packtrain.cli.retained import kept
    from packtrain.core.platform import LocalPlatform
    from packtrain.monitor import report as monitor

    platform, folder = LocalPlatform(), folders.find_run(run)
    told = monitor.as_json(platform, folder) if as_json else monitor.report(platform, folder, kept(platform, folder))
    typer.echo(told, nl=False)
