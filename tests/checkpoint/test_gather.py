"""Restores over several ranks: each block is read once, whatever layout wrote it and whatever layout wants it."""

from __future__ import annotations

import errno
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.deal import Bounds, Deal
from packtrain.checkpoint.format import Box, Manifest, PartTable, PlacedBox, TensorSpec
from packtrain.checkpoint.gather import CRC_BYTES
from packtrain.checkpoint.reader import Checkpoint
from packtrain.checkpoint.wants import Wanted, flat_boxes
from packtrain.core.errors import CheckpointDamaged, CheckpointUnreadable
from packtrain.core.fake import FakeDisk, FakePlatform, fail
from tests.checkpoint.fabrics import world
from tests.checkpoint.worlds import bits, image_of, same_bits

SMALL = Bounds(run_blocks=2, stage_bytes=3000, window_bytes=700, step_bytes=64)
"""So that a few kilobytes take several stages, and a lane several windows."""


class Layout(NamedTuple):
    """How a tensor is cut, one number of equal pieces a dim, and by how many ranks each piece is held."""

    cuts: tuple[int, ...]
    copies: int


def boxes_of(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[Box]:
    """Pieces in C order; the last ones smaller, or empty, where a dim is no multiple."""
    ranges = []
    for n, pieces in zip(shape, cuts):
        step = -(-n // pieces)
        ranges.append([(min(at * step, n), min((at + 1) * step, n)) for at in range(pieces)])
    return list(itertools.product(*ranges))


class Saved(NamedTuple):
    disk: FakeDisk
    manifest: Manifest
    tables: list[PartTable]

    def opened(self, name: str = "reader", readers: Sequence[Sequence[int]] | None = None) -> Checkpoint:
        return Checkpoint(FakePlatform(self.disk, name), "/run", self.manifest, self.tables, readers=readers)


def saved(tensors: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]], writers: int, block_bytes: int) -> Saved:
    """A checkpoint of `name: (dtype, shape, cuts)`, the pieces handed to the writers in turn."""
    platform = FakePlatform(FakeDisk(), "writer")
    platform.mkdir("/run")
    specs = [TensorSpec(n, dtype, shape, ("d",) * len(shape)) for n, (dtype, shape, _) in tensors.items()]
    pieces: list[list[fmt.LocalTensor]] = [[] for _ in range(writers)]
    for spec in specs:
        whole = bits(spec.name, spec.dtype, spec.shape)
        for nth, box in enumerate(boxes_of(spec.shape, tensors[spec.name][2])):
            piece = whole[tuple(slice(*side) for side in box)]
            pieces[nth % writers].append(fmt.LocalTensor(spec, box, piece))
    tables = []
    for number, own in enumerate(pieces):
        distinct = {(p.spec.name, p.box): p for p in own if fmt.volume(p.box)}
        layout, image = image_of(list(distinct.values()))
        writer = f"r{number:05d}"
        platform.write_new(f"/run/{fmt.image_name(writer)}", image)
        crcs = [fmt.crc32c(image[at : at + block_bytes]) for at in range(0, len(image), block_bytes)]
        tables.append(PartTable(
            1, writer, fmt.image_name(writer), len(image), fmt.sha256(image), block_bytes, crcs, list(layout.boxes)
        ))
    return Saved(platform.disk, Manifest(step=1, attempt=1, tensors=specs, parts=[]), tables)


