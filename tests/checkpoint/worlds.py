"""What the tests of this room build: tensors with known bits, buffers that hold them, runs with a log, and a judge."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.publish import Gate, Part, Save, carry
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.platform import Platform
from packtrain.core.units import NS

RUN = "/run"
WRITER = "r00000"


@lru_cache(maxsize=1024)
def bits(name: str, dtype: str, shape: tuple[int, ...], salt: int = 0) -> np.ndarray:
    """Repeatable values of a dtype: any bit pattern, bools 0 or 1."""
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"{name} {salt}".encode())))
    numpy_dtype = fmt.DTYPES[dtype][1]
    raw = rng.bytes(math.prod(shape) * numpy_dtype.itemsize)
    if dtype == "bool":
        return (np.frombuffer(raw, np.uint8).reshape(shape) & 1).astype(bool)
    return np.frombuffer(raw, numpy_dtype).reshape(shape)


def tensor_of(name: str, dtype: str, shape: tuple[int, ...], salt: int = 0) -> fmt.LocalTensor:
    """A whole tensor in one box."""
    spec = fmt.TensorSpec(name, dtype, shape, tuple(f"d{i}" for i in range(len(shape))))
    return fmt.LocalTensor(spec, fmt.whole(shape), bits(name, dtype, shape, salt))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def image_of(pieces: Sequence[fmt.LocalTensor]) -> tuple[fmt.ImageLayout, bytes]:
    layout = fmt.plan_image([(piece.spec, piece.box) for piece in pieces])
    buffer = bytearray(layout.bytes_total)
    layout.fill_header(buffer)
    for i, piece in enumerate(pieces):
        layout.fill(buffer, i, piece.array)
    return layout, bytes(buffer)


def part_of(platform: Platform, pieces: Sequence[fmt.LocalTensor], path: str, writer: str = WRITER) -> Part:
    """What a worker does before it offers: a whole image in a buffer."""
    layout, image = image_of(pieces)
    platform.write_new(path, image)
    specs = tuple(dict.fromkeys(piece.spec for piece in pieces))
    return Part(writer, path, layout.bytes_total, specs, layout.boxes)


@lru_cache(maxsize=1024)
def small_state(attempt: int, step: int) -> list[fmt.LocalTensor]:
    """The state that `attempt` has at `step`; no two are alike."""
    salt = attempt * 1_000_000 + step
    return [tensor_of("w", "bfloat16", (3, 2), salt), tensor_of("step", "int32", (), salt)]


def save_of(
    platform: Platform, attempt: int, step: int, folder: str = "/buffers", deadline_s: float = 60.0
) -> Save:
    """A save of `small_state`, its buffer filled."""
    part = part_of(platform, small_state(attempt, step), f"{folder}/{WRITER}.a{attempt}.{step}")
    about = {"data_index": step, "seed": 7, "meta": {"guard": {"mean": 0.1}}}
    return Save(step, attempt, (part,), about, platform.boot_ns() + int(deadline_s * NS))


def make_run(platform: Platform, run: str = RUN) -> CommitLog:
    """Folders and an empty log."""
    for name in ("checkpoints", "tombstones"):
        platform.mkdir(f"{run}/{name}")
    log = CommitLog(platform, f"{run}/commits")
    log.probe()
    return log


def publish_small(platform: Platform, log: CommitLog, attempt: int, step: int, run: str = RUN) -> Commit:
    """A whole save, published."""
    platform.mkdir("/buffers" if run == RUN else f"{run}/buffers")
    save = save_of(platform, attempt, step, "/buffers" if run == RUN else f"{run}/buffers")
    return carry(platform, log, run, save, Gate())


# --- the judge ---------------------------------------------------------------------------------------


def judge(platform: Platform, run: str = RUN, note: object = "", load: bool = True) -> list[Commit]:
    """Everything that must hold of a run, whatever happened to it; returns the log. `load`: checkpoints too."""
    commits = CommitLog(platform, f"{run}/commits").all()
    names = [name for name in platform.listdir(f"{run}/commits") if not name.startswith(".")]
    assert names == [f"{n:012d}" for n in range(1, len(commits) + 1)], f"numbers are not dense: {names} {note}"
    begun = 0
    latest: dict[int, int] = {}
    for commit in commits:
        if commit.kind == "begin":
            assert commit.attempt > begun, f"attempt {commit.attempt} began after {begun}: {note}"
            begun = commit.attempt
            continue
        assert commit.attempt == begun, f"dead attempt {commit.attempt} published after {begun} began: {note}"
        assert commit.step > latest.get(begun, -1), f"step {commit.step} published after {latest[begun]}: {note}"
        latest[begun] = commit.step
        if load:
            must_load(platform, run, commit, note)
    _judge_lineage(commits, note)
    return commits


def must_load(platform: Platform, run: str, commit: Commit, note: object = "") -> None:
    """The published checkpoint is whole and holds exactly what its attempt had at that step."""
    checkpoint = open_checkpoint(platform, run, commit)
    assert checkpoint.verify() == [], f"commit {commit.number} is damaged: {note}"
    assert (checkpoint.manifest.attempt, checkpoint.manifest.step) == (commit.attempt, commit.step), note
    for piece in small_state(commit.attempt, commit.step):
        assert same_bits(checkpoint.read(piece.spec.name), piece.array), f"commit {commit.number}: other bits: {note}"


def _judge_lineage(commits: list[Commit], note: object) -> None:
    """Every record follows the one before it (nobody rolled back), so restore reads the last save of all."""
    for commit in commits:
        assert commit.parent == commit.number - 1, f"record {commit.number} follows {commit.parent}: {note}"
        before = [c for c in commits[: commit.number] if c.kind == "save"]
        if commit.kind == "begin":
            assert commit.step == (before[-1].step if before else -1), f"{commit} restores another step: {note}"


# --- states worth killing for ------------------------------------------------------------------------

ROWS = 96


def big_state(attempt: int, step: int, writers: int, writer: str | None) -> list[fmt.LocalTensor]:
    """400 KiB cut by rows over `writers`, as `writer` holds it; None: whole. Cheap to make: one seed, then
    arithmetic."""
    salt = (attempt * 1009 + step) % 251
    w = _base() + np.float32(salt)
    m = (_base()[:, :7] * 0 + salt).astype(np.uint8)
    pieces = []
    for array, name, dtype in ((w, "w", "float32"), (m, "m", "uint8")):
        spec = fmt.TensorSpec(name, dtype, array.shape, ("embed", "mlp"))
        first, rows = (0, ROWS) if writer is None else (int(writer[1:]) * ROWS // writers, ROWS // writers)
        box = ((first, first + rows), (0, array.shape[1]))
        pieces.append(fmt.LocalTensor(spec, box, array[first : first + rows]))
    stamp = fmt.TensorSpec("stamp", "int64", (2,), ("x",))
    if writer in (None, WRITER):
        pieces.append(fmt.LocalTensor(stamp, ((0, 2),), np.array([attempt, step], np.int64)))
    return pieces


@lru_cache(maxsize=1)
def _base() -> np.ndarray:
    return np.random.Generator(np.random.PCG64(1)).random((ROWS, 1024), np.float32)
