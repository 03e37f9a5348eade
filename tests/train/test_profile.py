"""Where a step's time goes: operations to kinds, a recorded trace to shares, and a traced run."""

from __future__ import annotations

import pathlib
import random

import pytest
from jax.profiler import ProfileData

from packtrain.core.records import ProfileDone, StepDone
from packtrain.train.profile import HOLDS, KINDS, Span, begins, kinds_of, read_trace, shares
from tests.train import rig

RECORDED = pathlib.Path(__file__).parent / "recorded"
"""Two steps of a product, a loop named attention, a loss, a norm and an update; jax 0.10.2, one CPU core."""


def test_a_recorded_trace() -> None:
    """The recorded program and trace give these nanoseconds by kind; together they are those of the two steps."""
    kinds = kinds_of((RECORDED / "two_steps.hlo.txt").read_text())
    spans, window = read_trace(ProfileData.from_file(str(RECORDED / "two_steps.xplane.pb")))
    found = shares(spans, kinds, window)
    assert found == {
        "matmul": 110285, "attention": 268051, "loss": 89266, "optimizer": 216894, "norm": 25529, "collective": 0,
        "host": 161249, "other": 4629,
    }
    assert sum(found.values()) == window[1] - window[0]
    assert {span.name for span in spans} <= kinds.keys()


PROGRAM = """HloModule jit_step
%fused (p: f32[2,2]) -> f32[2,2] {
  %p = f32[2,2]{1,0} parameter(0)
  ROOT %dot.1 = f32[2,2]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%body (t: (s32[], f32[2,2])) -> (s32[], f32[2,2]) {
  ROOT %tuple.1 = (s32[], f32[2,2]{1,0}) tuple(%t)
}
ENTRY %main (x: f32[2,2]) -> f32[2,2] {
  %fusion.1 = f32[2,2]{1,0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/jvp()/dot_general"}
  %fusion.2 = f32[2,2]{1,0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/jvp(loss)/dot_general"}
  %while.1 = (s32[], f32[2,2]{1,0}) while(%t), body=%body, metadata={op_name="jit(step)/attention/while"}
  %add.1 = f32[2,2]{1,0} add(%x, %x), metadata={op_name="jit(step)/transpose(jvp(attention))/jit(norm)/add"}
  %all-reduce.1 = f32[2,2]{1,0} all-reduce(%x), metadata={op_name="jit(step)/optimizer/psum"}
  ROOT %copy.1 = f32[2,2]{1,0} copy(%x)
}
"""


def test_what_an_operation_is() -> None:
    """A product inside a fusion makes it one, unless it is part of the loss; the innermost name counts, a collective is
    one wherever it is, a loop only holds others, and what has no name is other."""
    kinds = kinds_of(PROGRAM)
    assert [kinds[name] for name in ("fusion.1", "fusion.2", "while.1", "add.1", "all-reduce.1", "copy.1")] == [
        "matmul", "loss", HOLDS, "norm", "collective", "other"
    ]


def test_time_is_shared() -> None:
    """Kinds that run at one time share it, what is outside the window does not count, an unknown operation is other,
    one that holds others is nothing, and time without any is the host's."""
    kinds = {"a": "matmul", "b": "loss", "w": HOLDS}
    spans = [Span("a", 5, 20), Span("a", 12, 20), Span("b", 18, 25), Span("w", 0, 100), Span("c", 30, 99)]
    found = {kind: ns for kind, ns in shares(spans, kinds, (10, 40)).items() if ns}
    assert found == {"matmul": 9, "loss": 6, "host": 5, "other": 10}


@pytest.mark.parametrize("seed", range(20))
def test_kinds_add_up_to_the_window(seed: int) -> None:
    """To the nanosecond, whatever overlaps."""
    draw = random.Random(seed)
    kinds = {str(n): kind for n, kind in enumerate(KINDS)}
    spans = [Span(str(draw.randrange(9)), at, at + draw.randrange(50)) for at in draw.choices(range(200), k=60)]
    assert sum(shares(spans, kinds, (20, 190)).values()) == 170


def test_when_a_trace_begins() -> None:
    """After four steps, or as soon as no more are left than were asked for; never at the end."""
    assert [begins(calls, 9 - calls, 2) for calls in range(1, 10)] == [False] * 3 + [True] * 5 + [False]
    assert begins(1, 5, 9) and not begins(1, 5, 4)


def test_a_traced_run_is_the_same_run(tmp_path: pathlib.Path) -> None:
    """Losses and the final state have the bits of a run without a trace."""
    ends = []
    for name, steps in (("plain", 0), ("traced", 2)):
        made = rig.Attempt(rig.fresh_folder(tmp_path, name), profile_steps=steps)
        ends.append((rig.bits(made.run()), rig.losses(rig.records(made.folder, StepDone))))
    assert ends[0] == ends[1]
    (record,) = rig.records(str(tmp_path / "traced"), ProfileDone)
    assert (record.step, record.steps) == (6, 2) and record.ns["matmul"] > 0
