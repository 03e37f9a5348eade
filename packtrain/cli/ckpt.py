"""`packtrain ckpt`: what a run saved. The verbs, a small file each or a few together."""

from __future__ import annotations

import typer

from packtrain.cli import (
    ckpt_copy,
    ckpt_diff,
    ckpt_import,
    ckpt_keep,
    ckpt_repair,
    ckpt_restore,
    ckpt_show,
    ckpt_verify,
    export,
)

app = typer.Typer(
    help="List, check, mend, compare, copy, keep, drop and go back to what a run saved.", no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("ls")(ckpt_show.ls)
app.command("show")(ckpt_show.show)
app.command("verify")(ckpt_verify.verify)
app.command("repair")(ckpt_repair.repair)
app.command("diff")(ckpt_diff.diff)
app.command("copy")(ckpt_copy.copy)
app.command("pin")(ckpt_keep.pin)
app.command("unpin")(ckpt_keep.unpin)
app.command("tombstone")(ckpt_keep.tombstone)
app.command("restore")(ckpt_restore.restore)
app.command("export")(export.export)
app.command("import")(ckpt_import.import_)
