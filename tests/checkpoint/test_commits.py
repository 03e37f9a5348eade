"""The log by itself: reading by number, exclusive link, who may publish, what counts as unknown."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.checkpoint import asked
from packtrain.checkpoint.commits import Commit, CommitLog, parse_record, render_record
from packtrain.core.errors import CommitStale, CommitsUnfit, CommitUnknown, RunMoved, TermLost
from packtrain.core.fake import Baton, FakeDisk, FakePlatform, Fault, duplicate, explore, fail, late, lost_reply, stale
from packtrain.core.platform import LocalPlatform
from tests.checkpoint.worlds import RUN, make_run

LOG = f"{RUN}/commits"
WRITERS = ("r00000",)


def fresh(faults=None):
    platform = FakePlatform(FakeDisk(), "a")
    log = make_run(platform)
    platform.faults = faults
    return platform, log


def begin(log, parent=None, **more):
    return log.begin(parent, WRITERS, "node", **more)


def test_a_run_grows_and_restore_follows_parents(tmp_path):
    """On a real disk: attempts and saves get dense numbers, and restore follows parents, not the newest save."""
    platform = LocalPlatform()
    log = make_run(platform, str(tmp_path))
    assert log.head() == 0 and log.restore_point() is None
    first = begin(log, 0)
    assert (first.number, first.attempt, first.step, first.parent) == (1, 1, -1, 0)
    saves = [log.publish(1, step, f"d{step}", f"step-{step:08d}.a0001.t1") for step in (10, 20, 30)]
    assert [save.parent for save in saves] == [1, 2, 3]
    back = begin(log, saves[0].number)
    assert (back.number, back.attempt, back.step, back.parent) == (5, 2, 10, 2)
    again = CommitLog(platform, f"{tmp_path}/commits")
    assert again.restore_point() == saves[0]
    assert [c.number for c in again.lineage(again.head())] == [5, 2, 1]
    assert log.publish(2, 20, "x", "step-00000020.a0002.t1").parent == 5
    assert [c.number for c in again.all()] == [1, 2, 3, 4, 5, 6]
    assert sorted(p.name for p in (tmp_path / "commits").iterdir()) == [f"{n:012d}" for n in range(1, 7)]


@pytest.mark.parametrize("head", [0, 1, 2, 3, 4, 7, 8, 9, 100])
def test_head_is_found_by_number_with_few_reads(head):
    """Doubling and bisection find the head of a log of any length, reading a logarithm of it and listing nothing."""
    platform, log = fresh()
    if head:
        begin(log, 0)
    for step in range(1, head):
        log.publish(1, step, "", "")
    before = platform.ops
    trace = len(platform.disk.trace)
    assert CommitLog(platform, LOG).head() == head
    assert platform.ops - before <= 4 + 2 * max(1, head).bit_length() * 2
    assert "listdir" not in {op for _, op, _ in platform.disk.trace[trace:]}


def test_fresh_needs_number_one_absent():
    """From nothing means an empty log, or one that leads to no save; a log that holds a save refuses it."""
    _, log = fresh()
    begin(log, 0)
    assert begin(log, 0).parent == 1
    log.publish(2, 5, "", "")
    with pytest.raises(CommitStale, match="nothing may start from nothing"):
        begin(log, 0)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOTDIR, errno.ETIMEDOUT])
def test_only_no_such_name_is_absence(code):
    """Any error but ENOENT while reading is UNKNOWN, and nothing begins on it."""
    _, log = fresh(lambda op, path, n: fail(code) if op == "read" else None)
    for ask in (log.head, log.restore_point, lambda: begin(log, 0), lambda: log.publish(1, 1, "", "")):
        with pytest.raises(CommitUnknown):
            ask()


def test_a_missing_folder_is_not_an_empty_log():
    """An unmounted disk (the folder of the log is gone) is UNKNOWN, never a fresh run."""
    log = CommitLog(FakePlatform(FakeDisk(), "a"), LOG)
    with pytest.raises(CommitUnknown, match="does not exist"):
        log.head()
    with pytest.raises(CommitUnknown):
        begin(log, 0)


def test_every_damaged_byte_makes_a_record_unknown():
    """A record with any byte flipped, or cut anywhere, is UNKNOWN: nobody restores from it or begins after it."""
    whole = render_record(Commit(number=1, kind="begin", attempt=1, step=-1, parent=0, nonce="aa", writers=WRITERS))
    assert parse_record(whole) is not None
    for i in range(len(whole)):
        for bit in range(8):
            assert parse_record(whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :]) is None, (i, bit)
        assert parse_record(whole[:i]) is None
    assert parse_record(whole + b"\n") is None
    platform, log = fresh()
    platform.write_new(log.path(1), whole[:-2])
    with pytest.raises(CommitUnknown, match="damaged") as caught:
        begin(log)
    assert caught.value.where == log.path(1) and "from a copy" in caught.value.fix and "--new" in caught.value.fix


def test_a_record_under_another_number_is_unknown():
    """A whole record found under a number that is not its own is UNKNOWN."""
    platform, log = fresh()
    begin(log, 0)
    platform.write_new(log.path(2), platform.read(log.path(1)))
    with pytest.raises(CommitUnknown):
        CommitLog(platform, LOG).last()


@given(st.binary(max_size=80))
def test_any_bytes_are_a_record_or_none(data):
    """No bytes make the parser of records fail."""
    assert parse_record(data) is None


def test_a_dead_attempt_cannot_publish():
    """After a newer attempt began, the older one is told to stop; so is one that repeats or goes back a step."""
    _, log = fresh()
    begin(log, 0)
    log.publish(1, 10, "", "")
    for step in (9, 10):
        with pytest.raises(CommitStale):
            CommitLog(log._platform, LOG).publish(1, step, "", "")
    begin(log)
    with pytest.raises(CommitStale, match="attempt 1 is over"):
        log.publish(1, 20, "", "")
    with pytest.raises(CommitUnknown):
        log.publish(3, 20, "", "")


def test_attempt_numbers_only_grow():
    """A given attempt number must be above all begun."""
    _, log = fresh()
    begin(log, 0, attempt=4)
    with pytest.raises(CommitStale):
        begin(log, attempt=4)
    assert begin(log).attempt == 5


def at_first(op: str, fault: Fault):
    """That fault at the first such operation, none after."""
    left = [1]

    def strike(seen: str, path: str, n: int) -> Fault | None:
        if seen != op or not left[0]:
            return None
        left[0] = 0
        return fault

    return strike


@pytest.mark.parametrize("fault", [lost_reply(), lost_reply(errno.EEXIST), duplicate(), duplicate(1)])
def test_lost_replies_and_repeats_of_link_publish_once(fault):
    """Whatever link answers, the record exists once under its number and the writer knows it as its own."""
    platform, log = fresh(at_first("link", fault))
    begun = begin(log, 0)
    assert CommitLog(platform, LOG).all() == [begun]
    assert platform.listdir(LOG) == ["000000000001"], "the temp name stayed"


@pytest.mark.parametrize("after", range(1, 12))
def test_a_late_link_is_recognized_by_its_writer(after):
    """A save whose link is done long after it was reported failed is recognized by its log, not published twice."""
    platform, log = fresh()
    begin(log, 0)
    platform.faults = at_first("link", late(after))
    for _ in range(3):
        try:
            done = log.publish(1, 10, "digest", "step-00000010.a0001.t1")
            break
        except CommitUnknown:
            continue
    assert (done.number, done.step) == (2, 10)
    assert CommitLog(platform, LOG).head() == 2


def test_a_stale_view_never_overwrites():
    """A cache that hides the newest records makes the writer look again, or give up as UNKNOWN; it harms nothing."""
    platform, log = fresh()
    begin(log, 0)
    log.publish(1, 10, "", "")
    platform.faults = lambda op, path, n: stale(8) if op == "read" and path.endswith("0000000002") else None
    late_comer = CommitLog(platform, LOG)
    with pytest.raises(CommitUnknown):
        late_comer.publish(1, 20, "", "")
    platform.faults = None
    assert late_comer.publish(1, 20, "", "").number == 3


def before_link(do):
    """Do it once, right before the first link."""
    left = [do]

    def strike(op: str, path: str, n: int) -> None:
        if op == "link" and left:
            left.pop()()

    return strike


def test_two_beginners_one_wins():
    """A beginner that finds another attempt begun since it looked is told so, and begins nothing."""
    platform, log = fresh()
    other = CommitLog(FakePlatform(platform.disk, "b"), LOG)
    platform.faults = before_link(lambda: begin(other, 0))
    with pytest.raises(CommitStale, match="attempt 1 has begun"):
        begin(log, 0)
    assert CommitLog(platform, LOG).head() == 1


def test_a_save_that_slips_in_is_what_the_next_attempt_restores():
    """A save published while an attempt is beginning is restored by it, not abandoned."""
    platform, log = fresh()
    begin(log, 0)
    other = CommitLog(FakePlatform(platform.disk, "b"), LOG)
    platform.faults = before_link(lambda: other.publish(1, 10, "", ""))
    assert (begin(log).step, log.restore_point().step) == (10, 10)


def test_a_directory_without_exclusive_link_is_unfit():
    """Start-up refuses a directory whose link is refused, or is no exclusive create; another error is only UNKNOWN."""
    for code, error in ((errno.EPERM, CommitsUnfit), (errno.ENOTSUP, CommitsUnfit), (errno.ENOSPC, CommitUnknown)):
        platform = FakePlatform(FakeDisk(), "a", faults=at_first("link", fail(code)))
        with pytest.raises(error):
            make_run(platform)
        assert platform.listdir(LOG) == []


def test_a_directory_whose_link_lies_is_unfit():
    """A second link to one name that is not refused makes the directory unfit."""
    class Lies(FakePlatform):
        def link(self, source: str, target: str) -> None:
            if not self.exists(target):
                super().link(source, target)

    with pytest.raises(CommitsUnfit, match="second link"):
        make_run(Lies(FakeDisk(), "a"))


def test_a_term_says_nothing_of_checkpoints():
    """Terms take numbers and count up; what reads checkpoints passes over them, and none is a parent."""
    platform, log = fresh()
    assert log.term() == 0 and log.take_term("n", "/c/a").term == 1
    assert log.last() is None and log.begun() is None and log.restore_point() is None and log.head() == 1
    first = begin(log, 0, term=1)
    save = log.publish(1, 10, "d", "step-00000010.a0001.t1")
    assert log.take_term("m", "/c/b").term == 2
    assert log.last() == save == log.restore_point() and log.begun() == first
    late = log.publish(1, 20, "e", "step-00000020.a0001.t1")
    assert (late.number, late.parent, late.term) == (5, 3, 2)
    assert [c.number for c in log.lineage(log.head())] == [5, 3, 2]
    assert CommitLog(platform, LOG).term() == 2


def test_a_term_hides_no_save_from_its_writer():
    """After a term a step that is published is late as before, and one's own record is still recognized."""
    platform, log = fresh()
    begin(log, 0)
    save = log.publish(1, 10, "d", "f")
    CommitLog(platform, LOG).take_term("n", "/c/a")
    assert log.publish(1, 10, "d", "f") == save
    with pytest.raises(CommitStale):
        CommitLog(platform, LOG).publish(1, 10, "d", "f")
    begin(log)
    with pytest.raises(CommitStale):
        log.publish(1, 20, "d", "f")


