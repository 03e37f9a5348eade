"""Every format gives its documents byte for byte; whatever is corrupt is refused with file and line or row, or
counted."""

from __future__ import annotations

import gzip
import io
import json
import pathlib
from collections.abc import Callable

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.errors import BadValue, CorpusMissing, CorruptInput
from packtrain.data import readers
from packtrain.data.listing import Item, Listing, kind_of, units
from packtrain.data.readers import Skips, read_item, text_pieces

PIECE = 1 << 20


def read(path: pathlib.Path, skip_max: int = 0, field: str = "text", piece: int = PIECE, **part: int) -> list[bytes]:
    return list(read_item(Item(str(path), kind_of(path.name)[0], **part), field, piece, Skips(skip_max)))


def write_zst(path: pathlib.Path, *frames: bytes) -> None:
    path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(frame) for frame in frames))


def write_parquet(path: pathlib.Path, texts: list[str | None], rows: int = 2, **more: list) -> None:
    table = pyarrow.table({"text": texts, **more})
    pyarrow.parquet.write_table(table, path, row_group_size=rows, write_page_checksum=True)


LINES = [
    {"text": "first\nline"}, {"other": 1, "text": "zwö 🐴"}, {"text": ""}, {"text": "x" * 5000, "n": [1, {"text": 2}]},
]
DOCUMENTS = [b"first\nline", "zwö 🐴".encode(), b"x" * 5000]
JSONL = b"\n".join(json.dumps(line).encode() for line in LINES)


def test_text(tmp_path: pathlib.Path) -> None:
    """A text file is one document, byte for byte, with its line ends and without them; an empty file is none."""
    for data in (b"a\r\nb\n", "é".encode(), b"\xef\xbb\xbfbom", b"\x00\n"):
        (tmp_path / "a.py").write_bytes(data)
        assert read(tmp_path / "a.py") == [data]
    (tmp_path / "a.py").write_bytes(b"")
    assert read(tmp_path / "a.py") == []


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_json_lines(tmp_path: pathlib.Path, ending: str) -> None:
    """JSON lines give their texts in order, plain and compressed; blank lines and empty texts give none."""
    path = tmp_path / f"a.jsonl{ending}"
    data = JSONL + b"\n\n  \n"
    if ending == ".zst":
        write_zst(path, data[:40], b"", data[40:])
    else:
        path.write_bytes(gzip.compress(data) if ending else data)
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_text(tmp_path: pathlib.Path, ending: str) -> None:
    """A compressed text is the text, over several frames and members too."""
    path = tmp_path / f"a.txt{ending}"
    data = [b"one\n" * 90_000, b"two\n" * 90_000]
    path.write_bytes(b"".join(map(gzip.compress, data))) if ending == ".gz" else write_zst(path, *data)
    assert read(path) == [b"".join(data)]


def test_parquet(tmp_path: pathlib.Path) -> None:
    """Parquet gives the rows of its text column in order over row groups, or of another column when asked."""
    write_parquet(tmp_path / "a.parquet", ["a", "", "é", "d", "e"], body=["1", "2", "3", "4", "5"], n=[1, 2, 3, 4, 5])
    assert read(tmp_path / "a.parquet") == [b"a", "é".encode(), b"d", b"e"]
    assert read(tmp_path / "a.parquet", field="body", start=1, stop=2) == [b"3", b"4"]
    with pytest.raises(BadValue, match="no column") as caught:
        read(tmp_path / "a.parquet", field="n")
    assert "text, body" in caught.value.fix


BITS_OF_TEXT = st.sampled_from([b"\n", b"a", "é".encode(), "🐴".encode(), b"word ", b"x" * 40])


