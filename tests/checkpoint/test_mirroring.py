"""Mirrors by cadence, and what was deleted from outside: with virtual time, fake couriers, and real ones on fake disks.
"""

from __future__ import annotations

import errno
import math
import signal
import threading
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise

import msgspec
import pytest

from packtrain.checkpoint.asked import pin
from packtrain.checkpoint.bring_back import bring_back
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.copies import send
from packtrain.checkpoint.courier import Errand, back, nearest
from packtrain.checkpoint.listing import listing
from packtrain.checkpoint.mirroring import HANG_S, LOOK_S, Mirroring
from packtrain.checkpoint.mirrors import RETRY_S_MAX, RETRY_S_MIN, due_in_s, read_state, retry_s, with_held
from packtrain.checkpoint.purge import execute
from packtrain.checkpoint.reader import missing, survey
from packtrain.checkpoint.retention import Action, owed, plan
from packtrain.core.errors import CheckpointDamaged, NameAbsent, PurgeRefused, TransferDamaged
from packtrain.core.fake import FakeDisk, FakePlatform, FakeProcess, Fault, crash, fail, power_cut
from packtrain.core.journal import Journal
from packtrain.core.records import BroughtBack, ErrorSeen, EvalDone, MirrorDone, Record
from packtrain.core.stores import Folder
from packtrain.core.transfer import TransferConfig
from packtrain.core.units import NS
from tests.checkpoint.mirrored import BOTH, FAR, NEAR, World, run_errand
from tests.checkpoint.worlds import RUN, judge, must_load
from tests.supervise.noted import begun

ONE = TransferConfig(threads=1)


# --- by cadence --------------------------------------------------------------------------------------------


def test_each_mirror_by_its_own_cadence() -> None:
    """The latest checkpoint is brought when its mirror's time has come, once; in between nothing is."""
    world = World()
    assert math.isclose(world.look(), math.inf) and world.errands() == ["near:2", "far:2"]
    world.passes(60)
    world.save(20)
    assert world.look() == pytest.approx(40, abs=1) and world.errands() == []
    world.passes(41)
    world.save(30)
    world.look()
    assert world.errands() == ["near:4"]
    assert world.has("/near", world.commits[2]) and not world.has("/far", world.commits[2])
    assert not world.has("/near", world.commits[1])
    world.passes(900)
    world.look()
    assert world.errands() == ["far:4"]
    must_load(world.platform, "/far", world.commits[2])
    assert [done.verified for done in world.records(MirrorDone)] == ["r"] * 4
    assert world.records(ErrorSeen) == []


def test_another_attempt_and_another_place() -> None:
    """A carrier of a later attempt counts on from the last copy; where the spec names another place, all is due."""
    world = World()
    world.look()
    world.errands()
    world.save(20)
    world.care = Mirroring(world.platform, RUN, 2, BOTH)
    world.look()
    assert world.errands() == []
    moved = CheckpointConfig(mirrors=(Mirror(name="near", place="/far/away"),))
    world.platform.mkdir("/far/away")
    world.care = Mirroring(world.platform, RUN, 2, moved)
    world.look()
    assert world.errands() == ["near:3"]
    world.platform.write_replacing(f"{RUN}/mirrors/near.json", b"{")
    world.care = Mirroring(world.platform, RUN, 3, moved)
    world.look()
    assert world.errands() == ["near:3"] and world.records(MirrorDone)[-1].bytes_sent == 0


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    """A copy from the future does not keep the next one waiting for that future."""
    commit = Commit(number=9, kind="save", attempt=1, step=5, parent=8, nonce="", digest="", folder="")
    state = with_held(read_state(FakePlatform(FakeDisk()), RUN, "near"), commit, 1000.0)
    later = Commit(number=10, kind="save", attempt=1, step=6, parent=9, nonce="", digest="", folder="")
    assert due_in_s(NEAR, state, commit, 5000.0) == math.inf
    assert due_in_s(NEAR, state, later, 1040.0) == 60.0
    assert due_in_s(NEAR, state, later, 900.0) == 0.0
    assert [retry_s(n) for n in (1, 2, 99)] == [RETRY_S_MIN, 2 * RETRY_S_MIN, RETRY_S_MAX]


