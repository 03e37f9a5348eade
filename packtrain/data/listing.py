"""Which files a corpus is, in an order that depends on their names alone, dealt into units of work of bounded size.

Folders are walked in sorted order; hidden names, `__pycache__` and linked folders are left out, and of the rest the
files that look like text by their suffix are taken (the others are counted). A file named outright is taken whatever
it is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from packtrain.core.errors import CorpusMissing, CorruptInput

Kind = Literal["text", "jsonl", "parquet"]

TEXT_SUFFIXES = frozenset((
    ".txt", ".text", ".md", ".rst", ".tex", ".org", ".adoc", ".csv", ".tsv", ".py", ".pyi", ".pyx", ".ipynb", ".c",
    ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".m", ".mm", ".swift", ".rs", ".go", ".java", ".kt", ".scala",
    ".js", ".jsx", ".mjs", ".ts", ".tsx", ".vue", ".rb", ".php", ".pl", ".pm", ".lua", ".r", ".jl", ".hs", ".ml",
    ".mli", ".clj", ".ex", ".exs", ".erl", ".lisp", ".el", ".scm", ".f90", ".f", ".pas", ".asm", ".s", ".sh", ".bash",
    ".zsh", ".fish", ".ps1", ".bat", ".sql", ".html", ".htm", ".xml", ".css", ".scss", ".json", ".yaml", ".yml",
    ".toml", ".ini", ".cfg", ".conf", ".cmake", ".mk", ".proto", ".diff", ".patch", ".srt", ".log",
))
COMPRESSED = (".gz", ".zst")
UNIT_FILES = 4096


class Item(msgspec.Struct, frozen=True):
    """A file, or the part of it that starts in [start, stop): bytes, or row groups of parquet; stop -1: all of it."""

    path: str
    kind: Kind
    start: int = 0
    stop: int = -1


class Found(msgspec.Struct, frozen=True):
    path: str
    kind: Kind
    bytes: int
    modified_ns: int


def kind_of(name: str) -> tuple[Kind, str]:
    """What a file of this name holds, and the suffix that says so."""
    stem = name.lower()
    for ending in COMPRESSED:
        stem = stem.removesuffix(ending)
    suffix = os.path.splitext(stem)[1]
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl", suffix
    return ("parquet" if suffix == ".parquet" else "text"), suffix


class Listing:
    """Files of `paths`, found one after the other. `ignored`: files of folders passed over so far."""

    def __init__(self, paths: Sequence[str], suffixes: Sequence[str] = ()) -> None:
        self._paths = paths
        self._suffixes = frozenset(s.lower() for s in suffixes) or TEXT_SUFFIXES
        self.ignored = 0

    def __iter__(self) -> Iterator[Found]:
        """Raises CorpusMissing for a path that is not there, CorruptInput for a name that is no UTF-8."""
        for path in self._paths:
            if not os.path.exists(path):
                raise CorpusMissing("there is nothing here", where=path, fix="name a file or a folder that exists")
            if os.path.isdir(path):
                yield from self._walk(path)
            else:
                yield _found(path, kind_of(path)[0])

    def _walk(self, folder: str) -> Iterator[Found]:
        with os.scandir(folder) as entries:
            names = sorted((e.name, e.is_dir(follow_symlinks=False)) for e in entries)
        for name, is_folder in names:
            path = os.path.join(folder, name)
            if name.startswith(".") or name == "__pycache__":
                continue
            if is_folder:
                yield from self._walk(path)
            elif os.path.isfile(path):
                kind, suffix = kind_of(name)
                if kind == "text" and suffix not in self._suffixes:
                    self.ignored += 1
                else:
                    yield _found(path, kind)


def _found(path: str, kind: Kind) -> Found:
    stat, whole = os.stat(path), os.path.abspath(path)
    try:
        whole.encode()
    except UnicodeEncodeError:
        raise CorruptInput(
            "the name of this file, or of a folder around it, is not UTF-8",
            where=os.fsencode(whole).decode(errors="backslashreplace"), fix="rename it, or move it elsewhere",
        ) from None
    return Found(whole, kind, stat.st_size, stat.st_mtime_ns)


def units(files: Iterator[Found], unit_bytes: int, piece_bytes: int) -> Iterator[tuple[Item, ...]]:
    """Deal files into units of about `unit_bytes`: many small files, or a part of a big one that can be read in parts.

    Parts of a text begin at multiples of `piece_bytes`, where documents are cut anyway (`readers.py`), so that where a
    unit ends never shows in the documents. Compressed files cannot be read from the middle and stay whole.
    """
    waiting: list[Item] = []
    waiting_bytes = 0
    for file in files:
        parts = _parts(file, unit_bytes, piece_bytes)
        if waiting and (len(parts) > 1 or waiting_bytes + file.bytes > unit_bytes or len(waiting) >= UNIT_FILES):
            yield tuple(waiting)
            waiting, waiting_bytes = [], 0
        if len(parts) > 1:
            yield from ((part,) for part in parts)
        else:
            waiting += parts
            waiting_bytes += file.bytes
    if waiting:
        yield tuple(waiting)


def _parts(file: Found, unit_bytes: int, piece_bytes: int) -> list[Item]:
    if file.bytes <= unit_bytes or file.path.endswith(COMPRESSED):
        return [Item(file.path, file.kind)]
    if file.kind == "parquet":
        return _row_group_parts(file, unit_bytes)
    step = max(1, unit_bytes // piece_bytes) * piece_bytes
    return [Item(file.path, file.kind, start, min(start + step, file.bytes)) for start in range(0, file.bytes, step)]


def _row_group_parts(file: Found, unit_bytes: int) -> list[Item]:
    import pyarrow
    import pyarrow.parquet

    try:
        groups = pyarrow.parquet.read_metadata(file.path).num_row_groups
    except (pyarrow.ArrowException, OSError):
        return [Item(file.path, file.kind)]  # the reader meets the same damage and reports it in its place
    per_part = max(1, groups * unit_bytes // file.bytes)
    return [Item(file.path, file.kind, g, min(g + per_part, groups)) for g in range(0, groups, per_part)]
