"""The bytes of a checkpoint: safetensors images, part tables, the manifest. Pure; no file is opened here.

    checkpoints/step-00001234.a0007.t1/
      part-r00000.safetensors    image: any tool that knows safetensors opens it
      part-r00000.json           PartTable: boxes, byte ranges, crc32c of each 4 MiB block of the image, its SHA-256
      manifest.json              Manifest: tensor table, parts with size and SHA-256, step, seed, ...; its own SHA-256
                                 is the digest that the commit log publishes

So the digest vouches for the manifest, the manifest for each table, a table for each block, a block for its bytes.
The mesh is no part of this: a tensor is whatever boxes its writers happened to hold, and they tile its logical shape.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import google_crc32c
import ml_dtypes
import msgspec
import numpy as np

from packtrain.core.errors import CheckpointDamaged, FormatUnknown

assert sys.byteorder == "little", "safetensors images hold little-endian numbers as they lie in memory"

FORMAT = 1
BLOCK_BYTES = 4 << 20
BLOCK_BYTES_MAX = 64 << 20
ALIGN_BYTES = 64
MANIFEST = "manifest.json"
TENSORS_MAX = 1 << 20
DIMS_MAX = 32
DAMAGED_FIX = (
    "resume the run: it goes back by itself to an older save that is whole; where none is, start another with --new"
)

DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "float64": ("F64", np.dtype(np.float64)),
    "float32": ("F32", np.dtype(np.float32)),
    "float16": ("F16", np.dtype(np.float16)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float8_e4m3fn": ("F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": ("F8_E5M2", np.dtype(ml_dtypes.float8_e5m2)),
    "int64": ("I64", np.dtype(np.int64)),
    "int32": ("I32", np.dtype(np.int32)),
    "int16": ("I16", np.dtype(np.int16)),
    "int8": ("I8", np.dtype(np.int8)),
    "uint64": ("U64", np.dtype(np.uint64)),
    "uint32": ("U32", np.dtype(np.uint32)),
    "uint16": ("U16", np.dtype(np.uint16)),
    "uint8": ("U8", np.dtype(np.uint8)),
    "bool": ("BOOL", np.dtype(np.bool_)),
}
"""Name in the manifest -> (name in a safetensors header, numpy dtype)."""

Box = tuple[tuple[int, int], ...]
"""[start, stop) per dim; () for a scalar."""

_FOLDER = re.compile(r"step-(\d{8,18})\.a(\d{4,9})\.t(\d{1,9})")
_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class TensorSpec(msgspec.Struct, frozen=True):
    """One logical tensor: what the model calls it, whatever the mesh."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    """Axis names, one per dim."""


class LocalTensor(NamedTuple):
    """The piece of a tensor that one writer holds."""

    spec: TensorSpec
    box: Box
    array: np.ndarray[Any, Any]


class PlacedBox(msgspec.Struct, frozen=True):
    """Where the bytes of one box lie in its image, in C order."""

    tensor: str
    dtype: str
    box: Box
    offset: int
    bytes: int


class PartTable(msgspec.Struct, frozen=True):
    """part-<writer>.json."""

    format: int
    writer: str
    file: str
    bytes: int
    sha256: str
    block_bytes: int
    crc32c: list[int]
    boxes: list[PlacedBox]


class PartEntry(msgspec.Struct, frozen=True):
    """What the manifest says of one part: enough to catch any change of its two files."""

    writer: str
    bytes: int
    sha256: str
    table_bytes: int
    table_sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json."""

    format: int = FORMAT
    step: int
    attempt: int
    data_index: int = 0
    """Next batch."""
    plan_hash: str = ""
    seed: int = 0
    code_hash: str = ""
    meta: dict[str, Any] = msgspec.field(default_factory=dict)
    """Guard statistics and whatever else the trainer wants to find again."""
    tensors: list[TensorSpec]
    parts: list[PartEntry]


# --- names -------------------------------------------------------------------------------------------


class FolderName(NamedTuple):
    """Which save a checkpoint folder holds; `attempt` of one step gets a new folder for each new `try`."""

    step: int
    attempt: int
    trial: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}.a{self.attempt:04d}.t{self.trial}"


