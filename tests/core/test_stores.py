"""Folders and buckets keep one contract, and a folder keeps it through crashes."""

from __future__ import annotations

import errno
import pathlib
from collections.abc import Callable
from functools import partial

import pytest

from packtrain.core.errors import NameAbsent, NameTaken, StoreRefused, StoreUnreachable
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform, Fault, crash, explore, fail, power_cut
from packtrain.core.platform import LocalPlatform
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
    store.upload(plan).put(0, b"damaged!")
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