def wanted_by(shapes: Mapping[str, tuple[int, ...]], layouts: Mapping[str, Layout], ranks: int) -> Wanted:
    """Piece after piece dealt to the ranks, each to `copies` of them."""
    wanted: dict[str, dict[Box, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        holders: dict[Box, set[int]] = {}
        for nth, box in enumerate(boxes_of(shape, layouts[name].cuts)):
            for copy in range(layouts[name].copies):
                holders.setdefault(box, set()).add((nth + copy * max(1, ranks // layouts[name].copies)) % ranks)
        wanted[name] = {box: tuple(sorted(who)) for box, who in holders.items()}
    return wanted


def image_reads(one: Saved) -> int:
    return sum(op == "read" for _, op, _ in one.disk.trace)


def size_of(table: PartTable, block: int) -> int:
    return min(table.block_bytes, table.bytes - block * table.block_bytes)


def check_world(
    one: Saved, wanted: Wanted, ranks: int, bounds: Bounds = SMALL, readers: Sequence[Sequence[int]] | None = None
) -> None:
    """Each rank gets exactly what it wants, bit for bit; of the images each wanted block is read once by all, and by
    one that can."""
    before = image_reads(one)
    held, failed, board = world([one.opened(f"rank{rank}", readers) for rank in range(ranks)], wanted, bounds=bounds)
    assert failed == [None] * ranks
    plan = Deal(one.tables, wanted, ranks, bounds, readers)
    specs = {spec.name: spec for spec in one.manifest.tensors}
    for rank in range(ranks):
        mine = {
            (name, box) for name, boxes in wanted.items() for box, who in boxes.items()
            if rank in who and fmt.volume(box)
        }
        assert set(held[rank]) == mine
        for (name, box), array in held[rank].items():
            whole = bits(name, specs[name].dtype, specs[name].shape)
            assert same_bits(array, whole[tuple(slice(*side) for side in box)])
    reads = [(read.table, read.block) for rank in range(ranks) for stage in plan.share(rank) for read in stage.reads]
    assert len(set(reads)) == len(reads) == image_reads(one) - before
    for rank in range(ranks):
        tables = {read.table for stage in plan.share(rank) for read in stage.reads}
        assert readers is None or all(rank in readers[table] for table in tables)
        for stage in plan.share(rank):
            passed_on = {(cut.table, cut.block) for cuts in stage.sends.values() for cut in cuts}
            sizes = [size_of(one.tables[table], block) for table, block in passed_on]
            assert len(sizes) < 2 or sum(sizes) <= bounds.stage_bytes
    assert board.largest <= bounds.window_bytes + CRC_BYTES
    assert sum(plan.read_bytes(rank) for rank in range(ranks)) == plan.read_bytes() <= sum(t.bytes for t in one.tables)


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "bfloat16", "int8", "bool", "int64"])


@st.composite
def cases(draw):
    ranks, writers = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    tensors, layouts = {}, {}
    for number in range(draw(st.integers(1, 4))):
        shape, name = draw(SHAPES), f"t{number}"
        cut = st.tuples(*[st.integers(1, 4)] * len(shape))
        tensors[name] = (draw(DTYPES), shape, draw(cut))
        layouts[name] = Layout(draw(cut), draw(st.integers(1, ranks)))
    bounds = Bounds(*(draw(st.integers(low, high)) for low, high in ((1, 3), (1, 2000), (5, 600), (1, 64))))
    return tensors, layouts, ranks, writers, draw(st.integers(7, 300)), bounds


@given(cases())
def test_any_layout_on_any_ranks(case) -> None:
    """Shapes, dtypes, cuts, writers, ranks, copies, sizes of blocks and bounds at random: exactly the bits wanted, each
    block read once, no exchange larger than allowed."""
    tensors, layouts, ranks, writers, block_bytes, bounds = case
    shapes = {name: shape for name, (_, shape, _) in tensors.items()}
    check_world(saved(tensors, writers, block_bytes), wanted_by(shapes, layouts, ranks), ranks, bounds)

@settings(max_examples=30)
@given(cases(), st.data())
def test_ranks_that_have_not_every_image(case, data) -> None:
    """Where each part can be read by some ranks alone, whoever wants it, the bits are the same, each block is read once
    and by a rank that has it."""
    tensors, layouts, ranks, writers, block_bytes, bounds = case
    one = saved(tensors, writers, block_bytes)
    readers = [sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))) for _ in one.tables]
    check_world(one, wanted_by({name: t[1] for name, t in tensors.items()}, layouts, ranks), ranks, bounds, readers)


def test_what_one_reads_for_another_alone_is_bounded() -> None:
    """A rank that has what only another one wants holds no more of it at a time than of what many want."""
    one = saved({"t": ("int8", (4000,), (1,))}, 1, 100)
    check_world(one, {"t": {((0, 4000),): (1,)}}, 2, Bounds(2, 300, 100, 10), [[0]])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_flat_boxes_follow_each_other(shape: list[int], data: st.DataObject) -> None:
    """Any range of a flat array is a few boxes of it that hold its elements in order."""
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found = flat_boxes(shape, start, stop)
    taken = [numbers[tuple(slice(*side) for side in box)].ravel() for box in found]
    assert np.array_equal(np.concatenate([*taken, np.arange(0)]), np.arange(start, stop))
    assert len(found) <= 2 * len(shape)


# --- the deal ----------------------------------------------------------------------------------------


def rows_of(tensors: int, writers: int, shape: tuple[int, int, int]) -> list[PartTable]:
    """Tables of float32 tensors whose middle dim is cut over the writers; nobody wrote the images."""
    tables = []
    for n in range(writers):
        step = shape[1] // writers
        box, size = ((0, shape[0]), (n * step, (n + 1) * step), (0, shape[2])), 4 * shape[0] * step * shape[2]
        boxes = [PlacedBox(f"t{t}", "float32", box, 64 + t * size, size) for t in range(tensors)]
        total = 64 + tensors * size
        crcs = [0] * fmt.block_count(total, fmt.BLOCK_BYTES)
        tables.append(PartTable(1, f"r{n}", f"p{n}", total, "", fmt.BLOCK_BYTES, crcs, boxes))
    return tables


