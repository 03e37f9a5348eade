"""What a store can really do, found by trying: some accept every header and enforce none.

`rclone serve s3` 1.75 answers 200 to a conditional create and overwrites, and to object lock and keeps nothing
(measured 2026-11-29). So nothing is believed that was not seen refused.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from packtrain.core.errors import NameAbsent, NameTaken, PacktrainError, StoreRefused, StoreUnreachable
from packtrain.core.objects import ObjectStore
from packtrain.core.platform import Platform
from packtrain.core.s3 import S3Bucket, md5_of
from packtrain.core.stores import Store

LOCK_S = 60.0


class Answer(NamedTuple):
    """`holds`: True seen, False seen not to hold, None: could not be tried. `words`: what was seen."""

    holds: bool | None
    words: str


class Abilities(NamedTuple):
    """What a tier in this store may rely on."""

    reads: Answer
    """What was written is read at once, whole and in ranges, and has its size."""
    lists: Answer
    """What was written is listed at once, and gone from the list when it was erased."""
    creates: Answer
    """A second create of one name is refused and changes nothing: it can hold the commit log."""
    versions: Answer
    """An overwritten object can be had back."""
    locks: Answer
    """A locked version cannot be deleted, even by us, until its time is over: governance mode."""

    def named(self) -> dict[str, Answer]:
        """By the names a person knows them by."""
        return dict(zip(("read after write", "list after write", "exclusive create", "versions", "object lock"), self))


def probe(platform: Platform, store: Store) -> Abilities:
    """Try every ability with small objects named `probe-...`, which are erased again.

    Locked versions stay for LOCK_S where governance may not be bypassed. Raises nothing: what breaks is unknown.
    """
    name = f"probe-{platform.token()}"
    bucket = _bucket(store)
    return Abilities(
        _tried(lambda: _reads(store, f"{name}-reads")), _tried(lambda: _lists(store, f"{name}-lists")),
        _tried(lambda: _creates(store, f"{name}-creates")), _tried(lambda: _versions(bucket, f"{name}-versions")),
        _tried(lambda: _locks(platform, bucket, f"{name}-locked")),
    )


def probe_lock(platform: Platform, store: Store) -> Answer:
    """Whether it enforces object lock, tried with one small object. Raises nothing: what breaks is unknown."""
    return _tried(lambda: _locks(platform, _bucket(store), f"probe-{platform.token()}-locked"))


def lock_until(store: Store, name: str, until_s: float) -> None:
    """Governance retention for the present version of an object, up to a wall-clock time: until then only who may
    bypass governance can delete it. Only for a store that `probe_lock` saw enforce it. Raises StoreRefused,
    StoreUnreachable."""
    bucket = _bucket(store)
    assert bucket is not None, f"{store.url} was not seen to lock anything"
    until = datetime.fromtimestamp(until_s, UTC)
    bucket.call("put_object_retention", name, Retention={"Mode": "GOVERNANCE", "RetainUntilDate": until})


def _bucket(store: Store) -> S3Bucket | None:
    return store.bucket if isinstance(store, ObjectStore) else None


def _tried(look: Callable[[], Answer]) -> Answer:
    try:
        return look()
    except PacktrainError as error:
        return Answer(None, f"could not be tried: {error.what}")


def _reads(store: Store, name: str) -> Answer:
    data = bytes(range(256)) * 64
    store.create(name, data)
    try:
        if store.size(name) != len(data) or store.read(name, 0, len(data)) != data:
            return Answer(False, "other bytes came back than were written")
        try:
            part = store.read(name, 1000, 99)
        except StoreRefused:
            return Answer(False, "it cannot give a range of an object")
        if part != data[1000:1099]:
            return Answer(False, "a range of an object is not that range")
        return Answer(True, "written, then read whole and in ranges")
    finally:
        store.erase(name)


def _lists(store: Store, name: str) -> Answer:
    before = name[:-1]
    store.create(name, b"x")
    seen = (name, 1) in store.list("", after=before).names
    store.erase(name)
    if not seen:
        return Answer(False, "what was written is not listed")
    if (name, 1) in store.list("", after=before).names or store.exists(name):
        return Answer(False, "what was erased is still there")
    return Answer(True, "listed when written, gone when erased")


def _creates(store: Store, name: str) -> Answer:
    """The answer counts for nothing without what is read afterwards."""
    store.create(name, b"first")
    try:
        try:
            store.create(name, b"second")
            refused = False
        except NameTaken:
            refused = True
        if store.read(name, 0, 99) != b"first":
            return Answer(False, "a second create of one name overwrote the first: no commit log here")
        if not refused:
            return Answer(False, "a second create of one name was not refused: no commit log here")
        return Answer(True, "a second create of one name was refused")
    finally:
        store.erase(name)


def _versions(bucket: S3Bucket | None, name: str) -> Answer:
    if bucket is None:
        return _NO_BOTO3
    first = bucket.call("put_object", name, Body=b"first").get("VersionId")
    second = bucket.call("put_object", name, Body=b"second").get("VersionId")
    try:
        if not first or not second or first == second:
            return Answer(False, "writes get no version: versioning is off, or not known here")
        old = bucket.call("get_object", name, VersionId=first)["Body"].read()
        if old != b"first":
            return Answer(False, "an old version reads as the new one")
        return Answer(True, "an overwritten object was read by its version")
    finally:
        for version in (first, second):
            _erase_version(bucket, name, version)


def _locks(platform: Platform, bucket: S3Bucket | None, name: str) -> Answer:
    """Lock a version in governance mode for a minute and try to delete it."""
    if bucket is None:
        return _NO_BOTO3
    until = datetime.fromtimestamp(platform.wall_s(), UTC) + timedelta(seconds=LOCK_S)
    try:
        version = bucket.call(
            "put_object", name, Body=b"locked", ObjectLockMode="GOVERNANCE", ObjectLockRetainUntilDate=until,
            ContentMD5=md5_of(b"locked"),
        ).get("VersionId")
    except StoreRefused as error:
        return Answer(False, f"an object cannot be locked: {error.what}")
    try:
        return _lock_seen(bucket, name, version)
    finally:
        _erase_version(bucket, name, version, bypass=True)


def _lock_seen(bucket: S3Bucket, name: str, version: str | None) -> Answer:
    if not version:
        return Answer(False, "the lock was accepted, but the object has no version to lock: it protects nothing")
    try:
        bucket.call("delete_object", name, VersionId=version)
    except StoreRefused:
        kept = bucket.call("get_object", name, VersionId=version)["Body"].read() == b"locked"
        return Answer(kept, "a locked version refused to be deleted" if kept else "a locked version was lost")
    return Answer(False, "the lock was accepted, and the version deleted all the same: it protects nothing")


def _erase_version(bucket: S3Bucket, name: str, version: str | None, bypass: bool = False) -> None:
    """Take the probe's own version away; where that is refused, it ends with its lock."""
    arguments: dict[str, Any] = {"VersionId": version} if version else {}
    if bypass and version:
        arguments["BypassGovernanceRetention"] = True
    try:
        bucket.call("delete_object", name, **arguments)
    except (StoreRefused, StoreUnreachable, NameAbsent):
        return


_NO_BOTO3 = Answer(None, "not asked: only S3 through boto3 tells (pip install 'packtrain[s3]')")
