"""Where a step's time goes: a trace of some steps, and its time by kind of work.

The model names its parts (`jax.named_scope`), the compiled program says for each operation which part it came from, and
the trace says when each operation ran. The first two are joined by `kinds_of`, with the third by `shares`: both pure.
The trace itself opens in TensorBoard, xprof and Perfetto.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.profiler import ProfileData

from packtrain.core.records import ProfileDone

WARM_CALLS = 4
"""Steps of an attempt before the first that is traced, which fill caches; fewer where fewer are left."""
MODULE = "jit_step"
MARK = "packtrain profiled steps"
KINDS = ("matmul", "attention", "loss", "optimizer", "norm", "collective", "host", "other")
"""`matmul`: products of the projections, and what the compiler fused into them. `attention`, `loss`: all of these
parts, their products too. `optimizer`: update, norm and digest of the gradient. `norm`: norms and RoPE. `host`: no
operation ran on the device. `other`: the rest."""
SCOPES = ("attention", "loss", "optimizer", "norm")
"""Names that model and step give to their parts; the innermost of an operation counts."""
COLLECTIVE = re.compile(r"^(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)")
AROUND, HOLDS = ("while", "conditional", "call", "async-start", "async-done"), ""
"""Operations that only hold others, and their kind: their time is that of what they hold."""
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = .*? (?P<op>[a-z][\w\-]*)\((?P<rest>.*)$")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")


class Span(NamedTuple):
    """One operation that ran."""

    name: str
    start_ns: int
    end_ns: int


class Instruction(NamedTuple):
    op: str
    scope: str
    calls: str


# --- from a compiled program to kinds --------------------------------------------------------------


def kinds_of(program: str) -> dict[str, str]:
    """Operation -> kind, or HOLDS, from the text of a compiled program."""
    bodies: dict[str, dict[str, Instruction]] = {}
    body: dict[str, Instruction] = {}
    for line in program.splitlines():
        if begins := COMPUTATION.match(line):
            body = bodies.setdefault(begins["name"], {})
        elif found := INSTRUCTION.match(line):
            body[found["name"]] = _instruction(found)
    return {name: _kind(one, bodies) for body in bodies.values() for name, one in body.items()}


def _instruction(found: re.Match[str]) -> Instruction:
    path, calls = re.search(r'op_name="([^"]*)"', found["rest"]), re.search(r"calls=%?([\w.\-]+)", found["rest"])
    parts = re.findall(r"\w+", path[1]) if path else []
    scope = next((part for part in reversed(parts) if part in SCOPES), "")
    return Instruction(found["op"], scope, calls[1] if calls else "")


def _kind(one: Instruction, bodies: dict[str, dict[str, Instruction]]) -> str:
    """What a fusion does is what its last operation is named after; a product inside makes a nameless one a product."""
    if one.op in AROUND:
        return HOLDS
    if COLLECTIVE.match(one.op):
        return "collective"
    if one.scope in ("attention", "loss", "optimizer"):
        return one.scope
    return "matmul" if _multiplies(one, bodies) else one.scope or "other"


def _multiplies(one: Instruction, bodies: dict[str, dict[str, Instruction]]) -> bool:
    if one.op in ("dot", "custom-call"):  # on accelerators products are calls of a library
        return True
    return any(_multiplies(inner, bodies) for inner in bodies.get(one.calls, {}).values())


# --- from a trace to shares ------------------------------------------------------------------------


def shares(spans: Iterable[Span], kinds: dict[str, str], window: tuple[int, int]) -> dict[str, int]:
    """Nanoseconds of the window by kind; they add up to it exactly.

    Where operations of several kinds run at one time each kind gets an equal part of it; where none runs it is `host`.
    An operation that `kinds` does not know is `other`.
    """
    begin, end = window
    named = [(kinds.get(span.name, "other"), span) for span in spans]
    changes = sorted(
        (min(max(at, begin), end), step, kind)
        for kind, span in named if kind != HOLDS for at, step in ((span.start_ns, 1), (span.end_ns, -1))
    )
    running, total, last = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0), begin
    for at, step, kind in [*changes, (end, 0, "other")]:
        _divide(at - last, [kind for kind in KINDS if running[kind]] or ["host"], total)
        running[kind] += step
        last = at
    return total


def _divide(ns: int, among: Sequence[str], total: dict[str, int]) -> None:
    each, rest = divmod(ns, len(among))
    for n, kind in enumerate(among):
        total[kind] += each + (n < rest)


def read_trace(trace: ProfileData) -> tuple[list[Span], tuple[int, int]]:
    """The operations of the first device, and the time from begin to end of the steps.

    A trace without the mark, which `Profiler` sets, has the time from its first to its last operation.
    """
    spans, marks, devices = [], [], []
    for event in (event for plane in trace.planes for line in plane.lines for event in line.events):
        span = Span(event.name, round(event.start_ns), round(event.start_ns + event.duration_ns))
        if event.name == MARK:
            marks.append(span)
            continue
        stats = dict(event.stats)
        if "hlo_op" in stats:
            own = str(stats.get("hlo_module", "")) == MODULE
            spans.append(span._replace(name=str(stats["hlo_op"]) if own else "?"))
            devices.append(int(str(stats.get("device_ordinal", 0))))
    kept = [span for span, device in zip(spans, devices) if device == min(devices)]
    window = marks or kept or [Span("", 0, 0)]
    return kept, (min(span.start_ns for span in window), max(span.end_ns for span in window))


# --- in a loop -------------------------------------------------------------------------------------


class Compiled:
    """A step whose program is kept in sight: compiled at its first call, once, as the jitted one would be."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self._program: Any = None

    def __call__(self, *args: Any) -> Any:
        if self._program is None:
            self._program = self._step.lower(*args).compile()
        return self._program(*args)

    def text(self) -> str:
        assert self._program is not None, "the program is read after a step"
        return str(self._program.as_text())


