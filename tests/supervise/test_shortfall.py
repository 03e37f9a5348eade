"""Where mirrors may lie, and what is said at the end of a run of those that lack its last checkpoint."""

from __future__ import annotations

import pathlib

import pytest

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.mirrors import read_state, with_held, write_state
from packtrain.core.errors import CheckpointLost, Contradiction, MirrorFailed, PacktrainError
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.platform import LocalPlatform
from packtrain.supervise.mirrors import check_places, shortfall
from tests.checkpoint.worlds import RUN, make_run, publish_small

NEAR = Mirror(name="near", place="/near", deadline_s=500.0)
B2 = Mirror(name="b2", place="s3://b/x", deadline_s=500.0, key_id="env:KEY", endpoint="https://s3.example.com")


class Done:
    """A run with one published save."""

    def __init__(self) -> None:
        self.platform = FakePlatform(FakeDisk())
        log = make_run(self.platform)
        log.begin(None, ["r00000"], "a")
        self.commit: Commit = publish_small(self.platform, log, 1, 10)

    def told(self, *mirrors: Mirror) -> list[PacktrainError]:
        return shortfall(self.platform, RUN, CheckpointConfig(mirrors=mirrors))

    def is_on(self, mirror: Mirror) -> None:
        """A courier's end."""
        state = read_state(self.platform, RUN, mirror.name, mirror.place)
        write_state(self.platform, RUN, with_held(state, self.commit, 0.0))


def test_a_run_without_mirrors_asks_nothing() -> None:
    """Its end does not even read the log."""
    run = Done()
    run.platform.replace(f"{RUN}/commits", "/away")
    assert run.told() == []


def test_a_log_that_cannot_be_read_at_the_end_is_a_warning() -> None:
    """Nobody knows then which mirrors have what, and that is said."""
    run = Done()
    run.platform.write_replacing(f"{RUN}/commits/{1:012d}", b"{")
    (told,) = run.told(NEAR)
    assert isinstance(told, MirrorFailed) and "nobody knows which mirrors" in told.what


def test_mirrors_that_lack_the_last_step_are_named() -> None:
    """Each with the command that brings it there; of one that has it nothing is said."""
    run = Done()
    run.is_on(NEAR)
    (told,) = run.told(NEAR, B2)
    assert "step 10, the last one, is not on mirror b2" in told.what
    assert told.fix.endswith(
        "packtrain ckpt copy /run --to s3://b/x --endpoint https://s3.example.com --key-id env:KEY"
    )
    run.is_on(B2)
    assert run.told(NEAR, B2) == []


def test_a_last_checkpoint_that_is_gone_is_told() -> None:
    """Whoever has it, and how it comes back."""
    run = Done()
    folder = f"{RUN}/checkpoints/{run.commit.folder}"
    for name in run.platform.listdir(folder):
        run.platform.unlink(f"{folder}/{name}")
    run.platform.rmdir(folder)
    (told,) = run.told(NEAR)
    assert isinstance(told, CheckpointLost)
    assert "step 10, was taken away from outside (its folder): no mirror has it" in told.what
    run.is_on(NEAR)
    (told,) = run.told(NEAR)
    assert "mirror near has it" in told.what and "ckpt repair" in told.fix


def test_a_mirror_in_a_run_is_refused(tmp_path: pathlib.Path) -> None:
    """Its own folder (behind a link, too), a folder in it, and one among the checkpoints of any run are no places; a
    run that began as a copy is named as a mirror in the spec it was copied with, and may be."""
    platform, run, other = LocalPlatform(), tmp_path / "run", tmp_path / "other"
    for folder in (run / "checkpoints", run / "commits", other / "checkpoints", other / "commits"):
        folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    whys = {
        f"{run}": "is the run folder itself", f"{tmp_path}/link": "is the run folder itself",
        f"file://{run}/": "is the run folder itself", f"{run}/copies": "inside the run folder",
        f"{tmp_path}/link/checkpoints": "inside the run folder", f"{other}/checkpoints": "among the checkpoints",
        f"{other}/checkpoints/x/y": "among the checkpoints",
    }
    for place, why in whys.items():
        with pytest.raises(Contradiction, match=why) as caught:
            check_places(platform, [Mirror(name="m", place=place)], str(run))
        assert caught.value.where == "checkpoint.mirrors, m" and "folder of its own" in caught.value.fix
    good = [f"{tmp_path}/run2", f"{other}", "s3://run/checkpoints", f"{tmp_path}/checkpoints"]
    check_places(platform, [Mirror(name=f"m{n}", place=place) for n, place in enumerate(good)], str(run))
    (run / "copied").mkdir()
    check_places(platform, [Mirror(name="m", place=str(run))], str(run))
