"""`packtrain ckpt copy`: a published checkpoint to a folder or a bucket."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packtrain.cli.options import SAVE_HELP, Run
from packtrain.cli.places import Endpoint, KeyId, RateOption, Region, Secret

if TYPE_CHECKING:
    from packtrain.core.transfer import Progress, Tally


def copy(
    run: Run,
    to: Annotated[str, typer.Option("--to", metavar="URL", help="A folder, s3://BUCKET/PREFIX, gs://... or az://...")],
    step: Annotated[
        str | None, typer.Option("--step", metavar="STEP", help=f"{SAVE_HELP} Default: what a restart would read.")
    ] = None,
    rate: RateOption = "",
    threads: Annotated[int, typer.Option("--threads", min=1, max=64, help="Chunks of 8 MiB on the way at once.")] = 4,
    endpoint: Endpoint = "", region: Region = "", key_id: KeyId = "", secret: Secret = "",
) -> None:
    """Copy a checkpoint to another place, verify every byte there.

    Its manifest goes last, so a copy cut short is no checkpoint. The same command goes on from what has arrived, and
    mends a copy that was damaged later.
    """
    from packtrain.checkpoint.copies import send
    from packtrain.cli import folders
    from packtrain.cli.places import place, rate_of
    from packtrain.cli.published import named
    from packtrain.core.platform import LocalPlatform
    from packtrain.core.transfer import TransferConfig

    platform, folder = LocalPlatform(), folders.find_run(run)
    commit = named(platform, folder, step)
    target = place(platform, to, endpoint, region, key_id, secret)
    config = TransferConfig(threads=threads, copy_bytes_per_s_max=rate_of(rate))
    with CopyBar() as bar:
        done = send(platform, folder, commit, target, config, progress=bar)
    typer.echo(f"step {commit.step} of {run} is in {target.url}/checkpoints/{commit.folder}: {_told(done)}")


def _told(done: Tally) -> str:
    from packtrain.core.units import bytes_text

    words = [f"{bytes_text(done.bytes_total)} verified", f"{bytes_text(done.bytes_sent)} sent"]
    words += [f"{bytes_text(done.bytes_kept)} was there"] if done.bytes_kept else []
    words += [f"{done.chunks_sent_again} chunks sent again"] if done.chunks_sent_again else []
    words += [f"{done.chunks_read_again} chunks read again"] if done.chunks_read_again else []
    return ", ".join(words)


class CopyBar:
    """Progress of a copy: a bar on a terminal, a line for each tenth elsewhere."""

    def __init__(self, out: Any = None) -> None:
        self._out = out or sys.stderr
        self._tenth = 0
        self._bar: Any = None

    def __enter__(self) -> CopyBar:
        if self._out.isatty():
            from rich import progress as rich
            from rich.console import Console

            self._bar = rich.Progress(
                rich.TextColumn("copying"), rich.BarColumn(bar_width=36), rich.TaskProgressColumn(),
                rich.TextColumn("{task.fields[words]}"), console=Console(file=self._out),
            )
            self._bar.__enter__()
            self._task = self._bar.add_task("", total=None, words="")
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*exc)

    def __call__(self, told: Progress) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=told.bytes_done, total=told.bytes_total, words=_words(told))
            return
        tenth = 10 * told.bytes_done // told.bytes_total if told.bytes_total else 10
        if tenth > self._tenth:
            self._tenth = tenth
            print(f"copying: {_words(told)}", file=self._out, flush=True)


def _words(told: Progress) -> str:
    from packtrain.core.units import bytes_text, duration_text

    left = f", {duration_text(told.eta_s)} left" if 0 < told.eta_s < math.inf else ""
    amount = f"{bytes_text(told.bytes_done)} of {bytes_text(told.bytes_total)} verified"
    return f"{amount}, {bytes_text(told.bytes_per_s)}/s{left}"
