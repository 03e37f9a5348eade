"""A copied checkpoint is whole where its manifest is, and is no checkpoint where it is not."""

from __future__ import annotations

import pytest

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.copies import send
from packtrain.checkpoint.listing import listing
from packtrain.checkpoint.reader import checkpoint_bytes, open_checkpoint, survey, verify_commit
from packtrain.core.errors import CheckpointDamaged, NameTaken, TransferDamaged, TransferLate
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform, Fault, crash, power_cut
from packtrain.core.platform import LocalPlatform
from packtrain.core.stores import Folder, Store, StoreConfig, open_store
from packtrain.core.transfer import TransferConfig
from packtrain.core.units import NS
from tests.checkpoint.worlds import RUN, make_run, must_load, publish_small
from tests.core.flips import Flipping, flip

ONE = TransferConfig(threads=1)
MIRROR = "/mirror"


def run_of_two(disk: FakeDisk | None = None) -> tuple[FakePlatform, list[Commit]]:
    """A run with two published saves, and an empty folder beside it; all durable."""
    platform = FakePlatform(disk or FakeDisk())
    platform.mkdir(MIRROR)
    log = make_run(platform)
    log.begin(None, ["r00000"], "a")
    commits = [publish_small(platform, log, 1, step) for step in (5, 10)]
    platform.disk.sync_all()
    return platform, commits


def names(store: Store) -> list[str]:
    return [name.rpartition("/")[2] for name, _ in store.list_all("")]


def test_a_copy_loads_bit_for_bit() -> None:
    """What arrives in a folder is read like a run's own checkpoint; in a bucket lie the same bytes; a second copy sends
    nothing, and two checkpoints lie side by side."""
    platform, commits = run_of_two()
    mirror, bucket = Folder(platform, MIRROR), open_store(LocalPlatform(), StoreConfig("memory://"))
    for commit in commits:
        for store in (mirror, bucket):
            done = send(platform, RUN, commit, store, ONE)
            assert done.bytes_sent + done.bytes_kept == done.bytes_checked == done.bytes_total
            assert done.bytes_sent > checkpoint_bytes(platform, RUN, commit)
            assert send(platform, RUN, commit, store, ONE).bytes_sent == 0
        must_load(platform, MIRROR, commit)
    assert sorted(names(bucket)) == sorted(names(mirror)) and len(names(mirror)) == 2 * 3 + 3 + 2
    for name, size in mirror.list_all(""):
        assert bucket.read(name, 0, size + 1) == mirror.read(name, 0, size)


@pytest.mark.parametrize("fault", [crash(), power_cut()], ids=["kill", "power cut"])
def test_killed_at_every_operation(fault: Fault) -> None:
    """Killed anywhere, the copy has no manifest, or is whole, and the log beside it leads to nothing else; the next one
    ends it, and that outlives a power cut, whatever the first had not made durable."""
    ended, k, unseen = False, 0, 0
    while not ended:
        k += 1
        platform, (commit, _) = run_of_two()
        disk = platform.disk
        ended = not _died(disk, k, fault, commit)
        platform = platform.crash() if fault.kind == "power_cut" and not ended else FakePlatform(disk)
        there = platform.exists(f"{MIRROR}/checkpoints/{commit.folder}/manifest.json")
        unseen += not there
        assert not there or verify_commit(platform, MIRROR, commit) == [], k
        assert not _led_to(platform) or (there and _led_to(platform) == commit), k
        send(platform, RUN, commit, Folder(platform, MIRROR), ONE)
        platform = platform.crash()
        must_load(platform, MIRROR, commit)
        assert _led_to(platform) == commit
    assert there and unseen > 30


def _led_to(platform: FakePlatform) -> Commit | None:
    """What a restart would read in the mirror."""
    if not platform.exists(f"{MIRROR}/commits"):
        return None
    return CommitLog(platform, f"{MIRROR}/commits").restore_point()


def _died(disk: FakeDisk, k: int, fault: Fault, commit: Commit) -> bool:
    platform = FakePlatform(disk, faults=lambda op, path, n: fault if n == k else None)
    try:
        send(platform, RUN, commit, Folder(platform, MIRROR), ONE)
    except FakeCrash:
        return True
    return False


