"""The collectives of a compiled program, read from its HLO text: what kind, over which mesh axes, how many bytes.

Those inside a loop count as often as it turns. Bytes are what one device sends where the algorithm is a ring, the unit
of `packtrain.train.shape`: (n - 1) / n of the whole array for a gather or a reduce-scatter, twice that for an
all-reduce.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple

import jax
import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
OPERATION = re.compile(r"^ +(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z\-]*)\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
CALLED = re.compile(r"(?:body|condition|calls|to_apply|branch_computations)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
NUMBERS = re.compile(r"\d+")
Groups = frozenset[frozenset[int]]


class Collective(NamedTuple):
    kind: str
    axes: tuple[str, ...]
    sent: int
    """Bytes a device sends in all its turns."""
    turns: int


def array_bytes(text: str) -> int:
    """Of a type as HLO writes it: `f32[14,128]{1,0}`, or a tuple of such."""
    sizes = (BYTES[kind] * math.prod(map(int, NUMBERS.findall(dims))) for kind, dims in ARRAY.findall(text))
    return sum(sizes)


def groups_of(line: str) -> Groups:
    """`replica_groups` in any of the three ways HLO writes them: a list, an iota, or axes of a mesh of its own."""
    text = line.split("replica_groups=", 1)[1]
    if text.startswith("{"):
        listed = re.findall(r"\{([\d,]+)\}", text[1 : text.index("}}") + 1])
        return frozenset(frozenset(_numbers(group)) for group in listed)
    if match := re.match(r"\[([\d,]+)\]<=(\S+?),? ", text):
        return _rows(_iota(match[2]).reshape(_numbers(match[1])))
    return _of_mesh(text)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in NUMBERS.findall(text)]


def _iota(text: str) -> np.ndarray:
    """`[2,2,2]T(1,0,2)`: 0, 1, 2, ... in that shape, transposed so."""
    shape, _, order = text.partition("T")
    grid = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return grid.transpose(_numbers(order)) if order else grid


def _of_mesh(text: str) -> Groups:
    """`mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`."""
    match = re.match(r"mesh\[(.*?)\](?:, device_ids=\(([^)]*\)?)\))? \{(.*?)\}", text)
    assert match, f"replica groups that cannot be read: {text[:80]}"
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    ids = _iota(match[2]) if match[2] else np.arange(math.prod(sizes.values()))
    grid, names = ids.reshape(list(sizes.values())), list(sizes)
    over = [names.index(name) for name in re.findall(r"'(\w+)'", match[3])]
    last = np.moveaxis(grid, over, range(grid.ndim - len(over), grid.ndim))
    return _rows(last.reshape(-1, math.prod(sizes[names[n]] for n in over)))


def _rows(grid: np.ndarray) -> Groups:
    return frozenset(frozenset(map(int, row)) for row in grid)


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes whose members the groups are; fails where there are none. `mesh`: the outermost axis first."""
    grid, names = np.arange(math.prod(mesh.values())).reshape(list(mesh.values())), list(mesh)
    wide = [n for n, name in enumerate(names) if mesh[name] > 1]
    for count in range(len(wide) + 1):
        for over in combinations(wide, count):
            last = np.moveaxis(grid, over, range(grid.ndim - count, grid.ndim))
            if _rows(last.reshape(-1, math.prod(grid.shape[n] for n in over))) == groups:
                return tuple(names[n] for n in over)
    raise AssertionError(f"no axes of {dict(mesh)} make the groups {sorted(map(sorted, groups))}")


def sent_bytes(kind: str, result: int, n: int) -> int:
    """What one of `n` devices sends in a ring for a collective whose result has `result` bytes on a device."""
    if kind == "collective-permute":
        return result
    whole = result * n if kind == "reduce-scatter" else result
    return (2 if kind == "all-reduce" else 1) * whole * (n - 1) // n


