"""A copy is whole, verified and within its bounds, or says why not and goes on later."""

from __future__ import annotations

import math
import pathlib
import threading
from collections.abc import Callable

import google_crc32c
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packtrain.core.errors import (
    NameAbsent,
    NameTaken,
    StoreUnreachable,
    TransferDamaged,
    TransferLate,
    TransferStopped,
    UploadLost,
)
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform, Fault, crash, explore, power_cut
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.stores import Folder, Store, StoreConfig, open_store
from packtrain.core.transfer import Item, Progress, Throttle, TransferConfig, copy
from packtrain.core.units import NS
from tests.core.flips import Flipping, Touch, flip
from tests.core.store_contract import pattern

ONE = TransferConfig(threads=1, chunk_bytes=64)
"""One thread and small chunks: everything in the caller's thread, so virtual time may pass."""


def sums(data: bytes, block: int = 16) -> tuple[int, ...]:
    return tuple(google_crc32c.value(data[at : at + block]) for at in range(0, len(data), block))


def two_folders(disk: FakeDisk | None = None) -> tuple[FakePlatform, Store, Store]:
    platform = FakePlatform(disk or FakeDisk())
    platform.mkdir("/tmp/from")
    platform.mkdir("/tmp/to")
    return platform, Folder(platform, "/tmp/from"), Folder(platform, "/tmp/to")


def memory() -> Store:
    return open_store(LocalPlatform(), StoreConfig("memory://"))


def item(data: bytes, known: bool = True, name: str = "a/f") -> Item:
    return Item(name, name, len(data), 0, sums(data), 16) if known else Item(name, name)


# --- whole and verified --------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 15, 16, 63, 64, 65, 300]), min_size=1, max_size=4), known=st.booleans(),
    chunk=st.sampled_from([1, 16, 17, 64, 1000]), kinds=st.tuples(st.booleans(), st.booleans()),
)
def test_any_sizes_any_kinds(sizes: list[int], known: bool, chunk: int, kinds: tuple[bool, bool]) -> None:
    """Objects of any size, cut anyhow, arrive whole from any kind in any kind; a second copy sends nothing."""
    platform, *folders = two_folders()
    source, target = (memory() if bucket else folder for bucket, folder in zip(kinds, folders))
    contents = {f"o{i}/f": pattern(size, i) for i, size in enumerate(sizes)}
    for name, data in contents.items():
        source.create(name, data)
    items = [item(data, known and bool(data), name) for name, data in contents.items()]
    config = TransferConfig(threads=1, chunk_bytes=chunk)
    done = copy(platform, source, target, items, config)
    assert {name: target.read(name, 0, 999) for name, _ in target.list_all("")} == contents
    total = sum(sizes)
    assert (done.bytes_sent, done.bytes_checked, done.bytes_kept) == (total, total, 0)
    again = copy(platform, source, target, items, config)
    assert (again.bytes_sent, again.bytes_kept, again.items_kept) == (0, total, len(items))


def test_a_range_becomes_an_object(tmp_path: pathlib.Path) -> None:
    """An item names a range of its source, and only that arrives; four threads make the same bytes as one."""
    (tmp_path / "to").mkdir()
    data = pattern(5000)
    (tmp_path / "f").write_bytes(data)
    stores = [open_store(LocalPlatform(), StoreConfig(str(path))) for path in (tmp_path, tmp_path / "to")]
    items = [Item("f", f"part-{i}", 1000, 1000 * i, sums(data[1000 * i : 1000 * i + 1000]), 16) for i in range(5)]
    done = copy(LocalPlatform(), *stores, items, TransferConfig(threads=4, chunk_bytes=64))
    assert b"".join((tmp_path / "to" / f"part-{i}").read_bytes() for i in range(5)) == data
    assert done.bytes_sent == done.bytes_checked == done.bytes_total == 5000


def test_what_is_there_with_other_content(tmp_path: pathlib.Path) -> None:
    """A target's name that holds something else is refused, and replaced only where the caller says so."""
    data = pattern(300)
    for there in (b"short", b"x" * 300, data + b"and more"):
        for known in (True, False):
            platform, source, target = two_folders()
            source.create("a/f", data)
            target.create("a/f", there)
            with pytest.raises(NameTaken, match="something else"):
                copy(platform, source, target, [item(data, known)], ONE)
            assert target.read("a/f", 0, 999) == there
            copy(platform, source, target, [item(data, known)], ONE, replace=True)
            assert target.read("a/f", 0, 999) == data


