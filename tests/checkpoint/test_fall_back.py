"""A save that the run's own disk will not take goes to another, and everybody finds it there."""

from __future__ import annotations

import errno
import pathlib
import shutil

import google_crc32c
import msgspec
import pytest

from packtrain.checkpoint import asked
from packtrain.checkpoint.carrier import open_carrier
from packtrain.checkpoint.commits import Commit, CommitLog, parse_record, render_record
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.copies import send
from packtrain.checkpoint.courier import lost
from packtrain.checkpoint.homes import Homes
from packtrain.checkpoint.publish import HOME_TRIES, RANK_TRY, Gate, carry
from packtrain.checkpoint.purge import execute
from packtrain.checkpoint.reader import checkpoint_bytes, is_going, missing, open_checkpoint, survey, verify_commit
from packtrain.checkpoint.repair import Places, repair
from packtrain.checkpoint.retention import Action, plan
from packtrain.checkpoint.where import checkpoint_folder, fall_back_home, is_place, require_outside
from packtrain.core.errors import CheckpointDamaged, CheckpointUnreadable, Contradiction, SaveFailed, SaveFellBack
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform, Fault, crash, delay, fail
from packtrain.core.platform import LocalPlatform
from packtrain.core.stores import Folder
from packtrain.core.transfer import TransferConfig
from tests.checkpoint import foreign
from tests.checkpoint.worlds import RUN, WRITER, judge, make_run, must_load, publish_small, save_of

OWN, SCRATCH, SECOND = f"{RUN}/checkpoints", "/scratch", "/second"
HOUR_S = 3600.0


def world() -> tuple[FakePlatform, CommitLog, list[str]]:
    """A run with a begun attempt and one save, and two other disks; their homes for this run."""
    platform = FakePlatform(FakeDisk())
    log = make_run(platform)
    first = log.begin(0, (WRITER,), "a")
    for folder in (SCRATCH, SECOND, "/buffers"):
        platform.mkdir(folder)
    publish_small(platform, log, 1, 5)
    platform.disk.sync_all()
    return platform, log, [fall_back_home(root, RUN, first) for root in (SCRATCH, SECOND)]


def refuse(platform: FakePlatform, fault: Fault, *places: str, ops: str = "create write") -> None:
    """From now on those folders refuse; everything else, the log included, is well."""
    def strike(op: str, path: str, n: int) -> Fault | None:
        return fault if op in ops.split() and path.startswith(tuple(places)) else None

    platform.faults = strike


def save(platform: FakePlatform, log: CommitLog, homes: list[str], step: int = 10) -> tuple[Commit, list[SaveFellBack]]:
    told: list[SaveFellBack] = []
    commit = carry(platform, log, RUN, save_of(platform, 1, step), Gate(), Homes(platform, [RUN, *homes]), told.append)
    platform.faults = None
    return commit, told


def fallen() -> tuple[FakePlatform, CommitLog, Commit]:
    """A save that fell back to the first other disk."""
    platform, log, homes = world()
    refuse(platform, fail(errno.ENOSPC), OWN)
    commit, _ = save(platform, log, homes)
    assert commit.place == homes[0]
    return platform, log, commit


@pytest.mark.parametrize("fault", [fail(errno.ENOSPC), fail(errno.EROFS), fail(errno.EIO)], ids=["full", "ro", "EIO"])
def test_the_next_disk_takes_it(fault: Fault) -> None:
    """Full, read-only or failing: after a few tries the save is on the next disk, published and told with the obstacle;
    nothing half written stays on the first, and all outlives a power cut."""
    platform, log, homes = world()
    refuse(platform, fault, OWN)
    commit, told = save(platform, log, homes)
    tries = [path for _, op, path in platform.disk.trace if op == "mkdir" and path.startswith(f"{OWN}/step-00000010")]
    assert len(set(tries)) == HOME_TRIES and platform.listdir(OWN) == ["step-00000005.a0001.t1"]
    assert commit.place == homes[0] and commit.folder.endswith(f".t{RANK_TRY + 1}")
    (warning,) = told
    assert OWN.rpartition("/")[0] in warning.what and homes[0] in warning.where and "free space" in warning.fix
    judge(platform.crash())