def test_a_mirror_is_a_run_to_go_on_with() -> None:
    """What lies in a mirror after a copy is read as a run: its spec, its log, its restore point."""
    world = World()
    world.platform.mkdir(f"{RUN}/spec")
    world.platform.write_new(f"{RUN}/spec/0001.toml", b"seed = 1\n")
    world.look()
    assert world.platform.read("/near/spec/0001.toml") == b"seed = 1\n"
    assert CommitLog(world.platform, "/near/commits").restore_point() == world.commits[0]
    begin = CommitLog(world.platform, "/near/commits").begin(None, ["r00000"], "b")
    assert (begin.attempt, begin.step) == (2, 10)


@pytest.mark.parametrize(("happens", "expected"), [("", 2), ("purged", 3), ("hurries", 3)])
def test_a_mirror_slower_than_the_saves_gets_one_all_the_same(happens: str, expected: int) -> None:
    """A copy that its deadline cut short goes on with the same checkpoint while newer ones are published, in a later
    attempt too; where its source was purged meanwhile, and when the run is done, the newest is brought."""
    slow = msgspec.structs.replace(NEAR, deadline_s=0.5, bytes_per_s_max=1500.0)
    world = World(CheckpointConfig(keep_last=1, mirrors=(slow,)))
    world.look()
    world.save(20)
    world.care = Mirroring(world.platform, RUN, 2, CheckpointConfig(keep_last=1, mirrors=(NEAR,)))
    doing = {"purged": lambda: world.rm(world.commits[0]), "hurries": world.care.hurry}
    doing.get(happens, int)()
    world.look(1)
    assert world.errands() == ["near:2", f"near:{expected}"]
    must_load(world.platform, "/near", world.commits[expected - 2])
    assert read_state(world.platform, RUN, "near").begun == 0


# --- what goes wrong ---------------------------------------------------------------------------------------


