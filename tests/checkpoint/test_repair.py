"""What is bad in a published checkpoint comes back from a copy of it, and nothing else is fetched or touched."""

from __future__ import annotations

import errno
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.copies import send
from packtrain.checkpoint.reader import open_checkpoint, verify_commit
from packtrain.checkpoint.repair import AWAY, Outcome, Places, repair
from packtrain.core.errors import CheckpointGone, RunHeld, RunUnusable
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform, Fault, crash, power_cut
from packtrain.core.holder import hold
from packtrain.core.platform import LocalPlatform
from packtrain.core.stores import Folder, Store, StoreConfig, open_store
from packtrain.core.transfer import TransferConfig
from tests.checkpoint.worlds import RUN, image_of, make_run, tensor_of
from tests.core.flips import Flipping

MIRROR, SECOND = "/mirror", "/second"
BLOCK = 4096
"""Of the images here. Ours write larger ones; smaller ones are allowed, and make these tests quick."""
ONE = TransferConfig(threads=1)


@cache
def images() -> list[list[fmt.LocalTensor]]:
    """Two writers: one of two blocks, the last short, one of a few bytes."""
    big = tensor_of("big", "uint8", (BLOCK + 1000,))
    return [[big, tensor_of("scale", "float32", (3,))], [tensor_of("own", "int64", (5,))]]


@cache
def pristine() -> tuple[dict[str, bytes], Commit]:
    """Every file of a run with one checkpoint, and of a copy of it."""
    platform = FakePlatform(FakeDisk())
    log = make_run(platform)
    log.begin(0, ("r00000", "r00001"), "a")
    name = str(fmt.FolderName(1, 1, 1))
    platform.mkdir(f"{RUN}/checkpoints/{name}")
    parts = [written(platform, f"{RUN}/checkpoints/{name}", f"r{i:05d}", images()[i]) for i in range(2)]
    specs = [piece.spec for pieces in images() for piece in pieces]
    manifest = fmt.encode(fmt.Manifest(step=1, attempt=1, tensors=specs, parts=parts, seed=7))
    platform.write_new(f"{RUN}/checkpoints/{name}/{fmt.MANIFEST}", manifest)
    commit = log.publish(1, 1, fmt.sha256(manifest), name)
    platform.mkdir(MIRROR)
    send(platform, RUN, commit, Folder(platform, MIRROR), ONE)
    names = [f"{root}/{name}" for root in (RUN, MIRROR) for name, _ in Folder(platform, root).list_all("")]
    return {name: platform.read(name) for name in names}, commit


def written(platform: FakePlatform, folder: str, writer: str, pieces: list[fmt.LocalTensor]) -> fmt.PartEntry:
    """An image and its table."""
    layout, image = image_of(pieces)
    sums = [fmt.crc32c(image[at : at + BLOCK]) for at in range(0, len(image), BLOCK)]
    table = fmt.encode(fmt.PartTable(
        format=fmt.FORMAT, writer=writer, file=fmt.image_name(writer), bytes=len(image), sha256=fmt.sha256(image),
        block_bytes=BLOCK, crc32c=sums, boxes=list(layout.boxes),
    ))
    platform.write_new(f"{folder}/{fmt.image_name(writer)}", image)
    platform.write_new(f"{folder}/{fmt.table_name(writer)}", table)
    return fmt.PartEntry(writer, len(image), fmt.sha256(image), len(table), fmt.sha256(table))


def world() -> FakePlatform:
    """Those files on a disk of their own, durable."""
    platform = FakePlatform(FakeDisk())
    for path, data in pristine()[0].items():
        platform.mkdir(path.rpartition("/")[0])
        platform.disk.create(path).data[:] = data
    platform.disk.sync_all()
    return platform


COMMIT = pristine()[1]
FOLDER = f"{RUN}/checkpoints/{COMMIT.folder}"
IMAGE = f"{FOLDER}/part-r00000.safetensors"
FILES = sorted(path for path in pristine()[0] if path.startswith(FOLDER))


def data_of(platform: FakePlatform, path: str) -> bytearray:
    return platform.disk.find_file(path).data


