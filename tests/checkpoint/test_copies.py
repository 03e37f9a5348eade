"""A copied checkpoint is whole where its manifest is, and is no checkpoint where it is not."""

from __future__ import annotations

import pytest

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.copies import send
from packtrain.checkpoint.reader import open_checkpoint, verify_commit
from packtrain.core.errors import CheckpointDamaged, NameTaken, TransferDamaged
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform, Fault, crash, power_cut
from packtrain.core.platform import LocalPlatform
from packtrain.core.stores import Folder, Store, StoreConfig, open_store
from packtrain.core.transfer import TransferConfig
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
            assert done.bytes_sent == done.bytes_checked == done.bytes_total > 0
            assert send(platform, RUN, commit, store, ONE).bytes_sent == 0
        must_load(platform, MIRROR, commit)
    assert sorted(names(bucket)) == sorted(names(mirror)) and len(names(mirror)) == 6
    for name, size in mirror.list_all(""):
        assert bucket.read(name, 0, size + 1) == mirror.read(name, 0, size)


@pytest.mark.parametrize("fault", [crash(), power_cut()], ids=["kill", "power cut"])
def test_killed_at_every_operation(fault: Fault) -> None:
    """Killed anywhere, the copy has no manifest, or is whole; the next one ends it."""
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
        send(platform, RUN, commit, Folder(platform, MIRROR), ONE)
        must_load(platform, MIRROR, commit)
    assert there and unseen > 30


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
    """A byte flipped at rest in any file of the copy is found by the next copy, and only that file is sent again."""
    platform, (commit, _) = run_of_two()
    mirror = Folder(platform, MIRROR)
    total = send(platform, RUN, commit, mirror, ONE).bytes_total
    folder = f"{MIRROR}/checkpoints/{commit.folder}"
    for name in platform.listdir(folder):
        whole = platform.read(f"{folder}/{name}")
        with platform.reopen(f"{folder}/{name}") as file:
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