def test_a_name_that_is_taken_meanwhile() -> None:
    """What appears under the name while its object is on the way is not overwritten."""
    for make in (lambda inner: inner, lambda inner: memory()):
        platform, source, inner = two_folders()
        source.create("a/f", pattern(300))
        target = make(inner)
        theirs: list[object] = []

        def meanwhile(what: str, number: int, data: bytes, target: Store = target, theirs: list = theirs) -> bytes:
            if what == "put" and not theirs:
                theirs.append(target.create("a/f", b"theirs"))
            return data

        with pytest.raises(NameTaken):
            copy(platform, source, Flipping(target, meanwhile), [item(pattern(300))], ONE)
        assert target.read("a/f", 0, 99) == b"theirs"


# --- damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_a_byte_flipped_on_the_way_to_a_folder(known: bool) -> None:
    """One flipped bit in what is put, or in what is read back, costs that chunk again and no other."""
    for what in ("put", "look"):
        platform, source, inner = two_folders()
        data = pattern(300)
        source.create("a/f", data)
        target = Flipping(inner, flip(what, 2))
        done = copy(platform, source, target, [item(data, known)], ONE)
        assert inner.read("a/f", 0, 999) == data
        assert (done.chunks_sent_again, target.counts["put"], done.bytes_sent) == (1, 6, 364)


@pytest.mark.parametrize("known", [True, False])
def test_a_byte_flipped_on_the_way_to_a_bucket(known: bool) -> None:
    """A bucket is read back when the object is whole; a flipped bit costs that object again."""
    platform, source, _ = two_folders()
    data = pattern(300)
    source.create("a/f", data)
    for what in ("put", "read"):
        target = Flipping(memory(), flip(what, 3))
        done = copy(platform, source, target, [item(data, known)], ONE)
        assert target.inner.read("a/f", 0, 999) == data
        assert (done.chunks_sent_again, done.bytes_checked, target.counts["put"]) == (5, 300, 10)


def forgets(what: str, *numbers: int) -> Touch:
    """The store that no longer knows the upload, at the n-th put, finish or finished; at every one, without numbers."""

    def touch(kind: str, number: int, data: bytes) -> bytes:
        if kind == what and (not numbers or number in numbers):
            raise UploadLost("gone", where="a/f", fix="try again")
        return data

    return touch


@pytest.mark.parametrize("bucket, again", [(False, 3), (True, 5)])
def test_an_upload_that_the_store_forgets(bucket: bool, again: int) -> None:
    """The object is begun anew, twice at most: no chunk is put that could not help any more, nor one that stayed."""
    data = pattern(300)
    for numbers, puts in (((2,), 3 + again), ((0, 1), 7)):
        platform, source, folder = two_folders()
        source.create("a/f", data)
        target = Flipping(memory() if bucket else folder, forgets("put", *numbers))
        copy(platform, source, target, [item(data)], ONE)
        assert (target.inner.read("a/f", 0, 999), target.counts["put"]) == (data, puts)
    target = Flipping(memory() if bucket else folder, forgets("put"))
    with pytest.raises(UploadLost):
        copy(platform, source, target, [item(data, name="a/f")._replace(target="a/g")], ONE)
    assert target.counts["put"] == 3


def test_an_upload_that_the_store_forgets_at_its_end() -> None:
    """It is begun anew; where it was finished and only the answer was lost, what is there is checked and stays."""
    data = pattern(300)
    for what, puts in (("finish", 10), ("finished", 5)):
        platform, source, _ = two_folders()
        source.create("a/f", data)
        target = Flipping(memory(), forgets(what, 0))
        done = copy(platform, source, target, [item(data)], ONE)
        assert (target.inner.read("a/f", 0, 999), target.counts["put"], done.bytes_checked) == (data, puts, 300)


def test_a_byte_flipped_on_the_way_from_the_source() -> None:
    """Where the caller knows the checksums a bad read of the source is read again, before anything is sent."""
    platform, inner, target = two_folders()
    data = pattern(300)
    inner.create("a/f", data)
    source = Flipping(inner, flip("read", 1))
    done = copy(platform, source, target, [item(data)], ONE)
    assert target.read("a/f", 0, 999) == data
    assert (done.chunks_read_again, source.counts["read"], done.bytes_sent) == (1, 6, 300)


