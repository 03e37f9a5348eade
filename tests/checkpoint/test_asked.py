"""Pins, wishes and what a person marks: they hold while a job runs, and nothing that must stay goes."""

from __future__ import annotations

import errno

import pytest

from packtrain.checkpoint import asked
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.listing import listing
from packtrain.checkpoint.purge import execute
from packtrain.checkpoint.reader import survey, verify_commit
from packtrain.checkpoint.retention import Action, plan, purging_name, why_kept
from packtrain.core.errors import CheckpointGone, CommitUnknown
from packtrain.core.fake import Baton, FakeCrash, FakePlatform, crash, explore, fail
from packtrain.train.seat import _begin
from tests.checkpoint.test_retention import CONFIG, make_saves, run_plan
from tests.checkpoint.worlds import RUN, WRITER, publish_small

# --- pins --------------------------------------------------------------------------------------------


def test_a_pin_made_later_takes_the_mark_away():
    """A checkpoint pinned after it was tombstoned is lifted by the next plan, stays past its grace, and serves its
    whole time anew once it is unpinned."""
    platform, _, saves = make_saves(3)
    run_plan(platform, CONFIG)
    asked.pin(platform, RUN, saves[0].folder, "the paper")
    assert asked.pins(platform, RUN)[saves[0].folder].reason == "the paper"
    platform.sleep(101.0)
    assert run_plan(platform, CONFIG)[0] == [Action("lift", saves[0].folder, "kept again")]
    asked.unpin(platform, RUN, saves[0].folder)
    assert asked.pins(platform, RUN) == {}
    assert [action.action for action in run_plan(platform, CONFIG)[0]] == ["tombstone"]
    assert verify_commit(platform, RUN, saves[0]) == []


def test_a_pin_made_after_the_plan_is_obeyed():
    """What a plan decided before the pin was there is refused when its turn comes, marking and purging both."""
    platform, _, saves = make_saves(4)
    marks = plan(survey(platform, RUN), CONFIG)
    asked.pin(platform, RUN, saves[0].folder)
    errors = [done.error for done in execute(platform, RUN, 1, marks, CONFIG.grace_s)]
    assert errors[0]["name"] == "checkpoint.purge_refused" and "pinned" in errors[0]["what"] and errors[1] is None
    platform.sleep(101.0)
    purges = plan(survey(platform, RUN), CONFIG)
    assert [action.folder for action in purges] == [saves[1].folder]
    asked.pin(platform, RUN, saves[1].folder)
    (done,) = execute(platform, RUN, 1, purges, CONFIG.grace_s)
    assert "pinned" in done.error["what"] and verify_commit(platform, RUN, saves[1]) == []


def marked():
    """Three saves, the first to be purged now."""
    platform, _, saves = make_saves(3)
    run_plan(platform, CONFIG)
    platform.sleep(101.0)
    return platform.disk, saves[0], plan(survey(platform, RUN), CONFIG)


def test_a_pin_and_a_purge_at_once():
    """In every interleaving of a pin and a purge with two preemptions: who was told that it is pinned has it whole."""
    outcomes = set()
    for choices in explore():
        disk, save, actions = marked()
        baton = Baton(choices, disk.clock, 2, lambda op, path: "/pins" in path or "/tombstones" in path
                      or path.endswith("manifest.json"))
        carrier, person = FakePlatform(disk, "carrier", baton), FakePlatform(disk, "person", baton)
        _, pinned = baton.run(
            lambda carrier=carrier, actions=actions: execute(carrier, RUN, 1, actions, CONFIG.grace_s),
            lambda person=person, save=save: asked.pin(person, RUN, save.folder),
        )
        after = FakePlatform(disk, "after")
        assert pinned.error is None or isinstance(pinned.error, CheckpointGone), choices
        whole = verify_commit(after, RUN, save) == []
        assert whole or pinned.error is not None, choices
        assert (save.folder in asked.pins(after, RUN)) == (pinned.error is None), choices
        outcomes.add((whole, pinned.error is None))
    assert outcomes >= {(True, True), (False, False)}


