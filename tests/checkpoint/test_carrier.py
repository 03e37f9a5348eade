"""The carrier and the saver together, over their real socket: what is published, what is refused, and what it
survives."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import pathlib
import shutil
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import safetensors

from packtrain.checkpoint.carrier import Carrier, main, open_carrier
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.format import LocalTensor, TensorSpec, whole
from packtrain.checkpoint.reader import open_checkpoint, survey
from packtrain.checkpoint.retention import plan
from packtrain.checkpoint.saver import Saver, SaveResult
from packtrain.checkpoint.slots import BufferFolder, choose_buffer_folder
from packtrain.core.bulk import Image
from packtrain.core.contract import CarrierClient
from packtrain.core.errors import CommitUnknown, SaveFailed
from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from tests.checkpoint.worlds import image_of, judge, make_run, must_load, publish_small, same_bits, small_state

LONG_S = 60.0
"""Never waited out: the outcome comes first, or `Rig.skip` lets this long pass at once."""


class GatedPlatform(LocalPlatform):
    """The real machine, where one operation of a save hangs while the gate is shut, and sleeping takes no time."""

    def __init__(self) -> None:
        self.skipped_ns = 0
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Semaphore(0)
        self.hangs_in, self.hangs_under = "create", "/"
        self.before_sleep: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.before_sleep()
        self.skipped_ns += int(seconds * NS)

    def boot_ns(self) -> int:
        return super().boot_ns() + self.skipped_ns

    def create_image(self, path: str, size: int, mode: int = 0o644) -> Image:
        self._pass("create", path.endswith(".safetensors") and path.startswith(self.hangs_under))
        return super().create_image(path, size, mode)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        self._pass("read", "/buffers/" in path)
        return super().read_into(path, offset, buffer)

    def fsync_dir(self, path: str) -> None:
        self._pass("fsync_dir", path.endswith("/checkpoints"))
        super().fsync_dir(path)

    def _pass(self, op: str, here: bool) -> None:
        if here and op == self.hangs_in and not self.gate.is_set():
            self.waiting.release()
            self.gate.wait()


class Rig:
    """A run with a begun attempt and a carrier that serves it from a thread."""

    def __init__(
        self, folder: str, writers: tuple[str, ...] = ("r00000",), config: CheckpointConfig | None = None
    ) -> None:
        self.folder, self.config = folder, config
        self.platform = GatedPlatform()
        self.log = make_run(self.platform, folder)
        self.begin = self.log.begin(0, writers, "node")
        self.closing: list[Callable[[], object]] = []
        self.socket = ""
        self.carrier: Carrier
        self.start_carrier("c0")

    def start_carrier(self, name: str) -> None:
        self.socket = f"{self.folder}/{name}"
        carrier = self.carrier = open_carrier(
            self.platform, self.folder, self.socket, self.begin.number, self.config
        )
        thread = threading.Thread(target=carrier.serve)
        thread.start()

        def end() -> None:
            carrier.stop()
            thread.join()

        self.closing.insert(0, end)

    def client(self) -> CarrierClient:
        client = CarrierClient(self.socket, LONG_S)
        self.closing.append(client.close)
        return client

    def saver(self, writer: str = "r00000", deadline_s: float = LONG_S, attempt: int = 1) -> Saver:
        return Saver(self.platform, f"{self.folder}/buffers", self.client(), attempt, writer, deadline_s)

    def offer(self, **changes: object) -> dict[str, object]:
        """A good offer of step 10 by r00000, with changes."""
        pieces = small_state(1, 10)
        layout, image = image_of(pieces)
        path = f"{self.folder}/image{len(os.listdir(self.folder))}"
        self.platform.write_new(path, image)
        good = {
            "id": 1, "attempt": 1, "step": 10, "writer": "r00000", "buffer": path, "bytes": layout.bytes_total,
            "deadline_s": LONG_S, "tensors": msgspec.to_builtins([piece.spec for piece in pieces]),
            "boxes": msgspec.to_builtins(layout.boxes),
        }
        return good | changes

    def skip(self, seconds: float) -> None:
        """So much time passes, and the carrier's loop, woken by a visitor, sees it."""
        self.platform.sleep(seconds)
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(self.socket)

    def close(self) -> None:
        self.platform.gate.set()
        for close in reversed(self.closing):
            close()


@pytest.fixture
def rig(tmp_path) -> Iterator[Rig]:
    rig = Rig(str(tmp_path))
    yield rig
    rig.close()


def one(results: list[SaveResult]) -> SaveResult:
    (result,) = results
    return result