def test_a_slow_disk_gets_half_of_the_time() -> None:
    """Where the first disk is too slow the second gets what is left of the deadline, and the save makes it."""
    platform, log, homes = world()
    refuse(platform, delay(40.0), OWN, ops="create")
    began_ns = platform.boot_ns()
    commit, told = save(platform, log, homes)
    assert commit.place == homes[0] and "too slow" in told[0].what
    assert 40 <= (platform.boot_ns() - began_ns) / 1e9 < 60


def test_a_disk_that_stalls_for_twenty_minutes() -> None:
    """The save fails at its deadline however long the disk hangs, and nothing of it is published when that comes back;
    the next save is."""
    platform, log, _ = world()
    head = log.head()
    refuse(platform, delay(1200.0), OWN, ops="create")
    with pytest.raises(SaveFailed):
        save(platform, log, [])
    platform.faults = None
    assert log.head() == head
    assert save(platform, log, [], 15)[0].step == 15
    judge(platform)


def test_the_one_after_that_and_none() -> None:
    """A disk that is not mounted is passed over, and is not made a folder of; where none takes it the save fails with
    every obstacle, as without any; when its own disk is well again the next save lies there."""
    platform, log, homes = world()
    platform.rmdir(SCRATCH)
    refuse(platform, fail(errno.ENOSPC), OWN)
    commit, told = save(platform, log, homes)
    assert commit.place == homes[1] and f"{homes[0]}: " in told[0].what and not platform.exists(SCRATCH)
    refuse(platform, fail(errno.ENOSPC), OWN, SECOND)
    with pytest.raises(SaveFailed) as caught:
        save(platform, log, homes, 15)
    platform.faults = None
    assert all(f"{home}: " in caught.value.what for home in (RUN, *homes)) and log.head() == 3
    assert save(platform, log, homes, 20)[0].place == ""
    judge(platform)


def test_a_log_that_takes_no_record_fails_the_save() -> None:
    """The log stays where it is: where it cannot be written no fall-back helps, and nothing is published."""
    platform, log, homes = world()
    refuse(platform, fail(errno.ENOSPC), f"{RUN}/")
    with pytest.raises(SaveFailed, match="not confirmed as published"):
        save(platform, log, homes)
    assert log.head() == 2 and platform.listdir(OWN) == ["step-00000005.a0001.t1"]


@pytest.mark.parametrize("op", ["create", "link"])
def test_what_is_surely_not_published_leaves_nothing(op: str) -> None:
    """Where no record could even be tried, what was written on the other disk goes: nobody would look for it there.
    Where a link was tried the record may have come to be, so it stays."""
    platform, log, homes = world()

    def strike(done: str, path: str, n: int) -> Fault | None:
        refused = (done == op and path.startswith(f"{RUN}/commits")) or (done == "write" and path.startswith(OWN))
        return fail(errno.ENOSPC) if refused else None

    platform.faults = strike
    with pytest.raises(SaveFailed, match="not confirmed as published"):
        save(platform, log, homes)
    platform.faults = None
    left = platform.listdir(f"{homes[0]}/checkpoints")
    assert left == ([] if op == "create" else [f"step-00000010.a0001.t{RANK_TRY + 1}"]) and log.head() == 2


def test_everybody_finds_it() -> None:
    """Restore, verify, survey, pins and copies see it where it lies; a copy has it in its own folder, and is read there
    even where the other disk is at hand; the run folder goes first when it was brought back."""
    platform, log, commit = fallen()
    must_load(platform, RUN, commit)
    assert log.restore_point() == commit and missing(platform, RUN, commit) == ""
    assert commit.folder in survey(platform, RUN).ages_s
    asked.pin(platform, RUN, commit.folder)
    platform.mkdir("/mirror")
    send(platform, RUN, commit, Folder(platform, "/mirror"), TransferConfig(threads=1))
    assert checkpoint_folder(platform, "/mirror", commit) == f"/mirror/checkpoints/{commit.folder}"
    must_load(platform, "/mirror", commit)
    image = f"{checkpoint_folder(platform, RUN, commit)}/part-r00000.safetensors"
    platform.disk.find_file(image).data[-1] ^= 1
    repair(platform, RUN, commit, Places(platform, [Folder(platform, "/mirror")]))
    must_load(platform, RUN, commit)
    platform.disk.replace(SCRATCH, "/away")
    assert missing(platform, RUN, commit) == f"its folder, in {commit.place}"
    assert commit.folder not in survey(platform, RUN).ages_s
    repair(platform, RUN, commit, Places(platform, [Folder(platform, "/mirror")]))
    platform.disk.replace("/away", SCRATCH)
    assert checkpoint_folder(platform, RUN, commit) == f"{OWN}/{commit.folder}"
    must_load(platform, RUN, commit)


