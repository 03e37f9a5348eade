"""`packtrain doctor`: the limits in time that a run is kept alive by, from inner to outer."""

from __future__ import annotations

from packtrain.cli.checkup import FAIL, OK, Finding
from packtrain.core.errors import PacktrainError
from packtrain.core.platform import Platform
from packtrain.supervise.config import Rung, SuperviseConfig


def limit_findings(platform: Platform, run_folder: str) -> list[Finding]:
    """Of a run: each ladder in a line. FAIL where one is not in order, and for a spec that cannot be read."""
    from packtrain.cli import spec
    from packtrain.train.sections import newest_spec

    try:
        return rendered(spec.read(newest_spec(platform, run_folder)).supervise)
    except PacktrainError as error:
        return [Finding(FAIL, "limits", error.what, error.fix)]


def rendered(config: SuperviseConfig) -> list[Finding]:
    return [Finding(OK, "limits", " < ".join(map(_words, rungs))) for rungs in config.ladder()]


def _words(rung: Rung) -> str:
    return f"{rung.seconds:g} s {rung.key} ({rung.why})"
