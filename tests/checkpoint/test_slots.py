"""The memory tier: no slot that claims to be whole does not load, and nothing begins from a slot that may not be taken.

Kills are those of a process: a machine that goes down takes its memory along.
"""

from __future__ import annotations

import copy
import os
import random
import shutil

import msgspec
import numpy as np
import pytest

from packtrain.checkpoint import asked, slots
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.format import LocalTensor, TensorSpec, plan_image, whole
from packtrain.checkpoint.reader import restoring
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import (
    SHARED_BYTES_MIN,
    Buffer,
    BufferFolder,
    choose_buffer_folder,
    drop_folder,
    held_in,
    look,
    memory_folder,
)
from packtrain.core.errors import CarrierLost, Contradiction, NeitherRestoreNorFresh, SlotDamaged
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform, crash, fail, tear
from packtrain.core.memory import container_left
from packtrain.core.platform import LocalPlatform
from packtrain.core.units import GIB
from packtrain.train.seat import _begin
from tests.checkpoint.test_kills import Children, children  # noqa: F401
from tests.checkpoint.worlds import RUN, WRITER, big_state, make_run, publish_small, same_bits, small_state

FOLDER = memory_folder(RUN, "a")
NODE = LocalPlatform().node()


class Client:
    """A carrier that takes what it is offered and is done when the test says so. `lost`: it is gone."""

    def __init__(self):
        self.offers, self.told, self.ended = [], [], []
        self.lost, self.reachable = False, True

    def offer(self, message):
        if self.lost:
            raise CarrierLost("gone", where="here", fix="none")
        self.offers.append(message)
        return "accepted"

    def tell(self, message):
        if not self.lost:
            self.told.append(message)
        return not self.lost

    def publish(self, number=0):
        self.ended.append({"id": self.offers[number]["id"], "ok": True, "commit": 2})

    def outcomes(self):
        ended, self.ended = self.ended, []
        return ended

    def wait(self, ticket, timeout_s):
        return None

    def close(self):
        pass


def begun_run(platform, writers=(WRITER,)):
    log = make_run(platform)
    log.begin(0, writers, "node")
    platform.mkdir("/dev/shm")
    return log


def saver_of(platform, log, client=None, writer=WRITER, slots=True):
    begun = log.begun()
    return Saver(platform, BufferFolder(FOLDER, slots=slots), client or Client(), begun.attempt, writer, 60.0, begun)


def remember(saver, step, attempt=1, begins=None):
    return saver.remember(step, small_state(attempt, step), {"data_index": step, "seed": 7, "mark": "kept"}, begins)


def begin_again(platform, log):
    """The next attempt, as whoever begins does it, and what it restores; None: nothing from memory."""
    found = look(platform, RUN, log)
    if found.memory is None:
        return None
    begin = log.begin(None, (WRITER,), "node", memory=found.memory)
    return begin


def must_restore(platform, begin, note=""):
    """What it begins from in memory is bit for bit what its attempt had at that step."""
    attempt, step, digest = begin.memory
    with restoring(platform, RUN, begin.number, digest) as checkpoint:
        assert (checkpoint.manifest.step, checkpoint.published) == (step, False), note
        assert (checkpoint.manifest.data_index, checkpoint.manifest.meta) == (step, {"mark": "kept"}), note
        for piece in small_state(attempt, step):
            assert same_bits(checkpoint.read(piece.spec.name), piece.array), note


# --- kills ---------------------------------------------------------------------------------------------


def five_saves(platform, log, done):
    """Copies of steps 1 to 5; that of 2 is being written away from then on, and the carrier is lost before 4."""
    client = Client()
    saver = saver_of(platform, log, client)
    for step in range(1, 6):
        client.lost = step == 4
        assert remember(saver, step) is not None
        done.append(step)
        if step in (2, 4):
            saver.save(step, small_state(1, step), {"data_index": step, "seed": 7, "mark": "kept"})
    saver.close()