def test_a_row_group_is_not_held(tmp_path: pathlib.Path) -> None:
    """Of a row group of 40 MiB, less than 16 MiB are in memory while its rows are read."""
    table = pyarrow.table({"text": [str(i) * (8192 // len(str(i))) for i in range(5000)]})
    plain = {"compression": "none", "use_dictionary": False}
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5000, **plain)
    del table
    before = pyarrow.total_allocated_bytes()
    documents = read_item(Item(str(tmp_path / "a.parquet"), "parquet"), "text", PIECE, Skips(0))
    assert max(pyarrow.total_allocated_bytes() - before for _ in documents) < 16 << 20


@given(st.lists(BITS_OF_TEXT, max_size=80), st.integers(4, 60))
def test_pieces_are_the_text(parts: list[bytes], piece: int) -> None:
    """Pieces of a text, end to end, are the text; each is whole UTF-8; read from any multiple on they are the same."""
    data = b"".join(parts)
    pieces = list(text_pieces(io.BytesIO(data), piece))
    assert b"".join(pieces) == data and all(pieces)
    assert data.decode() == "".join(p.decode() for p in pieces)
    n = -(-len(data) // piece)
    for step in (1, 2, 5):
        ranges = [list(text_pieces(io.BytesIO(data), piece, i, min(i + step, n))) for i in range(0, n, step)]
        assert [p for some in ranges for p in some] == pieces


def test_pieces_are_bounded_and_end_with_lines() -> None:
    """A piece ends behind a newline where one comes within 64 KiB of the multiple, and is never longer than that."""
    lines = b"".join(b"line %d\n" % i for i in range(40_000))
    pieces = list(text_pieces(io.BytesIO(lines), 50_000))
    assert all(p.endswith(b"\n") for p in pieces) and len(pieces) == -(-len(lines) // 50_000)
    flat = list(text_pieces(io.BytesIO("é".encode() * 200_000), 50_001))
    assert max(map(len, flat)) <= 50_003 and len(flat) == 8


def test_parts_of_json_lines(tmp_path: pathlib.Path) -> None:
    """Read in parts of any size, a file of JSON lines gives each line exactly once, in order."""
    data = b"".join(b'{"text": "%d"}\n' % 10**i + b"\n" * (i == 3) for i in range(6))
    (tmp_path / "a.jsonl").write_bytes(data)
    for step in range(1, len(data) + 2):
        parts = [read(tmp_path / "a.jsonl", start=i, stop=min(i + step, len(data))) for i in range(0, len(data), step)]
        assert [d for part in parts for d in part] == [b"%d" % 10**i for i in range(6)]


def bad_text(path: pathlib.Path) -> None:
    path.write_bytes(b"fine\nalso fine\nnot \xff so\n")


def bad_gzip(path: pathlib.Path) -> None:
    data = gzip.compress(b"text\n" * 9000)
    path.write_bytes(data[: len(data) // 2])


def flipped_gzip(path: pathlib.Path) -> None:
    data = bytearray(gzip.compress(bytes(range(97, 123)) * 900))
    data[-6] ^= 1
    path.write_bytes(data)


def bad_zst(path: pathlib.Path) -> None:
    write_zst(path, b"text\n" * 9000)
    path.write_bytes(path.read_bytes()[:-4])


def no_zst(path: pathlib.Path) -> None:
    path.write_bytes(b"this is no zstd at all, but it is long enough")


def lines(*bad: bytes) -> Callable[[pathlib.Path], None]:
    return lambda path: path.write_bytes(b'{"text": "good"}\n\n' + b"\n".join(bad) + b'\n{"text": "last"}\n')


def bad_rows(path: pathlib.Path) -> None:
    write_parquet(path, ["a", "b", "c", None, "e"])


def binary_rows(path: pathlib.Path) -> None:
    column = pyarrow.array([b"a", b"b", b"\xff\xfe", b"d"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=2)


def cut_parquet(path: pathlib.Path) -> None:
    write_parquet(path, ["a"] * 9)
    path.write_bytes(path.read_bytes()[:-9])


def flipped_parquet(path: pathlib.Path) -> None:
    table = pyarrow.table({"text": [f"text number {i}" for i in range(60)]})
    pyarrow.parquet.write_table(
        table, path, row_group_size=20, write_page_checksum=True, use_dictionary=False, compression="none",
        column_encoding="PLAIN",
    )
    data = bytearray(path.read_bytes())
    data[data.index(b"text number 25") + 3] ^= 1
    path.write_bytes(data)


CORRUPT = [
    ("a.py", bad_text, "line 3", "UTF-8", 0),
    ("a.txt.gz", bad_gzip, "a.txt.gz", "cannot be read", None),
    ("a.txt.gz", flipped_gzip, "a.txt.gz", "CRC", None),
    ("a.txt.zst", bad_zst, "a.txt.zst", "cut off", None),
    ("a.jsonl.zst", no_zst, "a.jsonl.zst", "cannot be read", 0),
    ("a.jsonl", lines(b'{"text": "cut'), "line 3", "malformed", 2),
    ("a.jsonl", lines(b'{"txt": "misnamed"}'), "line 3", "'text'", 2),
    ("a.jsonl", lines(b'{"text": null}'), "line 3", "null", 2),
    ("a.jsonl", lines(b'{"text": "\xff"}'), "line 3", "UTF-8", 2),
    ("a.jsonl", lines(b'{"text": "\\ud800"}'), "line 3", "", 2),
    ("a.jsonl", lines(b"[1, 2]"), "line 3", "object", 2),
    ("a.parquet", bad_rows, "row group 1, row 2", "null", 4),
    ("a.parquet", binary_rows, "row group 1, row 1", "UTF-8", 3),
    ("a.parquet", cut_parquet, "a.parquet", "cannot be read", 0),
    ("a.parquet", flipped_parquet, "row group 1", "cannot be read", None),
]


@pytest.mark.parametrize("case", CORRUPT, ids=lambda case: f"{case[0]}-{case[2]}-{case[3]}")
def test_corrupt_input_is_refused_and_counted(tmp_path: pathlib.Path, case: tuple) -> None:
    """Corrupt input is an error that names file and line or row; under an allowance it is counted and the rest is
    read."""
    name, write, where, what, left = case
    path = tmp_path / name
    write(path)
    with pytest.raises(CorruptInput) as caught:
        read(path)
    assert str(path) in caught.value.where and where in caught.value.where
    assert what in caught.value.what and "skip_max" in caught.value.fix
    skips = Skips(1)
    documents = list(read_item(Item(str(path), kind_of(name)[0]), "text", PIECE, skips))
    assert skips.count == 1 and where in skips.named[0]
    assert left is None or len(documents) == left


def test_an_allowance_is_counted(tmp_path: pathlib.Path) -> None:
    """As many corrupt lines as allowed are skipped; one more is an error that says how many went before."""
    path = tmp_path / "a.jsonl"
    lines(b"{", b"}", b"{}")(path)
    assert read(path, skip_max=3) == [b"good", b"last"]
    with pytest.raises(CorruptInput, match="2 skipped before") as caught:
        read(path, skip_max=2)
    assert "line 5" in caught.value.where


def test_lines_are_numbered_from_the_top(tmp_path: pathlib.Path) -> None:
    """In a part that begins inside the file, a corrupt line is named by its number in the file."""
    path = tmp_path / "a.jsonl"
    lines(b"{")(path)
    with pytest.raises(CorruptInput) as caught:
        read(path, start=18, stop=24)
    assert caught.value.where.endswith("line 3")


def test_a_line_without_end_is_refused(tmp_path: pathlib.Path) -> None:
    """A line longer than the bound is refused without being held whole, and the line after it is read."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * (readers.LINE_BYTES_MAX + 10) + b'"}\n{"text": "next"}\n')
    with pytest.raises(CorruptInput, match="longer"):
        read(path)
    assert read(path, skip_max=1) == [b"next"]


def test_an_unreadable_file_is_corrupt(tmp_path: pathlib.Path) -> None:
    """A file that vanished after it was listed, or is a folder by now, is corrupt input, not a traceback."""
    for path in (tmp_path / "gone.txt", tmp_path / "gone.parquet", tmp_path):
        with pytest.raises(CorruptInput, match="cannot be read"):
            read(path)


def touch(folder: pathlib.Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 100)


def test_folders_are_walked_in_order(tmp_path: pathlib.Path) -> None:
    """Text files of a folder come in sorted order; hidden, cached and linked folders are left out, other files
    counted."""
    touch(tmp_path, "b/z.py", "b/a.md", "a.txt.gz", "c.jsonl", "B.py", "pic.png", "b/lib.so")
    touch(tmp_path, ".git/x.py", "b/__pycache__/y.py", ".hidden.py")
    (tmp_path / "round").symlink_to(tmp_path)
    listing = Listing([str(tmp_path)])
    assert [f.path[len(str(tmp_path)) + 1 :] for f in listing] == ["B.py", "a.txt.gz", "b/a.md", "b/z.py", "c.jsonl"]
    assert listing.ignored == 2
    assert [pathlib.Path(f.path).name for f in Listing([str(tmp_path)], [".png"])] == ["c.jsonl", "pic.png"]


def test_named_files_are_taken(tmp_path: pathlib.Path) -> None:
    """A file named outright is taken whatever its suffix; a path that is not there is an error that names it."""
    touch(tmp_path, "notes", "pic.png")
    assert [f.kind for f in Listing([str(tmp_path / "notes"), str(tmp_path / "pic.png")])] == ["text", "text"]
    with pytest.raises(CorpusMissing) as caught:
        list(Listing([str(tmp_path / "nothing")]))
    assert "nothing" in caught.value.where


def test_units_cover_every_file(tmp_path: pathlib.Path) -> None:
    """Small files share a unit up to its size, a big text is dealt at multiples of the piece size, nothing is left
    out."""
    touch(tmp_path, *(f"s{i:02}.py" for i in range(25)))
    (tmp_path / "t_big.txt").write_bytes(b"line\n" * 1000)
    (tmp_path / "u_big.txt.gz").write_bytes(b"y" * 5000)
    touch(tmp_path, "v.py")
    dealt = list(units(iter(Listing([str(tmp_path)])), 1000, 300))
    sizes = [[pathlib.Path(i.path).stat().st_size for i in unit] for unit in dealt]
    assert [sum(s) for s, unit in zip(sizes, dealt) if all(i.stop < 0 for i in unit)] == [1000, 1000, 500, 5000, 100]
    parts = [(i.start, i.stop) for unit in dealt for i in unit if i.stop >= 0]
    assert parts == [(a, min(a + 900, 5000)) for a in range(0, 5000, 900)]


def test_parquet_is_dealt_by_row_groups(tmp_path: pathlib.Path) -> None:
    """A big parquet file is dealt in runs of row groups that together give every row once."""
    texts = [f"{i} " + "x" * 300 for i in range(100)]
    write_parquet(tmp_path / "a.parquet", texts, rows=5)
    size = (tmp_path / "a.parquet").stat().st_size
    dealt = list(units(iter(Listing([str(tmp_path)])), size // 4, 300))
    assert 3 <= len(dealt) <= 10
    got = [d for unit in dealt for item in unit for d in read_item(item, "text", PIECE, Skips(0))]
    assert got == [t.encode() for t in texts]