def mirror(platform: FakePlatform, folder: str = MIRROR) -> Flipping:
    """The copy, through a line that counts."""
    return Flipping(Folder(platform, folder))


def mend(platform: FakePlatform, *stores: Store) -> Outcome:
    return repair(platform, RUN, COMMIT, Places(platform, stores or [mirror(platform)]))


def must_be_whole(platform: FakePlatform) -> None:
    """Every file of the checkpoint is the published one, and nothing lies beside them."""
    assert verify_commit(platform, RUN, COMMIT) == []
    assert [f"{FOLDER}/{name}" for name in platform.listdir(FOLDER)] == FILES
    assert all(bytes(data_of(platform, path)) == pristine()[0][path] for path in FILES)


def test_files_here() -> None:
    """The world of these tests is what it says: two images, one of two blocks, tables, a manifest, a whole copy."""
    platform = world()
    must_be_whole(platform)
    assert len(FILES) == 5 and -(-len(data_of(platform, IMAGE)) // BLOCK) == 2
    assert mend(platform) == Outcome() and verify_commit(platform, MIRROR, COMMIT) == []


def needed(platform: FakePlatform) -> int:
    """Bytes of the blocks and small files that are bad, told by looking at them: what a repair may fetch."""
    total = 0
    for path in FILES:
        good = pristine()[0][path]
        here = bytes(data_of(platform, path)) if platform.exists(path) else b""
        size = BLOCK if path.endswith(".safetensors") else 1 << 20
        here = here[: len(good)] if size == BLOCK else here  # what an image has too much needs no fetching
        spans = [slice(at, at + size) for at in range(0, len(good), size)]
        total += sum(len(good[span]) for span in spans if here[span] != good[span])
    return total


@pytest.mark.parametrize(
    ("offset", "block"), [(0, 0), (BLOCK - 1, 0), (BLOCK, 1)], ids=["header", "end of a block", "its neighbour"],
)
def test_one_flipped_byte_costs_one_block(offset: int, block: int) -> None:
    """A flipped byte of an image: that block alone is fetched, and the damage is told by file, tensor and range."""
    platform, place = world(), Flipping(Folder(world(), MIRROR))
    data_of(platform, IMAGE)[offset] ^= 1
    wanted = needed(platform)
    done = mend(platform, place)
    (damage,) = done.damage
    assert damage.file == "part-r00000.safetensors" and "big" in damage.tensors and "own" not in damage.tensors
    assert f"1 of 2 blocks cannot be used, the first is bytes {block * BLOCK}.." in damage.what
    assert place.bytes["read"] == done.bytes_fetched == wanted <= BLOCK and done.left == []
    must_be_whole(platform)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.rpartition("/")[2])
def test_a_file_that_is_gone_comes_back(path: str) -> None:
    """Any file deleted, or turned into rubbish: it and nothing else is fetched."""
    platform = world()
    for ruin in (platform.unlink, lambda path: platform.disk.overwrite(platform.disk.find_file(path), b"rubbish")):
        ruin(path)
        done = mend(platform)
        assert [damage.file for damage in done.damage] == [path.rpartition("/")[2]] and done.left == []
        assert done.bytes_fetched == len(pristine()[0][path])
        must_be_whole(platform)


def test_a_folder_that_is_gone_comes_back() -> None:
    """All of it deleted: all of it is fetched, from a bucket as from a folder, and outlives a power cut."""
    bucket = open_store(LocalPlatform(), StoreConfig("memory://"))
    send(world(), RUN, COMMIT, bucket, ONE)
    for store in (None, bucket):
        platform = world()
        for path in FILES:
            platform.unlink(path)
        platform.rmdir(FOLDER)
        platform.rmdir(f"{RUN}/checkpoints")
        platform.disk.sync_all()
        done = mend(platform, *([store] if store else []))
        assert len(done.damage) == 5 and done.bytes_fetched == sum(len(pristine()[0][path]) for path in FILES)
        must_be_whole(platform.crash())


