"""Who has offered and written what, as the publishing carrier sees it: pure, so tried in any order of reports."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.checkpoint.clients import Offer
from packtrain.checkpoint.format import PartEntry
from packtrain.checkpoint.joint import (
    OVER_MAX,
    Joint,
    Order,
    Report,
    Trial,
    again_s,
    begun,
    heard,
    missing,
    offered,
    order,
)
from packtrain.checkpoint.neighbours import Ends
from packtrain.checkpoint.open_save import OpenSave

NODES = {"n1": ("r2", "r3"), "n2": ("r4",)}
SUM = "0" * 64


def report(node: str = "n1", life: int = 1, **changes: object) -> Report:
    """What the carrier of that node says, in its so-manieth life."""
    good = {
        "attempt": 1, "begin": "b", "node": node, "boot": "boot", "began_ns": life, "round": f"{node}.{life}",
        "step": 7, "left_s": 9.0, "writers": NODES[node],
    }
    return Report(**(good | changes))


def offers(told: Report) -> list[Offer]:
    return [Offer(1, 1, 7, writer, "", 10, 9.0, (), ()) for writer in told.writers]


def entry(writer: str, **changes: object) -> PartEntry:
    good = {"writer": writer, "bytes": 10, "sha256": SUM, "table_bytes": 1, "table_sha256": SUM}
    return PartEntry(**(good | changes))


def wrote(trial: str, node: str = "n1", life: int = 1, **changes: object) -> Report:
    entries = tuple(entry(writer, **changes) for writer in NODES[node])
    return report(node, life, trial=trial, entries=entries)


def all_offered() -> Joint:
    joint = Joint()
    for node in NODES:
        joint = offered(joint, report(node), offers(report(node)))
    return joint


def do(joint: Joint, told: Report) -> str:
    return order(joint, told, 0, 0.1).do


def test_the_way_of_a_save():
    """Told who has what, all write into the try and nobody twice; when all have, nothing is missing."""
    joint = Joint()
    assert do(joint, report()) == "tell"
    joint = all_offered()
    assert do(joint, report()) == "wait"
    joint = begun(joint, Trial("t", 0, "folder", 5_000_000_000))
    told = order(joint, report(), 0, 0.1)
    assert (told.do, told.trial, told.folder, told.writers, told.left_s) == ("write", "t", "folder", ("r2", "r3"), 5.0)
    joint = heard(joint, wrote("t"))
    assert missing(joint) == ["r4"] and do(joint, wrote("t")) == "wait"
    assert missing(heard(joint, wrote("t", "n2"))) == []


def test_a_failed_try_is_over_for_all():
    """After one has failed nobody is told to write into that try; in the next one everybody is, again."""
    joint = heard(begun(all_offered(), Trial("t", 0, "f", 1)), wrote("t"))
    joint = heard(joint, report("n2", trial="t", obstacle="no space"))
    assert joint.obstacle == "n2: no space" and do(joint, report("n2")) == "wait"
    joint = begun(joint, Trial("u", 0, "f", 1))
    assert joint.obstacle == "" and missing(joint) == ["r2", "r3", "r4"]
    for node in NODES:
        assert do(joint, report(node)) == "write"
    assert missing(heard(joint, wrote("t"))) == ["r2", "r3", "r4"], "of a try that is over"
    assert not heard(joint, report("n2", trial="t", obstacle="no space")).obstacle


def test_a_restarted_carrier_takes_over():
    """What a carrier wrote before it was restarted counts; what it had not is its successor's, and nothing that the old
    one says later is heard."""
    joint = begun(all_offered(), Trial("t", 0, "f", 1))
    again = report(life=2)
    assert do(joint, again) == "tell"
    joint = offered(joint, again, offers(again))
    assert do(joint, again) == "write" and do(joint, report()) == "wait"
    assert missing(heard(joint, wrote("t"))) == ["r2", "r3", "r4"]
    assert offered(joint, report(), offers(report())).sources == joint.sources
    joint = heard(joint, wrote("t", life=2))
    later = report(life=3)
    joint = offered(joint, later, offers(later))
    assert missing(joint) == ["r4"] and do(joint, later) == "wait"


def test_a_writer_that_comes_late_to_its_new_carrier_is_asked_too():
    """Of a restarted carrier one writer offers before the try and another during it: both are told to write in it."""
    one = report(life=2, writers=("r2",))
    joint = begun(offered(all_offered(), one, offers(one)), Trial("t", 0, "f", 1))
    told = order(joint, one, 0, 0.1)
    assert (told.do, told.writers) == ("write", ("r2",))
    both = report(life=2, trial="t", entries=(entry("r2"),))
    joint = heard(offered(joint, both, offers(both)), both)
    told = order(joint, both, 0, 0.1)
    assert (told.do, told.writers) == ("write", ("r3",))


def test_another_boot_is_another_carrier():
    """After a reboot the clock of a node begins anew: the carrier of the new boot takes over all the same."""
    rebooted = report(life=0, boot="other")
    assert offered(all_offered(), rebooted, offers(rebooted)).sources["r2"] == rebooted.source


@pytest.mark.parametrize(
    "changes", [{"bytes": 11}, {"sha256": "x"}, {"sha256": SUM[1:]}, {"table_bytes": 0}, {"table_sha256": SUM + "0"}]
)
def test_nonsense_is_not_believed(changes):
    """What cannot be the part that was offered is not taken for it."""
    joint = begun(all_offered(), Trial("t", 0, "f", 1))
    assert missing(heard(joint, wrote("t", **changes))) == ["r2", "r3", "r4"]


def test_nobody_writes_for_others():
    """A carrier's word counts for the writers that it was asked of, and for no others."""
    joint = begun(all_offered(), Trial("t", 0, "f", 1))
    greedy = report("n2", writers=("r2", "r4"), trial="t", entries=(entry("r2"), entry("r4")))
    assert missing(heard(joint, greedy)) == ["r2", "r3"]


