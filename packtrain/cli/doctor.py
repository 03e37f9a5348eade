"""`packtrain doctor`: what this machine, or a store, offers, and what to do about what it lacks."""

from __future__ import annotations

from typing import Annotated

import typer

from packtrain.cli.places import Endpoint, KeyId, Region, Secret


def doctor(
    store: Annotated[
        str, typer.Option("--store", metavar="URL", help="Look at a folder or bucket instead; writes small objects.")
    ] = "",
    run: Annotated[
        str, typer.Option("--run", metavar="RUN", help="Look at a run: limits, worlds, mirrors; writes small objects.")
    ] = "",
    endpoint: Endpoint = "", region: Region = "", key_id: KeyId = "", secret: Secret = "",
) -> int:
    """Look at this machine, a store or a run, say what to fix.

    Python, cores, memory, disk, shared memory, hard links, extras, devices; of a store, what it really keeps of what
    it promises; of a run, its limits in time, which of its worlds are compiled, its mirrors, what they have, and the
    same. Exit 78 when something must be fixed.
    """
    import os

    from packtrain.cli import folders
    from packtrain.cli.cached import cached_findings
    from packtrain.cli.checkup import FAIL, checkup, devices, mirror_findings, store_findings
    from packtrain.cli.limits import limit_findings
    from packtrain.cli.places import place
    from packtrain.core.platform import LocalPlatform

    platform = LocalPlatform()
    if run:
        folder = folders.find_run(run)
        compiled = cached_findings(platform, folder, os.environ, lambda: devices(platform))
        findings = [*limit_findings(platform, folder), *compiled, *mirror_findings(platform, folder)]
    elif store:
        findings = store_findings(platform, place(platform, store, endpoint, region, key_id, secret))
    else:
        findings = checkup()
    for finding in findings:
        typer.echo(f"{finding.verdict:<8}{finding.subject:<18}{finding.found}")
        if finding.fix:
            typer.echo(f"{'':<26}{finding.fix}")
    return 78 if any(finding.verdict == FAIL for finding in findings) else 0