def test_what_is_good_is_not_written() -> None:
    """Files that are whole keep their very inodes; one whose only fault is bytes too many needs no place at all."""
    platform = world()
    before = {path: platform.disk.find_file(path) for path in FILES}
    data_of(platform, IMAGE).extend(b"more")
    done = repair(platform, RUN, COMMIT, Places(platform, []))
    assert done.bytes_fetched == 0 and "bytes long" in done.damage[0].what
    must_be_whole(platform)
    assert [path for path in FILES if platform.disk.find_file(path) is not before[path]] == [IMAGE]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_damage_is_mended(data: st.DataObject) -> None:
    """Whatever is flipped, cut, grown, deleted or exchanged in however many files: a copy mends it, and no more is
    fetched than bad blocks and small files."""
    platform = world()
    for _ in range(data.draw(st.integers(1, 4))):
        there = [path for path in FILES if platform.exists(path) and data_of(platform, path)]
        if there:
            ruin(platform, data.draw, there)
    wanted = needed(platform)
    place = mirror(platform)
    done = mend(platform, place)
    assert done.left == [] and place.bytes["read"] == done.bytes_fetched <= wanted
    must_be_whole(platform)


def ruin(platform: FakePlatform, draw: st.DrawFn, there: list[str]) -> None:
    path = draw(st.sampled_from(there))
    content = data_of(platform, path)
    match draw(st.sampled_from(["flip", "cut", "grow", "delete", "swap"])):
        case "flip":
            content[draw(st.integers(0, len(content) - 1))] ^= draw(st.integers(1, 255))
        case "cut":
            del content[draw(st.integers(0, len(content) - 1)) :]
        case "grow":
            content += draw(st.binary(min_size=1, max_size=9))
        case "delete":
            platform.unlink(path)
        case "swap":
            other = platform.disk.find_file(draw(st.sampled_from(there)))
            node = platform.disk.find_file(path)
            node.data, other.data = other.data, node.data


# --- places ------------------------------------------------------------------------------------------


def two_copies() -> FakePlatform:
    platform = world()
    platform.mkdir(SECOND)
    send(platform, MIRROR, COMMIT, Folder(platform, SECOND), ONE)
    data_of(platform, IMAGE)[5] ^= 1
    return platform


@pytest.mark.parametrize("how", ["damaged there, too", "no such name", "not there"])
def test_a_bad_place_is_passed_over(how: str) -> None:
    """The first place has that very block damaged, or has no such file, or is not there: the next one gives it."""
    platform = two_copies()
    there = IMAGE.replace(RUN, MIRROR, 1)
    first = mirror(platform)
    if how == "damaged there, too":
        data_of(platform, there)[9] ^= 1
    elif how == "no such name":
        platform.unlink(there)
    else:
        first = mirror(platform, "/unmounted")
    places = Places(platform, [first, mirror(platform, SECOND)])
    done = repair(platform, RUN, COMMIT, places)
    assert done.left == [] and how in places.refused[first.url].what and list(places.refused) == [first.url]
    assert places.fetched[SECOND] == BLOCK
    must_be_whole(platform)


def test_two_bad_places_make_one_good_one() -> None:
    """Of two blocks that are bad here each place has one whole: together they mend it."""
    platform = two_copies()
    data_of(platform, IMAGE)[BLOCK + 5] ^= 1
    data_of(platform, IMAGE.replace(RUN, MIRROR, 1))[5] ^= 2
    data_of(platform, IMAGE.replace(RUN, SECOND, 1))[BLOCK + 5] ^= 2
    assert mend(platform, mirror(platform), mirror(platform, SECOND)).left == []
    must_be_whole(platform)


