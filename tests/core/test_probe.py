"""Abilities of a store are what was seen, not what it answers."""

from __future__ import annotations

from contextlib import suppress

from packtrain.core.errors import NameTaken, StoreUnreachable
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.platform import LocalPlatform
from packtrain.core.probe import probe
from packtrain.core.stores import Folder, Page, Store, StoreConfig, open_store
from tests.core.flips import Flipping, flip


class Lying(Flipping):
    """Accepts every create; `overwrites`: and does it."""

    def __init__(self, inner: Store, overwrites: bool) -> None:
        super().__init__(inner)
        self.overwrites = overwrites

    def create(self, name: str, data: bytes) -> None:
        if self.overwrites:
            self.inner.erase(name)
        with suppress(NameTaken):
            self.inner.create(name, data)


class Forgetful(Flipping):
    """Lists nothing, erases nothing, or is gone."""

    def __init__(self, inner: Store, what: str) -> None:
        super().__init__(inner)
        self.what = what

    def list(self, prefix: str, after: str = "") -> Page:
        return Page((), "") if self.what == "list" else self.inner.list(prefix, after)

    def erase(self, name: str) -> None:
        if self.what != "erase":
            self.inner.erase(name)

    def create(self, name: str, data: bytes) -> None:
        if self.what == "create":
            raise StoreUnreachable("no answer in 30.0 s", where="there", fix="later")
        self.inner.create(name, data)


def folder() -> Store:
    return Folder(FakePlatform(FakeDisk()), "/tmp")


def test_folder_and_memory_are_what_they_should_be() -> None:
    """Both can hold a commit log, tell nothing of versions and locks, and nothing of the probe stays."""
    for store in (folder(), open_store(LocalPlatform(), StoreConfig("memory://"))):
        found = probe(LocalPlatform(), store)
        assert (found.reads.holds, found.lists.holds, found.creates.holds) == (True, True, True)
        assert found.versions.holds is found.locks.holds is None
        assert list(store.list_all("")) == []
        assert found.named()["exclusive create"] == (True, "a second create of one name was refused")
        assert list(found.named()) == [
            "read after write", "list after write", "exclusive create", "versions", "object lock"
        ]


def test_a_liar_is_found_out() -> None:
    """Whoever accepts a second create is no home for a commit log, whether it overwrites or only says so."""
    for overwrites, words in ((True, "overwrote the first"), (False, "was not refused")):
        found = probe(LocalPlatform(), Lying(folder(), overwrites))
        assert found.creates.holds is False and words in found.creates.words
        assert found.reads.holds is True


def test_damage_and_silence_are_told_apart() -> None:
    """Other bytes and other ranges than were written, lists that lack a name, erased names that stay: each is NO. A
    store that cannot be asked is unknown."""
    platform = LocalPlatform()
    assert probe(platform, Flipping(folder(), flip("read", 0))).reads.words.startswith("other bytes")
    assert probe(platform, Flipping(folder(), flip("read", 1))).reads.words.startswith("a range")
    assert probe(platform, Forgetful(folder(), "list")).lists.words == "what was written is not listed"
    assert probe(platform, Forgetful(folder(), "erase")).lists.words == "what was erased is still there"
    gone = probe(platform, Forgetful(folder(), "create"))
    assert gone.creates == (None, "could not be tried: no answer in 30.0 s")