def test_a_foreign_reader_finds_it(tmp_path: pathlib.Path) -> None:
    """The reader in examples/ follows the record to the other disk, and prefers the run folder."""
    platform, log = LocalPlatform(), make_run(LocalPlatform(), f"{tmp_path}/run")
    first = log.begin(0, (WRITER,), "a")
    (tmp_path / "scratch").mkdir()
    publish_small(platform, log, 1, 5, f"{tmp_path}/run")
    home = fall_back_home(f"{tmp_path}/scratch", f"{tmp_path}/run", first)
    part = save_of(platform, 1, 10, f"{tmp_path}/run/buffers")
    shutil.move(f"{tmp_path}/run/checkpoints", f"{tmp_path}/old")
    commit = carry(platform, log, f"{tmp_path}/run", part, Gate(), Homes(platform, [f"{tmp_path}/run", home]))
    assert commit.place == home
    found = foreign.load().read(tmp_path / "run")
    shutil.copytree(f"{home}/checkpoints", f"{tmp_path}/run/checkpoints")
    shutil.rmtree(home)
    again = foreign.load().read(tmp_path / "run")
    assert sorted(found) == ["step", "w"] and all((found[name] == again[name]).all() for name in ("step",))


def test_retention_takes_it_from_there() -> None:
    """When its time has come purge.py deletes it on the other disk, and nothing else there."""
    platform, log, commit = fallen()
    for step in (15, 20, 25):
        publish_small(platform, log, 1, step)
    platform.mkdir(f"{commit.place}/checkpoints/step-00000010.a0009.t1")
    config = CheckpointConfig(keep_last=1, grace_s=HOUR_S)
    for _ in range(2):
        actions = plan(survey(platform, RUN), config)
        done = execute(platform, RUN, 1, actions, config.grace_s)
        assert all(one.error is None for one in done), done
        platform.pause(2 * HOUR_S)
    assert platform.listdir(f"{commit.place}/checkpoints") == ["step-00000010.a0009.t1"]
    assert platform.listdir(OWN) == ["step-00000025.a0001.t1"]


def test_a_copy_of_the_run_purges_nothing_there() -> None:
    """A copy that is gone on with, or the run folder under another name, reads what lies on the other disk; it is not
    theirs to purge."""
    fork = "/other/run"
    platform, _, commit = fallen()
    platform.mkdir("/other")
    platform.disk.replace(RUN, fork)
    log = CommitLog(platform, f"{fork}/commits")
    must_load(platform, fork, commit)
    log.begin(None, (WRITER,), "a")
    publish_small(platform, log, 2, 15, fork)
    for kind in ("tombstone", "purge"):
        (done,) = execute(platform, fork, 2, [Action(kind, commit.folder, "x")], 0.0)
    assert done.error is not None and "belongs to another run folder" in done.error["what"]
    must_load(platform, fork, commit)


@pytest.mark.parametrize("place", ["scratch", "/scratch/../etc", "/scratch/"])
def test_a_record_that_leads_elsewhere_is_refused(place: str) -> None:
    """A place is an absolute path that says where it leads."""
    platform, _, commit = fallen()
    with pytest.raises(CheckpointDamaged, match="no place"):
        checkpoint_folder(platform, RUN, msgspec.structs.replace(commit, place=place))


@pytest.mark.parametrize("away", ["the disk", "its mount point is empty"])
def test_a_disk_that_is_away_is_no_damage(away: str) -> None:
    """Where the place a save fell back to is not there, as when its disk is not mounted, opening it names the place and
    is to be tried again: the save is not damaged, so no run goes back to the one before. The warning of a lost
    checkpoint names it as well. What is missing in a place that is there is damage."""
    platform, _, commit = fallen()
    platform.disk.replace(SCRATCH, "/away")
    if away != "the disk":
        platform.mkdir(SCRATCH)
    with pytest.raises(CheckpointUnreadable, match=commit.place) as caught:
        open_checkpoint(platform, RUN, commit)
    assert caught.value.where == commit.place and "mounted" in caught.value.fix
    with pytest.raises(CheckpointUnreadable):
        verify_commit(platform, RUN, commit)
    assert checkpoint_bytes(platform, RUN, commit) == 0 and not is_going(platform, RUN, commit)
    warned = lost(RUN, commit, "there is no mirror", again=False)
    assert commit.place in warned.what and commit.place in warned.fix
    if away != "the disk":
        platform.rmdir(SCRATCH)
    platform.disk.replace("/away", SCRATCH)
    must_load(platform, RUN, commit)
    platform.disk.replace(f"{commit.place}/checkpoints/{commit.folder}", "/away")
    with pytest.raises(CheckpointDamaged):
        open_checkpoint(platform, RUN, commit)


