"""Folders and buckets keep one contract, and a folder keeps it through crashes."""

from __future__ import annotations

import errno
import pathlib
from collections.abc import Callable
from functools import partial

import pytest

from packtrain.core.errors import BadValue, NameAbsent, NameTaken, StoreHeld, StoreRefused, StoreUnreachable
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform, Fault, crash, explore, fail, power_cut
from packtrain.core.platform import LocalPlatform, Lock
from packtrain.core.stores import PAGE_NAMES_MAX, Folder, Plan, Store, StoreConfig, open_store
from tests.core.store_contract import CHECKS

KINDS: dict[str, Callable[[pathlib.Path], Store]] = {
    "folder": lambda path: open_store(LocalPlatform(), StoreConfig(f"file://{path}")),
    "fake folder": lambda path: Folder(FakePlatform(FakeDisk()), "/tmp"),
    "memory": lambda path: open_store(LocalPlatform(), StoreConfig("memory://")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", CHECKS)
def test_every_kind_keeps_the_contract(check: str, kind: str, tmp_path: pathlib.Path) -> None:
    """Small and large objects, absent names, names that lead elsewhere and listings, the same on every kind."""
    CHECKS[check](KINDS[kind](tmp_path))


@pytest.mark.parametrize("kind", ["fake folder", "memory"])
def test_listings_have_pages(kind: str, tmp_path: pathlib.Path) -> None:
    """More names than fit a page come in several, none twice and none left out."""
    store = KINDS[kind](tmp_path)
    names = [f"f{i:05d}" for i in range(PAGE_NAMES_MAX + 2)]
    for name in names:
        store.create(name, b"")
    first = store.list("")
    assert len(first.names) == PAGE_NAMES_MAX and first.after
    assert [name for name, _ in store.list_all("")] == names


def test_a_folder_that_is_gone_is_not_empty() -> None:
    """Where the folder itself is missing (a disk that is not mounted) nothing is absent: every question is an error,
    and nothing is made in its place."""
    platform = FakePlatform(FakeDisk())
    store = Folder(platform, "/tmp/mount")
    for ask in (
        lambda: store.size("a"), lambda: store.read("a", 0, 1), lambda: store.exists("a"), lambda: store.list(""),
        lambda: store.create("a", b"x"), lambda: store.upload(Plan("a", 1, 1)), lambda: store.erase("a"),
    ):
        with pytest.raises(StoreUnreachable, match="this folder is not there"):
            ask()
    assert not platform.exists("/tmp/mount")


def test_a_file_is_no_folder() -> None:
    """A file where the folder should be is refused: it will not become one by waiting, as a mount may."""
    platform = FakePlatform(FakeDisk())
    platform.write_new("/tmp/file", b"x")
    store = Folder(platform, "/tmp/file")
    for ask in (
        lambda: store.size("a"), lambda: store.read("a", 0, 1), lambda: store.list(""), lambda: store.create("a", b"x"),
        lambda: store.upload(Plan("a", 1, 1)),
    ):
        with pytest.raises(StoreRefused, match="this is a file, not a folder"):
            ask()


@pytest.mark.parametrize(
    ("code", "expected"), [(errno.EACCES, StoreRefused), (errno.EROFS, StoreRefused), (errno.EIO, StoreUnreachable),
                           (errno.ENOSPC, StoreUnreachable), (errno.ESTALE, StoreUnreachable)],
)
def test_a_disks_errors_are_told_apart(code: int, expected: type[Exception]) -> None:
    """What the disk will never do is refused; what it cannot do now is unreachable; neither is an absence."""
    strike = lambda op, path, n: fail(code) if n and op not in ("is_dir", "mkdir") else None  # noqa: E731
    store = Folder(FakePlatform(FakeDisk(), faults=strike), "/tmp")
    for ask in (lambda: store.size("a"), lambda: store.read("a", 0, 1), lambda: store.create("a", b"x")):
        with pytest.raises(expected):
            ask()


def test_a_create_is_whole_or_absent_after_any_crash() -> None:
    """Killed at any operation, or with the power cut there, a create leaves the whole object or none; once it has
    returned, the object outlives a power cut."""
    for kind in (crash(), power_cut()):
        for k in range(1, 40):
            disk = FakeDisk()
            FakePlatform(disk).mkdir("/tmp/store")
            disk.sync_all()
            ended = _dies_at(disk, k, kind, lambda platform: Folder(platform, "/tmp/store").create("a/b", b"whole"))
            for choices in explore(limit=200):
                left = Folder(FakePlatform(disk.after_power_cut(choices)) if kind.kind == "power_cut" or ended
                              else FakePlatform(disk), "/tmp/store")
                found = left.read("a/b", 0, 99) if left.exists("a/b") else None
                assert found in ((b"whole",) if ended else (None, b"whole")), (k, choices)
                if kind.kind == "crash" and not ended:
                    break
            if ended:
                break
        assert ended


def test_an_upload_killed_anywhere_is_gone_on_with() -> None:
    """Killed at any operation, a large upload is never visible in part; the next process sends only what is not there:
    after k whole chunks at most one of them again."""
    data = bytes(range(40))
    plan = Plan("a/b", len(data), 8)
    sent_again = []
    for k in range(1, 60):
        disk = FakeDisk()
        arrived: list[int] = []
        send = partial(_send_from, plan, data, arrived)
        ended = _dies_at(disk, k, crash(), send)
        store = Folder(FakePlatform(disk), "/tmp")
        assert not store.exists("a/b") or store.read("a/b", 0, 99) == data
        if ended:
            break
        if not store.exists("a/b"):
            again: list[int] = []
            _send(store, plan, data, again)
            sent_again.append(len(set(arrived) & set(again)))
        assert store.read("a/b", 0, 99) == data
    assert ended and max(sent_again) == 0


def test_an_upload_with_other_content_in_its_way() -> None:
    """A chunk that an earlier process left damaged is not taken for good."""
    platform = FakePlatform(FakeDisk())
    store, plan = Folder(platform, "/tmp"), Plan("f", 16, 8)
    first = store.upload(plan)
    first.put(0, b"damaged!")
    first.leave()
    upload = store.upload(plan)
    assert upload.has(0, b"damaged!".__eq__) and not upload.has(0, b"intended".__eq__)
    assert not upload.has(1, b"intended".__eq__)


def test_of_two_finishes_one_is_told() -> None:
    """A name that appeared while a large object was on its way is not overwritten."""
    store = Folder(FakePlatform(FakeDisk()), "/tmp")
    upload = store.upload(Plan("f", 3, 8))
    upload.put(0, b"mine")
    store.create("f", b"theirs")
    with pytest.raises(NameTaken):
        upload.finish(replace=False)
    assert store.read("f", 0, 99) == b"theirs"
    with pytest.raises(NameAbsent):
        store.size("g")


def test_what_fsync_refused_is_not_believed() -> None:
    """After a failed fsync the cache still shows what never reached the disk, and the next fsync says that all is well:
    nothing of that file is taken for arrived, and a power cut after the next copy leaves it whole."""
    disk, asked = FakeDisk(), []
    plan, data = Plan("f", 16, 8), b"all of the bytes"

    def faults(op: str, path: str, n: int) -> Fault | None:
        if op == "fsync":
            asked.append(path)
        return fail(errno.EIO) if op == "fsync" and len(asked) == 1 else None

    store = Folder(FakePlatform(disk, faults=faults), "/tmp")
    with pytest.raises(StoreUnreachable):
        _send(store, plan, data, [])
    assert disk.find_dir("/tmp").names == {}
    sent: list[int] = []
    _send(store, plan, data, sent)
    assert sent == [0, 1]
    assert Folder(FakePlatform(disk).crash(), "/tmp").read("f", 0, 99) == data


@pytest.mark.parametrize("kind", ["folder", "fake folder"])
def test_two_cannot_fill_one_name(kind: str, tmp_path: pathlib.Path) -> None:
    """While one writes a name, whoever begins another object of that name is refused and told who it is; what is
    published afterwards is the first one's; the next may then begin, and no lock is left behind."""
    store = KINDS[kind](tmp_path)
    first = store.upload(Plan("a/f", 4, 4))
    for plan in (Plan("a/f", 4, 4), Plan("a/f", 9, 4)):
        with pytest.raises(StoreHeld, match=r"process \d+ on .* is writing it"):
            store.upload(plan)
    store.upload(Plan("a/g", 4, 4)).leave()
    first.put(0, b"AAAA")
    first.finish(replace=False)
    second = store.upload(Plan("a/f", 4, 4))
    second.put(0, b"BBBB")
    assert store.read("a/f", 0, 99) == b"AAAA"
    second.finish(replace=True)
    second.leave()
    assert store.read("a/f", 0, 99) == b"BBBB"
    with pytest.raises(StoreUnreachable, match="was left"):
        first.put(0, b"CCCC")


def test_a_put_that_hangs_keeps_its_name() -> None:
    """Who leaves while a thread of its hangs in the disk keeps others out until that thread is back: its late write
    must not land in what they publish."""
    disk, late = FakeDisk(), []

    def faults(op: str, path: str, n: int) -> None:
        if op == "write_at":
            upload.leave()
            with pytest.raises(StoreHeld):
                other.upload(plan)
            late.append(path)

    plan, other = Plan("f", 4, 4), Folder(FakePlatform(disk), "/tmp")
    upload = Folder(FakePlatform(disk, faults=faults), "/tmp").upload(plan)
    upload.put(0, b"AAAA")
    upload.leave()
    assert late and sorted(disk.find_dir("/tmp").names) == [".new-4-4-f"]
    other.upload(plan).finish(replace=False)
    assert other.read("f", 0, 9) == b"AAAA"


class _Sweeping(LocalPlatform):
    """The one who held the first lock asked for takes its name away right before it goes."""

    sweeps = 1

    def lock(self, path: str, note: str) -> Lock | None:
        lock = super().lock(path, note)
        if self.sweeps:
            self.sweeps -= 1
            self.unlink(path)
        return lock


def test_a_lock_on_a_name_that_went_is_no_lock(tmp_path: pathlib.Path) -> None:
    """A lock file is taken away by its holder; who opened it before and locks it after has nothing, and asks again."""
    upload = Folder(_Sweeping(), str(tmp_path)).upload(Plan("f", 4, 4))
    with pytest.raises(StoreHeld):
        Folder(LocalPlatform(), str(tmp_path)).upload(Plan("f", 4, 4))
    upload.leave()
    assert list(tmp_path.glob(".new-lock-*")) == []


def test_the_root_is_a_folder_too() -> None:
    """`/` holds names like any folder; a path of nothing is refused, for it is a slip."""
    disk = FakeDisk()
    store = Folder(FakePlatform(disk, faults=lambda op, path, n: crash() if n > 200 else None), "/")
    store.create("tmp/a/small", b"x")
    _send(store, Plan("tmp/large", 4, 4), b"data", [])
    assert [name for name, _ in store.list_all("tmp")] == ["tmp/a/small", "tmp/large"]
    assert {name for _, op, name in disk.trace if op == "fsync_dir"} == {"/", "/tmp", "/tmp/a"}
    for url in ("", "file://"):
        with pytest.raises(BadValue, match="without a path"):
            open_store(LocalPlatform(), StoreConfig(url))


def _dies_at(disk: FakeDisk, k: int, fault: Fault, act: Callable[[FakePlatform], None]) -> bool:
    """Whether `act` came to its end before its k-th operation."""
    try:
        act(FakePlatform(disk, faults=lambda op, path, n: fault if n == k else None))
    except FakeCrash:
        return False
    return True


def _send_from(plan: Plan, data: bytes, sent: list[int], platform: FakePlatform) -> None:
    _send(Folder(platform, "/tmp"), plan, data, sent)


def _send(store: Store, plan: Plan, data: bytes, sent: list[int]) -> None:
    """Upload what is not there; `sent` tells which chunks arrived."""
    upload = store.upload(plan)
    for index in range(plan.chunks):
        offset, size = plan.span(index)
        chunk = data[offset : offset + size]
        if not upload.has(index, chunk.__eq__):
            upload.put(index, chunk)
            sent.append(index)
    upload.finish(replace=False)
