"""Which published step a person means."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from packtrain.cli.published import named
from packtrain.core.errors import RunMissing
from packtrain.core.platform import LocalPlatform
from tests.checkpoint.worlds import make_run, publish_small


def test_a_step_or_the_last(tmp_path: pathlib.Path) -> None:
    """Without a step the last save of the lineage; one that never was, or whose folder retention took, is refused with
    those there are; a run without any says so."""
    platform, run = LocalPlatform(), str(tmp_path)
    log = make_run(platform, run)
    log.begin(0, ("r00000",), "node")
    with pytest.raises(RunMissing, match="no checkpoint yet"):
        named(platform, run, None)
    commits = {step: publish_small(platform, log, 1, step, run) for step in (10, 20, 30)}
    assert named(platform, run, None) == commits[30] and named(platform, run, "10") == commits[10]
    shutil.rmtree(tmp_path / "checkpoints" / commits[20].folder)
    for step in (15, 20):
        with pytest.raises(RunMissing, match=f"no checkpoint {step}") as refused:
            named(platform, run, str(step))
        assert refused.value.fix == "there are steps 30, 10"