@pytest.mark.parametrize("fault", [crash(), tear(0.5, "crash"), tear(0.9, "crash")], ids=["before", "half", "most"])
def test_killed_at_every_operation(fault):
    """Killed at any change or read of a file, in the middle of a copy too, what was remembered last is restored bit for
    bit, or what was being copied; never anything else."""
    killed = 0
    for k in range(1, 200):
        disk = FakeDisk()
        first = FakePlatform(disk, "a")
        log, done = begun_run(first), []
        worker = FakePlatform(disk, "a", faults=lambda op, path, n, k=k: fault if n == k else None)
        try:
            five_saves(worker, CommitLog(worker, f"{RUN}/commits"), done)
        except FakeCrash:
            killed += 1
        else:
            break
        after = FakePlatform(disk, "a")
        for one in held_in(after, FOLDER):
            assert one.slot.crc32c == (slots.fmt.crc32c(after.read(one.image)),), f"killed at {k}: {one.image}"
        begin = begin_again(after, CommitLog(after, f"{RUN}/commits"))
        step = begin.memory[1] if begin is not None else 0
        assert step in (max(done, default=0), max(done, default=0) + 1), f"killed at {k}: {step} after {done}"
        if begin is not None:
            must_restore(after, begin, f"killed at {k}")
    assert killed > 40 and log.head() == 1


@pytest.mark.parametrize("op", ["map_file", "unlink", "create", "replace"])
def test_a_file_system_that_refuses_costs_one_copy(op):
    """An error at a file operation of a copy is counted, the slot before stays what a restart takes, and the next copy
    works again."""
    disk = FakeDisk()
    refuses = []
    platform = FakePlatform(disk, "a", faults=lambda done, path, n: fail() if done == op and refuses else None)
    log = begun_run(platform)
    saver = saver_of(platform, log)
    for step in (1, 2, 3) if op == "unlink" else (1,):
        remember(saver, step)
    last = 3 if op == "unlink" else 1
    refuses.append(True)
    remember(saver, last + 1)
    refuses.clear()
    assert look(platform, RUN, log).memory[1] == last
    assert remember(saver, last + 2) is not None and saver.forgot == 1 and saver.skip_reason
    assert look(platform, RUN, log).memory[1] == last + 2


def test_real_kills_while_filling(children, tmp_path, memory_disk):  # noqa: F811
    """A worker that copies 400 KiB again and again, killed -9 at ten drawn moments, leaves the last step or the one
    before it whole and true."""
    run, rng, platform = str(tmp_path), random.Random(4), LocalPlatform()
    log = make_run(platform, run)
    begin = log.begin(0, (WRITER,), "node")
    try:
        for kill in range(10):
            name = children.start(
                id=f"m{kill}", role="rememberer", run=run, begin=begin.number, writers=1, writer=WRITER, socket=""
            )
            for _ in range(rng.randint(2, 40)):
                said = children.wait_for(name, "fills")
            children.kill(name)
            filling = max([int(event.split()[1]) for who, event in children.events if who == name and "fills" in event])
            found = look(platform, run, log)
            assert found.memory is not None and found.memory[1] >= filling - 2, (found, said)
            begin = log.begin(None, (WRITER,), "node", memory=found.memory)
            with restoring(platform, run, begin.number, found.memory[2]) as checkpoint:
                for piece in big_state(found.memory[0], found.memory[1], 1, None):
                    assert same_bits(checkpoint.read(piece.spec.name), piece.array), kill
    finally:
        shutil.rmtree(memory_folder(run, NODE), ignore_errors=True)


# --- damage --------------------------------------------------------------------------------------------


def test_any_flipped_byte_is_found_before_use():
    """Whatever byte of an image or a record changes: a record is not believed, an image is found out by name when it is
    read, and then no attempt begins from it again."""
    platform = FakePlatform(FakeDisk(), "a")
    log = begun_run(platform)
    remember(saver_of(platform, log), 1)
    [one] = held_in(platform, FOLDER)
    begin = begin_again(platform, log)
    record = platform.disk.find_file(one.image + ".json")
    for at in range(len(record.data)):
        record.data[at] ^= 4
        assert held_in(platform, FOLDER) == [], at
        record.data[at] ^= 4
    image, kept = platform.disk.find_file(one.image), bytes(record.data)
    for at in range(len(image.data)):
        image.data[at] ^= 4
        with pytest.raises(SlotDamaged, match="step 1 cannot be restored from memory") as error:
            must_restore(platform, begin)
        assert one.image in error.value.where and look(platform, RUN, log).memory is None, at
        image.data[at] ^= 4
        platform.write_new(one.image + ".json", kept)
    must_restore(platform, begin)


