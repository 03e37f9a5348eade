"""What is kept, what may go and when: the pure plan, and the one module that carries it out."""

from __future__ import annotations

import errno
from math import nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.format import FolderName
from packtrain.checkpoint.publish import Gate, carry
from packtrain.checkpoint.purge import discard_try, execute
from packtrain.checkpoint.reader import open_checkpoint, survey, verify_commit
from packtrain.checkpoint.retention import (
    Action,
    Survey,
    kept_folders,
    lineage_of,
    owed,
    parse_tombstone,
    plan,
    why_kept,
)
from packtrain.core.errors import Contradiction
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform, crash, fail
from tests.checkpoint.histories import configs, logs, saved, surveys
from tests.checkpoint.worlds import RUN, WRITER, judge, make_run, publish_small, save_of


def restore_folder(commits):
    return next((commit.folder for commit in lineage_of(commits) if commit.kind == "save"), None)


@given(surveys(), configs)
def test_the_plan_never_touches_what_must_stay(state, config):
    """Neither the restore point, nor the last `keep_last` of the lineage, nor each `keep_every_steps`-th, nor a
    folder of the attempt that runs is ever planned for deletion; a purge has a tombstone that has served its
    grace."""
    actions = plan(state, config)
    saves = [commit for commit in lineage_of(state.commits) if commit.kind == "save"]
    attempt = state.commits[-1].attempt
    published = {commit.folder for commit in state.commits if commit.kind == "save"}
    for action in actions:
        assert action.folder in state.ages_s
        stone = state.tombstones.get(action.folder)
        if action.action == "lift":
            assert stone is not None
            continue
        assert action.folder != restore_folder(state.commits)
        assert action.folder not in [commit.folder for commit in saves[: config.keep_last]]
        step = int(action.folder[5:13])
        on_lineage = action.folder in {commit.folder for commit in saves}
        assert not (on_lineage and config.keep_every_steps and step % config.keep_every_steps == 0)
        if action.folder not in published:
            assert f".a{attempt:04d}." not in action.folder and state.ages_s[action.folder] >= config.debris_s
        if action.action == "purge":
            assert stone is not None and state.now_s - stone.written_s >= config.grace_s
        else:
            assert stone is None


@given(surveys(), configs)
def test_the_plan_is_pure(state, config):
    """The same survey gives the same plan, and making it changes nothing."""
    before = (dict(state.tombstones), dict(state.ages_s))
    assert plan(state, config) == plan(state, config)
    assert before == (dict(state.tombstones), dict(state.ages_s))


@given(surveys(), configs, st.data())
def test_pinned_folders_stay(state, config, data):
    """A pinned folder is never marked or purged, and a mark it has is lifted."""
    pinned = data.draw(st.sets(st.sampled_from(sorted(state.ages_s)))) if state.ages_s else set()
    for action in plan(msgspec.structs.replace(state, pinned=pinned), config):
        assert action.folder not in pinned or action.action == "lift"


@given(logs(), configs)
def test_the_floor_holds(commits, config):
    """At least one save stays whatever is configured, and as many of the lineage as are asked for."""
    saves = [commit for commit in lineage_of(commits) if commit.kind == "save"]
    kept = kept_folders(Survey(commits=commits, tombstones={}, ages_s={}, now_s=0.0), config)
    assert config.keep_last >= 1 and len(kept) >= min(len(saves), config.keep_last)
    assert not saves or saves[0].folder in kept


def test_a_rollback_keeps_what_it_leads_to():
    """After a rollback the save it leads to stays though newer ones exist, and those are off the lineage."""
    first = Commit(number=1, kind="begin", attempt=1, step=-1, parent=0, nonce="")
    saves = [saved(number, 1, number - 1) for number in range(2, 7)]
    back = Commit(number=7, kind="begin", attempt=2, step=1, parent=2, nonce="")
    ages = {save.folder: 0.0 for save in saves}
    state = Survey(commits=(first, *saves, back), tombstones={}, ages_s=ages, now_s=0.0)
    actions = plan(state, CheckpointConfig(keep_last=1))
    assert [action.folder for action in actions] == [str(FolderName(n, 1, 1)) for n in range(2, 6)]