def begins(calls: int, left: int, steps: int) -> bool:
    """Whether to trace from here, after so many calls, with so many steps left: warm, or no more left than wanted."""
    return left > 0 and (calls >= WARM_CALLS or left <= steps)


class Profiler:
    """Traces `steps` steps of this attempt into `folder`; `program` gives the text of the step's compiled program.

    Begin and end are the loop's to call: nothing may be in flight then.
    """

    def __init__(self, folder: str, steps: int, program: Callable[[], str]) -> None:
        self._folder, self._steps, self._program = folder, steps, program
        self._mark = jax.profiler.TraceAnnotation(MARK)
        self._first = 0
        self.state: Literal["waiting", "tracing", "done"] = "waiting"

    def turns(self, calls: int, index: int, end: int) -> bool:
        """Whether it is time to begin, or to end, before batch `index` of a run of `end`, after so many calls."""
        if self.state == "waiting":
            return begins(calls, end - index, self._steps)
        return self.state == "tracing" and index >= min(self._first + self._steps, end)

    def begin(self, index: int) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call, otherwise: it slows the loop and swells the file
        jax.profiler.start_trace(self._folder, profiler_options=options)
        self._mark.__enter__()
        self._first, self.state = index, "tracing"

    def end(self, index: int) -> ProfileDone:
        """What the trace says. Reading it takes a second or a few."""
        self.close()
        newest = max(Path(self._folder).rglob("*.xplane.pb"), key=os.path.getmtime)
        spans, window = read_trace(ProfileData.from_file(str(newest)))
        found = shares(spans, kinds_of(self._program()), window)
        return ProfileDone(step=index, steps=index - self._first, ns=found, folder=self._folder)

    def close(self) -> None:
        if self.state == "tracing":
            self._mark.__exit__(None, None, None)
            jax.profiler.stop_trace()
        self.state = "done"

