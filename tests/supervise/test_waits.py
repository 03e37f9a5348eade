"""What a foreground waits for where a run has mirrors, and what it says in the end: on a fake disk with a fake carrier.
"""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Callable

import pytest

from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.courier import lost, warning
from packtrain.checkpoint.mirrors import read_state, with_held, write_state
from packtrain.core.errors import CheckpointLost, Contradiction, MirrorFailed, PacktrainError
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import MirrorDone
from packtrain.core.units import NS
from packtrain.supervise.mirrors import HURRY, Waits, check_places
from tests.checkpoint.worlds import RUN, make_run, publish_small

NEAR = Mirror(name="near", place="/near", deadline_s=500.0)
B2 = Mirror(name="b2", place="s3://b/x", deadline_s=500.0, key_id="env:KEY", endpoint="https://s3.example.com")
SOCKET = "/carrier"


class Scene:
    """A run with one published save, a carrier that takes signals, and a foreground that looks once a second."""

    def __init__(self, *mirrors: Mirror, listens: bool = True) -> None:
        self.platform = FakePlatform(FakeDisk(), programs=lambda argv: lambda process: process.catches.add(HURRY))
        self.log = make_run(self.platform)
        self.log.begin(None, ["r00000"], "a")
        self.commit = publish_small(self.platform, self.log, 1, 10)
        if listens:
            self.platform.write_new(SOCKET, b"")
        self.carrier = self.platform.spawn(["carrier"], {}, log_path=None)
        self.said: list[str] = []
        self.warned: list[PacktrainError] = []
        self.happens: Callable[[int], object] = lambda second: None
        self.seconds = 0
        self.stops_at = 10**9
        self.waits = Waits(
            self.platform, RUN, CheckpointConfig(mirrors=mirrors), SOCKET, self._look, self.said.append,
            self.warned.append,
        )

    def _look(self) -> bool:
        self.platform.sleep(1.0)
        self.seconds += 1
        self.happens(self.seconds)
        return self.seconds >= self.stops_at

    def rm(self) -> None:
        folder = f"{RUN}/checkpoints/{self.commit.folder}"
        for name in self.platform.listdir(folder):
            self.platform.unlink(f"{folder}/{name}")
        self.platform.rmdir(folder)

    def is_on(self, mirror: Mirror) -> None:
        """A courier's end."""
        state = read_state(self.platform, RUN, mirror.name, mirror.place)
        write_state(self.platform, RUN, with_held(state, self.commit, 0.0))
        self.waits.noted(MirrorDone(mirror=mirror.name, step=10, commit=self.commit.number))

    def tell_lost(self) -> None:
        self.waits.noted(warning(lost(RUN, self.commit, "no mirror", again=False)))


def test_a_run_without_mirrors_asks_nothing() -> None:
    """Its end does not even read the log."""
    scene = Scene()
    scene.platform.replace(f"{RUN}/commits", "/away")
    scene.waits.until_brought(scene.carrier)
    assert scene.warned == [] and scene.said == [] and scene.seconds == 0


def test_a_log_that_cannot_be_read_at_the_end_is_a_warning() -> None:
    """What else is to be done at the end is done."""
    scene = Scene(NEAR)
    scene.platform.write_replacing(f"{RUN}/commits/{1:012d}", b"{")
    scene.waits.until_brought(scene.carrier)
    (told,) = scene.warned
    assert isinstance(told, MirrorFailed) and "nobody knows which mirrors" in told.what and scene.seconds == 0


def test_the_end_waits_for_every_mirror() -> None:
    """The carrier is told once, and when all have it there is nothing to warn of."""
    scene = Scene(NEAR, B2)
    scene.happens = lambda second: {5: lambda: scene.is_on(NEAR), 9: lambda: scene.is_on(B2)}.get(second, int)()
    scene.waits.until_brought(scene.carrier)
    assert scene.seconds == 9 and scene.warned == [] and scene.carrier.signals == [signal.SIGUSR1]
    assert scene.said[-1] == "step 10 is on near, b2"