def test_a_purge_that_died_is_finished_although_it_had_claimed():
    """A claim left behind by a carrier that died keeps later pins away and does not stop the next purge."""
    disk, save, actions = marked()
    dying = FakePlatform(disk, "dying", faults=lambda op, path, n: crash() if op == "unlink" else None)
    with pytest.raises(FakeCrash):
        execute(dying, RUN, 1, actions, CONFIG.grace_s)
    after = FakePlatform(disk, "after")
    assert purging_name(save.folder) in after.listdir(f"{RUN}/tombstones")
    with pytest.raises(CheckpointGone, match="purge of this checkpoint has begun"):
        asked.pin(after, RUN, save.folder)
    assert [one.error for one in execute(after, RUN, 1, actions, CONFIG.grace_s)] == [None]
    assert save.folder not in after.listdir(f"{RUN}/checkpoints")
    assert purging_name(save.folder) not in after.listdir(f"{RUN}/tombstones")
    with pytest.raises(CheckpointGone, match="not there"):
        asked.pin(after, RUN, save.folder)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"folder":1}', b"null"])
def test_a_damaged_pin_holds(data):
    """A pin that cannot be read keeps its checkpoint; a file that is no pin's keeps none."""
    platform, _, saves = make_saves(3)
    platform.mkdir(f"{RUN}/pins")
    platform.write_new(f"{RUN}/pins/{saves[0].folder}.json", data)
    platform.write_new(f"{RUN}/pins/notes.json", data)
    assert set(asked.pins(platform, RUN)) == {saves[0].folder}
    assert run_plan(platform, CONFIG)[0] == []


def test_pins_that_cannot_be_read_stop_retention():
    """Where pins cannot be listed nothing is marked and nothing is purged."""
    disk, save, actions = marked()
    FakePlatform(disk, "person").mkdir(f"{RUN}/pins")
    sick = FakePlatform(disk, "sick", faults=lambda op, path, n: fail(errno.EIO) if path.endswith("/pins") else None)
    with pytest.raises(OSError):
        survey(sick, RUN)
    (done,) = execute(sick, RUN, 1, actions, CONFIG.grace_s)
    assert done.error is not None and verify_commit(FakePlatform(disk, "after"), RUN, save) == []


# --- marks of a person ---------------------------------------------------------------------------------


def test_a_person_may_drop_what_is_kept_for_its_number():
    """A mark that was asked for is not lifted from a save kept by `keep_every_steps`, and is from the last ones."""
    platform, _, saves = make_saves(4)
    config = CheckpointConfig(keep_last=2, keep_every_steps=1, grace_s=100.0)
    assert plan(survey(platform, RUN), config) == []
    marks = [Action("tombstone", save.folder, "asked", asked=True) for save in (saves[0], saves[2])]
    execute(platform, RUN, 1, marks, config.grace_s)
    platform.sleep(101.0)
    actions = plan(survey(platform, RUN), config)
    assert [(action.action, action.folder) for action in actions] == [
        ("purge", saves[0].folder), ("lift", saves[2].folder)
    ]


def test_why_a_mark_is_refused():
    """The restore point, the last ones and what is pinned are refused with the reason; others are not."""
    platform, _, saves = make_saves(4)
    asked.pin(platform, RUN, saves[0].folder)
    seen = survey(platform, RUN)
    said = [why_kept(seen, CONFIG, save.folder) for save in saves]
    assert said == ["it is pinned", None, "it is one of the last 2 saves (checkpoint.keep_last)",
                    "a restart would read it"]


# --- where the next attempt begins -----------------------------------------------------------------------


def log_of(platform):
    return CommitLog(platform, f"{RUN}/commits")