def test_a_slot_that_is_gone_or_short_is_not_there():
    """An image that was cut or removed, or a record without one, is no slot; a begin that names it says so."""
    platform = FakePlatform(FakeDisk(), "a")
    log = begun_run(platform)
    remember(saver_of(platform, log), 1)
    [one] = held_in(platform, FOLDER)
    begin = begin_again(platform, log)
    del platform.disk.find_file(one.image).data[-1:]
    assert held_in(platform, FOLDER) == []
    platform.unlink(one.image)
    assert held_in(platform, FOLDER) == []
    with pytest.raises(SlotDamaged, match="gone or changed"):
        must_restore(platform, begin)


@pytest.mark.parametrize("tier", [True, False], ids=["slots", "buffers"])
def test_a_folder_that_was_removed_costs_what_was_in_it(tier):
    """Somebody removes the folder of a worker that trains: the next save and the next copy lie in files that are there,
    also a save of the very step that was copied last."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    saver = Saver(platform, BufferFolder(FOLDER, slots=tier), client, 1, WRITER, 60.0, begun_run(platform).begun())
    for step in (1, 2, 3, 4):
        if tier:
            assert remember(saver, step) is not None
        if step in (3, 4):
            drop_folder(platform, FOLDER)
        saver.save(step, small_state(1, step), {"data_index": step, "seed": 7, "mark": "kept"})
        assert platform.size(client.offers[-1]["buffer"]) == client.offers[-1]["bytes"]
        client.publish(-1)
        assert [(result.step, result.error) for result in saver.poll()] == [(step, None)]
    if tier:
        assert remember(saver, 5) is not None and {one.slot.step for one in held_in(platform, FOLDER)} == {4, 5}


def test_an_image_is_as_old_as_what_it_was_filled_with(tmp_path, memory_disk):
    """Pages that are there already are written without a word to the file system: the image says when it was filled."""
    platform, folder, state = LocalPlatform(), memory_folder(str(tmp_path), NODE), small_state(1, 1)
    buffer, layout = Buffer(f"{folder}/{WRITER}"), plan_image([(tensor.spec, tensor.box) for tensor in state])
    try:
        buffer.fill(platform, layout, state)
        os.utime(buffer.path, (1.0, 1.0))
        buffer.fill(platform, layout, state)
        assert platform.modified_s(buffer.path) > 1e9
    finally:
        drop_folder(platform, folder)


def test_another_record_is_not_the_one_that_was_named():
    """A record that is true, but not the one the attempt began from, is refused: the digest in the log decides."""
    platform = FakePlatform(FakeDisk(), "a")
    log = begun_run(platform)
    remember(saver_of(platform, log), 1)
    [one] = held_in(platform, FOLDER)
    begin = begin_again(platform, log)
    other = msgspec.structs.replace(one.slot, about=one.slot.about | {"data_index": 2})
    platform.write_replacing(one.image + ".json", slots.render(other))
    with pytest.raises(SlotDamaged, match="gone or changed"):
        must_restore(platform, begin)


# --- who may take what -----------------------------------------------------------------------------------


def test_all_writers_or_none():
    """A step is taken when every writer of the attempt holds it: the newest such, not the newest of one; and it is read
    whole across their slots."""
    platform, writers = FakePlatform(FakeDisk(), "a"), ("r00000", "r00001")
    log = begun_run(platform, writers)
    savers = {name: saver_of(platform, log, writer=name) for name in writers}
    for step, names in ((1, writers), (2, writers), (3, writers[:1])):
        for name in names:
            savers[name].remember(step, big_state(1, step, 2, name), {})
    found = look(platform, RUN, log)
    assert found.memory[:2] == (1, 2)
    begin = log.begin(None, writers, "node", memory=found.memory)
    with restoring(platform, RUN, begin.number, found.memory[2]) as checkpoint:
        for piece in big_state(1, 2, 2, None):
            assert same_bits(checkpoint.read(piece.spec.name), piece.array)
    log.begin(None, ("r00000", "r00001", "r00002"), "node")
    assert look(platform, RUN, log).memory is None


def test_only_the_last_attempt_and_only_what_is_newer():
    """Slots of an attempt before the last, of another run in the same place, and steps that are on disk are left."""
    platform = FakePlatform(FakeDisk(), "a")
    log = begun_run(platform)
    saver = saver_of(platform, log)
    remember(saver, 10)
    assert look(platform, RUN, log) == ((1, 10, look(platform, RUN, log).memory[2]), look(platform, RUN, log).note)
    publish_small(platform, log, 1, 10)
    assert look(platform, RUN, log) == (None, "")
    remember(saver, 12)
    assert "2 steps newer than the newest on disk" in look(platform, RUN, log).note
    other = FakePlatform(FakeDisk(), "b")
    assert look(other, RUN, begun_run(other)).memory is None
    for name in platform.listdir(FOLDER):  # the folder of a run that was deleted and made anew
        other.mkdir(FOLDER)
        other.write_new(f"{FOLDER}/{name}", platform.read(f"{FOLDER}/{name}"))
    assert len(held_in(other, FOLDER)) == 2 and look(other, RUN, CommitLog(other, f"{RUN}/commits")).memory is None
    log.begin(None, (WRITER,), "node")
    assert look(platform, RUN, log).memory is None


def test_two_runs_share_nothing(tmp_path):
    """Every run has a folder of its own, whatever way its path is written."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert memory_folder(one, "a") != memory_folder(two, "a") != memory_folder(two, "b")
    assert memory_folder(one, "a") == memory_folder(f"{two}/../one", "a")