def test_a_lower_term_begins_nothing():
    """A coordinator that finds a higher term than its own is told so and begins nothing; one without terms may."""
    platform, log = fresh()
    mine = log.take_term("n", "/c/a").term
    begin(log, 0, term=mine)
    CommitLog(platform, LOG).take_term("m", "/c/b")
    with pytest.raises(TermLost, match="term 2"):
        begin(log, term=mine)
    assert begin(log, term=2).attempt == 2 and begin(log).attempt == 3


def test_a_closed_log_takes_no_term():
    """Nobody leads a run that goes on elsewhere."""
    _, log = fresh()
    begin(log, 0)
    log.close("/elsewhere")
    with pytest.raises(RunMoved):
        log.take_term("n", "/c/a")


def test_a_wish_outlives_a_term():
    """What a person asked the next attempt to begin from is not forgotten because a coordinator leads in between."""
    platform, log = fresh()
    begin(log, 0)
    save = log.publish(1, 10, "d", "step-00000010.a0001.t1")
    log.publish(1, 20, "e", "step-00000020.a0001.t1")
    asked.wish(platform, RUN, save, log.last().number)
    term = log.take_term("n", "/c/a").term
    assert asked.wished(platform, RUN, log) == save
    begin(log, save.number, term=term)
    assert asked.wished(platform, RUN, log) is None


