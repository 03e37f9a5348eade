"""The end of a run that is done: what its carriers owe, in the policy, and what a coordinator waits for on a fake disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.courier import lost, warning
from packtrain.checkpoint.mirrors import read_state, with_held, write_state
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.records import AttemptEnded, MirrorDone
from packtrain.core.units import NS
from packtrain.supervise import messages as m
from packtrain.supervise.events import CarrierWanted, Done, Silent, WrapUp
from packtrain.supervise.job import Job
from packtrain.supervise.state import CLOSING, WRAPPING
from packtrain.supervise.waits import RETAIN_NS, Waits
from tests.checkpoint.worlds import RUN, make_run, publish_small
from tests.supervise.played import CONFIG, Play, actions, finish, owns, written

# --- the policy ----------------------------------------------------------------------------------------


def wrapping(nodes: int = 2, status: int = 0) -> Play:
    """All ranks of a run have ended."""
    play = Play(nodes=nodes).run()
    for number in range(nodes):
        play.end(number, status)
    assert play.state.run.stage == WRAPPING
    return play


def wrap_up(play: Play) -> int:
    (one,) = [one for one in play.state.pending.values() if isinstance(one.own, WrapUp)]
    return one.id


def test_a_run_that_is_done_tells_every_carrier() -> None:
    """Each node of the attempt is told, once, when the last rank is done; carriers end only after what they owe was
    waited for, and the run is done."""
    play = Play(nodes=2).run()
    assert not actions(play.end(0, 0), m.RunDone)
    issued = play.end(1, 0)
    assert [node for node, _ in actions(issued, m.RunDone)] == ["n0", "n1"]
    assert [one.done for one in owns(issued, WrapUp)] == [True]
    assert not actions(play.wait(3000), m.EndAttempt)
    assert len(actions(play.happened(Done(id=wrap_up(play))), m.EndAttempt)) == 2
    ended = play.did_all()
    assert [one.exit_code for one in written(ended, AttemptEnded)] == [0] and finish(play).exit_code == 0


def test_a_run_that_goes_on_owes_nothing_yet() -> None:
    """After a crash, or a stop, nobody is told that the run is done."""
    assert not any(isinstance(one.action, m.RunDone) for one in wrapping(status=1).state.pending.values())
    play = Play(nodes=2).run()
    play.ask("stop")
    play.end(0, 75)
    assert not actions(play.end(1, 75), m.RunDone)


def test_who_asks_to_stop_waits_for_mirrors_as_for_workers() -> None:
    """Once, however often it is said: the wait is over after `grace_s`. At once: at once. The run is done either way,
    and what the coordinator says of its wait afterwards changes nothing."""
    for words in (1, 2):
        play = wrapping()
        id = wrap_up(play)
        for _ in range(3):
            last = play.ask("stop")
            assert not actions(last, m.EndAttempt)
        if words == 2:
            last = play.ask("stop", at_once=True)
        if words == 1:
            assert not actions(last + play.wait(CONFIG.grace_s - 1), m.EndAttempt)
            last = play.wait(2)
        assert len(actions(last, m.EndAttempt)) == 2 and play.state.run.stage == CLOSING
        assert id not in play.state.pending and not play.happened(Done(id=id))
        play.did_all()
        assert finish(play).exit_code == 0


def test_a_word_from_before_the_end_counts() -> None:
    """A run that was asked to stop and got done instead: the grace goes on, and one more word ends the wait."""
    for more in (0, 1):
        play = Play(nodes=1).run()
        play.ask("stop")
        play.wait(10)
        play.end(0, 0)
        issued = play.ask("stop", at_once=True) if more else play.wait(CONFIG.grace_s - 10 + 1)
        assert actions(issued, m.EndAttempt)


@pytest.mark.parametrize("how", ["lost", "another agent"])
def test_nobody_waits_for_a_publisher_that_is_gone(how: str) -> None:
    """Its carrier was to bring the last checkpoint: with the node, or its agent, it is gone. Another node may go."""
    play = wrapping()
    play.happened(Silent(node="n1", seconds=3.0))
    assert not actions(play.wait(30), m.EndAttempt)
    if how == "lost":
        play.happened(Silent(node="n0", seconds=3.0))
        play.wait(30)
    else:
        play.join("n0", agent="b")
    assert play.state.run.stage != WRAPPING
    play.did_all()
    assert play.state.run.exit_code == 0


def test_a_carrier_that_cannot_answer_any_more_keeps_nobody_waiting() -> None:
    """Retention that was asked of a node which is lost is asked of the next one that publishes."""
    play = Play(nodes=2, spares=1).run()
    play.happened(CarrierWanted(request="{}"))
    play.happened(Silent(node="n0", seconds=3.0))
    play.wait(30)
    play.end_rest()
    play.run()
    assert [node for node, _ in actions(play.happened(CarrierWanted(request="{}")), m.AskCarrier)] == ["n2"]


# --- the coordinator's wait ----------------------------------------------------------------------------

NEAR = Mirror(name="near", place="/near", deadline_s=500.0)
B2 = Mirror(name="b2", place="s3://b/x", deadline_s=300.0)
ID = 7


class Scene:
    """A run with one published save; time passes a second at a look."""

    def __init__(self, *mirrors: Mirror, retained: bool = True) -> None:
        self.platform = FakePlatform(FakeDisk())
        self.log = make_run(self.platform)
        self.log.begin(None, ["r00000"], "a")
        self.commit = publish_small(self.platform, self.log, 1, 10)
        self.hangs = False
        job = Job(
            name="r", run_folder=RUN, worker=(), carrier=(), version="t", checkpoint=CheckpointConfig(mirrors=mirrors)
        )
        self.waits, self.ns, self.retained = Waits(self.platform, job, self.log, self.do), 0, retained

    def do(self, kind: str, call: Callable[[], Any], then: Callable[[Any], None]) -> bool:
        """An errand: over at once, or never where the disk hangs."""
        if self.hangs:
            return False
        then(call())
        return True

    def wrap(self, done: bool = True) -> None:
        self.waits.until_wrapped(ID, lambda: self.retained, done, self.ns)

    def seconds(self, most: int = 10_000) -> int:
        """Until it is over."""
        for second in range(1, most):
            self.ns += NS
            if self.waits.look(self.ns):
                return second
        raise AssertionError(self.waits.text)

    def going_on(self, seconds: int) -> bool:
        for _ in range(seconds):
            self.ns += NS
            if self.waits.look(self.ns):
                return False
        return True

    def is_on(self, *mirrors: Mirror) -> None:
        """A courier's end."""
        for mirror in mirrors:
            state = read_state(self.platform, RUN, mirror.name, mirror.place)
            write_state(self.platform, RUN, with_held(state, self.commit, 0.0))
            self.tried(mirror)

    def tried(self, mirror: Mirror, error: str = "") -> None:
        self.waits.noted(MirrorDone(mirror=mirror.name, step=10, commit=self.commit.number, error=error))

    def rm(self, commit: Commit) -> None:
        self.platform.replace(f"{RUN}/checkpoints/{commit.folder}", "/away")