def test_a_log_that_was_taken_over_takes_nothing_from_memory():
    """What lies in memory is of the log that was closed: after a copy was taken over nothing begins from it."""
    platform = FakePlatform(FakeDisk(), "a")
    log = begun_run(platform)
    remember(saver_of(platform, log), 3)
    assert look(platform, RUN, log).memory is not None
    log.take_over(log.head(), 1)
    assert look(platform, RUN, log) == (None, "")


def test_by_hand_the_same_memory_is_taken_once():
    """By hand an attempt that began from memory and got no further is not begun from the same again: the next one takes
    the disk and says so; where it left something newer, that is taken."""
    platform = FakePlatform(FakeDisk(), "a")
    log = begun_run(platform)
    publish_small(platform, log, 1, 2)
    remember(saver_of(platform, log), 3)
    begin, _, _ = _begin(platform, RUN, fresh=False, memory=True)
    assert begin.memory[:2] == (1, 3)
    saver = saver_of(platform, log)
    again = FakePlatform(_copy(platform), "a")
    begin, restore, note = _begin(again, RUN, fresh=False, memory=True)
    assert begin.memory is None and restore.commit == 2 and "step 3 in memory led to nothing newer" in note
    remember(saver, 4, attempt=2)
    begin, _, _ = _begin(platform, RUN, fresh=False, memory=True)
    assert begin.memory[:2] == (2, 4)


def test_by_hand():
    """By hand an attempt begins from memory where that is newer, needs no --fresh for it, and takes nothing from there
    where a person asked for a save, for a fresh start, or for no memory tier."""
    platform = FakePlatform(FakeDisk(), "a")
    log = begun_run(platform)
    remember(saver_of(platform, log), 3)
    begin, restore, _ = _begin(FakePlatform(_copy(platform), "a"), RUN, fresh=True, memory=True)
    assert (begin.memory, restore) == (None, None)
    with pytest.raises(NeitherRestoreNorFresh):
        _begin(platform, RUN, fresh=False, memory=False)
    begin, restore, note = _begin(platform, RUN, fresh=False, memory=True)
    assert begin.memory == (1, 3, restore.digest) and restore.commit == begin.number and "from memory" in note
    must_restore(platform, begin)
    saver = saver_of(platform, log)
    save = publish_small(platform, log, 2, 4)
    remember(saver, 5, attempt=2)
    asked.wish(platform, RUN, save, log.head())
    begin, restore, note = _begin(platform, RUN, fresh=False, memory=True)
    assert (begin.memory, restore.commit, note) == (None, save.number, "")


def _copy(platform):
    """Another disk with the same files."""
    disk = FakeDisk()
    disk.root = copy.deepcopy(platform.disk.root)
    return disk


# --- slots and saves -------------------------------------------------------------------------------------


