"""`packtrain set RUN KEY=VALUE`: another value for a run that has begun, kept as its next spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.options import Run

if TYPE_CHECKING:
    from packtrain.core.errors import UsageError
    from packtrain.core.platform import Platform

WORKERS = (
    "checkpoint.every_steps", "checkpoint.every_s", "checkpoint.memory_every_steps", "checkpoint.peer_memory",
    "checkpoint.deadline_s", "guard.", "optim.learning_rate", "optim.warmup_steps", "optim.schedule",
    "optim.decay_fraction", "optim.final_fraction", "optim.weight_decay", "optim.clip_norm", "train.steps",
    "train.minutes_max", "train.eval_every_steps", "train.eval_rows_max", "train.sample_",
)
"""What workers read when an attempt begins; a key, or how keys begin."""
LAUNCHED = (
    "supervise.", "checkpoint.keep_", "checkpoint.grace_s", "checkpoint.debris_s", "checkpoint.peer_bytes_per_s_max",
    "checkpoint.fallback", "checkpoint.mirrors",
)
"""What coordinator, agents and carriers are started with."""
WHY_NOT = {
    "model": "its checkpoints hold this model",
    "optim": "its checkpoints hold this optimizer's state, or its bits would not be those of the same optimizer",
    "data": "the order of its batches follows from it, and would be another one from the middle on",
    "seed": "all that is random in it follows from the seed",
    "train": "what is compiled, or how the world is laid out, follows from it: its numbers would not go on alike",
    "checkpoint": "carriers of one run must agree on it from the start",
}
AGAIN = "when the run's command is given again"
BY_TRADE = "it tells how the run was made"


def set_(
    run: Run,
    values: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="As for `train --set`.")],
) -> None:
    """Change values of a run that has begun.

    Each is checked as when a run is made, written as the run's next spec and into its journal, and stays. What workers
    read is in force from the next attempt on; what keeps them alive, when the run's command is given again. What would
    make it another run is refused, with the reason.
    """
    from packtrain.cli import folders, spec
    from packtrain.cli.launch import usable
    from packtrain.cli.world import record
    from packtrain.core.config import difference
    from packtrain.core.platform import LocalPlatform
    from packtrain.train.sections import newest_spec

    platform, folder = LocalPlatform(), folders.find_run(run)
    newest = newest_spec(platform, folder)
    current = spec.read(newest)
    changed = spec.overridden(current, values)
    for value in values:
        if error := refusal(value.partition("=")[0]):
            raise error
    spec.check_judged(changed)
    lines = difference(current, changed)
    if not lines:
        typer.echo("nothing changes: that is so already")
        return
    with usable(folder):
        number = record(platform, newest, changed)
        _journal(platform, folder, number, lines)
    for line in lines:
        typer.echo(f"{line}, in force {when(line.partition(':')[0])}")


def when(key: str) -> str:
    if key == "checkpoint.keep_best":
        return f"{AGAIN}, and until then the old value counts; but saves follow evaluations from the next attempt on"
    return "from the next attempt on" if key.startswith(WORKERS) else AGAIN


def refusal(key: str) -> UsageError | None:
    """Why a run that has begun keeps this value; None: it may change."""
    from packtrain.core.errors import UsageError

    if key.startswith((*WORKERS, *LAUNCHED)):
        return None
    return UsageError(
        f"{key} of a run that has begun stays: {WHY_NOT.get(key.partition('.')[0], BY_TRADE)}", where=f"set {key}",
        fix="give the run's own command with --new and this value: that is another run",
    )


def _journal(platform: Platform, folder: str, number: int, lines: list[str]) -> None:
    from contextlib import closing

    from packtrain.core.journal import Journal
    from packtrain.core.records import SpecChanged

    with closing(Journal(platform, f"{folder}/journal", role="operator")) as journal:
        journal.write(SpecChanged(spec=number, changes=lines), durable=True)