def test_what_nobody_has_stays_and_is_told() -> None:
    """A block that no place has whole stays bad, its file untouched; the rest is mended, and a manifest that was gone
    does not come back beside it: a checkpoint that is not whole does not open."""
    platform = world()
    data_of(platform, IMAGE)[5] ^= 1
    bad = bytes(data_of(platform, IMAGE))
    for path in FILES[:1] + FILES[-1:]:
        platform.unlink(path)
    data_of(platform, IMAGE.replace(RUN, MIRROR, 1))[6] ^= 1
    done = mend(platform)
    assert [damage.file for damage in done.left] == ["part-r00000.safetensors", "manifest.json"]
    assert bytes(data_of(platform, IMAGE)) == bad and not platform.exists(f"{FOLDER}/manifest.json")
    assert platform.read(FILES[-1]) == pristine()[0][FILES[-1]] and len(platform.listdir(FOLDER)) == 4
    data_of(platform, IMAGE.replace(RUN, MIRROR, 1))[6] ^= 1
    assert mend(platform).left == []
    must_be_whole(platform)


def test_a_place_that_does_not_answer_is_left_alone() -> None:
    """A place that is away is asked a few times and then no more, however many blocks are bad."""
    platform = two_copies()
    for path in FILES[1:]:
        platform.unlink(path)
    away = mirror(platform, "/unmounted")
    asked = []
    away.read = lambda name, offset, size: asked.append(name) or Folder(platform, "/unmounted").read(name, 0, 1)
    assert mend(platform, away, mirror(platform, SECOND)).left == []
    assert len(asked) == AWAY
    must_be_whole(platform)


@pytest.mark.parametrize("more", [False, True], ids=["alone", "beside a bad block"])
def test_a_block_whose_checksum_lies(more: bool) -> None:
    """Bytes that agree with every block's crc32c and not with the SHA-256 of the whole are found, beside a block that
    is plainly bad as well, and mended by fetching all of them."""
    platform = world()
    if more:
        data_of(platform, IMAGE)[-1] ^= 1
    done = repair(Forgetful(platform.disk), RUN, COMMIT, Places(platform, [mirror(platform)]))
    size = len(pristine()[0][IMAGE])
    assert done.left == [] and done.bytes_fetched == size + more * (size - BLOCK)
    assert ("1 of 2 blocks" if more else "SHA-256 differs although") in done.damage[0].what
    must_be_whole(platform)


class Forgetful(FakePlatform):
    """Its disk gives another byte in a way that crc32c does not see: four bytes more that undo it."""

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        data = super().read(path, offset, size)
        return colliding(data) if path == IMAGE and offset == 0 else data


@cache
def colliding(data: bytes) -> bytes:
    """The same first block but for its last five bytes, of the same crc32c: the last four are solved for."""
    good = pristine()[0][IMAGE][:BLOCK]
    wanted, head = fmt.crc32c(good), good[:-5] + bytes([good[-5] ^ 1])
    base = fmt.crc32c(head + bytes(4))
    rows = [(fmt.crc32c(head + (1 << i).to_bytes(4, "little")) ^ base, 1 << i) for i in range(32)]
    left, chosen = wanted ^ base, 0
    for bit in reversed(range(32)):  # Gauss, over bits
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows.remove(pivot)
        rows = [(a ^ pivot[0], b ^ pivot[1]) if a >> bit & 1 else (a, b) for a, b in rows]
        if left >> bit & 1:
            left, chosen = left ^ pivot[0], chosen ^ pivot[1]
    assert left == 0
    return head + chosen.to_bytes(4, "little")


# --- the disk and others -----------------------------------------------------------------------------


class BadSector(FakePlatform):
    """Reading the second block of the image fails."""

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        if path == IMAGE and offset == BLOCK:
            raise OSError(errno.EIO, "Input/output error", path)
        return super().read(path, offset, size)


def test_a_disk_that_refuses_a_block() -> None:
    """A bad sector: reading one block gives EIO, which counts as damage here; the new file is written elsewhere."""
    platform = world()
    before = platform.disk.find_file(IMAGE)
    done = repair(BadSector(platform.disk), RUN, COMMIT, Places(platform, [mirror(platform)]))
    assert done.left == [] and done.bytes_fetched == len(pristine()[0][IMAGE]) - BLOCK
    assert "1 of 2 blocks cannot be used" in done.damage[0].what and platform.disk.find_file(IMAGE) is not before
    must_be_whole(platform)