def test_a_damaged_checkpoint_is_not_copied() -> None:
    """A byte flipped in any file of the source ends the copy before there is a manifest; one flipped on the way is read
    again."""
    platform, (commit, _) = run_of_two()
    folder = f"{RUN}/checkpoints/{commit.folder}"
    for name in platform.listdir(folder):
        whole = platform.read(f"{folder}/{name}")
        with platform.reopen(f"{folder}/{name}") as file:
            file.write_at(len(whole) - 1, bytes([whole[-1] ^ 1]))
            mirror = Folder(platform, MIRROR)
            with pytest.raises((CheckpointDamaged, TransferDamaged)):
                send(platform, RUN, commit, mirror, ONE)
            assert "manifest.json" not in names(mirror), name
            file.write_at(0, whole)
    send(platform, RUN, commit, Folder(platform, MIRROR), ONE)
    must_load(platform, MIRROR, commit)


class Rotting(FakePlatform):
    """From some read of manifest.json on, its disk gives other bytes."""

    reads_left = 1

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        data = super().read(path, offset, size)
        if not path.endswith("manifest.json"):
            return data
        self.reads_left -= 1
        return data if self.reads_left >= 0 else data.replace(b'"seed":7', b'"seed":8')


def test_a_manifest_that_changes_is_not_copied() -> None:
    """A manifest that is another one when it is read for the copy than when the checkpoint was opened is not copied."""
    platform, (commit, _) = run_of_two()
    mirror = Folder(platform, MIRROR)
    with pytest.raises(CheckpointDamaged, match="not what was published"):
        send(Rotting(platform.disk), RUN, commit, mirror, ONE)
    assert names(mirror) == []