def test_no_save_goes_where_no_record_may_lead() -> None:
    """A home whose path a record may not name is passed over with a word, and the next one takes the save."""
    platform, log, homes = world()
    refuse(platform, fail(errno.ENOSPC), OWN)
    commit, told = save(platform, log, [f"/second/..{homes[0]}", homes[1]])
    assert commit.place == homes[1] and "no record may name" in told[0].what
    must_load(platform, RUN, commit)


def test_old_records_load() -> None:
    """A record that was written before there were places is read as one that names none."""
    commit = Commit(number=7, kind="save", attempt=1, step=5, parent=6, nonce="n", digest="d", folder="f")
    new = render_record(commit)
    body = new.rpartition(b',"crc":"')[0].replace(b',"place":""', b"")
    assert b"place" not in body
    old = b'%s,"crc":"%08x"}\n' % (body, google_crc32c.value(body))
    assert parse_record(old) == parse_record(new) == commit


def test_killed_at_every_operation() -> None:
    """Killed anywhere on the way to the other disk: what is published loads, from wherever it lies."""
    k, ended, published = 0, False, set()
    while not ended:
        k += 1
        platform, _, homes = world()
        disk = platform.disk
        ended = not _died(disk, homes, k)
        after = FakePlatform(disk).crash()
        commits = judge(after, note=k)
        published.add(len(commits))
    assert published == {2, 3} and k > 40 and verify_commit(after, RUN, commits[-1]) == [] and commits[-1].place


def _died(disk: FakeDisk, homes: list[str], k: int) -> bool:
    def strike(op: str, path: str, n: int) -> Fault | None:
        if n == k:
            return crash()
        return fail(errno.ENOSPC) if op == "write" and path.startswith(OWN) else None

    platform = FakePlatform(disk, faults=strike)
    try:
        log, all_homes = CommitLog(platform, f"{RUN}/commits"), Homes(platform, [RUN, *homes])
        carry(platform, log, RUN, save_of(platform, 1, 10), Gate(), all_homes)
    except FakeCrash:
        return True
    return False


@pytest.mark.parametrize(
    "places", [("scratch",), ("/a", "/a"), ("/a", "/a/"), ("//a",), ("/a//b",), ("/a/./b",), ("/a/../b",), ("/a/.",)]
)
def test_places_that_make_no_sense(places: tuple[str, ...]) -> None:
    """A relative path, one that is not written plainly, and one named twice are refused with the key."""
    with pytest.raises(Contradiction, match="absolute"):
        CheckpointConfig(fallback=places)


def test_what_the_config_takes_can_be_read() -> None:
    """Every place the config takes makes a home that a record may name."""
    first = world()[1].read(1)
    assert first is not None
    for root in CheckpointConfig(fallback=("/a", "/b/", "/c/d e", "/")).fallback:
        assert is_place(fall_back_home(root, RUN, first))


def test_no_place_in_the_run_folder(tmp_path: pathlib.Path) -> None:
    """A place in the run folder, or that folder itself, by whatever name, is refused; one beside or around it not."""
    run, link = f"{tmp_path}/run", f"{tmp_path}/link"
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(run)
    for root in (run, f"{run}/", f"{run}/saves", f"{link}/saves"):
        with pytest.raises(Contradiction, match="lies in the run folder"):
            require_outside([root], run)
    require_outside([f"{run}2", str(tmp_path), "/"], run)
    log = make_run(LocalPlatform(), run)
    begin = log.begin(0, (WRITER,), "a")
    with pytest.raises(Contradiction):
        open_carrier(LocalPlatform(), run, f"{tmp_path}/s", begin.number, CheckpointConfig(fallback=(f"{run}/saves",)))
