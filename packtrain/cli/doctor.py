"""`packtrain doctor`: what this machine offers, and what to do about what it lacks."""

from __future__ import annotations

import typer


def doctor() -> int:
    """Look at this machine, say what to fix.

    Python, cores, memory, disk, shared memory, hard links, extras, devices. Exit 78 when something must be fixed.
    """
    from packtrain.cli.checkup import FAIL, checkup

    findings = checkup()
    for finding in findings:
        typer.echo(f"{finding.verdict:<8}{finding.subject:<16}{finding.found}")
        if finding.fix:
            typer.echo(f"{'':<24}{finding.fix}")
    return 78 if any(finding.verdict == FAIL for finding in findings) else 0