class Leaders:
    """Two coordinators, each of which takes a term, begins an attempt and publishes, all steps of both interleaved."""

    def __init__(self, choices):
        self.disk = FakeDisk()
        setup = FakePlatform(self.disk, "setup")
        make_run(setup)
        self.disk.sync_all()
        self.baton = Baton(choices, self.disk.clock, 2, lambda op, path: op in ("read", "link"))
        self.choices, self.led = choices, {}

    def lead(self, name):
        platform = FakePlatform(self.disk, name, self.baton)
        log = CommitLog(platform, LOG)
        term = log.take_term(name, f"/c/{name}").term
        try:
            self.led[name] = (term, log.begin(None, WRITERS, "node", term=term))
        except (TermLost, CommitStale):
            self.led[name] = (term, None)

    def run(self):
        for outcome in self.baton.run(lambda: self.lead("a"), lambda: self.lead("b")):
            assert outcome.error is None, f"{outcome.error!r}: {self.choices}"
        records = CommitLog(FakePlatform(self.disk, "judge"), LOG).all()
        highest = 0
        for record in records:
            begun = [term for term, begin in self.led.values() if begin == record]
            assert not begun or begun == [highest], f"term {begun} began under term {highest}: {self.choices}"
            highest = max(highest, record.term)
        assert sorted(term for term, _ in self.led.values()) == [1, 2], self.choices
        leader = next(begin for term, begin in self.led.values() if term == 2)
        assert leader is not None or any(begin for _, begin in self.led.values()), self.choices


def test_of_two_leaders_one_is_obeyed():
    """In every interleaving of two coordinators their terms differ, and none begins an attempt after a higher term."""
    worlds = 0
    for choices in explore():
        Leaders(choices).run()
        worlds += 1
    assert worlds > 50