def read(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Every collective of a compiled program that runs; of two branches both are counted."""
    bodies = dict(_computations(text))
    turns = Counter[str]()
    _visit(text.split("\nENTRY ", 1)[1].split(" ", 1)[0].lstrip("%"), 1, bodies, turns)
    return [found for name, times in turns.items() for found in _within(bodies[name], times, mesh)]


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name, lines = match[1], []
        elif line == "}":
            yield name, lines
        else:
            lines.append(line)


def _visit(name: str, times: int, bodies: Mapping[str, list[str]], turns: Counter[str]) -> None:
    turns[name] += times
    for line in bodies[name]:
        if " while(" not in line:
            loop = 1
        elif match := TURNS.search(line):
            loop = int(match[1])
        else:  # as long as the data says: nothing can be counted there, and nothing needs to be
            loop = 0
            assert not any(_talks(other, bodies) for other in _called(line)), f"no known number of turns: {line[:120]}"
        for other in _called(line):
            _visit(other, times * loop, bodies, turns)


def _called(line: str) -> list[str]:
    return [called.lstrip("%") for match in CALLED.finditer(line) for called in match[1].split(", ")]


def _talks(name: str, bodies: Mapping[str, list[str]]) -> bool:
    """Whether a computation, or one it calls, holds a collective."""
    operations = [match[2] for match in map(OPERATION.match, bodies[name]) if match]
    return any(kind in operations for kind in KINDS) or any(
        _talks(other, bodies) for line in bodies[name] for other in _called(line)
    )


def _within(lines: list[str], times: int, mesh: Mapping[str, int]) -> Iterator[Collective]:
    for line in lines:
        match = OPERATION.match(line)
        if match and match[2] in KINDS:
            groups = groups_of(line)
            n = len(next(iter(groups)))
            sent = times * sent_bytes(match[2], array_bytes(match[1]), n)
            yield Collective(match[2], axes_of(groups, mesh), sent, times)


def totals(found: Iterable[Collective | Traced]) -> dict[tuple[tuple[str, ...], str], int]:
    """(axes, kind) -> bytes a device sends."""
    sums = Counter[tuple[tuple[str, ...], str]]()
    for each in found:
        sums[each.axes, each.kind] += each.sent
    return dict(sums)


TRACED = {
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "psum": "all-reduce", "pmax": "all-reduce",
    "all_to_all": "all-to-all",
}


class Traced(NamedTuple):
    """A collective of a traced program, before any compiler: types are those that were written."""

    kind: str
    axes: tuple[str, ...]
    type: np.dtype
    sent: int


def traced(program: Any, mesh: Mapping[str, int], turns: int = 1) -> Iterator[Traced]:
    """Every collective of a jaxpr, of loops, branches and inner programs too; sent as `Collective` says."""
    for operation in program.eqns:
        if kind := TRACED.get(operation.primitive.name):
            over = operation.params.get("axis_name") or operation.params["axes"]
            n = math.prod(mesh[axis] for axis in over)
            for made in operation.outvars:
                result = made.aval.size * made.aval.dtype.itemsize
                yield Traced(kind, tuple(over), made.aval.dtype, turns * sent_bytes(kind, result, n))
        loop = operation.params["length"] if operation.primitive.name == "scan" else 1
        for value in jax.tree.leaves(list(operation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from traced(inner, mesh, turns * loop)


def operations(text: str) -> Iterator[str]:
    """The kind of every instruction, those inside fusions too."""
    return (match[2] for match in map(OPERATION.match, text.splitlines()) if match)


def arrays(text: str) -> Iterator[tuple[str, int, str]]:
    """(kind of instruction, elements of its result, the line) for every instruction whose result is one array."""
    for line in text.splitlines():
        match = OPERATION.match(line)
        if match and not match[1].startswith("("):
            yield match[2], math.prod(map(int, NUMBERS.findall(ARRAY.findall(match[1])[0][1]))), line