def test_what_never_came_counts_for_nothing():
    """In a place of copies, before and after it was promoted, a save that was not brought is none of the last ones:
    those that are there stay, the one that was brought and deleted is owed, and a later save of its own counts."""
    first = Commit(number=1, kind="begin", attempt=1, step=-1, parent=0, nonce="")
    saves = [saved(number, 1, step) for number, step in ((2, 5), (3, 15), (4, 20))]
    moved = Commit(number=5, kind="moved", attempt=1, step=-1, parent=4, nonce="")
    there = {saves[0].folder: 0.0, saves[2].folder: 0.0}
    for commits in ((first, *saves), (first, *saves, moved)):
        state = Survey(commits=commits, tombstones={}, ages_s=there, now_s=0.0, copied={2, 4})
        assert plan(state, CheckpointConfig(keep_last=2)) == []
        assert why_kept(state, CheckpointConfig(keep_last=2), saves[0].folder) is not None
    own = saved(6, 1, 25)
    state = Survey(commits=(first, *saves, moved, own), tombstones={}, ages_s=there, now_s=0.0, copied={2})
    assert [commit.step for commit in owed(state, CheckpointConfig(keep_last=9))] == [25, 5]
    state = msgspec.structs.replace(state, ages_s={**there, own.folder: 0.0}, copied={2, 4})
    assert [action.folder for action in plan(state, CheckpointConfig(keep_last=2))] == [saves[0].folder]


def test_an_empty_log_plans_nothing():
    """With no record at all nothing is known, so nothing may go."""
    folder = str(FolderName(1, 1, 1))
    assert plan(Survey(commits=(), tombstones={}, ages_s={folder: 1e9}, now_s=0.0), CheckpointConfig()) == []


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"folder":"../x","written_s":1,"reason":""}'])
def test_a_damaged_tombstone_marks_nothing(data):
    """A tombstone that cannot be read, or names no checkpoint folder, has marked nothing."""
    assert parse_tombstone(data) is None


# --- carrying it out ---------------------------------------------------------------------------------


def make_saves(n: int):
    platform = FakePlatform(FakeDisk(), "a")
    log = make_run(platform)
    log.begin(0, (WRITER,), "node")
    return platform, log, [publish_small(platform, log, 1, step) for step in range(1, n + 1)]


def run_plan(platform, config, attempt=1):
    actions = plan(survey(platform, RUN), config)
    return actions, execute(platform, RUN, attempt, actions, config.grace_s)


CONFIG = CheckpointConfig(keep_last=2, grace_s=100.0, debris_s=500.0)


def test_tombstone_then_grace_then_purge():
    """Folders beyond the last ones are marked first, purged only when the grace has passed, and what stays still
    loads."""
    platform, _, saves = make_saves(5)
    old = [commit.folder for commit in saves[:3]]
    actions, done = run_plan(platform, CONFIG)
    assert actions == [Action("tombstone", folder, "beyond the last 2, or off the lineage") for folder in old]
    assert all(one.error is None for one in done)
    assert run_plan(platform, CONFIG)[0] == []
    platform.sleep(99.0)
    assert run_plan(platform, CONFIG)[0] == []
    assert len(platform.listdir(f"{RUN}/checkpoints")) == 5
    platform.sleep(2.0)
    actions, done = run_plan(platform, CONFIG)
    assert [(one.action.action, one.error) for one in done] == [("purge", None)] * 3
    assert platform.listdir(f"{RUN}/checkpoints") == [commit.folder for commit in saves[3:]]
    for commit in saves[3:]:
        assert verify_commit(platform, RUN, commit) == []
    assert run_plan(platform, CONFIG)[0] == []
    assert len(platform.listdir(f"{RUN}/tombstones")) == 3, "the record of what was purged stays"