def parse_folder(name: str) -> FolderName | None:
    """None unless `name` is exactly a checkpoint folder's: nothing that could lead elsewhere passes."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    folder = FolderName(int(match[1]), int(match[2]), int(match[3]))
    return folder if str(folder) == name else None


def is_writer(name: str) -> bool:
    return _WRITER.fullmatch(name) is not None


def image_name(writer: str) -> str:
    return f"part-{writer}.safetensors"


def is_image(name: str) -> bool:
    """Whether a file of a checkpoint folder holds tensors: their bytes are what its size is told as."""
    return name.endswith(".safetensors")


def table_name(writer: str) -> str:
    return f"part-{writer}.json"


# --- boxes -------------------------------------------------------------------------------------------


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, n) for n in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def box_text(box: Box) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Their common part; None when it is empty. Two scalars' boxes share ()."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(0 <= start <= stop <= n for (start, stop), n in zip(box, shape, strict=True))


def check_tiling(spec: TensorSpec, boxes: Sequence[Box], where: str) -> None:
    """Raise CheckpointDamaged unless `boxes` cover each element of the tensor exactly once."""
    outside = next((box for box in boxes if not is_inside(box, spec.shape)), None)
    if outside is not None:
        raise _damaged(f"tensor {spec.name}: box [{box_text(outside)}] is outside its shape {list(spec.shape)}", where)
    solid = [box for box in boxes if volume(box)]
    pair = _overlap(solid)
    if pair is not None:
        a, b = pair
        raise _damaged(f"tensor {spec.name}: boxes [{box_text(a)}] and [{box_text(b)}] overlap", where)
    total = math.prod(spec.shape)
    missing = total - sum(volume(box) for box in solid)
    if missing:
        raise _damaged(f"tensor {spec.name}: {missing} of {total} elements were written by nobody", where)


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Some two that share an element. Quadratic, but a row at a time: one tensor has few thousand boxes at most."""
    if len(boxes) < 2 or not boxes[0]:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    bounds = np.array(boxes, dtype=np.int64)
    for i in range(len(boxes) - 1):
        later = bounds[i + 1 :]
        low = np.maximum(bounds[i, :, 0], later[:, :, 0])
        high = np.minimum(bounds[i, :, 1], later[:, :, 1])
        hits = np.flatnonzero((low < high).all(axis=1))
        if len(hits):
            return boxes[i], boxes[i + 1 + int(hits[0])]
    return None


