"""The fault table is whole: every marked cell has its tests, every fault that can be asked for has its row."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
from typing import Any

import pytest

from packtrain.supervise.faults import KINDS
from tests.house.tree import ROOT
from tests.supervise.fault_table import COLUMNS, TABLE, Row, page, verbs
from tests.supervise.faults import FAULTS

DOES = re.compile(r"(?P<file>tests/[\w/]+\.py)::(?P<test>test_\w+)(?:\[(?P<case>.+)\])?")
PAGE = ROOT / "docs" / "FAULTS.md"
WORDS = (
    "pause", "drain", "cordon", "replace", "save", "cannot launch", "ranks differ", "guard rollback", "agent stopped",
)
"""Of the simulation alone: words of a person, and what belongs to no row."""


def missing(named: str) -> str:
    """Why a cell that names this test has none; empty: it has."""
    does = DOES.fullmatch(named)
    if does is None:
        return f"{named} names no test"
    if does["test"] not in functions(does["file"]):
        return f"{named}: there is no such test"
    if does["case"] and does["case"] not in cases(does["file"], does["test"]):
        return f"{named}: there is no such case"
    return ""


@functools.cache
def functions(file: str) -> frozenset[str]:
    path = ROOT / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return frozenset(one.name for one in tree.body if isinstance(one, ast.FunctionDef))


@functools.cache
def cases(file: str, test: str) -> frozenset[str]:
    """All values and names of its parameters, as text."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    found: set[str] = set()
    for mark in getattr(getattr(module, test), "pytestmark", []):
        if mark.name == "parametrize":
            found |= {str(value) for value in _flat(mark.args[1])} | {str(id) for id in mark.kwargs.get("ids") or ()}
    return frozenset(found)


def _flat(values: Any) -> list[Any]:
    return [one for value in values for one in (_flat(value) if isinstance(value, list | tuple) else [value])]


@pytest.mark.parametrize("row", TABLE, ids=[row.fault for row in TABLE])
def test_every_marked_cell_has_its_tests(row: Row) -> None:
    """All that a row names is there, and each row is tried at least once."""
    named = [test for cell in row[2:6] for test in cell]
    assert named and not [why for why in map(missing, named) if why]


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("tests/supervise/test_faults.py::test_gone", "no such test"), ("tests/gone.py::test_gone", "no such test"),
        ("tests/supervise/test_simulated.py::test_each_fault_alone_heals[burn]", "no such case"),
        ("tests/supervise/test_faults.py", "names no test"),
    ],
)
def test_a_cell_without_its_test_is_seen(named: str, why: str) -> None:
    """A test that was renamed or taken away, and a case that no longer runs."""
    assert why in missing(named)


def test_what_can_be_asked_for_has_a_row() -> None:
    """All that `packtrain break` does, all that the simulation plays, and nothing else."""
    assert verbs() == set(KINDS) == {verb for row in TABLE for verb in row.verbs}
    played = {test.rpartition("[")[2].removesuffix("]") for row in TABLE for test in row.fake}
    assert set(FAULTS) <= played | set(WORDS)


def test_the_page_is_made_from_the_table() -> None:
    """docs/FAULTS.md says what the table says; PACKTRAIN_UPDATE_GOLDEN=1 writes it anew."""
    assert len(COLUMNS) == len(TABLE[0]) - 3
    if os.environ.get("PACKTRAIN_UPDATE_GOLDEN"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()
