"""`packtrain logs RUN [RANK]`: what the processes of a run printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.options import Run

if TYPE_CHECKING:
    from packtrain.core.platform import Platform

BYTES_MAX = 1 << 20


def logs(
    run: Run,
    rank: Annotated[
        str, typer.Argument(metavar="[RANK]", help="A rank, or carrier. Default: the end of every log.")
    ] = "",
    attempt: Annotated[int, typer.Option("--attempt", metavar="N", help="Default: the last one.")] = 0,
    lines: Annotated[int, typer.Option("--lines", metavar="N", min=1, max=100_000, help="From the end of each.")] = 40,
) -> None:
    """Print the end of the logs of an attempt."""
    from packtrain.cli import folders
    from packtrain.core.errors import RunMissing
    from packtrain.core.platform import LocalPlatform

    platform, folder = LocalPlatform(), f"{folders.find_run(run)}/logs"
    attempts = sorted(name for name in _names(platform, folder) if name.isdigit())
    chosen = f"{attempt:04d}" if attempt else attempts[-1] if attempts else ""
    names = sorted(name for name in _names(platform, f"{folder}/{chosen}") if _is_of(name, rank))
    if not chosen or not names:
        what = f"rank {rank} in attempt" if rank else "attempt"
        raise RunMissing(
            f"there is no log of {what} {chosen or attempt or 'any'}", where=folder,
            fix=f"there are attempts {', '.join(attempts) or 'none'}",
        )
    for name in names:
        typer.echo(f"--- {folder}/{chosen}/{name}" if len(names) > 1 else "", nl=len(names) > 1)
        typer.echo(_end(platform, f"{folder}/{chosen}/{name}", lines))


def _is_of(name: str, rank: str) -> bool:
    """Whether a log is that of a rank. Each node has a carrier; a run by hand has one without a name."""
    return not rank or name == f"{rank}.log" or (rank == "carrier" and name.startswith("carrier-"))


def _names(platform: Platform, folder: str) -> list[str]:
    return platform.listdir(folder) if platform.is_dir(folder) else []


def _end(platform: Platform, path: str, lines: int) -> str:
    size = platform.size(path)
    data = platform.read(path, max(0, size - BYTES_MAX), BYTES_MAX)
    return "\n".join(data.decode(errors="replace").splitlines()[-lines:])