def test_a_save_on_disk_is_offered_from_the_slot_of_its_step():
    """Where the step was copied into memory there is no second copy, and a slot that is being written away, or the last
    whole one, is not filled."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    log = begun_run(platform)
    saver = saver_of(platform, log, client)
    remember(saver, 1)
    [one] = held_in(platform, FOLDER)
    assert saver.save(1, small_state(1, 1), {}) is not None and client.offers[0]["buffer"] == one.image
    before = platform.read(one.image)
    assert remember(saver, 1) is not None and len(held_in(platform, FOLDER)) == 1
    for step in (2, 3, 4):
        assert remember(saver, step) is not None
        assert platform.read(one.image) == before
    assert saver.save(4, small_state(1, 4), {}) is not None
    assert len({offer["buffer"] for offer in client.offers}) == 2
    assert remember(saver, 5) is not None and remember(saver, 6) is None and saver.forgot == 1
    assert saver.save(6, small_state(1, 6), {}) is None and "all buffers are held" in saver.skip_reason
    client.publish(0)
    assert remember(saver, 6) is not None


def test_what_was_restored_stays_until_something_newer_is_whole():
    """The slot an attempt began from is not dropped before a copy of its own is whole, also where the attempt ends
    at once; then it goes, so there are never more than three images."""
    platform = FakePlatform(FakeDisk(), "a")
    log = begun_run(platform)
    remember(saver_of(platform, log), 1)
    begin_again(platform, log)
    saver_of(platform, log).close()
    begin = begin_again(platform, log)
    assert begin.memory[:2] == (1, 1)
    must_restore(platform, begin)
    saver = saver_of(platform, log)
    images = []
    for step in (2, 3, 4, 5):
        remember(saver, step, attempt=3)
        images.append([name for name in platform.listdir(FOLDER) if not name.endswith(".json")])
    assert [len(names) for names in images] == [2, 3, 3, 3]
    assert not any(name.startswith(f"{WRITER}.a0001") for name in images[-1])
    assert look(platform, RUN, log).memory[:2] == (3, 5)


def test_what_was_forgotten_is_taken_by_nobody():
    """After `forget` no attempt begins from what this one held, or began from; what a carrier reads stays as it is."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    log = begun_run(platform)
    remember(saver_of(platform, log), 1)
    begin_again(platform, log)
    saver = saver_of(platform, log, client)
    for step in (2, 3):
        remember(saver, step, attempt=2)
    saver.save(3, small_state(2, 3), {})
    offered, before = client.offers[0]["buffer"], platform.read(client.offers[0]["buffer"])
    saver.forget()
    assert held_in(platform, FOLDER) == [] and look(platform, RUN, log).memory is None
    saver.close()
    assert platform.read(offered) == before and look(platform, RUN, log).memory is None


@pytest.mark.parametrize("slots", [True, False], ids=["slots", "buffers"])
def test_where_no_new_image_has_room_an_old_one_is_filled(slots):
    """Memory that fills up after some images were made keeps no later save away: those images are filled in turn."""
    disk, full = FakeDisk(), []
    platform = FakePlatform(disk, "a", faults=lambda op, path, n: fail(28) if op == "map_file" and full else None)
    log, client = begun_run(platform), Client()
    saver = saver_of(platform, log, client, slots=slots)
    for step in range(1, 3 if slots else 2):
        saver.save(step, small_state(1, step), {})
        client.publish(-1)
    saver.poll()
    full.append(True)
    for step in (5, 6, 7):
        saver.save(step, small_state(1, step), {})
        assert [offer["step"] for offer in client.offers][-1] == step
        client.publish(-1)
        assert [result.error for result in saver.poll()] == [None]