def test_saves_are_published_and_restore(rig):
    """What the saver offers is published in order, restores bit for bit, and its outcome carries commit, bytes and
    times."""
    saver = rig.saver()
    for step in (10, 20, 30):
        ticket = saver.save(step, small_state(1, step), {"data_index": step, "seed": 7, "guard": [0.5]})
        result = one(saver.wait_all(LONG_S))
        assert (result.ticket, result.step, result.error) == (ticket, step, None)
        assert result.bytes > 0 and result.write_s > 0 and result.stall_s > 0
    judge(rig.platform, rig.folder)
    point = rig.log.restore_point()
    manifest = open_checkpoint(rig.platform, rig.folder, point).manifest
    assert (point.step, manifest.data_index, manifest.seed, manifest.meta) == (30, 30, 7, {"guard": [0.5]})
    assert saver.skipped == 0


def test_two_saves_on_their_way_and_a_third_is_skipped(rig):
    """Two buffers: with two saves not ended the third finds none, is skipped and counted, and says why."""
    saver = rig.saver()
    rig.platform.gate.clear()
    assert saver.save(10, small_state(1, 10), {}) is not None
    assert saver.save(20, small_state(1, 20), {}) is not None
    assert saver.save(30, small_state(1, 30), {}) is None
    assert saver.skipped == 1 and "buffers" in saver.skip_reason
    rig.platform.gate.set()
    assert sorted(result.step for result in saver.wait_all(LONG_S)) == [10, 20]
    assert saver.save(40, small_state(1, 40), {}) is not None
    assert one(saver.wait_all(LONG_S)).error is None
    judge(rig.platform, rig.folder)


def test_saves_are_written_one_after_the_other(rig):
    """While one save hangs the next waits, for published late it would forbid the earlier one; busy beyond that."""
    client, saver = rig.client(), rig.saver()
    rig.platform.gate.clear()
    saver.save(10, small_state(1, 10), {})
    rig.platform.waiting.acquire()
    saver.save(20, small_state(1, 20), {})
    for ticket in (1, 2):
        assert client.offer(rig.offer(id=ticket, step=30)) == "busy"
    assert [(save.step, save.running) for save in rig.carrier._saves.values()] == [(10, True), (20, False)]
    rig.platform.gate.set()
    assert [result.error for result in saver.wait_all(LONG_S)] == [None, None]
    saves = judge(rig.platform, rig.folder)[1:]
    assert [commit.step for commit in saves] == [10, 20]
    assert sorted(os.listdir(f"{rig.folder}/checkpoints")) == [commit.folder for commit in saves], "written twice"


def test_one_step_is_saved_once(rig):
    """A step on its way or published already is not written again: the same ticket, or the same commit at once."""
    saver = rig.saver()
    rig.platform.gate.clear()
    ticket = saver.save(10, small_state(1, 10), {})
    assert saver.save(10, small_state(1, 10), {}) == ticket
    rig.platform.gate.set()
    first = one(saver.wait_all(LONG_S))
    again = saver.save(10, small_state(1, 10), {})
    assert one(saver.poll()) == first._replace(ticket=again, stall_s=0.0, write_s=0.0)
    assert rig.log.head() == 2


def test_changed_shapes_get_a_new_image(rig):
    """A state whose tensors change (another model part, a longer statistic) is laid out anew in the same buffers."""
    saver = rig.saver()
    for step in range(1, 7):
        pieces = small_state(1, step)[: 1 + step % 2]
        saver.save(step, pieces, {})
        commit = rig.log.read(one(saver.wait_all(LONG_S)).commit)
        checkpoint = open_checkpoint(rig.platform, rig.folder, commit)
        assert list(checkpoint.specs) == [piece.spec.name for piece in pieces] and checkpoint.verify() == []
        image = rig.platform.read(f"{checkpoint.folder}/part-r00000.safetensors")
        entries = dict(safetensors.deserialize(image))
        assert {name: bytes(entry["data"]) for name, entry in entries.items()} == {
            piece.spec.name: piece.array.tobytes() for piece in pieces
        }


def test_all_writers_must_answer(tmp_path):
    """A save is published when every writer named by `begin` has offered its part, each writer gets the outcome; one
    that goes on to a later step without the earlier one fails the earlier one at once, by name."""
    rig = Rig(str(tmp_path), ("r00000", "r00001"))
    try:
        a, b = rig.saver("r00000"), rig.saver("r00001")
        pieces = small_state(1, 10)
        a.save(10, pieces[:1], {})
        b.save(10, pieces[1:], {})
        assert one(a.wait_all(LONG_S)).commit == one(b.wait_all(LONG_S)).commit == 2
        must_load(rig.platform, rig.folder, rig.log.read(2))
        a.save(20, small_state(1, 20)[:1], {})
        b.save(30, small_state(1, 30)[1:], {})
        error = one(a.wait_all(LONG_S)).error
        assert error["name"] == SaveFailed.name and "r00001 went on to step 30" in error["what"]
        a.save(30, small_state(1, 30)[:1], {})
        assert one(a.wait_all(LONG_S)).commit == one(b.wait_all(LONG_S)).commit == 3
    finally:
        rig.close()


