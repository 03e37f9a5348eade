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