def grid(shape: tuple[int, int, int], copies: int, rows: int, columns: int) -> dict[Box, list[int]]:
    """Middle dim over `rows`, last over `columns`, each piece on `copies` ranks."""
    wanted = {}
    for (i, row), (j, column) in itertools.product(
        enumerate(boxes_of(shape[1:2], (rows,))), enumerate(boxes_of(shape[2:], (columns,)))
    ):
        wanted[(0, shape[0]), *row, *column] = [(copy * rows + i) * columns + j for copy in range(copies)]
    return wanted


@pytest.mark.parametrize(("tensors", "writers", "layout", "shifts"), [
    (10, 8, (2, 8, 1), 1),
    (10, 8, (4, 4, 1), 3),
    (10, 8, (2, 2, 4), 13),
    (20, 512, (4, 256, 1), 3),
    pytest.param(100, 512, (4, 256, 1), 3, marks=pytest.mark.soak),
], ids=str)
def test_shares_are_equal_and_the_exchanges_few(
    tensors: int, writers: int, layout: tuple[int, int, int], shifts: int
) -> None:
    """Every rank reads the same to within two blocks and all together the images; stages grow with what a rank passes
    on, not with ranks or blocks. The last is 1,024 ranks on 102,912 blocks (measured: 3 to 6 s)."""
    shape, ranks = (64, 4096, 4096), math.prod(layout)
    shape = shape if writers > 8 else (4, 4096, 1024)
    tables = rows_of(tensors, writers, shape)
    plan = Deal(tables, {f"t{t}": grid(shape, *layout) for t in range(tensors)}, ranks)
    reads = [plan.read_bytes(rank) for rank in range(ranks)]
    assert sum(reads) == plan.read_bytes() == sum(table.bytes for table in tables)
    assert max(reads) - min(reads) <= 2 * fmt.BLOCK_BYTES
    assert len(plan.window_bytes) <= shifts
    assert len(plan.share(0)) <= 2 + 2 * max(reads) // Bounds().stage_bytes


def test_a_block_is_read_by_one_who_wants_it_and_neighbours_by_the_same() -> None:
    """Ranks that want nothing of a block never read it; what two ranks both want is dealt in contiguous runs."""
    shape = (1, 4096, 4096)
    tables = rows_of(1, 2, shape)
    halves = boxes_of(shape, (1, 2, 1))
    plan = Deal(tables, {"t0": {halves[0]: [0, 1], halves[1]: [2]}}, 4)
    parts = [[(read.table, read.block) for stage in plan.share(rank) for read in stage.reads] for rank in range(4)]
    assert {table for table, _ in parts[0] + parts[1]} == {0} and {table for table, _ in parts[2]} == {1}
    assert not parts[3]
    runs = sum(b != (a[0], a[1] + 1) for part in parts[:2] for a, b in itertools.pairwise(part))
    assert runs <= len(tables[0].crc32c) // (2 * Bounds().run_blocks) + 1


def test_a_block_between_the_columns_of_a_rank_is_not_wanted_by_it() -> None:
    """Of rows longer than blocks, cut by columns, each rank reads its own columns' blocks; what it passes on is of the
    blocks where columns of both meet."""
    shape = (2, 2, 8 * fmt.BLOCK_BYTES)
    tables = rows_of(1, 1, shape)
    plan = Deal(tables, {"t0": grid(shape, 1, 1, 2)}, 2)
    assert plan.sent_bytes(0) + plan.sent_bytes(1) <= 8 * fmt.BLOCK_BYTES < plan.read_bytes() // 10
    assert abs(plan.read_bytes(0) - plan.read_bytes(1)) <= 2 * fmt.BLOCK_BYTES


def test_a_rank_holds_little_for_others() -> None:
    """In a stage each rank keeps no more than Bounds.stage_bytes of blocks that it is to pass on."""
    shape = (4, 4096, 1024)
    plan = Deal(rows_of(8, 4, shape), {f"t{t}": grid(shape, 1, 1, 4) for t in range(8)}, 4)
    for stage in plan.share(1):
        passed_on = {(cut.table, cut.block) for cuts in stage.sends.values() for cut in cuts}
        assert len(passed_on) * fmt.BLOCK_BYTES <= Bounds().stage_bytes


def test_only_what_is_wanted_is_passed_on() -> None:
    """Rows restored by columns on four ranks: each passes on three quarters of what it reads, not whole blocks."""
    shape = (4, 4096, 1024)
    plan = Deal(rows_of(4, 4, shape), {f"t{t}": grid(shape, 1, 1, 4) for t in range(4)}, 4)
    for rank in range(4):
        assert plan.sent_bytes(rank) == pytest.approx(0.75 * plan.read_bytes(rank), rel=1e-3)