def test_a_missing_writer_fails_the_save_at_its_deadline(tmp_path):
    """A save whose other writer never answers fails at its deadline, naming that writer."""
    rig = Rig(str(tmp_path), ("r00000", "r00001"))
    try:
        saver = rig.saver()
        saver.save(10, small_state(1, 10)[:1], {})
        rig.skip(LONG_S + 1)
        assert "no answer from r00001" in one(saver.wait_all(LONG_S)).error["what"]
        assert rig.log.head() == 1
    finally:
        rig.close()


def test_a_newer_attempt_tells_the_worker_to_stop(rig):
    """After a newer `begin` the outcome is CommitStale and says stop; nothing of the old attempt appears in the log."""
    client = rig.client()
    CommitLog(rig.platform, f"{rig.folder}/commits").begin(None, ("r00000",), "node")
    client.offer(rig.offer())
    outcome = client.wait(1, LONG_S)
    assert (outcome["ok"], outcome["stop"], outcome["error"]["name"]) == (False, True, "commits.stale")
    assert rig.log.head() == 2


def test_a_worker_of_another_attempt_is_told_to_stop(rig):
    """A carrier serves its own attempt: what a worker of another one offers is not saved under this one's name."""
    client = rig.client()
    client.offer(rig.offer(attempt=9))
    outcome = client.wait(1, LONG_S)
    assert (outcome["ok"], outcome["stop"], outcome["error"]["name"]) == (False, True, "commits.stale")
    assert rig.log.head() == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"writer": "r00009"}, {"writer": "../x"}, {"buffer": "image"}, {"buffer": "/nowhere"}, {"step": -1},
        {"deadline_s": 0}, {"deadline_s": 1e300}, {"bytes": -5}, {"bytes": 10}, {"bytes": 1 << 30},
        {"bytes": 1 << 55}, {"boxes": []}, {"tensors": []},
    ],
)
def test_an_offer_that_makes_no_sense_fails_alone(rig, changes):
    """An offer with impossible fields, or a buffer that is not what it says, gets an outcome with an error; the next
    is fine."""
    client = rig.client()
    assert client.offer(rig.offer(**changes)) == "accepted"
    outcome = client.wait(1, LONG_S)
    assert outcome["ok"] is False and outcome["error"]["name"] == SaveFailed.name and outcome["error"]["fix"]
    assert rig.log.head() == 1
    client.offer(rig.offer(id=2))
    assert client.wait(2, LONG_S)["ok"] is True
    assert len(os.listdir(f"{rig.folder}/checkpoints")) == 1, "a refused save left a folder"


@pytest.mark.parametrize(
    "garbage",
    [
        b"", b"\n", b"{}\n", b"garbage\n", b"\xff\xfe\x00\n", b"[" * 200_000 + b"\n", b'{"op":"delete"}\n',
        b'{"op":"offer"}\n', b'{"op":"offer","id":"x"}\n', b'{"op":"offer","id":1',
        b'{"op":"retain","id":1,"grace_s":0,"actions":[{"action":"rm","folder":"x","reason":""}]}\n',
    ],
)
def test_garbage_and_vanished_clients_harm_nobody(rig, garbage):
    """A client that sends no message, half of one, or nothing, and goes, costs its own connection and nothing else."""
    good = rig.client()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(rig.socket)
        sock.sendall(garbage)
        if garbage.endswith(b"\n"):
            sock.settimeout(LONG_S)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    assert good.offer(rig.offer()) == "accepted"
    assert good.wait(1, LONG_S)["ok"] is True


