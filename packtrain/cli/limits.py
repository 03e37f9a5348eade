"""`packtrain doctor`: the limits in time that a run is kept alive by, from inner to outer."""

from __future__ import annotations

from itertools import pairwise

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.cli.checkup import FAIL, OK, WARN, Finding
from packtrain.core.errors import PacktrainError
from packtrain.core.platform import Platform
from packtrain.supervise.config import Rung, SuperviseConfig
from packtrain.supervise.one_carrier import SAVING_FACTOR
from packtrain.train.config import GRACE_SHARE


def limit_findings(platform: Platform, run_folder: str) -> list[Finding]:
    """Of a run: each ladder in a line. FAIL where one is not in order, and for a spec that cannot be read."""
    from packtrain.cli import spec
    from packtrain.train.sections import newest_spec

    try:
        current = spec.read(newest_spec(platform, run_folder))
        return [*rendered(current.supervise), *save_limits(current.supervise, current.checkpoint)]
    except PacktrainError as error:
        return [Finding(FAIL, "limits", error.what, error.fix)]


def rendered(config: SuperviseConfig) -> list[Finding]:
    return [Finding(OK, "limits", " < ".join(map(_words, rungs))) for rungs in config.ladder()]


def save_limits(supervise: SuperviseConfig, checkpoint: CheckpointConfig) -> list[Finding]:
    """How the deadline of a save stands to the grace of a stop, and to the patience with a carrier that writes one."""
    last_s = min(checkpoint.deadline_s, GRACE_SHARE * supervise.grace_s)
    rungs = [
        Rung("the last save", last_s, f"asked to stop; any other one has {checkpoint.deadline_s:g} s"),
        Rung("grace_s", supervise.grace_s, "not stopped: killed"),
    ]
    patience_s = SAVING_FACTOR * supervise.carrier_overdue_s
    deadline = Rung("checkpoint.deadline_s", checkpoint.deadline_s, "a save has failed")
    patience = Rung(f"{SAVING_FACTOR} x carrier_overdue_s", patience_s, "a carrier that writes one hangs: given up")
    return [_in_order(rungs), _in_order([deadline, patience])]


def _in_order(rungs: list[Rung]) -> Finding:
    words = " <= ".join(map(_words, rungs))
    if all(inner.seconds <= outer.seconds for inner, outer in pairwise(rungs)):
        return Finding(OK, "limits", words)
    return Finding(WARN, "limits", words, f"lower {rungs[0].key}, or raise supervise.carrier_overdue_s")


def _words(rung: Rung) -> str:
    return f"{rung.seconds:g} s {rung.key} ({rung.why})"