def test_debris_goes_after_its_age_and_its_grace():
    """Folders nobody published stay while their attempt runs and while they are young; then tombstone, grace, purge."""
    platform, log, saves = make_saves(1)
    save = save_of(platform, 1, 50, folder="/buffers")
    platform.faults = lambda op, path, n: crash() if op == "link" else None
    with pytest.raises(FakeCrash):
        carry(platform, log, RUN, save, Gate())
    platform = FakePlatform(platform.disk, "b")
    assert len(platform.listdir(f"{RUN}/checkpoints")) == 2
    platform.sleep(1000.0)
    assert run_plan(platform, CONFIG)[0] == [], "its attempt is the last begun: it may still publish"
    CommitLog(platform, f"{RUN}/commits").begin(None, (WRITER,), "node")
    (action,), _ = run_plan(platform, CONFIG, attempt=2)
    assert (action.action, action.folder) == ("tombstone", str(FolderName(50, 1, 1)))
    platform.sleep(101.0)
    run_plan(platform, CONFIG, attempt=2)
    assert platform.listdir(f"{RUN}/checkpoints") == [saves[0].folder]


def refused(platform, action, attempt=1, grace_s=100.0):
    (done,) = execute(platform, RUN, attempt, [action], grace_s)
    return done.error["what"] if done.error else None


def test_the_purger_checks_again():
    """Whatever it is handed, purge refuses the restore point, a folder without a served tombstone, an old attempt's
    plan, a name that is no checkpoint folder, and any purge while the restore point does not open."""
    platform, log, saves = make_saves(3)
    first, point = saves[0].folder, saves[-1].folder
    assert "no tombstone" in refused(platform, Action("purge", first, ""))
    for folder in (first, point):
        assert refused(platform, Action("tombstone", folder, "")) is None
    assert "younger" in refused(platform, Action("purge", first, ""))
    platform.sleep(101.0)
    assert "restore would read it" in refused(platform, Action("purge", point, ""))
    for name in ("..", "../commits", "", first + "/..", "commits"):
        assert "no checkpoint folder" in refused(platform, Action("purge", name, ""))
    assert "not the last one begun" in refused(platform, Action("purge", first, ""), attempt=7)
    path = f"{RUN}/checkpoints/{point}/manifest.json"
    node = platform.disk.find_file(path)
    node.data[5] ^= 1
    assert "manifest" in refused(platform, Action("purge", first, ""))
    node.data[5] ^= 1
    log.begin(2, (WRITER,), "node")
    assert "restore would read it" in refused(platform, Action("purge", first, ""), attempt=2)
    assert len(platform.listdir(f"{RUN}/checkpoints")) == 3
    assert refused(platform, Action("purge", point, ""), attempt=2) is None
    judge_left = [commit for commit in saves if commit.folder in platform.listdir(f"{RUN}/checkpoints")]
    assert judge_left == saves[:2] and verify_commit(platform, RUN, saves[0]) == []


def test_nothing_is_purged_while_the_restore_point_is_damaged():
    """One flipped byte in an image, which opening does not see, refuses every purge; once whole it is read once."""
    platform, _, saves = make_saves(4)
    run_plan(platform, CONFIG)
    platform.sleep(101.0)
    path = f"{RUN}/checkpoints/{saves[-1].folder}/part-{WRITER}.safetensors"
    platform.disk.find_file(path).data[-1] ^= 1
    _, done = run_plan(platform, CONFIG)
    assert [one.error["name"] for one in done] == ["checkpoint.purge_refused"] * 2 and "crc32c" in done[0].error["what"]
    assert len(platform.listdir(f"{RUN}/checkpoints")) == 4
    platform.disk.find_file(path).data[-1] ^= 1
    reads = []
    platform.faults = lambda op, where, n: reads.append(where) if op == "read" and where == path else None
    assert [one.error for one in run_plan(platform, CONFIG)[1]] == [None, None]
    assert len(reads) == 1


def test_a_lifted_tombstone_starts_its_time_anew():
    """A folder that is kept again loses its mark, and a later mark serves the whole grace."""
    platform, log, saves = make_saves(3)
    run_plan(platform, CONFIG)
    platform.sleep(101.0)
    log.begin(saves[0].number, (WRITER,), "node")
    actions, _ = run_plan(platform, CONFIG, attempt=2)
    assert Action("lift", saves[0].folder, "kept again") in actions
    assert f"{saves[0].folder}.json" not in platform.listdir(f"{RUN}/tombstones")