# --- images ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageLayout:
    """A safetensors file before its numbers are known: the same every save, so a buffer's header is written once."""

    header: bytes
    boxes: tuple[PlacedBox, ...]
    """In the order they were planned."""
    bytes_total: int

    def fill_header(self, buffer: Any) -> None:
        memoryview(buffer)[: len(self.header)] = self.header

    def fill(self, buffer: Any, index: int, array: np.ndarray[Any, Any]) -> None:
        """Copy `array` to where box `index` lies in `buffer` (writable, `bytes_total` bytes)."""
        placed = self.boxes[index]
        dtype = DTYPES[placed.dtype][1]
        assert array.dtype == dtype, f"{placed.tensor}: array is {array.dtype}, its spec says {placed.dtype}"
        assert array.shape == box_shape(placed.box), f"{placed.tensor}: array {array.shape} is not box {placed.box}"
        if placed.bytes:
            target = np.frombuffer(buffer, dtype, count=placed.bytes // dtype.itemsize, offset=placed.offset)
            np.copyto(target.reshape(array.shape), array)


def plan_image(pieces: Sequence[tuple[TensorSpec, Box]]) -> ImageLayout:
    """Lay out one image. Data start at a multiple of 64 bytes and the widest dtypes come first, so each box is aligned
    to its element although safetensors allows no gap between tensors. Key: the name; of a part, `name@start:stop,...`.
    """
    keys = [_key(spec, box) for spec, box in pieces]
    assert len(set(keys)) == len(keys), "two boxes of one image have the same name and place"
    order = sorted(range(len(pieces)), key=lambda i: (-DTYPES[pieces[i][0].dtype][1].itemsize, keys[i]))
    entries: dict[str, Any] = {"__metadata__": {"packtrain": str(FORMAT)}}
    at, offsets = 0, [0] * len(pieces)
    for i in order:
        spec, box = pieces[i]
        code, dtype = DTYPES[spec.dtype]
        offsets[i], end = at, at + volume(box) * dtype.itemsize
        entries[keys[i]] = {"dtype": code, "shape": list(box_shape(box)), "data_offsets": [at, end]}
        at = end
    header = header_bytes(entries)
    boxes = tuple(
        PlacedBox(spec.name, spec.dtype, box, len(header) + offset, volume(box) * DTYPES[spec.dtype][1].itemsize)
        for (spec, box), offset in zip(pieces, offsets, strict=True)
    )
    return ImageLayout(header, boxes, len(header) + at)


def _key(spec: TensorSpec, box: Box) -> str:
    assert spec.name and "@" not in spec.name and spec.name != "__metadata__", f"no name for a tensor: {spec.name!r}"
    assert spec.dtype in DTYPES, f"{spec.name}: dtype {spec.dtype} is not one of {', '.join(DTYPES)}"
    assert is_inside(box, spec.shape), f"{spec.name}: box {box} is outside {spec.shape}"
    return spec.name if box == whole(spec.shape) else f"{spec.name}@{box_text(box)}"


def header_bytes(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


# --- checksums ---------------------------------------------------------------------------------------


def crc32c(data: bytes | np.ndarray[Any, Any]) -> int:
    """Of bytes, or of an array of uint8 that lies in one piece: neither is copied."""
    return int(google_crc32c.value(data))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def block_count(size: int, block_bytes: int) -> int:
    return -(-size // block_bytes)


# --- reading back ------------------------------------------------------------------------------------

T = TypeVar("T", Manifest, PartTable)


def encode(struct: Manifest | PartTable) -> bytes:
    return msgspec.json.encode(struct) + b"\n"


def decode(data: bytes, cls: type[T], where: str) -> T:
    """Raises FormatUnknown for a later format, CheckpointDamaged for anything else that cannot be read."""
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version != FORMAT:
            raise FormatUnknown(
                f"this checkpoint has format {version}, this version of packtrain reads {FORMAT}",
                where=where, fix="use the version of packtrain that wrote it, or a later one",
            )
        return msgspec.json.decode(data, type=cls)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(f"no {cls.__name__}: {error}", where) from error


class _Version(msgspec.Struct):
    format: int


def check_manifest(manifest: Manifest, where: str) -> None:
    """Every name and number is within bounds: nothing in a hostile manifest can lead out of its folder."""
    for entry in manifest.parts:
        if not is_writer(entry.writer) or entry.bytes < 0 or entry.table_bytes < 0:
            raise _damaged(f"part {entry.writer!r} is no part's name and size", where)
    writers, names = [e.writer for e in manifest.parts], [s.name for s in manifest.tensors]
    if len(set(writers)) != len(writers) or len(set(names)) != len(names) or len(names) > TENSORS_MAX:
        raise _damaged("a part or a tensor is listed twice, or there are too many", where)
    for spec in manifest.tensors:
        numbers = len(spec.shape) <= DIMS_MAX and all(0 <= n < 1 << 48 for n in spec.shape)
        if spec.dtype not in DTYPES or not numbers or math.prod(spec.shape) >= 1 << 56:
            raise _damaged(f"tensor {spec.name}: cannot be of dtype {spec.dtype} and shape {list(spec.shape)}", where)


def check_table(table: PartTable, entry: PartEntry, specs: dict[str, TensorSpec], where: str) -> None:
    """The table agrees with the manifest and with itself."""
    same = (table.writer, table.file, table.bytes, table.sha256) == (
        entry.writer, image_name(entry.writer), entry.bytes, entry.sha256,
    )
    size = table.block_bytes
    blocks = 0 < size <= BLOCK_BYTES_MAX and len(table.crc32c) == block_count(table.bytes, size)
    if not same or not blocks:
        raise _damaged(f"the table of part {entry.writer} does not fit the manifest", where)
    for placed in table.boxes:
        check_placed(placed, specs.get(placed.tensor), table.bytes, where)


def check_placed(placed: PlacedBox, spec: TensorSpec | None, image_bytes: int, where: str) -> None:
    """A box lies inside its tensor, and its bytes inside the image."""
    fits = spec is not None and spec.dtype == placed.dtype and is_inside(placed.box, spec.shape)
    size = volume(placed.box) * DTYPES[placed.dtype][1].itemsize if fits else -1
    if placed.bytes != size or placed.offset < 0 or placed.offset + size > image_bytes:
        raise _damaged(f"tensor {placed.tensor}: box [{box_text(placed.box)}] does not fit its tensor or image", where)


def _damaged(what: str, where: str) -> CheckpointDamaged:
    return CheckpointDamaged(what, where=where, fix=DAMAGED_FIX)