def test_damage_that_stays_is_told_by_name() -> None:
    """A source or a target that is damaged for good ends the copy, naming object and range, with nothing visible in
    a folder."""
    data = pattern(300)
    for make in (lambda inner: inner, lambda inner: memory()):
        platform, source, inner = two_folders()
        source.create("a/f", data)
        with pytest.raises(TransferDamaged, match=r"target gives(.|\n)*a/f, bytes 0\.\.64"):
            copy(platform, source, Flipping(make(inner), flip("put")), [item(data)], ONE)
        assert not inner.exists("a/f")  # a bucket has it; nothing here looked into that one
        with pytest.raises(TransferDamaged, match=r"source gives(.|\n)*/tmp/from a/f, bytes 0\.\.64"):
            copy(platform, Flipping(source, flip("read")), make(inner), [item(data)], ONE)
        with pytest.raises(TransferDamaged, match=r"source gives(.|\n)*bytes 256\.\.384"):
            copy(platform, source, make(inner), [Item("a/f", "a/g", 400)], TransferConfig(1, 128))
        with pytest.raises(NameAbsent):
            copy(platform, source, make(inner), [Item("nothing", "a/g")], ONE)


def test_damage_at_rest_is_repaired_by_the_same_copy() -> None:
    """A chunk of an unfinished file that changed while nobody looked is sent again; the others stay."""
    platform, source, target = two_folders()
    data = pattern(300)
    source.create("a/f", data)
    stopped = threading.Event()
    with pytest.raises(TransferStopped):
        copy(platform, source, target, [item(data)], ONE, stop=stopped, progress=lambda _: _after(platform, 4, stopped))
    (temp,) = [name for name in platform.listdir("/tmp/to/a") if name.startswith(".new-")]
    with platform.reopen(f"/tmp/to/a/{temp}") as file:
        file.write_at(70, b"?")
    done = copy(platform, source, target, [item(data)], ONE)
    assert target.read("a/f", 0, 999) == data
    assert (done.bytes_kept, done.bytes_sent) == (192, 108)


def _after(platform: FakePlatform, writes: int, stop: threading.Event) -> None:
    if sum(op == "write_at" for _, op, _ in platform.disk.trace) >= writes:
        stop.set()


