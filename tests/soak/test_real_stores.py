"""Real object stores on loopback: one suite over SeaweedFS, moto and the store that lies.

SeaweedFS and moto keep conditional creates, versions and locks; `rclone serve s3` accepts the words for all of them
and enforces none. What is not installed is skipped by name.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import google_crc32c
import msgspec
import pytest

from packtrain.checkpoint import courier
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.config import Mirror
from packtrain.checkpoint.courier import Errand
from packtrain.checkpoint.publish import Gate, Save, carry
from packtrain.checkpoint.reader import verify_commit
from packtrain.core.errors import StoreUnreachable
from packtrain.core.platform import LocalPlatform
from packtrain.core.probe import probe
from packtrain.core.records import ErrorSeen, MirrorDone, Record
from packtrain.core.stores import Store, StoreConfig, open_store
from packtrain.core.transfer import Item, TransferConfig, copy
from packtrain.core.units import MIB, NS
from tests.checkpoint.worlds import WRITER, make_run, must_load, part_of, publish_small, tensor_of
from tests.core.loopback import always, bad_server, error, hang
from tests.core.store_contract import CHECKS, pattern
from tests.house import tree
from tests.soak import servers
from tests.soak.servers import BUCKET, ID, KINDS, LOCKED, SECRET, Server, found, running

BLOCK = 4 * MIB
BIG = 40 * MIB + 4321
pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_STORE_ID", ID)
    monkeypatch.setenv("TEST_STORE_SECRET", SECRET)


def why_not(kind: str) -> str:
    absent = [name for name in ("boto3",) if importlib.util.find_spec(name) is None]
    absent += [] if found(KINDS[kind][0]) else [KINDS[kind][0]]
    return f"{' and '.join(absent)} not installed (packtrain[interop-test])" if absent else ""


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if why_not(request.param):
        pytest.skip(why_not(request.param))
    with running(request.param, tmp_path_factory.mktemp(request.param)) as started:
        yield started


def opened(config: StoreConfig) -> Store:
    return open_store(LocalPlatform(), config)


def folder(path: pathlib.Path) -> StoreConfig:
    path.mkdir(exist_ok=True)
    return StoreConfig(str(path))


def item(data: bytes, name: str = "step-7/part-r0.safetensors") -> Item:
    sums = tuple(google_crc32c.value(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    return Item(name, name, len(data), 0, sums, BLOCK)


def put_file(root: pathlib.Path, item: Item, data: bytes) -> None:
    (root / item.source).parent.mkdir(parents=True, exist_ok=True)
    (root / item.source).write_bytes(data)


@pytest.mark.parametrize("check", CHECKS)
def test_the_contract(server: Server, check: str, request: pytest.FixtureRequest) -> None:
    """What holds for a folder holds for a real bucket; creates are exclusive everywhere but on the store that lies."""
    if (server.kind, check) == ("rclone", "small_objects"):
        pytest.skip("rclone overwrites where a create must be refused; the probe says so, which is tested")
    CHECKS[check](opened(server.config(f"contract-{check}")))


def test_abilities_are_seen_through(server: Server) -> None:
    """The probe finds exclusive creates, versions and locks where they are kept, and says NO where they are only
    accepted; it leaves nothing behind."""
    platform = LocalPlatform()
    plain, locked = (probe(platform, opened(server.config("probe", bucket=bucket))) for bucket in (BUCKET, LOCKED))
    honest = server.kind != "rclone"
    for seen in (plain, locked):
        assert (seen.reads.holds, seen.lists.holds, seen.creates.holds) == (True, True, honest), seen
    assert (plain.versions.holds, plain.locks.holds) == (False, False), plain
    assert (locked.versions.holds, locked.locks.holds) == (honest, honest), locked
    assert list(opened(server.config("probe")).list_all("")) == []


def test_there_and_back(server: Server, tmp_path: pathlib.Path) -> None:
    """40 MiB and a small object go into the bucket and out again, bit for bit; a second copy sends nothing."""
    platform, data = LocalPlatform(), pattern(BIG)
    here, back = folder(tmp_path / "here"), folder(tmp_path / "back")
    there = server.config("there")
    items = [item(data), item(b"manifest", "step-7/manifest.json")]
    put_file(tmp_path / "here", items[0], data)
    put_file(tmp_path / "here", items[1], b"manifest")
    done = copy(platform, opened(here), opened(there), items)
    assert (done.bytes_sent, done.chunks_sent_again) == (BIG + 8, 0)
    assert copy(platform, opened(here), opened(there), items).bytes_sent == 0
    copy(platform, opened(there), opened(back), items)
    assert (tmp_path / "back" / items[0].target).read_bytes() == data


def test_a_byte_flipped_on_the_wire(server: Server, tmp_path: pathlib.Path) -> None:
    """One bit flipped on its way into the bucket is refused by the store or seen when read back; the object is right
    at the end, and the repeat is counted."""
    data = pattern(BIG, 3)
    put_file(tmp_path / "here", item(data), data)
    here = opened(folder(tmp_path / "here"))
    with flipping_line(server.endpoint, 25 * MIB) as line:
        there = msgspec.structs.replace(server.config("wire"), endpoint=line)
        done = copy(LocalPlatform(), here, opened(there), [item(data)])
    assert done.chunks_sent_again >= 1
    assert copy(LocalPlatform(), here, opened(server.config("wire")), [item(data)]).bytes_kept == BIG


@contextmanager
def flipping_line(endpoint: str, at: int) -> Iterator[str]:
    """A line to `endpoint` that flips one bit of a body after `at` bytes have gone towards it, over all
    connections together."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    left, flipped = [at], threading.Event()

    def carry(source: socket.socket, target: socket.socket, flips: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if flips:
                    left[0] -= len(data)
                    body = len(data) > 4096 and b"HTTP/1.1" not in data  # in a header it would be another request
                    if left[0] <= 0 and body and not flipped.is_set():
                        flipped.set()
                        data = data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection((host, int(port)))
            for ends in ((near, far, True), (far, near, False)):
                threading.Thread(target=carry, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


# --- a copy that is killed, and its rate -------------------------------------------------------------------


def copier(source: StoreConfig, target: StoreConfig, what: Item, rate: float, threads: int = 1) -> list[str]:
    words = [msgspec.json.encode(part).decode() for part in (source, target, [what])]
    return [sys.executable, "-m", "tests.soak.copier", *words, str(rate), str(threads)]


def test_a_checkpoint_goes_there_and_back(server: Server, tmp_path: pathlib.Path) -> None:
    """`packtrain ckpt copy`, killed -9 by hand at some moment and given again until it ends, never leaves a manifest
    without its parts, nor its record without a manifest; what is in the bucket then comes back as a folder whose log
    leads to a checkpoint that verifies."""
    platform, run = LocalPlatform(), tmp_path / "runs" / "mine"
    log = make_run(platform, str(run))
    log.begin(None, (WRITER,), "a")
    state = [tensor_of(f"w{i}", "float32", (1024, 1024 * (5 + i)), i) for i in range(3)]
    part = part_of(platform, state, str(tmp_path / "image"))
    end_ns = platform.boot_ns() + 300 * NS
    commit = carry(platform, log, str(run), Save(5, 1, (part,), {"seed": 7}, end_ns), Gate())
    (run / "spec").mkdir()
    (run / "spec" / "0001.toml").write_text("")
    place, there = f"s3://{BUCKET}/copy-{tmp_path.name}", opened(server.config(f"copy-{tmp_path.name}"))
    argv = [
        sys.executable, "-m", "packtrain", "ckpt", "copy", "mine", "--to", place, "--endpoint", server.endpoint,
        "--region", "us-east-1", "--key-id", "env:TEST_STORE_ID", "--secret", "env:TEST_STORE_SECRET",
        "--rate", "60MB/s",
    ]
    env = {**os.environ, "PACKTRAIN_HOME": str(tmp_path), "PYTHONPATH": str(tree.ROOT)}
    for patience_s in (2.0, 2.5, 3.0, 120.0):
        process = subprocess.Popen(
            argv, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            out, errors = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            parts = list(there.list_all("checkpoints"))
            whole = any(name.endswith("manifest.json") for name, _ in parts)
            assert len(parts) == 3 if whole else not there.exists(f"commits/{commit.number:012d}")
            continue
        assert process.returncode == 0 and "verified" in out, errors
        break
    back = tmp_path / "back"
    items = [Item(name, name) for name, _ in there.list_all("")]
    copy(platform, there, opened(folder(back)), items)
    assert CommitLog(platform, f"{back}/commits").restore_point() == commit
    assert verify_commit(platform, str(back), commit) == []


def test_a_mirror_is_locked(server: Server, tmp_path: pathlib.Path) -> None:
    """In a bucket that enforces object lock no file of a mirrored checkpoint, nor its records, can be deleted; a store
    that does not is told of once, and gets its copies all the same; either gives a deleted checkpoint back."""
    platform, run, told = LocalPlatform(), str(tmp_path / "run"), list[Record]()
    log = make_run(platform, run)
    log.begin(None, (WRITER,), "a")
    commits = [publish_small(platform, log, 1, step, run) for step in (5, 10)]
    place = server.config(f"mirror-{tmp_path.name}", bucket=LOCKED)
    mirror = Mirror(
        name="far", place=place.url, lock_days=1, endpoint=place.endpoint, region=place.region, key_id=place.key_id,
        secret=place.secret,
    )
    for commit in commits:
        assert courier.bring(Errand(platform, run, commit, told.append, threading.Event()), mirror) == 0
    honest = server.kind != "rclone"
    done = [record for record in told if isinstance(record, MirrorDone)]
    assert [(record.step, record.locked_days) for record in done] == [(5, honest), (10, honest)]
    warnings = [record.name for record in told if isinstance(record, ErrorSeen)]
    assert warnings == ([] if honest else ["checkpoint.not_locked"])
    names = [name for name, _ in opened(place).list_all("")]
    assert len(names) == 2 * 3 + 3 + 2
    for name in names if honest else []:
        assert refuses_to_delete(server, f"mirror-{tmp_path.name}/{name}"), name
    shutil.rmtree(f"{run}/checkpoints/{commits[1].folder}")
    assert courier.back(Errand(platform, run, commits[1], told.append, threading.Event()), [mirror]) == 0
    must_load(platform, run, commits[1])


def refuses_to_delete(server: Server, key: str) -> bool:
    from botocore.exceptions import ClientError

    version = servers.client(server).head_object(Bucket=LOCKED, Key=key)["VersionId"]
    try:
        servers.client(server).delete_object(Bucket=LOCKED, Key=key, VersionId=version)
    except ClientError:
        return True
    return False


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_a_killed_copy_goes_on(server: Server, kind: str, tmp_path: pathlib.Path) -> None:
    """After kill -9 in the middle of one large object the next copy sends again less than one chunk of what had
    arrived; into the store that cannot list its uploads the object is sent from its beginning."""
    data = pattern(BIG, 5)
    put_file(tmp_path / "here", item(data), data)
    here = folder(tmp_path / "here")
    there = folder(tmp_path / "there") if kind == "folder" else server.config(f"killed-{tmp_path.name}")
    process = subprocess.Popen(
        copier(here, there, item(data), 40e6), stdout=subprocess.PIPE, text=True, cwd=tree.ROOT
    )
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(3)]  # 3 chunks have arrived
    process.kill()
    process.communicate()
    assert all(said) and not opened(there).exists(item(data).target)
    done = copy(LocalPlatform(), opened(here), opened(there), [item(data)])
    resumes = kind == "folder" or server.kind != "rclone"
    assert done.bytes_sent <= (BIG - 3 * 8 * MIB if resumes else BIG)
    assert done.bytes_kept + done.bytes_sent == BIG
    assert copy(LocalPlatform(), opened(here), opened(there), [item(data)]).bytes_kept == BIG


def test_the_rate_is_held(server: Server, tmp_path: pathlib.Path, notes: list[str]) -> None:
    """Over loopback a copy capped at 8 MB/s moves what it moves within 5% of that, with four threads."""
    data = pattern(BIG, 7)
    put_file(tmp_path / "here", item(data), data)
    argv = copier(folder(tmp_path / "here"), server.config(f"rate-{tmp_path.name}"), item(data), 8e6, threads=4)
    rate = measured(argv)
    notes.append(f"copy into {server.kind} capped at 8 MB/s: {rate / 1e6:.2f} MB/s")
    assert 0.95 * 8e6 < rate < 1.05 * 8e6


def measured(argv: list[str]) -> float:
    """Bytes a second that a copier sent and read back."""
    said = subprocess.run(argv, capture_output=True, text=True, cwd=tree.ROOT)
    assert said.returncode == 0, said.stderr
    _, sent, checked, seconds = said.stdout.splitlines()[-1].split()
    return (int(sent) + int(checked)) / float(seconds)


@pytest.mark.root
@pytest.mark.parametrize(("cap", "least", "most"), [(4e6, 3.8e6, 4.2e6), (1e9, 8e6, 10.5e6)])
def test_under_a_shaped_line(tmp_path: pathlib.Path, cap: float, least: float, most: float, notes: list[str]) -> None:
    """On a line shaped to 10 MB/s a cap of 4 MB/s holds within 5%, and without a cap the copy ends at the line's own
    rate, with no error."""
    if why_not("rclone") or subprocess.run(["unshare", "-n", "sh", "-c", SHAPE]).returncode:
        pytest.skip("needs rclone, unshare and tc with the tbf qdisc")
    data = pattern(BIG if cap < 10e6 else 20 * MIB, 9)
    put_file(tmp_path / "here", item(data), data)
    program = [sys.executable, "-m", "tests.soak.shaped", str(tmp_path), str(cap)]
    rate = measured(["unshare", "-n", "sh", "-c", f'{SHAPE} && exec "$@"', "sh", *program])
    notes.append(f"copy on a line of 10 MB/s, cap {cap / 1e6:g} MB/s: {rate / 1e6:.2f} MB/s")
    assert least < rate < most


SHAPE = "ip link set lo up && tc qdisc add dev lo root tbf rate 80mbit burst 128kb latency 200ms"


# --- stores that break -----------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", [hang, always(error("500 Internal Server Error", "InternalError"))])
def test_large_objects_too_are_given_up(behaviour: object, tmp_path: pathlib.Path) -> None:
    """A copy of many parts into a store that hangs or answers 500 ends with our deadline, whichever client sends."""
    data = pattern(BIG)
    put_file(tmp_path / "here", item(data), data)
    with bad_server(behaviour) as server:  # type: ignore[arg-type]
        there = servers.Server("bad", server.url, None).config("x", deadline_s=2.0)  # type: ignore[arg-type]
        with pytest.raises(StoreUnreachable):
            copy(LocalPlatform(), opened(folder(tmp_path / "here")), opened(there), [item(data)], TransferConfig(1))
    assert os.environ["TEST_STORE_ID"] == ID
