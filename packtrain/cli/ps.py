"""`packtrain ps`: runs that live on their own on this machine, and their nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from packtrain.core.platform import Platform
    from packtrain.supervise.local import Live

NOTES = ("waits", "log")
"""What else the coordinator says of the run: what it waits for, why its log cannot be written."""
COLUMNS = ("run", "node", "state", "ranks", "step")


def ps() -> None:
    """List runs that live on their own here."""
    from packtrain.cli import folders
    from packtrain.cli.runs import table
    from packtrain.core.platform import LocalPlatform
    from packtrain.supervise.local import find

    platform, rows = LocalPlatform(), list[tuple[str, ...]]()
    for name in folders.run_names():
        live = find(platform, folders.named(name))
        rows += rows_of(platform, name, live) if live is not None else []
    typer.echo(table([COLUMNS, *rows]) if rows else f"no run of {folders.runs_folder()} lives on its own now")


def rows_of(platform: Platform, name: str, live: Live) -> list[tuple[str, ...]]:
    """The run, then each of its nodes; what is not known is a dash."""
    from packtrain.core.errors import PacktrainError
    from packtrain.supervise.console import ask
    from packtrain.supervise.local import agents_alive
    from packtrain.supervise.revive import tried

    try:
        status = ask(platform, live.coordinator, "status")
    except PacktrainError:
        alive, again = agents_alive(platform, live), tried(platform, live)
        often = f", started again {again.count}x by {again.by}" if again is not None and again.count else ""
        given_up = ", given up" if again is not None and again.given_up else ""
        first = (name, "-", f"no coordinator{often}{given_up}", "-", "-")
        return [first, *((name, node, "agent lives", "-", "-") for node in alive)]
    notes = [*(["paused"] if status.get("paused") else []), *(str(status[key]) for key in NOTES if status.get(key))]
    first = (name, "-", ", ".join([_text(status, "state"), *notes]), "-", _text(status, "step"))
    return [first, *(_row(name, node) for node in status.get("nodes", []) if isinstance(node, dict))]


def _row(name: str, node: dict[str, Any]) -> tuple[str, ...]:
    ranks, restarts = node.get("ranks") or [], node.get("restarts") or 0
    often = f", agent started again {restarts}x" if restarts else ""
    state = f"{_text(node, 'state')}{often}{', given up' if node.get('given_up') else ''}"
    return name, _text(node, "node"), state, ", ".join(map(str, ranks)) or "-", _text(node, "step")


def _text(fields: dict[str, Any], key: str) -> str:
    value = fields.get(key)
    return "-" if value is None or value == "" or value == -1 else str(value)