# --- failures ----------------------------------------------------------------------------------------

TENSORS = {"a": ("float32", (16, 40), (2, 1)), "b": ("int8", (700,), (2,)), "c": ("bfloat16", (), ())}
LAYOUTS = {"a": Layout((1, 4), 1), "b": Layout((2,), 2), "c": Layout((), 4)}
RANKS = 4


@pytest.fixture
def one() -> Saved:
    return saved(TENSORS, 2, 300)


@pytest.fixture
def wanted() -> Wanted:
    return wanted_by({name: shape for name, (_, shape, _) in TENSORS.items()}, LAYOUTS, RANKS)


def readers(one: Saved) -> list[Checkpoint]:
    return [one.opened(f"rank{rank}") for rank in range(RANKS)]


def test_damage_anywhere_is_raised_by_all(one: Saved, wanted: Wanted) -> None:
    """Whichever block is damaged: the rank that reads it names tensor and file, the others that rank, none waits."""
    for table in one.tables:
        for index in range(len(table.crc32c)):
            data = one.disk.find_file(f"/run/{table.file}").data
            data[index * table.block_bytes] ^= 1
            _, failed, _ = world(readers(one), wanted, bounds=SMALL)
            data[index * table.block_bytes] ^= 1
            assert [type(error) for error in failed] == [CheckpointDamaged] * RANKS
            who = [rank for rank, error in enumerate(failed) if error.what.startswith("tensor ")]
            assert len(who) == 1 and failed[who[0]].where == f"/run/{table.file}"
            others = [error.what for rank, error in enumerate(failed) if rank != who[0]]
            assert others == [f"rank {who[0]} found damage; the error there names tensor and file"] * (RANKS - 1)


def test_a_disk_that_refuses_one_rank_is_heard_by_all(one: Saved, wanted: Wanted) -> None:
    """It says nothing about the checkpoint, on any rank."""
    checkpoints = readers(one)
    platform = FakePlatform(one.disk, "rank2", faults=lambda op, path, n: fail(errno.EIO) if op == "read" else None)
    checkpoints[2] = Checkpoint(platform, "/run", one.manifest, one.tables)
    _, failed, _ = world(checkpoints, wanted, bounds=SMALL)
    assert [type(error) for error in failed] == [CheckpointUnreadable] * RANKS
    assert "refuses" in failed[2].what and failed[0].what == failed[3].what == "rank 2 cannot read the checkpoint"


def test_what_fails_for_another_reason_leaves_nobody_waiting(one: Saved, wanted: Wanted) -> None:
    """A rank whose device has no room raises that; the others say which rank it was."""

    def full(rank: int, name: str) -> None:
        if (rank, name) == (1, "b"):
            raise MemoryError

    _, failed, _ = world(readers(one), wanted, place=full, bounds=SMALL)
    assert isinstance(failed[1], MemoryError)
    for rank in (0, 2, 3):
        assert isinstance(failed[rank], CheckpointUnreadable)
        assert failed[rank].what == "rank 1 failed while it was restoring"


class Flip:
    """A wire that changes one byte of the `nth` window of rank 3."""

    def __init__(self, nth: int, at: int) -> None:
        self._nth, self._at = nth, at
        self._seen: Counter[int] = Counter()

    def __call__(self, rank: int, shift: int, window: np.ndarray) -> np.ndarray:
        self._seen[rank] += 1
        if rank == 3 and self._seen[rank] == self._nth:
            window[self._at] ^= 1
        return window


@pytest.mark.parametrize("at", [0, -1])
def test_a_byte_that_changes_on_the_way_is_found(one: Saved, wanted: Wanted, at: int) -> None:
    """In any window, at its beginning or in its checksum: the taker says from whom it came, and all fail. What a window
    without bytes begins with is padding: that changes nothing."""
    _, _, board = world(readers(one), wanted, bounds=SMALL)
    found = 0
    for nth in range(1, board.windows // RANKS + 1):
        held, failed, _ = world(readers(one), wanted, Flip(nth, at), bounds=SMALL)
        changed = [rank for rank, error in enumerate(failed) if error and "changed on the way" in error.what]
        if changed:
            found += 1
            assert all(isinstance(error, CheckpointUnreadable) for error in failed)
            assert f"from rank 3 to rank {changed[0]};" in failed[changed[0]].what
        else:
            assert at == 0 and failed == [None] * RANKS
            assert same_bits(held[0]["c", ()], bits("c", "bfloat16", ()))
    assert found > 2
