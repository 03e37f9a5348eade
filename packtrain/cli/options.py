"""Options that more than one verb has."""

from __future__ import annotations

from typing import Annotated

import typer

Profile = Annotated[
    int, typer.Option(
        "--profile", metavar="STEPS", min=0, max=1000, show_default="none",
        help="Trace so many steps, after the first four; say where time went.",
    )
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")]
SAVE_HELP = "A step, commit:N, or the name of a checkpoint folder, as `ckpt ls` shows them."
Save = Annotated[str, typer.Argument(metavar="STEP", help=SAVE_HELP)]
MaybeSave = Annotated[
    str | None, typer.Argument(metavar="[STEP]", help=f"{SAVE_HELP} Default: what a restart would read.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
