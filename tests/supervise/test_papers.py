"""A disk that hangs holds up neither a coordinator's decisions nor its agents; what it owes is done when it is back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packtrain.core.fake import FakeDisk, FakePlatform, fail
from packtrain.core.journal import Journal, read_folder
from packtrain.core.platform import Crew
from packtrain.core.records import CoordinatorBegan, RecordsLost
from packtrain.core.units import NS
from packtrain.supervise.papers import READ_NS, UNWRITTEN_MAX, Papers

JOURNAL = "/run/journal"


class Hanging(FakePlatform):
    """What is done in threads is done when the disk comes back."""

    hangs = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.waiting: list[Callable[[], None]] = []

    def crew(self, threads: int) -> Crew:
        return _Held(self)

    def come_back(self) -> None:
        self.hangs, works, self.waiting = False, self.waiting, []
        for work in works:
            work()


class _Held(Crew):
    def __init__(self, platform: Hanging) -> None:
        self._platform = platform

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._platform.hangs:
            self._platform.waiting.append(work)
        else:
            work()
        return lambda: None

    def close(self) -> None:
        pass


def papers() -> tuple[Hanging, Papers]:
    platform = Hanging(FakeDisk())
    for folder in ("/run", JOURNAL):
        platform.mkdir(folder)
    return platform, Papers(platform, "/run")


def terms(platform: Hanging) -> list[int]:
    return [one.record.term for one in read_folder(platform, JOURNAL).entries if hasattr(one.record, "term")]


def test_what_is_written_comes_in_order_with_its_own_time() -> None:
    """While the disk hangs nothing is waited for; then each record is there once, in order, dated when it happened."""
    platform, one = papers()
    platform.hangs, happened = True, []
    for term in range(1, 6):
        happened.append(platform.boot_ns())
        one.write(CoordinatorBegan(term=term, log=""))
        assert one.look() == []
        platform.sleep(60.0)
    assert terms(platform) == []
    platform.come_back()
    for _ in range(3):
        one.look()
        platform.sleep(2 * READ_NS / NS)
    entries = read_folder(platform, JOURNAL).entries
    assert [entry.record.term for entry in entries] == [1, 2, 3, 4, 5]
    assert all(0 <= entry.ns - ns < NS // 1000 for entry, ns in zip(entries, happened, strict=True))


def test_what_comes_into_the_journal_is_told_once() -> None:
    """Each entry in one look, or as past, also when the disk hung while it was read."""
    platform, one = papers()
    told = []
    for term in range(1, 7):
        one.write(CoordinatorBegan(term=term, log=""))
        platform.hangs = term % 2 == 0
        told += one.look()
        platform.sleep(1.0)
        told += one.look()
        platform.come_back()
    platform.sleep(1.0)
    told = one.past() + told + [entry for _ in range(2) for entry in one.look()]
    assert [entry.record.term for entry in told] == [1, 2, 3, 4, 5, 6]


def test_what_was_there_before_is_told_apart() -> None:
    """However late the first reading is done: what it found is past, once, and what came afterwards is news. A folder
    that cannot be listed was not read."""
    platform, one = papers()
    other = Papers(platform, "/run")
    other.write(CoordinatorBegan(term=1, log=""))
    other.flush(1.0)
    told, past = list[int](), list[int]()
    for look in range(100):
        platform.hangs = 35 <= look < 70
        platform.faults = lambda op, path, count, look=look: fail() if op == "listdir" and look < 35 else None
        if look == 70:
            platform.come_back()
        if look == 80:
            other.write(CoordinatorBegan(term=2, log=""))
            other.flush(1.0)
        told += [entry.record.term for entry in one.look()]
        past += [entry.record.term for entry in one.past()]
        assert look >= 70 or not past
        platform.sleep(1.0)
    assert (past, told) == ([1], [2])


def test_what_was_written_by_now_is_told_when_it_is_asked_for() -> None:
    """Also where a reading is under way that began before it was written, and at once, whenever the next one is due."""
    for under_way in (False, True):
        platform, one = papers()
        one.look()
        one.look()
        if under_way:
            platform.sleep(2 * READ_NS / NS)
            one.look()
        Journal(platform, JOURNAL, role="trainer").write(CoordinatorBegan(term=1, log=""), durable=True)
        read = one.read_now()
        assert not read()
        told = [entry.record.term for _ in range(2) for entry in one.look()]
        assert read() and told == [1]


def test_one_of_a_kind_at_a_time() -> None:
    """A second call of a kind is refused while the first is under way; what comes of one is told once, and what it
    raised too."""
    platform, one = papers()
    told: list[object] = []
    platform.hangs = True
    assert one.do("plan", lambda: 7, told.append) and not one.do("plan", lambda: 8, told.append)
    assert one.do("begin", lambda: 1 // 0, told.append)
    one.look()
    assert not told
    platform.come_back()
    one.look()
    one.look()
    assert told[0] == 7 and isinstance(told[1], ZeroDivisionError) and len(told) == 2
    assert one.do("plan", lambda: 9, told.append)


def test_what_waits_is_bounded_and_its_loss_is_told() -> None:
    """Beyond `UNWRITTEN_MAX` the oldest are lost, and the journal says how many."""
    platform, one = papers()
    platform.hangs = True
    one.look()
    for term in range(UNWRITTEN_MAX + 30):
        one.write(CoordinatorBegan(term=term, log=""))
    platform.come_back()
    one.flush(1.0)
    records = [entry.record for entry in read_folder(platform, JOURNAL).entries]
    assert [one.count for one in records if isinstance(one, RecordsLost)] == [30]
    assert terms(platform)[:2] == [30, 31] and len(terms(platform)) == UNWRITTEN_MAX


def test_the_last_words_have_a_bound() -> None:
    """A disk that hangs at the end is waited for no longer than was said; one that does not has them all."""
    platform, one = papers()
    platform.hangs = True
    one.write(CoordinatorBegan(term=1, log=""))
    before_ns = platform.boot_ns()
    assert not one.flush(10.0) and 10 * NS <= platform.boot_ns() - before_ns < 11 * NS
    one.close(1.0)
    platform.come_back()
    assert one.flush(1.0) and terms(platform) == [1]