# --- resuming --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [crash(), power_cut()], ids=["kill", "power cut"])
def test_killed_at_every_operation(fault: Fault) -> None:
    """Killed at any operation a copy leaves nothing visible in part; the next one ends it, sends at most one chunk
    twice where the machine lived on, and makes durable what it found."""
    data = pattern(300)
    ended, k = False, 0
    while not ended:
        k += 1
        disk = FakeDisk()
        _, source, _ = two_folders(disk)
        source.create("a/f", data)
        disk.sync_all()
        before = len(disk.trace)
        ended = not _died(disk, k, fault, item(data))
        written = sum(op == "write_at" for _, op, _ in disk.trace[before:])
        for choices in explore(limit=1 if fault.kind == "crash" else 30):
            after = disk if fault.kind == "crash" or ended else disk.after_power_cut(choices)
            platform, source, target = two_folders(after)
            assert not target.exists("a/f") or target.read("a/f", 0, 999) == data, k
            done = copy(platform, source, target, [item(data)], ONE)
            assert target.read("a/f", 0, 999) == data
            if fault.kind == "crash" and not ended:
                assert written + -(-done.bytes_sent // 64) <= 5 + 1, k
                for lost in explore(limit=4):
                    assert Folder(FakePlatform(disk.after_power_cut(lost)), "/tmp/to").read("a/f", 0, 999) == data, k
    assert k > 30


def _died(disk: FakeDisk, k: int, fault: Fault, what: Item) -> bool:
    platform = FakePlatform(disk, faults=lambda op, path, n: fault if n == k else None)
    try:
        copy(platform, Folder(platform, "/tmp/from"), Folder(platform, "/tmp/to"), [what], ONE)
    except FakeCrash:
        return True
    return False


def test_a_store_that_breaks_stops_the_copy_and_all_its_threads(tmp_path: pathlib.Path) -> None:
    """The first error ends the copy with that error, its threads end, and what had arrived is not sent again by the
    next."""
    data = pattern(6400)
    (tmp_path / "to").mkdir()
    (tmp_path / "f").write_bytes(data)

    def breaks(what: str, number: int, chunk: bytes) -> bytes:
        if what == "put" and number >= 50:
            raise StoreUnreachable("gone", where="here", fix="later")
        return chunk

    source, inner = (open_store(LocalPlatform(), StoreConfig(str(path))) for path in (tmp_path, tmp_path / "to"))
    config = TransferConfig(threads=4, chunk_bytes=64)
    broken = Flipping(inner, breaks)
    with pytest.raises(StoreUnreachable, match="gone"):
        copy(LocalPlatform(), source, broken, [item(data, name="f")], config)
    assert broken.counts["put"] <= 50 + 4 and not inner.exists("f")
    for thread in [thread for thread in threading.enumerate() if thread.name == "pool"]:
        thread.join(20)
        assert not thread.is_alive()
    done = copy(LocalPlatform(), source, inner, [item(data, name="f")], config)
    assert inner.read("f", 0, 9999) == data
    assert (done.bytes_kept, done.bytes_sent) == (3200, 3200)


# --- bounds ----------------------------------------------------------------------------------------------


def test_progress_of_what_is_there_already() -> None:
    """A copy that finds all there tells how fast it checks it, and when it will have: nothing is sent."""
    platform, source, target = two_folders()
    data, told = pattern(3000), list[Progress]()
    source.create("a/f", data)
    target.create("a/f", data)
    assert copy(platform, source, target, [item(data)], ONE, progress=told.append).bytes_sent == 0
    assert told[-1].bytes_done == 3000 and all(p.bytes_per_s > 0 for p in told) and told[-1].eta_s == 0


def timed_copy(
    rate: Callable[[Platform], float], bucket: bool = False, **config: float
) -> tuple[float, list[Progress]]:
    """Virtual seconds of a copy of 3,000 bytes, which move twice: sent, and read back."""
    platform, source, target = two_folders()
    target = memory() if bucket else target
    data = pattern(3000)
    source.create("a/f", data)
    told: list[Progress] = []
    began_ns = platform.boot_ns()
    copy(
        platform, source, target, [item(data)], TransferConfig(threads=1, chunk_bytes=48, **config),
        rate=lambda: rate(platform), progress=told.append,
    )
    return (platform.boot_ns() - began_ns) / NS, told


def test_the_cap_holds() -> None:
    """At 100 bytes a second 6,000 bytes take 60 s, to a folder and to a bucket; progress says so all along."""
    for rate, cap, bucket in (
        (lambda _: 1e9, 100.0, False), (lambda _: 100.0, 1e9, False), (lambda _: 100.0, 1e9, True),
    ):
        seconds, told = timed_copy(rate, bucket, copy_bytes_per_s_max=cap)
        assert 0.99 * 60 < seconds < 1.01 * 60
        assert told[-1].bytes_done == told[-1].bytes_total == 3000 and told[-1].eta_s == 0
        assert all(95 < p.bytes_per_s < 105 for p in told[5:60])
        halfway = told[len(told) // 4]
        assert halfway.eta_s == pytest.approx(45, rel=0.1)


def test_a_copy_yields_and_pauses() -> None:
    """A rate of 0 pauses without a byte moved; a lower rate slows at once, and a higher one is used again at once."""

    def rate(platform: Platform) -> float:
        at_s = platform.boot_ns() / NS - 100
        return 100.0 if at_s < 10 else 0.0 if at_s < 40 else 50.0

    seconds, _ = timed_copy(rate)
    assert 0.98 * (10 + 30 + 100) < seconds < 1.02 * (10 + 30 + 100)


def test_one_low_answer_costs_one_look() -> None:
    """A rate that is low when a chunk asks and high a moment later lets it go then: 8 MiB at 10 bytes a second would
    take ten days."""
    platform = FakePlatform(FakeDisk())
    rates = iter([10.0])
    throttle = Throttle(platform, lambda: next(rates, 1e9), lambda: None)
    began_ns = platform.boot_ns()
    throttle.take(8 << 20)
    assert 0.25 <= (platform.boot_ns() - began_ns) / NS < 0.3


@settings(max_examples=40)
@example(rates=[100.0], takes=[(10, 7.0)] * 2 + [(10, 0.0)] * 400)
@given(
    rates=st.lists(st.sampled_from([0.0, 20.0, 100.0, 100.0, 1000.0, math.inf]), min_size=1, max_size=30),
    takes=st.lists(st.tuples(st.integers(1, 100), st.sampled_from([0.0, 0.0, 0.1, 7.0])), min_size=50, max_size=200),
)
def test_the_cap_holds_whatever_the_rate_does(rates: list[float], takes: list[tuple[int, float]]) -> None:
    """However the rate asked for goes up, down, to nothing and to no limit, and whatever pauses the stores make, what
    goes in any 20 s is at most 5% more than a cap of 100 bytes a second, and a chunk, and never more on the whole."""
    platform = FakePlatform(FakeDisk())
    asked: list[float] = []

    def rate() -> float:
        asked.append(rates[len(asked) % len(rates)] if len(asked) < 3000 else 1000.0)
        return min(asked[-1], 100.0)

    throttle = Throttle(platform, rate, lambda: None)
    began_ns = platform.boot_ns()
    went: list[tuple[float, int]] = []
    for size, pause_s in takes:
        throttle.take(size)
        went.append(((platform.boot_ns() - began_ns) / NS, size))
        platform.sleep(pause_s)
    for i, (first_s, _) in enumerate(went):
        within = [size for at_s, size in went[i:] if at_s <= first_s + 20]
        assert sum(within[1:]) <= 100 * 20 * 1.05
    assert all(sum(size for _, size in went[: n + 1]) <= 100 * at_s + 1 for n, (at_s, _) in enumerate(went))


def test_the_deadline_is_kept() -> None:
    """A copy that cannot end by its deadline ends there, says how far it came, and the next goes on from that."""
    platform, source, target = two_folders()
    data = pattern(3000)
    source.create("a/f", data)
    config = TransferConfig(threads=1, chunk_bytes=48, copy_bytes_per_s_max=100, deadline_s=20)
    began_ns = platform.boot_ns()
    with pytest.raises(TransferLate, match="of 2.9 KiB were there and verified after 20s"):
        copy(platform, source, target, [item(data)], config)
    assert 20 <= (platform.boot_ns() - began_ns) / NS < 21
    done = copy(platform, source, target, [item(data)], TransferConfig(threads=1, chunk_bytes=48))
    assert 1900 < done.bytes_kept < 2100 and done.bytes_kept + done.bytes_sent == 3000


def test_a_copy_that_is_told_to_stop() -> None:
    """Once told, it moves nothing more, not even while it is paused, and publishes nothing."""
    platform, source, target = two_folders()
    source.create("a/f", pattern(300))
    stop = threading.Event()

    def rate() -> float:
        stop.set()
        return 0.0

    with pytest.raises(TransferStopped, match="goes on from here"):
        copy(platform, source, target, [item(pattern(300))], ONE, rate=rate, stop=stop)
    assert not target.exists("a/f")
    stop.clear()
    platform.disk.clock.at(platform.disk.clock.now_ns + 5 * NS, stop.set)
    began_ns = platform.boot_ns()
    with pytest.raises(TransferStopped):
        copy(platform, source, target, [item(pattern(300))], ONE, rate=lambda: 1.0, stop=stop)
    assert platform.boot_ns() - began_ns < 6 * NS


def test_memory_is_bounded_by_threads_and_chunks(tmp_path: pathlib.Path) -> None:
    """However many chunks there are, no more are held at once than there are threads."""
    data = pattern(6400)
    (tmp_path / "to").mkdir()
    (tmp_path / "f").write_bytes(data)
    held, most = [0], [0]

    def count(what: str, number: int, chunk: bytes) -> bytes:
        held[0] += 1 if what == "read" else -1 if what == "put" else 0
        most[0] = max(most[0], held[0])
        return chunk

    source = Flipping(open_store(LocalPlatform(), StoreConfig(str(tmp_path))), count)
    target = Flipping(open_store(LocalPlatform(), StoreConfig(str(tmp_path / "to"))), count)
    copy(LocalPlatform(), source, target, [item(data, name="f")], TransferConfig(threads=3, chunk_bytes=64))
    assert 1 <= most[0] <= 3