def test_a_damaged_tombstone_is_written_anew():
    """A damaged tombstone never counted; marking again gives the folder its whole grace."""
    platform, _, saves = make_saves(3)
    stone = f"{RUN}/tombstones/{saves[0].folder}.json"
    platform.write_new(stone, b"torn")
    platform.sleep(1000.0)
    assert [action.action for action in run_plan(platform, CONFIG)[0]] == ["tombstone"]
    found = parse_tombstone(platform.read(stone))
    assert found is not None and platform.wall_s() - found.written_s < 1.0


def test_a_persons_mark_outweighs_retentions_own():
    """Where retention marked a folder before, a person's mark counts from that time on, and is not lifted when the
    folder would be kept again; retention's own never takes a person's back."""
    platform, _, saves = make_saves(3)
    folder, stone = saves[0].folder, f"{RUN}/tombstones/{saves[0].folder}.json"
    asked = Action("tombstone", folder, "a person asked for it", asked=True)
    run_plan(platform, CONFIG)
    since_s = survey(platform, RUN).tombstones[folder].written_s
    platform.sleep(50.0)
    assert refused(platform, asked) is None
    found = survey(platform, RUN).tombstones[folder]
    assert found.asked and found.reason == asked.reason and found.written_s == since_s
    every = CheckpointConfig(keep_last=2, keep_every_steps=1)
    assert run_plan(platform, every)[0] == []
    before = platform.read(stone)
    assert refused(platform, Action("tombstone", folder, "why")) is None and platform.read(stone) == before


def test_a_purge_cut_short_refuses_to_open_and_is_finished_later():
    """Whichever operation a purge dies at, the folder is whole or refuses to open at once; the next plan finishes
    it."""
    for k in range(1, 20):
        platform, _, saves = make_saves(3)
        run_plan(platform, CONFIG)
        platform.sleep(101.0)
        deletes: list[str] = []

        def die(op, path, n, k=k, deletes=deletes):
            if op in ("unlink", "rmdir", "fsync_dir"):
                deletes.append(path)
            return crash() if len(deletes) == k else None

        platform.faults = die
        try:
            run_plan(platform, CONFIG)
        except FakeCrash:
            pass
        else:
            assert k > 4, "it died nowhere"
            return
        after = FakePlatform(platform.disk, "b")
        found = verify_commit(after, RUN, saves[0])
        assert found == [] if k == 1 else "manifest.json" in found[0].file
        open_checkpoint(after, RUN, saves[-1])
        run_plan(after, CONFIG)
        assert after.listdir(f"{RUN}/checkpoints") == [commit.folder for commit in saves[1:]]


def test_an_error_while_purging_is_an_outcome():
    """An I/O error costs one action, said with place and remedy; the others are carried out."""
    platform, _, saves = make_saves(4)
    run_plan(platform, CONFIG)
    platform.sleep(101.0)
    platform.faults = lambda op, path, n: fail(errno.EIO) if op == "rmdir" and saves[0].folder in path else None
    _, done = run_plan(platform, CONFIG)
    assert [one.error is None for one in done] == [False, True]
    assert done[0].error["where"].endswith(saves[0].folder) and done[0].error["fix"]


def test_a_restart_deletes_nothing():
    """Beginning attempts, again and again, leaves every file of checkpoints/ where it is."""
    platform, log, _ = make_saves(5)
    before = {name: platform.listdir(f"{RUN}/checkpoints/{name}") for name in platform.listdir(f"{RUN}/checkpoints")}
    for _ in range(5):
        log.begin(None, (WRITER,), "node")
        publish_small(platform, log, log.last().attempt, 100)
    after = {name: platform.listdir(f"{RUN}/checkpoints/{name}") for name in before}
    assert before == after
    judge(platform)


def test_discarding_what_is_not_there_is_no_error():
    """Giving up a try that made no folder yet changes nothing and raises nothing."""
    platform, _, _ = make_saves(1)
    discard_try(platform, f"{RUN}/checkpoints/step-00000009.a0001.t1")
    judge(platform)


@pytest.mark.parametrize(
    "bad", [{"deadline_s": 86_401.0}, {"debris_s": -1.0}, {"keep_every_steps": -1}, {"grace_s": nan}]
)
def test_a_configuration_that_cannot_work_is_refused(bad):
    """Deadlines that no carrier takes and negative ages and steps are refused at once."""
    with pytest.raises(Contradiction):
        CheckpointConfig(**bad)