def test_a_full_disk_is_one_message() -> None:
    """Where the mended image has no room the error names file and remedy, nothing is changed and nothing stays."""
    platform = world()
    data_of(platform, IMAGE)[5] ^= 1
    platform.disk.capacity_bytes = platform.disk.used_bytes
    with pytest.raises(RunUnusable, match="No space left") as caught:
        mend(platform)
    assert "free space" in caught.value.fix
    platform.disk.capacity_bytes = 1 << 40
    assert [f"{FOLDER}/{name}" for name in platform.listdir(FOLDER)] == FILES
    assert mend(platform).left == []
    must_be_whole(platform)


def test_two_repairs_of_one_run() -> None:
    """The second is refused with the first one's name, and touches nothing."""
    platform = world()
    lock = hold(platform, RUN, "packtrain ckpt repair", file="repairing")
    with pytest.raises(RunHeld, match="packtrain ckpt repair"):
        mend(FakePlatform(platform.disk, "b"), mirror(platform))
    lock.release()
    assert mend(platform) == Outcome()


@pytest.mark.parametrize("mark", ["purging", "json"])
def test_what_retention_took_stays_away(mark: str) -> None:
    """A checkpoint that was purged, or whose purge has begun, is not brought back."""
    platform = world()
    for path in FILES if mark == "json" else []:
        platform.unlink(path)
    platform.rmdir(FOLDER) if mark == "json" else None
    platform.mkdir(f"{RUN}/tombstones")
    platform.write_new(f"{RUN}/tombstones/{COMMIT.folder}.{mark}", b"")
    with pytest.raises(CheckpointGone):
        mend(platform)
    assert platform.exists(FOLDER) == (mark == "purging")


# --- kills -------------------------------------------------------------------------------------------


def gone_small() -> FakePlatform:
    """Rubble: an image with a bad block, another that is gone, a bad table, no manifest."""
    platform = world()
    data_of(platform, IMAGE)[5] ^= 1
    for name in ("part-r00001.safetensors", "manifest.json"):
        platform.unlink(f"{FOLDER}/{name}")
    data_of(platform, f"{FOLDER}/part-r00001.json")[5] ^= 1
    platform.disk.sync_all()
    return platform


@pytest.mark.parametrize("fault", [crash(), power_cut()], ids=["kill", "power cut"])
def test_killed_at_every_operation(fault: Fault) -> None:
    """Killed anywhere, each file is what it was or what was published, never anything between, and the checkpoint
    opens only when it is whole; the next repair ends it."""
    before = {path: bytes(data_of(gone_small(), path)) for path in FILES if gone_small().exists(path)}
    ended, k, halfway = False, 0, 0
    while not ended:
        k += 1
        platform = gone_small()
        ended = not _died(platform.disk, k, fault)
        platform = platform.crash() if fault.kind == "power_cut" and not ended else FakePlatform(platform.disk)
        now = {path: bytes(data_of(platform, path)) for path in FILES if platform.exists(path)}
        for path in FILES:
            assert now.get(path) in (before.get(path), pristine()[0][path]), (k, path)
        halfway += now not in (before, pristine()[0])
        if f"{FOLDER}/manifest.json" in now:
            assert verify_commit(platform, RUN, COMMIT) == [], k
        assert mend(platform).left == [], k
        must_be_whole(platform.crash())
    assert k > 50 and halfway > 10


def _died(disk: FakeDisk, k: int, fault: Fault) -> bool:
    platform = FakePlatform(disk, faults=lambda op, path, n: fault if n == k else None)
    try:
        mend(platform, mirror(FakePlatform(disk, "other")))
    except FakeCrash:
        return True
    return False


def test_a_reader_sees_old_or_new() -> None:
    """Who has the checkpoint open while it is mended reads right bits before and after, by the same object."""
    platform = world()
    checkpoint = open_checkpoint(platform, RUN, COMMIT)
    data_of(platform, IMAGE)[BLOCK + 700] ^= 1
    assert [damage.file for damage in checkpoint.verify()] == ["part-r00000.safetensors"]
    mend(platform)
    assert checkpoint.verify() == [] and CommitLog(platform, f"{RUN}/commits").restore_point() == COMMIT
