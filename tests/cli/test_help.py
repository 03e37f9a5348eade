"""`packtrain --help` and what it costs."""

from __future__ import annotations

import pathlib
import sys

from tests.cli.home import packtrain, script

ALLOWED = {"packtrain", "typer", "click", "annotated_doc", "shellingham", "typing_extensions", "colorama"}
"""What typer itself needs, in any of its versions."""

OURS = {"packtrain", "packtrain.cli", "packtrain.core", "packtrain.core.errors"} | {
    f"packtrain.cli.{name}" for name in (
        "attach", "breaking", "change", "ckpt", "ckpt_copy", "ckpt_diff", "ckpt_import", "ckpt_keep", "ckpt_repair",
        "ckpt_restore", "ckpt_show", "ckpt_verify", "data", "doctor", "ending", "export", "first_light", "logs", "main",
        "options", "places", "ps", "report", "run", "runs", "sample", "shape", "storm_demo", "train", "words",
    )
}

LIST = """
import sys
before = set(sys.modules)
from packtrain.cli.ending import end
from packtrain.cli.main import app
sys.stdout = open("help.txt", "w")
assert end(lambda: app(["--help"], standalone_mode=False)) == 0
sys.__stdout__.write("\\n".join(set(sys.modules) - before))
"""


def test_help_imports_almost_nothing(tmp_path: pathlib.Path) -> None:
    """--help imports the verbs' own small files, the errors and what typer needs; nothing else outside Python."""
    done = script(LIST, tmp_path)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    assert {name for name in modules if name.startswith("packtrain")} == OURS
    others = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert others <= ALLOWED | {"__editable___packtrain_finder"}


def test_help_lists_every_verb(tmp_path: pathlib.Path) -> None:
    """Every verb is in the help with a sentence that fits its line."""
    code, out, _ = packtrain(tmp_path, "--help")
    assert code == 0
    verbs = (
        "first-light", "train", "run", "sample", "data", "doctor", "runs", "report", "ps", "logs", "attach", "stop",
        "break", "set", "storm-demo",
    )
    for verb in verbs:
        line = next(line for line in out.splitlines() if line.startswith(f"  {verb} "))
        assert line.endswith(".") and not line.endswith("...")


def test_version(tmp_path: pathlib.Path) -> None:
    """--version prints one line and ends well."""
    code, out, errors = packtrain(tmp_path, "--version")
    assert code == 0 and out.startswith("packtrain ") and out.count("\n") == 1 and not errors