@pytest.mark.parametrize(
    ("changes", "good"),
    [({}, True), ({"writers": ()}, False), ({"writers": ("r9",)}, False), ({"step": -1}, False),
     ({"left_s": 1e9}, False), ({"left_s": float("nan")}, False), ({"left_s": -1.0}, True)],
)
def test_reports_are_looked_at(changes, good):
    """A report about writers that are none, or times that cannot be, makes no sense; a late one does."""
    assert report(**changes).makes_sense(["r0", "r2", "r3", "r4"]) == good


def test_reports_come_back():
    """A report is read as it was written."""
    told = wrote("t")
    assert msgspec.convert(msgspec.to_builtins(told), Report) == told


def test_many_writers_are_patient():
    """The more writers, the longer between reports, within bounds."""
    assert [again_s(n) for n in (2, 8, 1000, 10**6)] == [0.05, 0.05, 1.0, 2.0]


events = st.lists(
    st.tuples(
        st.sampled_from(["offer", "try", "wrote", "failed", "restart"]), st.sampled_from(sorted(NODES)),
        st.integers(0, 3), st.integers(0, 3),
    ),
    max_size=40,
)


@given(events)
def test_only_what_was_written_in_this_try_counts(happened):
    """Whatever is repeated, late, lost or said by carriers that were replaced: a part counts only if the carrier that
    it was asked of at that time said that it wrote it, in the try that goes on."""
    joint, lives, tries = all_offered(), dict.fromkeys(NODES, 1), 0
    true: set[str] = set()
    for what, node, back, late in happened:
        life, trial = max(1, lives[node] - back), max(0, tries - late)
        match what:
            case "restart":
                lives[node] += 1
            case "offer":
                told = report(node, life)
                joint = offered(joint, told, offers(told))
            case "try":
                tries += 1
                joint, true = begun(joint, Trial(str(tries), 0, "f", 1)), set()
            case "wrote":
                asked = {writer for writer in NODES[node] if joint.sources[writer] == report(node, life).source}
                true |= asked if tries and trial == tries else set()
                joint = heard(joint, wrote(str(trial), node, life))
            case "failed":
                joint = heard(joint, report(node, life, trial=str(trial), obstacle="x"))
        assert set(joint.entries) <= true
        if not joint.obstacle:
            assert set(joint.entries) == true


def test_an_end_is_told_to_who_took_part():
    """Of a save each carrier that reported it hears how it ended; a later save of the same step, and a stranger, do
    not."""
    ends, end = Ends(), Order(do="over", error={"name": "x"})
    save = OpenSave(7, 0, 0, joint=all_offered())
    ends.remember(save, end)
    assert ends.known(report()) == ends.known(report("n2")) == end
    assert ends.known(report(round="another")) is None
    for step in range(8, 9 + OVER_MAX):
        ends.remember(OpenSave(step, 0, 0), end)
    assert ends.known(report("n2")) == end, "those that nobody elsewhere took part in take no place"