def test_a_wish_is_obeyed_once():
    """The next attempt is told of the save that was asked for, and once it has begun nobody is any more."""
    platform, log, saves = make_saves(3)
    assert asked.wished(platform, RUN, log) is None
    asked.wish(platform, RUN, saves[0], log.head())
    assert asked.wished(platform, RUN, log_of(platform)) == saves[0]
    assert asked.next_restored(platform, RUN, log) == saves[0]
    begin, restore, _ = _begin(platform, RUN, fresh=False)
    assert (begin.parent, begin.step, begin.attempt) == (saves[0].number, saves[0].step, 2)
    assert (restore.commit, restore.digest) == (saves[0].number, saves[0].digest)
    assert asked.wished(platform, RUN, log_of(platform)) is None
    publish_small(platform, log_of(platform), 2, 9)
    assert asked.next_restored(platform, RUN, log_of(platform)).step == 9


def test_the_last_wish_counts():
    """Asked twice, the second wish replaces the first; one for the restore point is as none."""
    platform, log, saves = make_saves(3)
    for save in (saves[0], saves[2]):
        asked.wish(platform, RUN, save, log.head())
    begin, _, _ = _begin(platform, RUN, fresh=False)
    assert begin.parent == saves[2].number


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"commit":9,"digest":"x","step":1,"head":4,"written_s":0}'])
def test_a_damaged_wish_stops_the_start(data):
    """Nobody begins from elsewhere than was asked: a wish that cannot be read, or names no save, is said and stops."""
    platform, log, _ = make_saves(3)
    platform.write_new(f"{RUN}/restore.json", data)
    with pytest.raises(CommitUnknown, match="next attempt") as caught:
        _begin(platform, RUN, fresh=False)
    assert "ckpt restore" in caught.value.fix and log.head() == 4


def test_nothing_that_was_asked_for_is_purged():
    """A save off the lineage that the next attempt was asked to begin from is refused to every purge until then."""
    platform, log, saves = make_saves(4)
    log.begin(saves[1].number, (WRITER,), "node")
    run_plan(platform, CONFIG, attempt=2)
    asked.wish(platform, RUN, saves[3], log.head())
    platform.sleep(101.0)
    _, done = run_plan(platform, CONFIG, attempt=2)
    refused = {one.action.folder: one.error["what"] for one in done if one.error}
    assert refused == {saves[3].folder: "the next attempt was asked to begin from it"}
    assert verify_commit(platform, RUN, saves[3]) == []


# --- ls ----------------------------------------------------------------------------------------------------


def test_the_listing_says_how_each_stands():
    """On and off the lineage, next, pinned, marked with the time left, purged, taken by somebody, never published."""
    platform, log, saves = make_saves(5)
    run_plan(platform, CONFIG)
    platform.sleep(101.0)
    execute(platform, RUN, 1, [Action("purge", saves[0].folder, "")], CONFIG.grace_s)
    log.begin(saves[2].number, (WRITER,), "node")
    for name in platform.listdir(f"{RUN}/checkpoints/{saves[4].folder}"):
        platform.unlink(f"{RUN}/checkpoints/{saves[4].folder}/{name}")
    platform.rmdir(f"{RUN}/checkpoints/{saves[4].folder}")
    asked.pin(platform, RUN, saves[3].folder)
    platform.mkdir(f"{RUN}/checkpoints/step-00000009.a0001.t1")
    execute(platform, RUN, 2, [Action("tombstone", saves[1].folder, "")], CONFIG.grace_s)
    rows = listing(survey(platform, RUN), CONFIG, asked.next_restored(platform, RUN, log))
    assert [(row.step, row.words()) for row in rows] == [
        (1, "purged"), (2, ""), (3, "restored next"), (4, "pinned, rolled back"), (5, "rolled back, GONE"),
        (9, "uncommitted"),
    ]
    assert [row.lineage for row in rows] == [True, True, True, False, False, False]
    assert rows[1].purge_in_s == 0.0 and rows[0].purge_in_s is None and rows[5].commit == 0