def test_mirrors_that_lack_the_last_step_are_named() -> None:
    """A mirror that failed, or that a person did not wait for, is told with the command that brings it there."""
    for stops_at in (10**9, 3):
        scene = Scene(NEAR, B2)
        scene.stops_at = stops_at
        failed = MirrorDone(mirror="b2", step=10, commit=scene.commit.number, error="away")
        scene.happens = lambda second, scene=scene, failed=failed: (
            scene.is_on(NEAR) if second == 2 else scene.waits.noted(failed) if second == 4 else None
        )
        scene.waits.until_brought(scene.carrier)
        (told,) = scene.warned
        assert "step 10, the last one, is not on mirror b2" in told.what and scene.seconds == min(stops_at, 4)
        assert told.fix.endswith(
            "packtrain ckpt copy /run --to s3://b/x --endpoint https://s3.example.com --key-id env:KEY"
        )


def test_a_last_checkpoint_that_is_lost_ends_the_wait() -> None:
    """Once no mirror is said to have it, nobody waits out a deadline; that it is gone is told, whoever has it."""
    scene = Scene(NEAR)
    scene.rm()
    scene.tell_lost()  # by an earlier try: the last one is still to come
    scene.happens = lambda second: scene.tell_lost() if second == 7 else None
    scene.waits.until_brought(scene.carrier)
    (told,) = scene.warned
    assert scene.seconds == 7 and isinstance(told, CheckpointLost)
    assert "step 10, was taken away from outside (its folder): no mirror has it" in told.what
    scene.is_on(NEAR)
    scene.waits.until_brought(scene.carrier)
    assert "mirror near has it" in scene.warned[-1].what and "ckpt repair" in scene.warned[-1].fix


def test_one_that_comes_back_is_waited_for() -> None:
    """That a checkpoint was lost and is back keeps nobody from waiting for the mirrors that lack it."""
    scene = Scene(NEAR)
    scene.happens = lambda second: scene.tell_lost() if second == 2 else scene.is_on(NEAR) if second == 5 else None
    scene.waits.until_brought(scene.carrier)
    assert scene.seconds == 5 and scene.warned == []


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_carrier_that_is_gone(when: str) -> None:
    """Nothing is waited for, and what is not brought is named."""
    scene = Scene(NEAR)
    scene.happens = lambda second: scene.carrier.exit(-9)  # type: ignore[attr-defined]
    scene.waits.until_brought(None if when == "before" else scene.carrier)
    assert scene.seconds == (when == "meanwhile") and "not on mirror near" in scene.warned[0].what


def test_a_carrier_that_starts_is_not_killed() -> None:
    """The signal is sent once the carrier listens: before, it would end it."""
    scene = Scene(NEAR, listens=False)

    def happens(second: int) -> None:
        if second == 3:
            assert scene.carrier.signals == []  # type: ignore[attr-defined]
            scene.platform.write_new(SOCKET, b"")
        if second == 6:
            scene.is_on(NEAR)

    scene.happens = happens
    scene.waits.until_brought(scene.carrier)
    assert scene.carrier.signals == [HURRY] and scene.warned == []  # type: ignore[attr-defined]


def test_asked_to_stop_while_a_checkpoint_is_brought_back() -> None:
    """Then there is nothing to begin from; but where it is back by then, or nobody asked, the attempt begins."""
    for stops_at, back_at, expected in ((3, 99, True), (3, 3, False), (99, 4, False), (10**9, 10**9, False)):
        scene = Scene(NEAR)
        scene.platform.mkdir("/kept")
        scene.platform.replace(f"{RUN}/checkpoints/{scene.commit.folder}", "/kept/it")
        scene.stops_at = stops_at
        scene.happens = lambda second, scene=scene, back_at=back_at: second == back_at and scene.platform.replace(
            "/kept/it", f"{RUN}/checkpoints/{scene.commit.folder}"
        )
        began_ns = scene.platform.boot_ns()
        assert scene.waits.until_back(scene.commit, scene.carrier) is expected
        assert scene.platform.boot_ns() - began_ns <= 501 * NS


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