def test_a_client_that_never_reads_is_dropped(rig):
    """Outcomes that nobody reads do not pile up in the carrier: beyond a bound it drops the connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(rig.socket)
        line = json.dumps({"op": "offer", **rig.offer(writer="x" * 60_000)}).encode() + b"\n"
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(10_000):
                sock.sendall(line)
    client = rig.client()
    client.offer(rig.offer())
    assert client.wait(1, LONG_S)["ok"] is True


def test_a_worker_that_dies_after_its_offer_is_saved_all_the_same(rig):
    """An accepted offer is whole, so it is published though its worker is gone; the same offer again gets its
    outcome."""
    client = rig.client()
    rig.platform.gate.clear()
    offer = rig.offer()
    client.offer(offer)
    rig.platform.waiting.acquire()
    client.close()
    again = rig.client()
    assert again.offer(offer | {"id": 5}) == "accepted"
    assert again.offer(rig.offer(id=6)) == "busy", "another buffer for the same step and writer"
    rig.platform.gate.set()
    assert again.wait(5, LONG_S)["commit"] == 2
    again.offer(offer | {"id": 7})
    assert again.wait(7, LONG_S)["commit"] == 2
    judge(rig.platform, rig.folder)


def test_half_an_offer_is_no_offer(rig):
    """A worker that dies while it sends its offer has offered nothing."""
    line = json.dumps({"op": "offer", **rig.offer()}).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(rig.socket)
        sock.sendall(line)
    client = rig.client()
    client.offer(rig.offer(step=20))
    assert client.wait(1, LONG_S)["step"] == 20
    assert [commit.step for commit in rig.log.all()[1:]] == [20]


def test_a_stopped_carrier_finishes_what_it_took(rig):
    """Asked to stop in the middle of a save, with another waiting, a carrier publishes both, then ends."""
    saver = rig.saver()
    rig.platform.gate.clear()
    saver.save(10, small_state(1, 10), {})
    saver.save(20, small_state(1, 20), {})
    rig.platform.waiting.acquire()
    rig.carrier.stop()
    assert rig.client().offer(rig.offer(step=30)) == "busy"
    rig.platform.gate.set()
    assert sorted(result.step for result in saver.wait_all(LONG_S) if result.commit) == [10, 20]
    assert rig.log.restore_point().step == 20


def test_the_last_save_may_have_less_time(rig):
    """A save offered with the time left fails within it, and its error names place and remedy; others keep theirs."""
    saver = rig.saver()
    rig.platform.gate.clear()
    saver.save(10, small_state(1, 10), {}, deadline_s=7.0)
    rig.platform.waiting.acquire()
    rig.skip(8.0)
    error = one(saver.wait_all(LONG_S)).error
    assert error["name"] == SaveFailed.name and "the disk hangs" in error["what"] and error["where"] and error["fix"]
    rig.platform.gate.set()


def test_what_dead_attempts_left_in_memory_is_no_reason_to_leave_it(tmp_path):
    """Buffers of a killed attempt go before free memory is measured; buffers on the disk say why they are there."""

    class Small(LocalPlatform):
        def free_bytes(self, path):
            return 4096 - sum(os.stat(file).st_size for file in glob.glob(f"{folder}/*"))

    run = str(tmp_path)
    folder = choose_buffer_folder(LocalPlatform(), run, 1024).path
    if folder == f"{run}/buffers":
        pytest.skip("no memory file system here")
    try:
        for left in (folder, f"{run}/buffers"):
            os.makedirs(left, exist_ok=True)
            for name in ("r00000.a0001.0.g0", "r00001.a0001.0.g0"):
                pathlib.Path(left, name).write_bytes(bytes(512))
        refused = choose_buffer_folder(Small(), run, 896, "r00002")
        assert refused.path == f"{run}/buffers" and "on the run's own disk" in refused.fallback
        assert Saver(LocalPlatform(), refused, CarrierClient("/none"), 2, "r00002", 1.0).fallback == refused.fallback
        assert choose_buffer_folder(Small(), run, 896, "r00000") == BufferFolder(folder)
        assert os.listdir(folder) == os.listdir(f"{run}/buffers") == ["r00001.a0001.0.g0"]
    finally:
        shutil.rmtree(folder)


def test_a_new_carrier_knows_what_the_old_one_published(rig):
    """A save published by a carrier that did not live to say so is no reason to stop: offered again, it is done."""
    publish_small(rig.platform, rig.log, 1, 10, rig.folder)
    rig.start_carrier("c1")
    client = rig.client()
    client.offer(rig.offer())
    outcome = client.wait(1, LONG_S)
    assert (outcome["ok"], outcome["commit"]) == (True, 2)
    assert rig.log.head() == 2


def test_a_saver_clears_what_earlier_attempts_left(rig):
    """Buffers of a killed worker are dropped by the next attempt of the same writer, and by `close`; others' stay. The
    last to close takes the folder away."""
    buffers = f"{rig.folder}/buffers"
    first = rig.saver()
    first.save(10, small_state(1, 10), {})
    first.wait_all(LONG_S)
    other = rig.saver("r00001")
    other._buffers[0].fill(rig.platform, *_fillable())
    assert len(os.listdir(buffers)) == 2
    second = rig.saver(attempt=2)
    assert [name.split(".")[0] for name in os.listdir(buffers)] == ["r00001"]
    second.close()
    assert os.path.isdir(buffers)
    other.close()
    assert not os.path.exists(buffers)


def _fillable():
    pieces = small_state(1, 1)
    return image_of(pieces)[0], pieces


def test_no_room_for_a_buffer_is_an_outcome(rig):
    """Where no buffer can be made (here: folders in their places) the save fails with place and remedy; nothing
    raises."""
    saver = rig.saver()
    for buffer in saver._buffers:
        os.mkdir(buffer.path)
    ticket = saver.save(10, small_state(1, 10), {})
    error = one(saver.poll()).error
    assert ticket is not None and error["name"] == SaveFailed.name and error["where"] and error["fix"]


def test_buffers_go_to_memory_only_where_it_is_ours_and_big_enough(tmp_path):
    """The buffer folder is in memory, private and per run, if two images fit in half of it; else it is beside the
    run."""
    platform = LocalPlatform()
    run = str(tmp_path)
    assert choose_buffer_folder(platform, run, 1 << 60).path == f"{run}/buffers"
    folder = choose_buffer_folder(platform, run, 1024).path
    if folder == f"{run}/buffers":
        pytest.skip("no memory file system here")
    try:
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert choose_buffer_folder(platform, f"{run}/../{tmp_path.name}", 1024) == BufferFolder(folder)
        os.chmod(folder, 0o770)
        assert choose_buffer_folder(platform, run, 1024).path == f"{run}/buffers"
    finally:
        os.rmdir(folder)


def test_a_carrier_for_no_attempt_does_not_start(tmp_path):
    """A carrier asked to serve a record that begins no attempt says so (exit 75), rather than publish for nobody."""
    platform = LocalPlatform()
    log = make_run(platform, str(tmp_path))
    log.begin(0, ("r00000",), "node")
    log.publish(1, 1, "", "")
    for number in (2, 3):
        with pytest.raises(CommitUnknown, match="begins no attempt"):
            open_carrier(platform, str(tmp_path), f"{tmp_path}/s", number)
        argv = ["--run", str(tmp_path), "--socket", f"{tmp_path}/s", "--begin", str(number)]
        assert main(argv) == 75


def test_retention_is_carried_out_by_the_carrier(rig):
    """A plan sent as `retain` is carried out while saves go on; each action has its own outcome, refusals included."""
    saver = rig.saver()
    for step in (10, 20, 30):
        saver.save(step, small_state(1, step), {})
        assert one(saver.wait_all(LONG_S)).error is None
    client = rig.client()
    config = CheckpointConfig(keep_last=1, grace_s=0.0)
    for expected in ("tombstone", "purge"):
        actions = plan(survey(rig.platform, rig.folder), config)
        message = {"op": "retain", "id": 1, "grace_s": config.grace_s, "actions": msgspec.to_builtins(actions)}
        assert client.offer(message) == "accepted"
        outcome = client.wait(1, LONG_S)
        assert [(done["action"], done["error"]) for done in outcome["done"]] == [(expected, None)] * 2
    assert os.listdir(f"{rig.folder}/checkpoints") == [rig.log.restore_point().folder]
    refused = {"action": "purge", "folder": rig.log.restore_point().folder, "reason": ""}
    client.offer({"op": "retain", "id": 2, "grace_s": 0.0, "actions": [refused]})
    assert client.wait(2, LONG_S)["done"][0]["error"]["name"] == "checkpoint.purge_refused"
    must_load(rig.platform, rig.folder, rig.log.restore_point())


def test_values_survive_a_buffer_reused(rig):
    """The second use of a buffer holds the second state only, strided and zero-sized arrays included."""
    saver = rig.saver()
    for step in range(1, 5):
        base = np.arange(24, dtype=np.float32).reshape(4, 6) + step
        pieces = [piece._replace(array=piece.array) for piece in small_state(1, step)]
        pieces.append(_piece("t", base.T))
        pieces.append(_piece("z", np.zeros((0, 3), np.int8)))
        saver.save(step, pieces, {})
        commit: Commit | None = rig.log.read(one(saver.wait_all(LONG_S)).commit)
        assert commit is not None
        checkpoint = open_checkpoint(rig.platform, rig.folder, commit)
        assert same_bits(checkpoint.read("t"), np.ascontiguousarray(base.T))
        assert checkpoint.read("z").shape == (0, 3)


def _piece(name, array):
    return LocalTensor(TensorSpec(name, str(array.dtype), array.shape, ("a", "b")), whole(array.shape), array)