def test_a_damaged_copy_is_mended() -> None:
    """A byte flipped at rest in any file of the copy, or of the log beside it, is found by the next copy, and only that
    file is sent again."""
    platform, (commit, _) = run_of_two()
    mirror = Folder(platform, MIRROR)
    total = send(platform, RUN, commit, mirror, ONE).bytes_total
    everything = [name for name, _ in mirror.list_all("")]
    assert len(everything) == 3 + 2 + 1
    for name in everything:
        whole = platform.read(f"{MIRROR}/{name}")
        with platform.reopen(f"{MIRROR}/{name}") as file:
            file.write_at(len(whole) // 2, bytes([whole[len(whole) // 2] ^ 1]))
        done = send(platform, RUN, commit, mirror, ONE)
        assert (done.bytes_sent, done.bytes_kept) == (len(whole), total - len(whole)), name
        must_load(platform, MIRROR, commit)


def test_the_way_is_checked_too() -> None:
    """A bit flipped between source and target costs a repeat and nothing else."""
    platform, (commit, _) = run_of_two()
    target = Flipping(Folder(platform, MIRROR), flip("put", 0, 2))
    assert send(platform, RUN, commit, target, ONE).chunks_sent_again == 2
    must_load(platform, MIRROR, commit)


def test_another_runs_checkpoint_stays() -> None:
    """Where another run's checkpoint has the same name nothing is touched, and the copy is refused."""
    platform, (commit, _) = run_of_two()
    other = FakePlatform(FakeDisk())
    log = make_run(other)
    log.begin(None, ["r00000"], "a")
    publish_small(other, log, 1, 4)
    theirs = publish_small(other, log, 1, 5)
    assert theirs.folder == commit.folder and theirs.digest == commit.digest
    changed = other.read(f"{RUN}/checkpoints/{theirs.folder}/manifest.json").replace(b'"seed":7', b'"seed":8')
    mirror = Folder(platform, MIRROR)
    mirror.create(f"checkpoints/{commit.folder}/manifest.json", changed)
    with pytest.raises(NameTaken, match="another checkpoint"):
        send(platform, RUN, commit, mirror, ONE)
    assert names(mirror) == ["manifest.json"]
    assert open_checkpoint(platform, RUN, commit).manifest.seed == 7


def test_another_runs_place_is_refused() -> None:
    """Where another run's log lies, or this run's was gone on with, nothing is touched."""
    platform, (first, second) = run_of_two()
    mirror = Folder(platform, MIRROR)
    send(platform, RUN, first, mirror, ONE)
    CommitLog(platform, f"{MIRROR}/commits").begin(None, ["r00000"], "b")
    platform.mkdir("/other")
    CommitLog(platform, "/other/commits").probe()
    CommitLog(platform, "/other/commits").begin(None, ["r00000"], "b")
    for store in (mirror, Folder(platform, "/other")):
        before = list(store.list_all(""))
        with pytest.raises(NameTaken, match="another run has its log there"):
            send(platform, RUN, second, store, ONE)
        assert list(store.list_all("")) == before
    assert send(platform, RUN, first, mirror, ONE).bytes_sent == 0


def test_a_fork_behind_a_hole_stays() -> None:
    """Where a record is missing in a place that was gone on with, what lies behind it is not replaced; where the same
    history lies there, the missing record comes back."""
    platform, (_, second) = run_of_two()
    mirror, hole = Folder(platform, MIRROR), f"{MIRROR}/commits/{3:012d}"
    log = CommitLog(platform, f"{RUN}/commits")
    third = publish_small(platform, log, 1, 15)
    send(platform, RUN, third, mirror, ONE)
    platform.unlink(hole)
    send(platform, RUN, third, mirror, ONE)
    assert CommitLog(platform, f"{MIRROR}/commits").all() == log.all()
    for number in (4, 3):
        platform.unlink(f"{MIRROR}/commits/{number:012d}")
    CommitLog(platform, f"{MIRROR}/commits").begin(None, ["r00000"], "b")
    CommitLog(platform, f"{MIRROR}/commits").begin(None, ["r00000"], "b")
    platform.unlink(hole)
    before = {name: mirror.read(name, 0, size) for name, size in mirror.list_all("commits")}
    for commit in (second, third):
        with pytest.raises(NameTaken, match="another run has its log there"):
            send(platform, RUN, commit, mirror, ONE)
        assert {name: mirror.read(name, 0, size) for name, size in mirror.list_all("commits")} == before


@pytest.mark.parametrize("when", ["put", "create"])
def test_a_manifest_that_appears_meanwhile_stays(when: str) -> None:
    """Another checkpoint published under that name while the parts were on their way, or at the very moment this one's
    manifest is created, is not overwritten."""
    platform, (commit, _) = run_of_two()
    name = f"checkpoints/{commit.folder}/manifest.json"
    theirs = platform.read(f"{RUN}/{name}").replace(b'"seed":7', b'"seed":8')
    target = Meanwhile(Folder(platform, MIRROR), when, name, theirs)
    with pytest.raises(NameTaken):
        send(platform, RUN, commit, target, ONE)
    assert platform.read(f"{MIRROR}/{name}") == theirs


class Meanwhile(Flipping):
    """Somebody else creates an object right before the first chunk is put, or before it is created here."""

    def __init__(self, inner: Store, when: str, name: str, data: bytes) -> None:
        super().__init__(inner, self.touched)
        self._when, self._name, self._data = when, name, data

    def touched(self, what: str, number: int, data: bytes) -> bytes:
        if what == self._when and number == 0:
            self.inner.create(self._name, self._data)
        return data

    def create(self, name: str, data: bytes) -> None:
        if (self._when, self._name) == ("create", name):
            self.inner.create(name, self._data)
        super().create(name, data)


def test_what_was_not_copied_is_not_gone() -> None:
    """A place knows which of the log's saves were brought: the others are not missing there."""
    platform, (_, second) = run_of_two()
    send(platform, RUN, second, Folder(platform, MIRROR), ONE)
    found = survey(platform, MIRROR)
    assert set(found.copied) == {second.number} and len(found.commits) == second.number
    rows = listing(found, CheckpointConfig(), second)
    assert [(row.step, row.words()) for row in rows] == [(5, "not copied"), (10, "restored next")]


def test_a_deadline_is_of_all_that_is_sent() -> None:
    """Parts, manifest and log share one deadline."""
    platform, (commit, _) = run_of_two()
    platform.mkdir("/whole")
    began_ns = platform.boot_ns()
    send(platform, RUN, commit, Folder(platform, "/whole"), TransferConfig(threads=1, copy_bytes_per_s_max=100))
    needs_s = (platform.boot_ns() - began_ns) / NS
    began_ns, config = platform.boot_ns(), TransferConfig(1, copy_bytes_per_s_max=100, deadline_s=0.9 * needs_s)
    with pytest.raises(TransferLate):
        send(platform, RUN, commit, Folder(platform, MIRROR), config)
    assert 0.9 * needs_s <= (platform.boot_ns() - began_ns) / NS < needs_s
    send(platform, RUN, commit, Folder(platform, MIRROR), ONE)
    must_load(platform, MIRROR, commit)