def test_closing_leaves_what_is_not_on_disk():
    """A worker that ends before its newest copy was published leaves that one slot; after that, none."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    log = begun_run(platform)
    saver = saver_of(platform, log, client)
    for step in (1, 2, 3):
        remember(saver, step)
    saver.close()
    assert [one.slot.step for one in held_in(platform, FOLDER)] == [3] and len(platform.listdir(FOLDER)) == 2
    saver = saver_of(platform, log, client)
    remember(saver, 4)
    saver.save(4, small_state(1, 4), {})
    client.publish()
    saver.poll()
    saver.close()
    assert not platform.exists(FOLDER)


# --- room ----------------------------------------------------------------------------------------------


class Machine(LocalPlatform):
    """So much room in memory, and what some files of the kernel say."""

    def __init__(self, free, files=None):
        self.free, self.files = free, {"/proc/meminfo": "", "/proc/self/cgroup": "0::/a/b\n"} | (files or {})

    def free_bytes(self, path):
        return self.free

    def read(self, path, offset=0, size=-1):
        if path in self.files:
            return self.files[path].encode()
        if path.startswith(("/sys/", "/proc/")):
            raise FileNotFoundError(2, "none", path)
        return super().read(path, offset, size)


def test_the_budget(tmp_path, memory_disk):
    """Three images in half of what memory, machine and container leave make a memory tier; where only two fit there is
    none and it is said why; nobody who asks for none gets one or hears of it."""
    run, begun = str(tmp_path), object()
    try:
        def chosen(free, files=None, begun=begun):
            return choose_buffer_folder(Machine(free, files), run, 1000, None, begun)

        assert chosen(6000) == BufferFolder(memory_folder(run, NODE), slots=True)
        assert chosen(5999)[:3] == (memory_folder(run, NODE), "", False)
        assert "3 x 1000 B is over half of the 5.9 KiB free in /dev/shm" in chosen(5999).no_slots
        assert chosen(5999, begun=None) == chosen(6000, begun=None) == BufferFolder(memory_folder(run, NODE))
        tight = chosen(GIB, {"/proc/meminfo": "MemAvailable: 5 kB\n"})
        assert "of the 5.0 KiB free in this machine's memory" in tight.no_slots
        seven = choose_buffer_folder(Machine(14_000), run, 1000, None, begun, peer=True)
        six = choose_buffer_folder(Machine(13_999), run, 1000, None, begun, peer=True)
        assert (seven.slots, seven.lends, seven.no_lends) == (True, True, "") and not chosen(14_000).lends
        assert (six.slots, six.lends) == (True, False) and "no copies on other nodes: 7 x 1000 B is" in six.no_lends
        assert chosen(3999).path == f"{run}/buffers" and chosen(3999).no_slots
    finally:
        shutil.rmtree(memory_folder(run, NODE))


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"/sys/fs/cgroup/a/b/memory.max": "max\n", "/sys/fs/cgroup/a/b/memory.current": "7\n"}, None),
        ({"/sys/fs/cgroup/a/memory.max": "100\n", "/sys/fs/cgroup/a/memory.current": "70\n",
          "/sys/fs/cgroup/a/memory.stat": "anon 60\ninactive_file 10\n"}, 40),
        ({"/sys/fs/cgroup/memory.max": "100\n", "/sys/fs/cgroup/memory.current": "130\n"}, 0),
        ({"/proc/self/cgroup": "4:cpu,memory:/x\n", "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "50\n",
          "/sys/fs/cgroup/memory/x/memory.usage_in_bytes": "20\n"}, 30),
        ({"/proc/self/cgroup": "4:memory:/x\n",
          "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
          "/sys/fs/cgroup/memory/x/memory.usage_in_bytes": "20\n"}, None),
        ({"/proc/self/cgroup": "rubbish"}, None),
    ],
)
def test_what_a_container_leaves(files, left):
    """The tightest limit of the cgroup or one around it, of either version, less what is used and not just cached."""
    assert container_left(Machine(0, files)) == left


def test_a_cadence_cannot_be_negative():
    """The number of steps between copies is 0 or more."""
    with pytest.raises(Contradiction):
        CheckpointConfig(memory_every_steps=-1)


def test_sums_are_those_of_the_image():
    """A record's checksums are over the image as it lies in memory, block by block, header included."""
    platform = FakePlatform(FakeDisk(), "a")
    log = begun_run(platform)
    remember(saver_of(platform, log), 1)
    [one] = held_in(platform, FOLDER)
    data = np.frombuffer(platform.read(one.image), np.uint8)
    assert one.slot.crc32c == (slots.fmt.crc32c(data.tobytes()),) and len(data) == one.slot.bytes


def test_a_large_state_is_filled_by_several_threads_whole(tmp_path):
    """Above the size from which threads share the work every tensor still lies where the layout has it, bit for bit;
    the smallest one of them is not forgotten, and a second fill leaves nothing of the first."""
    rows = SHARED_BYTES_MIN // 4 // 1000 + 1
    sizes = {"a": rows // 2, "b": rows, "c": 1}
    specs = [TensorSpec(name, "float32", (n, 1000), ("r", "c")) for name, n in sizes.items()]
    layout = plan_image([(spec, whole(spec.shape)) for spec in specs])
    assert layout.bytes_total >= SHARED_BYTES_MIN
    buffer, platform = Buffer(f"{tmp_path}/r0.a0001.0"), LocalPlatform()
    for seed in (1, 2):
        dice = np.random.default_rng(seed)
        arrays = [dice.standard_normal(spec.shape, np.float32) for spec in specs]
        pieces = [LocalTensor(spec, whole(spec.shape), array) for spec, array in zip(specs, arrays)]
        buffer.fill(platform, layout, pieces)
        image = np.fromfile(buffer.path, np.uint8)
        for placed, array in zip(layout.boxes, arrays):
            there = image[placed.offset : placed.offset + placed.bytes]
            assert there.tobytes() == array.tobytes(), (seed, placed.tensor)
