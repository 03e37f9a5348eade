"""docs/FORMAT.md is enough to write a reader: its constants are those of the code, and the reader written after it,
examples/read_checkpoint.py, gives what was saved."""

from __future__ import annotations

import pathlib
import re
import tempfile

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.checkpoint import commits
from packtrain.checkpoint import format as fmt
from packtrain.core.fake import FakeDisk, FakePlatform
from tests.checkpoint import foreign
from tests.checkpoint.test_reader import published, rewritten, tilings
from tests.checkpoint.worlds import RUN, WRITER, bits, make_run, publish_small, same_bits, small_state, tensor_of
from tests.house import rules, tree

PAGE = tree.files("docs/FORMAT.md")["docs/FORMAT.md"]
SECTIONS = dict(re.findall(r"^## (\d)\. .*?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
FIELDS = {
    commits.Commit: "1", fmt.Manifest: "2", fmt.TensorSpec: "2", fmt.PartEntry: "2", fmt.PartTable: "3",
    fmt.PlacedBox: "3",
}


@pytest.mark.parametrize("struct", FIELDS, ids=lambda struct: struct.__name__)
def test_the_page_names_every_field(struct: type[msgspec.Struct]) -> None:
    """Each field of each file stands, in code letters, in the section on that file."""
    told = set(re.findall(r"`(\w+)`", SECTIONS[FIELDS[struct]]))
    assert set(struct.__struct_fields__) <= told


def test_the_page_has_the_constants_of_the_code() -> None:
    """Format, digits of a number, block size, alignment and every dtype with its name and width are those of the
    code."""
    assert f"`format`: {fmt.FORMAT}." in SECTIONS["2"]
    assert f"in {commits.DIGITS} digits" in PAGE and f"{1234:08d}" in PAGE
    assert f"{fmt.BLOCK_BYTES:,}" in SECTIONS["3"] and f"multiple of {fmt.ALIGN_BYTES}" in SECTIONS["4"]
    rows = [[cell.split() for cell in row.split("|")[1:4]] for row in SECTIONS["4"].splitlines() if row.count("|") > 4]
    told = {
        name.strip("`"): (code.strip("`"), int(size))
        for names, codes, sizes in rows[2:] for name, code, size in zip(names, codes, sizes, strict=True)
    }
    assert told == {name: (code, dtype.itemsize) for name, (code, dtype) in fmt.DTYPES.items()}


def test_the_example_is_short_and_foreign() -> None:
    """The reader has at most 60 lines and imports the standard library, numpy and ml_dtypes alone."""
    text = foreign.EXAMPLE.read_text()
    assert text.count("\n") <= 60
    assert not rules.beyond_standard_library("example", text, but=("numpy", "ml_dtypes"))


@settings(max_examples=40)
@given(st.data())
def test_the_example_reads_what_was_saved(data: st.DataObject) -> None:
    """Tensors of any dtype and shape, cut at random over several writers, come back bit for bit."""
    writers: list[list[fmt.LocalTensor]] = [[] for _ in range(data.draw(st.integers(1, 3)))]
    whole: dict[str, np.ndarray] = {}
    for i in range(data.draw(st.integers(1, 3))):
        shape, boxes = data.draw(tilings())
        name, dtype = f"t{i}", data.draw(st.sampled_from(list(fmt.DTYPES)))
        whole[name] = bits(name, dtype, shape)
        spec = fmt.TensorSpec(name, dtype, shape, tuple("abcd"[: len(shape)]))
        for box in boxes:
            piece = fmt.LocalTensor(spec, box, whole[name][tuple(slice(a, b) for a, b in box)])
            writers[data.draw(st.integers(0, len(writers) - 1))].append(piece)
    platform, _ = published(writers)
    with tempfile.TemporaryDirectory() as run:
        foreign.copied(platform, RUN, pathlib.Path(run))
        _same(foreign.load().read(run), whole)


def test_the_example_reads_every_dtype(tmp_path) -> None:
    """One tensor of each dtype, a scalar of each and an empty one of each come back bit for bit."""
    shapes = {"whole": (5, 3), "scalar": (), "empty": (0, 2)}
    pieces = [tensor_of(f"{d} {name}", d, shape) for d in fmt.DTYPES for name, shape in shapes.items()]
    platform, _ = published([pieces])
    foreign.copied(platform, RUN, tmp_path)
    _same(foreign.load().read(str(tmp_path)), {piece.spec.name: piece.array for piece in pieces})


def test_the_example_follows_the_lineage(tmp_path) -> None:
    """After a rollback it reads the save that was gone back to, not the newest."""
    platform = FakePlatform(FakeDisk(), "a")
    log = make_run(platform)
    log.begin(0, (WRITER,), "node")
    first, _ = (publish_small(platform, log, 1, step) for step in (10, 20))
    log.begin(first.number, (WRITER,), "node")
    foreign.copied(platform, RUN, tmp_path)
    _same(foreign.load().read(str(tmp_path)), {piece.spec.name: piece.array for piece in small_state(1, 10)})


def test_the_example_refuses_a_later_format(tmp_path) -> None:
    """A manifest of format 2 that its record vouches for is refused as that, not read as if it were ours."""
    platform, run, commit = rewritten(lambda manifest: manifest.update(format=2))
    foreign.copied(platform, run, tmp_path)
    (tmp_path / "commits" / f"{commit.number:012d}").write_bytes(commits.render_record(commit))
    with pytest.raises(ValueError, match="format 2"):
        foreign.load().read(str(tmp_path))


def _same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], array) for name, array in wanted.items())