@pytest.mark.parametrize(("mirrors", "done"), [((), True), ((NEAR,), False)])
def test_without_mirrors_or_with_more_to_come_only_retention_is_waited_for(
    mirrors: Sequence[Mirror], done: bool
) -> None:
    """Until it is answered, or its bound; nobody needs to be told of that."""
    for retained, expected in ((True, 1), (False, RETAIN_NS // NS)):
        scene = Scene(*mirrors, retained=retained)
        scene.wrap(done)
        assert scene.waits.text == "" and scene.seconds() == expected


def test_every_mirror_is_waited_for_and_named() -> None:
    """Those that lack the last step, until it is there; one that has it already is not waited for."""
    scene = Scene(NEAR, B2)
    scene.wrap()
    assert scene.going_on(1) and scene.waits.text.startswith("bringing step 10 to near, b2 (") and scene.going_on(100)
    scene.is_on(NEAR)
    assert scene.waits.text.startswith("bringing step 10 to b2 (") and scene.going_on(100)
    scene.is_on(B2)
    assert scene.seconds() == 1 and scene.waits.text == ""
    scene.wrap()
    assert scene.waits.text == "" and scene.seconds() == 1


def test_a_mirror_that_failed_is_not_tried_for_ever() -> None:
    """One try each after the run was done: what failed before says nothing, and the next try may be an hour away."""
    scene = Scene(NEAR, B2)
    scene.tried(B2, "of an earlier time")
    scene.wrap()
    scene.is_on(NEAR)
    assert scene.going_on(100)
    scene.tried(B2, "refused")
    assert scene.seconds() == 1


def test_a_mirror_that_says_nothing_has_its_deadline() -> None:
    """All deadlines, one after the other, and no longer."""
    scene = Scene(NEAR, B2)
    scene.wrap()
    assert scene.seconds() == NEAR.deadline_s + B2.deadline_s


def test_retention_is_waited_for_beside_the_mirrors() -> None:
    """However fast they are, it has its bound."""
    scene = Scene(NEAR, retained=False)
    scene.wrap()
    scene.is_on(NEAR)
    assert scene.seconds() == RETAIN_NS // NS


def test_a_last_checkpoint_that_is_lost_ends_the_wait() -> None:
    """Once it is gone and said to be on no mirror nobody waits out a deadline; one that is there is waited for."""
    for gone in (True, False):
        scene = Scene(NEAR)
        if gone:
            scene.rm(scene.commit)
        told = warning(lost(RUN, scene.commit, "no mirror", again=False))
        scene.waits.noted(told)  # of an earlier try: the last one is still to come
        scene.wrap()
        assert scene.going_on(5)
        scene.waits.noted(told)
        assert scene.going_on(5) is not gone


@pytest.mark.parametrize("what", ["wrapped", "back"])
def test_a_disk_that_hangs_does_not_stop_who_waits(what: str) -> None:
    """It is asked in errands alone, never in the coordinator's loop, and the bounds are kept all the same."""
    scene, asked = Scene(NEAR), list[str]()
    scene.hangs, scene.platform.faults = True, lambda op, path, count: asked.append(path)
    scene.wrap() if what == "wrapped" else scene.waits.until_back(ID, scene.ns)
    assert scene.seconds() == NEAR.deadline_s and not asked


def test_a_log_that_cannot_be_read_is_not_waited_for() -> None:
    """What nobody knows is told at the end (`shortfall`)."""
    scene = Scene(NEAR)
    scene.platform.write_replacing(f"{RUN}/commits/{scene.commit.number:012d}", b"{")
    scene.wrap()
    assert scene.seconds() == 1