def test_a_mirror_that_is_not_there_is_tried_later_and_later() -> None:
    """Each failure is a record and a warning that names mirror and place, and the pauses double; the other mirror has
    its copy meanwhile."""
    world = World()
    world.platform.rmdir("/near")
    tries = []
    for _ in range(400):
        world.look(2)
        tries += [world.platform.boot_ns() // NS for errand in world.errands() if errand == "near:2"]
        world.passes(1)
    assert [b - a for a, b in pairwise(tries)] == pytest.approx([30, 60, 120], abs=3)
    assert world.has("/far", world.commits[0])
    failed = [done for done in world.records(MirrorDone) if done.error]
    assert len(failed) == len(tries) and {done.mirror for done in failed} == {"near"}
    warnings = world.records(ErrorSeen)
    assert len(warnings) == len(tries) and {seen.severity for seen in warnings} == {"warning"}
    assert "step 10 is not on mirror near: this folder is not there" in warnings[0].what
    world.platform.mkdir("/near")
    world.passes(300)
    world.look()
    assert world.has("/near", world.commits[0])


def test_a_mirror_that_hangs_is_given_up() -> None:
    """A courier that does not end is killed after its deadline, said so, and tried again; the other mirror never
    waits, and a look never takes time."""
    world = World()
    world.acts = lambda process: None if '"near"' in str(process.argv) else run_errand(process)
    began_ns = world.platform.boot_ns()
    assert world.look() == LOOK_S
    assert world.has("/far", world.commits[0]) and world.errands() == ["near:2", "far:2"]
    assert world.platform.boot_ns() - began_ns < NS
    world.passes(NEAR.deadline_s + HANG_S - 1)
    world.look()
    assert world.records(ErrorSeen) == []
    world.passes(2)
    world.look()
    (told,) = world.records(ErrorSeen)
    assert "near" in told.what and "killed" in told.what and world.errands() == []
    world.passes(RETRY_S_MIN)
    world.acts = run_errand
    world.look()
    assert world.has("/near", world.commits[0])


def test_one_that_not_even_a_kill_ends() -> None:
    """It is told of once, its mirror waits for it, and no second courier goes to the same place."""
    world = World()
    deaf: list[FakeProcess] = []

    def hang(process: FakeProcess) -> int | None:
        if '"far"' in str(process.argv):
            return run_errand(process)
        deaf.append(process)
        process.receive = lambda signum: None  # type: ignore[method-assign]
        return None

    world.acts = hang
    for _ in range(40):
        world.look()
        world.passes(10)
    assert len(world.records(ErrorSeen)) == 1 and world.errands() == ["near:2", "far:2"]
    deaf[0].exit(-signal.SIGKILL)
    world.acts = run_errand
    world.look()
    assert world.has("/near", world.commits[0])


def test_a_source_that_was_deleted_is_said_in_words_of_a_mirror() -> None:
    """Not as damage."""
    world = World(CheckpointConfig(mirrors=(NEAR,)))

    def deleted_meanwhile(process: FakeProcess) -> int:
        world.rm(world.commits[0])
        return run_errand(process)

    world.acts = deleted_meanwhile
    assert world.care.look() == LOOK_S
    (told,) = world.records(ErrorSeen)
    assert told.name == "checkpoint.mirror_failed" and "the checkpoint is gone here (its folder)" in told.what
    assert "--new" not in told.fix and "the next save is mirrored" in told.fix


@pytest.mark.parametrize("status", [1, -signal.SIGSEGV])
def test_a_courier_that_breaks(status: int) -> None:
    """One that ends without a word is told of by the carrier, and sent again later."""
    world = World(CheckpointConfig(mirrors=(NEAR,)))
    world.acts = lambda process: status
    world.look()
    assert world.errands() == ["near:2"] and f"ended with {status}" in world.records(ErrorSeen)[0].what
    world.passes(RETRY_S_MIN + 1)
    world.acts = run_errand
    world.look()
    assert world.has("/near", world.commits[0])


def test_a_fault_of_ours_costs_one_look() -> None:
    """It is told, and the next look does what was due."""
    world = World()

    def broken(argv: Sequence[str]) -> None:
        raise ZeroDivisionError("a fault")

    whole, world.platform.programs = world.platform.programs, broken  # type: ignore[assignment]
    assert world.care.look() == RETRY_S_MIN
    world.platform.programs = whole
    world.look()
    assert world.has("/near", world.commits[0]) and world.has("/far", world.commits[0])
    (told,) = world.records(ErrorSeen)
    assert told.severity == "warning" and "ZeroDivisionError" in told.what


def test_a_disk_that_refuses_for_a_while_is_asked_again() -> None:
    """A survey that the disk refused is made again without news: the last save of a run is nobody's news any more."""
    world = World()
    world.platform.faults = lambda op, path, n: fail(errno.EIO) if "/commits/" in path else None
    assert world.look() == RETRY_S_MIN and not world.records(ErrorSeen)
    world.platform.faults = None
    world.passes(RETRY_S_MIN)
    world.look()
    assert world.has("/near", world.commits[0]) and world.has("/far", world.commits[0])


def test_the_last_one_of_a_run_that_is_done() -> None:
    """It goes to every mirror at once, whatever the cadence and what failed before; once, where that fails too."""
    world = World()
    world.look()
    world.platform.replace("/far", "/elsewhere")
    world.save(20)
    world.errands()
    world.care.hurry()
    world.look(5)
    assert sorted(world.errands()) == ["far:3", "near:3"] and world.has("/near", world.commits[1])


def test_what_is_being_copied_is_not_purged() -> None:
    """A purge that was decided earlier waits for the courier that reads the folder."""
    world = World(saves=4)
    world.acts = lambda process: None
    world.look()
    folder = world.commits[-1].folder
    assert world.care.busy == {folder}
    platform = world.platform
    execute(platform, RUN, 1, [Action("tombstone", folder, "test")], 0.0)
    (done,) = execute(platform, RUN, 1, [Action("purge", folder, "test")], 0.0, None, world.care.busy)
    assert done.error is not None and "copied" in done.error["what"] and done.error["name"] == PurgeRefused.name


# --- deleted from outside ----------------------------------------------------------------------------------


def test_a_deleted_folder_comes_back() -> None:
    """rm -rf of a published checkpoint is noticed after the next save; it comes back from the mirror, bit for bit,
    under its own name; that is journalled and said."""
    world = World()
    world.look()
    first = world.commits[0]
    world.rm(first)
    world.look()
    assert world.errands() == ["near:2", "far:2"]
    world.save(20)
    world.look()
    assert world.errands() == ["back:2"]
    must_load(world.platform, RUN, first)
    judge(world.platform)
    (record,) = world.records(BroughtBack)
    assert (record.mirror, record.step, record.commit, record.folder) == ("near", 10, 2, first.folder)
    (told,) = world.records(ErrorSeen)
    assert told.severity == "warning" and "back, from mirror near" in told.what
    world.platform = world.platform.crash()
    must_load(world.platform, RUN, first)


@pytest.mark.parametrize("name", ["manifest.json", "part-r00000.json", "part-r00000.safetensors"])
def test_a_lost_or_shortened_file_counts(name: str) -> None:
    """At the beginning of an attempt, too. What was left under the name steps aside, untouched."""
    for cut in (False, True):
        world = World()
        world.look()
        (commit,) = world.commits
        path = f"{RUN}/checkpoints/{commit.folder}/{name}"
        assert missing(world.platform, RUN, commit) == ""
        world.platform.unlink(path)
        if cut:
            world.platform.write_new(path, b"")
        assert missing(world.platform, RUN, commit) == name
        world.care = Mirroring(world.platform, RUN, 2, BOTH)
        world.look()
        must_load(world.platform, RUN, commit)
        aside = [one for one in world.platform.listdir(f"{RUN}/checkpoints") if one != commit.folder]
        assert aside == [f"{commit.folder[:-1]}2000"]
        assert len(world.platform.listdir(f"{RUN}/checkpoints/{aside[0]}")) == (3 if cut else 2)
        later = world.log.begin(None, ["r00000"], "a")
        world.passes(BOTH.debris_s + 1)
        actions = plan(survey(world.platform, RUN), BOTH)
        assert later.attempt == 2 and [(one.action, one.folder) for one in actions] == [("tombstone", aside[0])]


def test_a_purge_is_no_loss() -> None:
    """What retention marked, is purging, or has purged is never brought back; nor what it no longer keeps."""
    world = World(saves=4)
    world.look()
    world.errands()
    platform, config = world.platform, BOTH
    old = world.commits[0]
    for action in plan(survey(platform, RUN), config):
        execute(platform, RUN, 1, [action], 0.0)
    assert platform.exists(f"{RUN}/tombstones/{old.folder}.json")
    world.rm(world.commits[1])  # by retention's word or not: it was marked
    execute(platform, RUN, 1, [Action("purge", old.folder, "beyond")], 0.0)
    assert not platform.exists(f"{RUN}/checkpoints/{old.folder}")
    world.care.published()
    world.look()
    assert world.errands() == [] and world.records(ErrorSeen) == []
    assert [commit.step for commit in owed(survey(platform, RUN), config)] == [40, 30]


def test_what_a_person_let_go_is_no_loss() -> None:
    """A checkpoint that is kept for its number, but was marked by a person and purged, stays gone."""
    config = CheckpointConfig(keep_last=1, keep_every_steps=10, mirrors=(NEAR,))
    world = World(config, saves=2)
    world.look()
    world.errands()
    first = world.commits[0].folder
    for action in (Action("tombstone", first, "asked", asked=True), Action("purge", first, "asked")):
        (done,) = execute(world.platform, RUN, 1, [action], 0.0)
        assert done.error is None
    world.care.published()
    world.look()
    assert world.errands() == [] and world.records(ErrorSeen) == []


def test_what_a_copy_never_had_is_no_loss() -> None:
    """A run that goes on from a mirror has a log that names checkpoints nobody brought there."""
    world = World(saves=3)
    world.look()
    platform = world.platform
    log = CommitLog(platform, "/near/commits")
    log.begin(None, ["r00000"], "b")
    mine = Mirroring(platform, "/near", 2, BOTH)
    world.errands()
    mine.look()
    assert [commit.step for commit in owed(survey(platform, "/near"), BOTH)] == [30]
    assert [one[:3] for one in world.errands()] == ["far"], "and it is no mirror of itself"


def test_pinned_ones_are_owed() -> None:
    """A pinned checkpoint that was deleted comes back however old it is."""
    world = World()
    world.look()
    pin(world.platform, RUN, world.commits[0].folder)
    for step in (20, 30, 40, 50):
        world.save(step)
    world.rm(world.commits[0])
    world.look()
    assert "back:2" in world.errands()
    must_load(world.platform, RUN, world.commits[0])


def test_the_best_ones_are_owed() -> None:
    """One that is kept for its held-out figure alone comes back; one that is not kept does not."""
    world = World(CheckpointConfig(keep_last=1, keep_best=1, mirrors=(NEAR,)), saves=2)
    world.look()
    assert world.errands() == ["near:3"]
    world.save(30)
    with closing(Journal(world.platform, f"{RUN}/journal", "trainer")) as journal:
        journal.write(begun(1)[1])
        for step, loss in ((10, 2.0), (20, 1.0), (30, 3.0)):
            journal.write(EvalDone(step=step, store="s", loss=loss, bits_per_byte=loss, tokens=1), durable=True)
    for commit in world.commits[:2]:
        world.rm(commit)
    world.look()
    assert [one for one in world.errands() if one.startswith("back")] == ["back:3"]


def test_where_no_mirror_has_it() -> None:
    """Said once, with what to do: without mirrors, and where none of them has it."""
    for config, errands in ((CheckpointConfig(), []), (CheckpointConfig(mirrors=(FAR,)), ["back:2"])):
        world = World(config)
        world.rm(world.commits[0])
        world.look()
        assert world.errands() == errands, "what is lost is brought nowhere"
        for step in (20, 30, 40):
            world.save(step)
            world.look()
            world.passes(5)
        assert not [one for one in world.errands() if one.startswith("back")]
        (told,) = world.records(ErrorSeen)
        assert told.name == "checkpoint.lost" and "cannot be brought back" in told.what and "copy" in told.fix


def test_a_mirror_that_is_away_is_asked_again() -> None:
    """It is brought back when the mirror is there again; a lost checkpoint is not mirrored meanwhile."""
    config = CheckpointConfig(mirrors=(NEAR,))
    world = World(config)
    world.look()
    world.platform.replace("/near", "/elsewhere")
    world.rm(world.commits[0])
    world.care = Mirroring(world.platform, RUN, 2, config)
    world.errands()
    for _ in range(20):
        world.look()
        world.passes(1)
    assert world.errands() == ["back:2"] and "yet" in world.records(ErrorSeen)[0].what
    world.platform.replace("/elsewhere", "/near")
    world.passes(RETRY_S_MIN)
    world.look()
    must_load(world.platform, RUN, world.commits[0])


def test_a_mirror_with_other_bytes_is_not_believed() -> None:
    """A flipped byte in the mirror's copy is found before the checkpoint has its name again; the other mirror gives
    it."""
    world = World()
    world.look()
    (commit,) = world.commits
    path = f"/near/checkpoints/{commit.folder}/part-r00000.safetensors"
    data = world.platform.read(path)
    world.platform.write_replacing(path, data[:-1] + bytes([data[-1] ^ 1]))
    world.rm(commit)
    with pytest.raises(TransferDamaged):
        bring_back(world.platform, RUN, commit, Folder(world.platform, "/near"), ONE)
    assert world.platform.listdir(f"{RUN}/checkpoints") == []
    world.care.published()
    world.look()
    must_load(world.platform, RUN, commit)
    assert world.records(BroughtBack)[0].mirror == "far"


def test_bring_back_refuses() -> None:
    """What the store has not, and what is another checkpoint under that name, changes nothing here."""
    world = World(saves=2)
    (commit, other), platform = world.commits, world.platform
    near = Folder(platform, "/near")
    another = platform.read(f"{RUN}/checkpoints/{other.folder}/manifest.json")
    world.rm(commit)
    with pytest.raises(NameAbsent):
        bring_back(platform, RUN, commit, near, ONE)
    platform.mkdir(f"/near/checkpoints/{commit.folder}")
    platform.write_new(f"/near/checkpoints/{commit.folder}/manifest.json", another)
    with pytest.raises(CheckpointDamaged):
        bring_back(platform, RUN, commit, near, ONE)
    assert platform.listdir(f"{RUN}/checkpoints") == [other.folder]


def test_retention_that_was_faster() -> None:
    """What was marked while it was brought back stays gone, without a word: retention let go of it."""
    world = World()
    world.look()
    (commit,), platform = world.commits, world.platform
    world.rm(commit)
    execute(platform, RUN, 1, [Action("tombstone", commit.folder, "test")], 0.0)
    with pytest.raises(PurgeRefused):
        bring_back(platform, RUN, commit, Folder(platform, "/near"), ONE)
    assert not platform.exists(f"{RUN}/checkpoints/{commit.folder}")
    told: list[Record] = []
    assert back(Errand(platform, RUN, commit, told.append, threading.Event()), BOTH.mirrors) == 0 and not told


def test_somebody_who_was_faster() -> None:
    """What is whole again by then is left as it is; what another try left half, or wrong, is made good."""
    world = World()
    world.look()
    (commit,), platform = world.commits, world.platform
    before = platform.modified_s(f"{RUN}/checkpoints/{commit.folder}")
    world.passes(5)
    bring_back(platform, RUN, commit, Folder(platform, "/near"), ONE)
    assert platform.listdir(f"{RUN}/checkpoints") == [commit.folder]
    assert platform.modified_s(f"{RUN}/checkpoints/{commit.folder}") == before
    world.rm(commit)
    half = f"{RUN}/checkpoints/{commit.folder[:-1]}1000"
    platform.mkdir(half)
    platform.write_new(f"{half}/manifest.json", b"wrong")
    bring_back(platform, RUN, commit, Folder(platform, "/near"), ONE)
    must_load(platform, RUN, commit)
    assert platform.listdir(f"{RUN}/checkpoints") == [commit.folder]


def test_the_nearest_first() -> None:
    """Those known to have it, then disks, then buckets."""
    world = World(CheckpointConfig(mirrors=(FAR,)))
    world.look()
    bucket = Mirror(name="b2", place="s3://b")
    errand = Errand(world.platform, RUN, world.commits[0], lambda record: None, threading.Event())
    assert [mirror.name for mirror in nearest(errand, (bucket, NEAR, FAR))] == ["far", "near", "b2"]


@pytest.mark.parametrize("fault", [crash(), power_cut(), fail(5)], ids=["kill", "power cut", "EIO"])
@pytest.mark.parametrize("rest", [False, True], ids=["gone", "a file left"])
def test_brought_back_at_every_operation(fault: Fault, rest: bool) -> None:
    """Killed, or refused by the disk, at any operation, the checkpoint is lost or back and never something else; the
    next call ends it."""
    ended, k = False, 0
    while not ended:
        k += 1
        world = World()
        platform, (commit,) = world.platform, world.commits
        send(platform, RUN, commit, Folder(platform, "/near"), ONE)
        if rest:
            platform.unlink(f"{RUN}/checkpoints/{commit.folder}/part-r00000.json")
        else:
            world.rm(commit)
        platform.disk.sync_all()
        faulty = FakePlatform(platform.disk, "b", None, lambda op, path, n, k=k: fault if n == k else None)
        ended = _outcome(faulty, commit)
        faulty.kill()
        after = platform.crash() if fault.kind == "power_cut" and not ended else FakePlatform(platform.disk)
        if not missing(after, RUN, commit):
            must_load(after, RUN, commit, k)
        bring_back(after, RUN, commit, Folder(after, "/near"), ONE)
        must_load(after.crash(), RUN, commit, k)
    assert k > 20


def _outcome(platform: FakePlatform, commit: Commit) -> bool:
    """Whether it ended without meeting the fault."""
    try:
        bring_back(platform, RUN, commit, Folder(platform, "/near"), ONE)
    except BaseException:
        return False
    return True


# --- what is shown -----------------------------------------------------------------------------------------


def test_the_list_names_the_mirrors() -> None:
    """A checkpoint says on which mirrors it is, also when it is gone."""
    world = World(CheckpointConfig(mirrors=(NEAR, FAR)), saves=2)
    world.look()
    (first, second) = listing(survey(world.platform, RUN), BOTH, world.commits[1])
    assert (first.mirrors, second.mirrors) == ((), ("far", "near"))
    world.rm(world.commits[1])
    assert listing(survey(world.platform, RUN), BOTH, None)[1].words() == "GONE, on far, near"
