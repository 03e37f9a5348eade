"""What every Store must do, whichever kind: checks that the tests run over fakes and the soak over real servers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from packtrain.core.errors import NameAbsent, NameTaken, StoreRefused
from packtrain.core.stores import Plan, Store

CHUNK_BYTES = 5 << 20
"""The smallest part that S3 takes."""


def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes that differ from block to block."""
    return b"".join((seed * 1_000_003 + i).to_bytes(8, "little") for i in range(-(-size // 8)))[:size]


def small_objects(store: Store) -> None:
    """What was created is read back whole and in ranges, beyond its end there is nothing, and a second create is
    refused without a trace."""
    store.create("a/small", b"0123456789")
    assert store.size("a/small") == 10 and store.exists("a/small")
    assert store.read("a/small", 0, 10) == b"0123456789"
    assert store.read("a/small", 3, 4) == b"3456"
    assert store.read("a/small", 8, 10) == b"89"
    assert store.read("a/small", 10, 5) == store.read("a/small", 3, 0) == b""
    with pytest.raises(NameTaken):
        store.create("a/small", b"other")
    assert store.read("a/small", 0, 99) == b"0123456789"
    store.create("a/empty", b"")
    assert store.size("a/empty") == 0 and store.read("a/empty", 0, 5) == b""


def absent_names(store: Store) -> None:
    """A name that is not there is NameAbsent for whoever asks, False for `exists`, and no error to erase."""
    for name in ("nothing", "no/such/name"):
        with pytest.raises(NameAbsent):
            store.size(name)
        with pytest.raises(NameAbsent):
            store.read(name, 0, 1)
        assert not store.exists(name)
        store.erase(name)


def names_that_lead_elsewhere(store: Store) -> None:
    """No name leads out of the store or to what is not whole."""
    too_long = ("x" * 201, "a/" * 600 + "b")
    for name in ("", "/etc/passwd", "..", "a/../b", "a//b", "a/", "a/.new-x", "a b", "a\nb", *too_long):
        with pytest.raises(StoreRefused):
            store.read(name, 0, 1)
        with pytest.raises(StoreRefused):
            store.create(name, b"x")


def large_objects(store: Store) -> None:
    """A large object is not visible before it is finished, whole afterwards, and replaced only where that is said."""
    data = pattern(2 * CHUNK_BYTES + 12345)
    plan = Plan("large/object", len(data), CHUNK_BYTES)
    assert plan.chunks == 3
    upload = store.upload(plan)
    assert not any(upload.has(i, data[o : o + n].__eq__) for i, o, n in spans(plan))
    for i, offset, size in spans(plan):
        upload.put(i, data[offset : offset + size])
        assert not store.exists("large/object") and store.list("large").names == ()
        assert not upload.shows or upload.look(i) == data[offset : offset + size]
    upload.finish(replace=False)
    assert store.read("large/object", 0, len(data) + 1) == data
    assert store.list("large").names == (("large/object", len(data)),)
    other = store.upload(Plan("large/object", 3, CHUNK_BYTES))
    other.put(0, b"new")
    with pytest.raises(NameTaken):
        other.finish(replace=False)
    assert store.size("large/object") == len(data)
    again = store.upload(Plan("large/object", 3, CHUNK_BYTES))
    again.put(0, b"new")
    again.finish(replace=True)
    assert store.read("large/object", 0, 99) == b"new"


def listing(store: Store) -> None:
    """A listing gives every name under a folder once, in order, with its size; a folder is no mere prefix of names."""
    for i in range(30):
        store.create(f"list/d{i % 3}/f{i:02d}", b"x" * i)
    store.create("list2/f", b"x")
    expected = sorted((f"list/d{i % 3}/f{i:02d}", i) for i in range(30))
    assert list(store.list_all("list")) == expected
    assert list(store.list("list", after=expected[11][0]).names) == expected[12:]
    assert list(store.list_all("list/d1")) == [item for item in expected if "/d1/" in item[0]]
    assert list(store.list_all("nowhere")) == []
    store.erase("list/d0/f00")
    assert not store.exists("list/d0/f00") and list(store.list_all("list")) == expected[1:]


def spans(plan: Plan) -> list[tuple[int, int, int]]:
    return [(i, *plan.span(i)) for i in range(plan.chunks)]


CHECKS: dict[str, Callable[[Store], None]] = {
    check.__name__: check
    for check in (small_objects, absent_names, names_that_lead_elsewhere, large_objects, listing)
}
