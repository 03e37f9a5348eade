"""`packtrain runs`: a table of the runs in this folder."""

from __future__ import annotations

from typing import Any

import typer

COLUMNS = ("run", "recipe", "state", "step", "loss", "bits/byte", "age")
COMMAND_CHARS = 40
"""Of the command of a program, which may be long."""


def runs() -> None:
    """List the runs of this folder."""
    from packtrain.cli import folders
    from packtrain.core.platform import LocalPlatform

    names = folders.run_names()
    if not names:
        typer.echo(f"no runs in {folders.runs_folder()}; make one with `packtrain first-light` or `packtrain train`")
        return
    platform = LocalPlatform()
    typer.echo(table([COLUMNS, *(row(platform, name, f"{folders.runs_folder()}/{name}") for name in names)]))


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as they need to be, left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def row(platform: Any, name: str, folder: str) -> tuple[str, ...]:
    """One line of the table; what is not known is a dash."""
    from packtrain.core.units import duration_text
    from packtrain.monitor.report import gather, one_line

    sources = gather(platform, folder)
    facts = sources.facts
    evals = facts.final_evals()
    age_s = platform.wall_s() - last_change_s(platform, folder)
    about = one_line(sources.command)[:COMMAND_CHARS] or sources.recipe
    return (
        name, about, state(platform, folder, facts.state), str(facts.step),
        f"{facts.steps[-1].loss:.3f}" if facts.steps else "-",
        f"{evals[-1].bits_per_byte:.3f}" if evals else f"{facts.steps[-1].bits_per_byte:.3f}" if facts.steps else "-",
        duration_text(max(0.0, age_s)),
    )


def last_change_s(platform: Any, folder: str) -> float:
    """When its journal last grew; when it was made, for a run that never began."""
    journal = f"{folder}/journal"
    files = [f"{journal}/{name}" for name in platform.listdir(journal)] if platform.is_dir(journal) else []
    return max((platform.modified_s(path) for path in files), default=platform.modified_s(folder))


def state(platform: Any, folder: str, told: str) -> str:
    """What the journal says, except that a run nobody holds is not running, and one that somebody holds is."""
    from packtrain.core.holder import seems_held

    if told == "done":
        return told
    return "running" if seems_held(platform, folder) else "cut off" if told == "running" else told
