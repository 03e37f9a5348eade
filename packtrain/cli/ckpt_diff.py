"""`packtrain ckpt diff`: which tensors of two checkpoints differ, and by how much."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.options import Json

if TYPE_CHECKING:
    from packtrain.checkpoint.diff import TensorDiff
    from packtrain.checkpoint.reader import Checkpoint

COLUMNS = ("tensor", "state", "different", "max abs", "rms", "relative", "not finite")
SIDE = "RUN, or RUN@STEP with a step, commit:N or folder; of RUN alone, what a restart would read."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help=SIDE)],
    json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor, of any runs and layouts, a few MiB at a time.

    Exit code 0 whether they differ or not.
    """
    from packtrain.checkpoint.diff import bytes_of, compare
    from packtrain.cli.bars import Bars
    from packtrain.core.units import bytes_text

    one, other = _opened(a), _opened(b)
    total, done = sum(bytes_of(spec) for spec in one.manifest.tensors), 0
    with Bars(sys.stderr, bytes_text) as bars:

        def told(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            bars("comparing", done, total)

        found = list(compare(one, other, told))
    if json:
        from packtrain.cli.ckpt_show import print_json

        print_json(found)
    else:
        typer.echo(_text(found))


def _opened(text: str) -> Checkpoint:
    from packtrain.checkpoint.reader import open_checkpoint
    from packtrain.cli import folders, published
    from packtrain.core.platform import LocalPlatform

    run, word = published.run_and_word(text)
    platform, folder = LocalPlatform(), folders.find_run(run)
    return open_checkpoint(platform, folder, published.named(platform, folder, word))


def _text(found: list[TensorDiff]) -> str:
    from packtrain.cli.runs import table

    equal = sum(one.state == "equal" for one in found)
    if equal == len(found):
        return f"equal: all {equal} tensors, bit for bit"
    rows = [_row(one) for one in found if one.state != "equal"]
    return f"{table([COLUMNS, *rows])}\n{equal} of {len(found)} tensors are equal, bit for bit"


def _row(one: TensorDiff) -> tuple[str, ...]:
    from packtrain.monitor.report import printable

    name, state = printable(one.name), f"{one.state} {one.detail}".strip()
    if one.state != "differs":
        return (name, state, "", "", "", "", "")
    return (
        name, state, f"{one.different:,} of {one.elements:,}", f"{one.max_abs:.3g}", f"{one.rms:.3g}",
        f"{one.relative:.3g}", f"{one.not_finite:,}",
    )
