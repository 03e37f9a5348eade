"""The reading of collectives from a compiled program, against text written by hand."""

from __future__ import annotations

import pytest

from tests.train.collectives import Collective, array_bytes, axes_of, groups_of, read, sent_bytes, totals

MESH = {"replica": 2, "fsdp": 2, "tensor": 2}
PROGRAM = """HloModule jit_step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = f32[4]{0} all-gather(%x), channel_id=1, replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %g)
}

%outer (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %w = (s32[], f32[4]{0}) while(%p), condition=%less, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %r = bf16[6,2]{1,0} reduce-scatter(%y), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
}

%less (p: (s32[], f32[4])) -> pred[] {
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main.1 (p: f32[8]) -> f32[8] {
  %w = (s32[], f32[4]{0}) while(%p), condition=%less, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %s = (f32[8]{0}, f32[2]{0}) all-reduce(%a, /*index=1*/%b), replica_groups={{0,1,4,5},{2,3,6,7}}, to_apply=%add
  ROOT %p = f32[8]{0} parameter(0)
}
"""


def pairs(*groups: tuple[int, ...]) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(g) for g in groups)


@pytest.mark.parametrize(("text", "wanted"), [
    ("{{0,2},{1,3}}, dimensions={0}", pairs((0, 2), (1, 3))),
    ("[2,2]<=[4], x", pairs((0, 1), (2, 3))),
    ("[2,2]<=[2,2]T(1,0), x", pairs((0, 2), (1, 3))),
    ("mesh['a'=2,'b'=2] {'a'}, x", pairs((0, 2), (1, 3))),
    ("mesh['a'=1,'b'=2,'c'=4], device_ids=([2,2,2]T(1,0,2)) {'b'}, x", pairs((0, 2), (1, 3), (4, 6), (5, 7))),
    ("mesh['a'=2,'b'=2] {'a','b'}, x", pairs((0, 1, 2, 3))),
])
def test_groups_in_every_notation(text: str, wanted: frozenset[frozenset[int]]) -> None:
    """A list, an iota with and without transposition, and axes of a mesh: all give the sets they stand for."""
    assert groups_of(f"all-reduce(%x), replica_groups={text}") == wanted


@pytest.mark.parametrize(("groups", "wanted"), [
    (pairs((0, 4), (1, 5), (2, 6), (3, 7)), ("replica",)),
    (pairs((0, 2), (1, 3), (4, 6), (5, 7)), ("fsdp",)),
    (pairs((0, 1, 4, 5), (2, 3, 6, 7)), ("replica", "tensor")),
    (pairs(tuple(range(8))), ("replica", "fsdp", "tensor")),
    (pairs(*((n,) for n in range(8))), ()),
])
def test_groups_are_named_by_their_axes(groups: frozenset[frozenset[int]], wanted: tuple[str, ...]) -> None:
    """Devices that differ in the position on some axes only are a group of just these axes."""
    assert axes_of(groups, MESH) == wanted


def test_groups_of_no_axis_are_an_error() -> None:
    """Neighbours that no mesh axis joins are not taken for one."""
    with pytest.raises(AssertionError, match="no axes"):
        axes_of(pairs((0, 3), (1, 2), (4, 7), (5, 6)), MESH)


def test_bytes() -> None:
    """A tuple is the sum of its arrays; rings send (n - 1) / n of the whole, all-reduces twice that."""
    assert array_bytes("(f32[14,128]{1,0}, /*index=1*/bf16[3]{0}, u32[])") == 14 * 128 * 4 + 6 + 4
    assert sent_bytes("all-gather", 800, 8) == sent_bytes("reduce-scatter", 100, 8) == 700
    assert sent_bytes("all-reduce", 800, 8) == 1400


def test_loops_count_as_often_as_they_turn() -> None:
    """What lies in a loop inside a loop runs the product of both; branches of calls are found; nothing else counts."""
    found = read(PROGRAM, MESH)
    assert sorted(found) == [
        Collective("all-gather", ("fsdp",), 15 * 8, 15), Collective("all-reduce", ("replica", "tensor"), 60, 1),
        Collective("reduce-scatter", ("tensor",), 3 * 24, 3),
    ]
    assert totals(found) == {
        (("fsdp",), "all-gather"): 120, (("tensor",), "reduce-scatter"): 72, (("replica", "tensor"), "all-reduce"): 60,
    }


def test_a_loop_of_unknown_length() -> None:
    """Where devices talk in it nothing is guessed: it is an error. Where none does, it is passed over."""
    unknown = PROGRAM.replace('"known_trip_count":{"n":"5"}', "")
    with pytest.raises(AssertionError, match="no known number of turns"):
        read(unknown, MESH)
    silent = unknown.replace("all-gather(", "negate(")
    assert totals(read(silent, MESH)).keys() == {(("tensor",), "reduce-scatter"), (("replica", "tensor"), "all-reduce")}
