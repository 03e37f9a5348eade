"""A place of copies becomes the run, and the old place is closed: never are there two in which an attempt may begin."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from packtrain.checkpoint.asked import wish
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.copies import send
from packtrain.checkpoint.listing import listing
from packtrain.checkpoint.promote import promote
from packtrain.checkpoint.publish import Gate, carry
from packtrain.checkpoint.reader import survey, verify_commit
from packtrain.core.errors import CommitStale, CommitUnknown, NameTaken, PromoteRefused, RunMoved
from packtrain.core.fake import (
    Baton,
    Choices,
    FakeCrash,
    FakeDisk,
    FakePlatform,
    Fault,
    crash,
    explore,
    fail,
    power_cut,
)
from packtrain.core.stores import Folder, Store
from packtrain.core.transfer import TransferConfig
from tests.checkpoint.worlds import RUN, WRITER, make_run, must_load, publish_small, save_of
from tests.core.flips import Flipping

ONE = TransferConfig(threads=1)
MIRROR, SECOND = "/mirror", "/second"
OLD, NEW = f"{RUN}/commits", f"{MIRROR}/commits"


def mirrored() -> tuple[FakePlatform, list[Commit]]:
    """A run that saved 5, 10 and 15; 10 is in one place, 5 in another. All durable."""
    platform = FakePlatform(FakeDisk())
    log = make_run(platform)
    log.begin(None, [WRITER], "a")
    commits = [publish_small(platform, log, 1, step) for step in (5, 10, 15)]
    for place, commit in ((MIRROR, commits[1]), (SECOND, commits[0])):
        platform.mkdir(place)
        send(platform, RUN, commit, Folder(platform, place), ONE)
    platform.disk.sync_all()
    return platform, commits


def test_the_place_is_the_run_and_the_old_one_is_closed() -> None:
    """The next attempt begins in the place, above all old ones, from what was copied; what still lives of the old
    attempts publishes no more, nobody begins there, and it says where the run goes on. Again: nothing changes."""
    platform, commits = mirrored()
    old, new = CommitLog(platform, OLD), CommitLog(platform, NEW)
    old.begin(None, [WRITER], "a")
    for _ in range(2):
        done = promote(platform, RUN, MIRROR)
        assert (done.restored, done.closed, done.left) == (commits[1], True, (commits[2],))
        assert (old.head(), new.head()) == (6, 4)
    with pytest.raises(CommitStale):
        carry(platform, old, RUN, save_of(platform, 2, 20), Gate())
    with pytest.raises(RunMoved, match=MIRROR):
        old.begin(None, [WRITER], "a")
    assert old.restore_point() == commits[2]
    begin = new.begin(None, [WRITER], "b")
    assert (begin.attempt, begin.step) == (3, 10)
    commit = publish_small(platform, new, 3, 12, MIRROR)
    must_load(platform, MIRROR, commit)
    assert promote(platform, RUN, MIRROR).closed and new.head() == 6


def test_a_second_place_is_refused() -> None:
    """The old log names one place for all time: another is refused, --lost or not, and stays a copy that the new run
    can go on to fill."""
    platform, _ = mirrored()
    promote(platform, RUN, MIRROR)
    for lost in (False, True):
        with pytest.raises(RunMoved, match=MIRROR):
            promote(platform, RUN, SECOND, lost)
    new = CommitLog(platform, NEW)
    new.begin(None, [WRITER], "b")
    commit = publish_small(platform, new, 2, 20, MIRROR)
    send(platform, MIRROR, commit, Folder(platform, SECOND), ONE)
    assert promote(platform, MIRROR, SECOND).restored == commit
    with pytest.raises(RunMoved, match=SECOND):
        new.begin(None, [WRITER], "b")


def test_the_old_place_is_no_mirror_of_the_new_one() -> None:
    """What was closed takes no copies of the run that goes on elsewhere: its log went another way."""
    platform, _ = mirrored()
    promote(platform, RUN, MIRROR)
    new = CommitLog(platform, NEW)
    new.begin(None, [WRITER], "b")
    with pytest.raises(NameTaken):
        send(platform, MIRROR, publish_small(platform, new, 2, 20, MIRROR), Folder(platform, RUN), ONE)


@pytest.mark.parametrize("how", ["not found", "gone", "damaged", "read only"])
def test_an_old_place_that_cannot_be_closed(how: str) -> None:
    """Not to be found, gone, damaged or not writable: refused with the risk and the way to take it; with --lost it goes
    on. When the old log is back, the same call closes it, even after the new one was trained on."""
    platform, commits = mirrored()
    old: str | None = RUN
    if how == "not found":
        old = None
    elif how == "gone":
        platform.disk.replace(RUN, "/away")
    elif how == "damaged":
        platform.disk.find_file(f"{OLD}/{1:012d}").data[5] ^= 1
    else:
        platform.faults = lambda op, path, n: fail(errno.EROFS) if op == "create" and path.startswith(RUN) else None
    with pytest.raises(PromoteRefused, match="cannot be closed") as caught:
        promote(platform, old, MIRROR)
    assert "the run exists twice" in caught.value.fix and CommitLog(platform, NEW).head() == 3
    done = promote(platform, old, MIRROR, lost=True)
    assert (done.restored, done.closed) == (commits[1], False)
    platform.faults = None
    new = CommitLog(platform, NEW)
    new.begin(None, [WRITER], "b")
    publish_small(platform, new, 2, 20, MIRROR)
    if how == "gone":
        platform.disk.replace("/away", RUN)
    if how in ("gone", "read only"):
        assert promote(platform, RUN, MIRROR).closed
        with pytest.raises(RunMoved):
            CommitLog(platform, OLD).begin(None, [WRITER], "a")


def test_what_restore_needs_is_verified_first() -> None:
    """A flipped byte in what the next attempt would read is told by its file, and nothing is closed; nor where a record
    of the log is damaged, or one is missing behind which others lie."""
    platform, commits = mirrored()
    image = f"{MIRROR}/checkpoints/{commits[1].folder}/part-r00000.safetensors"
    record = f"{NEW}/{2:012d}"
    for path in (image, record):
        data = platform.disk.find_file(path).data
        data[-1] ^= 1
        with pytest.raises((PromoteRefused, CommitUnknown), match="damaged"):
            promote(platform, RUN, MIRROR)
        data[-1] ^= 1
    platform.disk.replace(f"{NEW}/{3:012d}", f"{NEW}/{7:012d}")
    with pytest.raises(PromoteRefused, match="missing"):
        promote(platform, RUN, MIRROR)
    assert CommitLog(platform, OLD).last() == commits[2]
    with pytest.raises(CommitUnknown):
        promote(platform, RUN, "/tmp")
    assert platform.listdir("/tmp") == []


def test_what_is_no_copy_is_refused() -> None:
    """A run of its own, a copy that was trained on without being promoted, and another run's copy stay what they are,
    and the log of the run named stays open."""
    platform, commits = mirrored()
    make_run(platform, "/other")
    CommitLog(platform, "/other/commits").begin(None, [WRITER], "a")
    with pytest.raises(PromoteRefused, match="no place of copies"):
        promote(platform, RUN, "/other")
    with pytest.raises(PromoteRefused, match="of another run"):
        promote(platform, "/other", MIRROR)
    CommitLog(platform, NEW).begin(None, [WRITER], "b")
    with pytest.raises(PromoteRefused, match="gone on with"):
        promote(platform, RUN, MIRROR)
    assert CommitLog(platform, OLD).last() == commits[2] and CommitLog(platform, "/other/commits").head() == 1


class Meanwhile(Flipping):
    """Something happens right before, or right after, a name is created in the store."""

    def __init__(self, inner: Store, name: str, after: bool, happens: Callable[[], None]) -> None:
        super().__init__(inner)
        self._name, self._after, self._happens = name, after, happens

    def create(self, name: str, data: bytes) -> None:
        if name == self._name and not self._after:
            self._happens()
        super().create(name, data)
        if name == self._name and self._after:
            self._happens()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["checkpoints/{}/manifest.json", f"copied/{6:012d}", f"commits/{4:012d}",
                                  f"commits/{6:012d}"])
def test_promoted_while_a_copy_is_under_way(name: str, after: bool) -> None:
    """Whenever in a copy its place is promoted, no record that was there then is replaced: the copy is refused where
    the log went on otherwise, the place stays the run, and what it saves afterwards is its own and not missing."""
    platform, _ = mirrored()
    old, new = CommitLog(platform, OLD), CommitLog(platform, NEW)
    old.begin(None, [WRITER], "a")
    commit = publish_small(platform, old, 2, 20)
    seen = list[list[Commit]]()

    def promoted() -> None:
        try:
            promote(platform, RUN, MIRROR)
        except PromoteRefused:  # the log leads to what is not there, for as long as the copy takes
            return
        new.begin(None, [WRITER], "b")
        publish_small(platform, new, 3, 30, MIRROR)
        seen.append(new.all())

    target = Meanwhile(Folder(platform, MIRROR), name.format(commit.folder), after, promoted)
    try:
        send(platform, RUN, commit, target, ONE)
        assert not seen or seen[0][:6] == old.all()[:6]
    except NameTaken:
        assert seen
    if not seen:
        promoted()
    assert CommitLog(platform, NEW).all() == seen[0] and promote(platform, RUN, MIRROR).closed
    assert CommitLog(platform, NEW).all() == seen[0] and seen[0][-1].step == 30
    rows = listing(survey(platform, MIRROR), CheckpointConfig(), seen[0][-1])
    assert {row.words() for row in rows if row.lineage} <= {"", "not copied", "restored next"}
    assert rows[-1].words() == "restored next"


def test_it_goes_on_from_where_the_run_went_back_to() -> None:
    """A rollback behind the last copy, or one that was asked for, holds in the place as well; where its save is not
    there, the place is refused until it was copied. What was asked for in the place goes before all."""
    for how in ("began", "asked", "asked here"):
        platform, commits = mirrored()
        old = CommitLog(platform, OLD)
        if how == "began":
            old.begin(commits[0].number, [WRITER], "a")
        else:
            wish(platform, RUN, commits[0], old.head())
        with pytest.raises(PromoteRefused, match="went back: it goes on from step 5, which is not here") as caught:
            promote(platform, RUN, MIRROR)
        assert f"ckpt copy {RUN} --step 5 --to {MIRROR}" in caught.value.fix
        assert (old.last() or commits[0]).kind != "moved"
        send(platform, RUN, commits[0], Folder(platform, MIRROR), ONE)
        if how == "asked here":
            wish(platform, MIRROR, commits[1], CommitLog(platform, NEW).head())
        expected = commits[1] if how == "asked here" else commits[0]
        for _ in range(2):
            assert promote(platform, RUN, MIRROR).restored == expected
        assert CommitLog(platform, NEW).begin(None, [WRITER], "b").step == expected.step


def test_killed_while_it_goes_back() -> None:
    """Killed anywhere, the next call goes on from what was asked for in the run, though its log has become longer."""
    ended, k = False, 0
    while not ended:
        k += 1
        platform, commits = mirrored()
        send(platform, RUN, commits[0], Folder(platform, MIRROR), ONE)
        wish(platform, RUN, commits[0], CommitLog(platform, OLD).head())
        ended = not _died(platform.disk, k, crash())
        platform = FakePlatform(platform.disk)
        assert promote(platform, RUN, MIRROR).restored == commits[0], k
    assert k > 40


def may_begin(platform: FakePlatform) -> set[str]:
    """The run, where it is open; a place, once it is no copy any more."""
    found = set()
    last = CommitLog(platform, OLD).last()
    if last is not None and last.kind != "moved":
        found.add(RUN)
    for place in (MIRROR, SECOND):
        last = CommitLog(platform, f"{place}/commits").last()
        if last is not None and last.kind == "moved":
            found.add(place)
    return found


@pytest.mark.parametrize("fault", [crash(), power_cut()], ids=["kill", "power cut"])
def test_killed_at_every_operation(fault: Fault) -> None:
    """Killed anywhere, there are never two that may begin an attempt; the next call ends it, and then there is one."""
    ended, k, none = False, 0, 0
    while not ended:
        k += 1
        platform, commits = mirrored()
        ended = not _died(platform.disk, k, fault)
        platform = platform.crash() if fault.kind == "power_cut" and not ended else FakePlatform(platform.disk)
        found = may_begin(platform)
        assert len(found) <= 1, (k, found)
        none += not found
        assert promote(platform, RUN, MIRROR).restored == commits[1]
        platform = platform.crash()
        assert may_begin(platform) == {MIRROR} and verify_commit(platform, MIRROR, commits[1]) == []
    assert k > 40 and none > 0


def _died(disk: FakeDisk, k: int, fault: Fault) -> bool:
    platform = FakePlatform(disk, faults=lambda op, path, n: fault if n == k else None)
    try:
        promote(platform, RUN, MIRROR)
    except FakeCrash:
        return True
    return False


def test_a_race_of_an_old_attempt() -> None:
    """An attempt of the old place publishes while it is closed, in every order of their operations on the log: its save
    is before the end or refused, and none comes after it."""
    seen = set()
    for choices in explore():
        seen.add(_race(choices))
    assert seen == {"published", "refused"}


def _race(choices: Choices) -> str:
    platform, _ = mirrored()
    disk = platform.disk
    baton = Baton(choices, disk.clock, preemptions_max=1, shared=lambda op, path: path.startswith(OLD) and op == "link")
    a, b = (FakePlatform(disk, name, baton) for name in "ab")
    told: list[str] = []

    def publish() -> None:
        try:
            CommitLog(a, OLD).publish(1, 20, "d", "step-00000020.a0001.t1")
            told.append("published")
        except CommitStale:
            told.append("refused")

    baton.run(publish, lambda: CommitLog(b, OLD).close(MIRROR))
    records = CommitLog(FakePlatform(disk), OLD).all()
    assert [one.kind for one in records].count("moved") == 1 and records[-1].place == MIRROR, choices
    assert (records[-2].step == 20) == (told == ["published"]), choices
    return told[0]
