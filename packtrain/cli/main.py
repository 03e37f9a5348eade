"""`packtrain`: the verbs. Each lives in a file of its own, which imports what it needs only when it runs.

Exit codes: 0 done · 2 usage · 70 our fault · 75 stopped on request, or try again · 78 configuration or input.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

from packtrain.core.errors import EXIT_AGAIN, INTERRUPTED

try:
    import typer

    from packtrain.cli import (
        attach,
        breaking,
        change,
        ckpt,
        data,
        doctor,
        export,
        first_light,
        logs,
        ps,
        report,
        run,
        runs,
        sample,
        shape,
        storm_demo,
        train,
        words,
    )
    from packtrain.cli.ending import end
except KeyboardInterrupt:  # importing is most of a command's first second, and `end` is not there yet
    print(INTERRUPTED, file=sys.stderr, flush=True)
    os._exit(EXIT_AGAIN)  # not sys.exit: see `main`

app = typer.Typer(
    name="packtrain", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Train language models on clusters that cannot be trusted.",
    epilog="Runs live in ./runs and stores in ./stores; PACKTRAIN_HOME names another place for both.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from packtrain.cli.version import version

        typer.echo(f"packtrain {version()}")
        raise typer.Exit


@app.callback()
def packtrain(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Train language models on clusters that cannot be trusted."""


app.command("first-light")(first_light.first_light)
app.command("storm-demo")(storm_demo.storm_demo)
app.command("train")(train.train)
app.command("run", context_settings=run.PASS_ON)(run.run)
app.command("sample")(sample.sample)
app.command("export")(export.export)
app.command("shape")(shape.shape)
app.add_typer(data.app, name="data")
app.add_typer(ckpt.app, name="ckpt")
app.command("doctor")(doctor.doctor)
app.command("runs")(runs.runs)
app.command("report")(report.report)
app.command("ps")(ps.ps)
app.command("logs")(logs.logs)
app.command("attach")(attach.attach)
app.command("stop")(words.stop)
app.command("pause")(words.pause)
app.command("resume")(words.resume)
app.command("set")(change.set_)
app.command("drain")(words.drain)
app.command("cordon")(words.cordon)
app.command("break")(breaking.break_)


def main() -> None:
    """The installed command."""
    code = end(lambda: app(standalone_mode=False))
    # Where Ctrl-C came inside a string that is executed (each namedtuple is one) CPython kills itself by SIGINT at its
    # end, however well that was caught, unless another string is executed after it.
    exec("")
    sys.exit(code)


if __name__ == "__main__":
    main()
