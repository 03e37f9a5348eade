"""What a model costs on a mesh, by arithmetic: parameters, bytes on each device, bytes sent, FLOPs a token.

Nothing is allocated or compiled. Sizes and pieces come from the declarations the trainer itself uses (`state_specs`,
`axes.TABLE`); how often something is gathered or summed is written down here, and tests compare that with compiled
programs. Layers are those of a scan: unrolled on CPU, the compiler gathers a layer's weights once and keeps them.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh

from packtrain.train import axes
from packtrain.train.axes import ParamSpec
from packtrain.train.config import ModelConfig, mesh_text
from packtrain.train.directions import is_orthogonal
from packtrain.train.flops import matmul_parameters
from packtrain.train.loss import CHUNK_BYTES
from packtrain.train.mesh import abstract_mesh
from packtrain.train.model import REMAT, param_specs
from packtrain.train.sections import Sections
from packtrain.train.state import LeafSpec, state_specs
from packtrain.train.step import BATCH_FIELDS

F32 = 4
PARTS = {
    "embedding": "embeddings", "unembedding": "embeddings", "gate": "mlp", "up": "mlp", "down": "mlp", "q": "attention",
    "k": "attention", "v": "attention", "out": "attention",
}
KEPT = {
    "q": "heads", "k": "kv_heads", "v": "kv_heads", "attended": "heads", "middle": "span", "gate": "mlp", "up": "mlp",
}
"""What a policy may name (`model.REMAT`) -> whose size it has."""
WORKING = {
    (False, False): {"span": 4, "stream": 7, "mlp": 7, "heads": 9, "kv_heads": 7},
    (True, False): {"span": 3, "stream": 7, "mlp": 5, "heads": 9, "kv_heads": 7},
    (False, True): {"span": 9, "stream": 4, "mlp": 6, "heads": 8, "kv_heads": 8},
    (True, True): {"span": 9, "stream": 4, "mlp": 5, "heads": 8, "kv_heads": 8},
}
"""(gate and up are kept, the stream is cut between branches) -> arrays at work in the backward pass of a layer: counted
in programs whose sizes were varied in turn, and by name in what the compiler says is live at the peak."""


UPDATING = {"adamw": (0, 0), "muon": (10, 16), "adafactor": (6, 6)}
"""optimizer -> arrays at work in an update, as large as the layers of a matrix that it takes at a time: where it takes
some, and where it takes all. Counted as those above."""


class Collective(NamedTuple):
    """One of the program's collectives, as one device sees it."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    """Of the whole array: what a gather results in, a reduce-scatter begins with, an all-reduce holds."""
    times: int
    """In a step."""
    of: int
    """Devices that take part."""

    @property
    def sent(self) -> int:
        """Bytes each device sends in a step, in a ring: (n - 1) / n of the array, twice that for an all-reduce."""
        return self.times * ((2 if self.kind == "all-reduce" else 1) * self.bytes * (self.of - 1) // self.of)


@dataclass(frozen=True)
class Layout:
    """A configuration on the mesh it names (none: one device).

    Raises LayoutError: an axis no dim is split over, or a dim that cannot be cut into equal pieces.
    """

    spec: Sections

    def __post_init__(self) -> None:
        for shape, _, dims in self.leaves.values():
            axes.check(dims, shape, self.mesh)
        axes.check(("span",), (self.spec.data.length,), self.mesh)

    @functools.cached_property
    def mesh(self) -> AbstractMesh:
        return abstract_mesh(self.spec.train.mesh)

    @functools.cached_property
    def leaves(self) -> dict[str, LeafSpec]:
        """Of the state: name -> (logical shape, dtype, dims)."""
        return state_specs(self.spec.model, self.spec.optim)

    @property
    def rows(self) -> int:
        """Of the global batch, padded."""
        return -(-self.spec.data.batch_rows // self.rows_multiple) * self.rows_multiple

    @property
    def rows_multiple(self) -> int:
        return axes.devices_on("rows", self.mesh) * self.spec.train.microbatches

    @property
    def compute(self) -> int:
        """Bytes of an element of the compute type."""
        return 2 if self.spec.train.precision == "bf16" else F32

    def elements(self, dims: tuple[str, ...], shape: tuple[int, ...]) -> int:
        """That a device holds."""
        return math.prod(size // axes.devices_on(dim, self.mesh) for dim, size in zip(dims, shape, strict=True))

    def activation(self, *sizes: tuple[str, int]) -> int:
        """Elements a device holds, in one microbatch, of an array whose first dim is rows."""
        rows = self.rows // self.rows_multiple
        return rows * math.prod(size // axes.devices_on(dim, self.mesh) for dim, size in sizes)


# --- sizes -----------------------------------------------------------------------------------------


def parameters(model: ModelConfig) -> dict[str, int]:
    """part -> parameters: embeddings, attention, mlp, norms."""
    counts = Counter[str]()
    specs = param_specs(model)
    for name, spec in (specs | specs["layers"]).items():
        if isinstance(spec, ParamSpec):
            counts[PARTS.get(name, "norms")] += math.prod(spec.shape)
    return dict(counts)


def state_bytes(of: Layout) -> dict[str, int]:
    """part of the state -> bytes on each device: params, opt, and the rest by its own name."""
    sums = Counter[str]()
    for name, (shape, dtype, dims) in of.leaves.items():
        sums[name.split("/")[0]] += of.elements(dims, shape) * np.dtype(dtype).itemsize
    return dict(sums)


def batch_bytes(of: Layout) -> int:
    """The step's batch on each device."""
    return of.elements(("rows", "length"), (of.rows, of.spec.data.length)) * F32 * len(BATCH_FIELDS)


def memory(of: Layout) -> dict[str, int]:
    """part -> bytes on each device at the most crowded moment of a step.

    State, batch and what layers keep are exact. What is at work was counted in the CPU compiler's programs (f32,
    blockwise attention) and is taken to be as many arrays elsewhere.
    """
    state, model = state_bytes(of), of.spec.model
    params, opt = state.pop("params"), state.pop("opt")
    sums = 2 if of.spec.train.microbatches > 1 else 1  # of all microbatches so far, and of this one
    kept = model.layers * kept_bytes(of)
    return {
        "parameters": params, "optimizer": opt, "batch and counters": sum(state.values()) + batch_bytes(of),
        "gradients": sums * params, "kept by layers": kept,
        # after the backward pass one sum of gradients is there, and nothing that layers kept
        "at work": max(working_bytes(of), update_bytes(of) - (sums - 1) * params - kept),
    }


def _sizes(of: Layout) -> dict[str, int]:
    """Elements of a microbatch's arrays on a device: streams (a span, and the whole length), mlp, heads, key heads."""
    model, length = of.spec.model, ("length", of.spec.data.length)
    return {
        "span": of.activation(("span", of.spec.data.length), ("stream", model.embed)),
        "stream": of.activation(length, ("stream", model.embed)),
        "mlp": of.activation(length, ("mlp", model.mlp)),
        "heads": of.activation(length, ("heads", model.heads), ("head", model.head)),
        "kv_heads": of.activation(length, ("kv_heads", model.kv_heads), ("head", model.head)),
    }


def kept_bytes(of: Layout) -> int:
    """That one layer keeps for its backward pass: its input, and what its policy names."""
    n, names = _sizes(of), REMAT[of.spec.train.remat]
    log_totals = of.activation(("length", of.spec.data.length), ("heads", of.spec.model.heads))
    elements = n["span"] + sum(n[KEPT[name]] for name in names)
    return of.compute * elements + ("attended" in names) * F32 * log_totals


def working_bytes(of: Layout) -> int:
    """That exist for a while: in the backward pass of a layer, or in the loss, whichever is more."""
    model, n = of.spec.model, _sizes(of)
    table = F32 * of.elements(("vocab", "stream"), (model.vocab, model.embed))
    weights = sum(_gathered(of, spec.dims[1:], spec.shape[1:]) for spec in param_specs(model)["layers"].values())
    cut = bool(axes.between("span", "length", of.mesh))
    arrays = WORKING["gate" in REMAT[of.spec.train.remat], cut]
    layer = of.compute * (weights + sum(count * n[name] for name, count in arrays.items())) + table
    scores = min(CHUNK_BYTES, F32 * of.activation(("length", of.spec.data.length)) * model.vocab)
    loss = 3 * table + 2 * scores + 3 * of.compute * n["stream"]
    return max(layer, loss)


def update_bytes(of: Layout) -> int:
    """That exist for a while after the backward pass, beside the gradients: those added up over the axes that do not
    cut them; then what the optimizer needs for the largest matrix.
    """
    params = [(shape, dims) for name, (shape, _, dims) in of.leaves.items() if name.startswith("params/")]
    summed = sum(F32 * of.elements(dims, shape) for shape, dims in params if axes.not_cutting(dims, of.mesh))
    some, every = UPDATING[of.spec.optim.name]
    taken = [0]
    for spec in filter(is_orthogonal, param_specs(of.spec.model)["layers"].values()):
        width = axes.dealt_at_once(spec.shape[0], spec.dims, of.mesh)
        arrays = some if width < spec.shape[0] else every
        taken.append(arrays * F32 * width * of.elements(spec.dims[1:], spec.shape[1:]))
    return max(summed, *taken)


def flops_per_token(spec: Sections) -> int:
    """Forward and backward, where rows are full and causal: a token sees (length + 1) / 2 keys, or its window."""
    model, length = spec.model, spec.data.length
    seen = min(length, model.window or length)
    pairs = seen * (seen + 1) // 2 + (length - seen) * seen
    return 6 * matmul_parameters(model) + 12 * model.layers * model.heads * model.head * pairs // length


# --- collectives -----------------------------------------------------------------------------------


def collectives(of: Layout) -> list[Collective]:
    """All of a step but those of a few scalars."""
    once = [*_sums_of_gradients(of), *_dealt(of)]
    parts = [*_weights(of), *_stream(of), *_keys(of), *_tables(of), *_loss(of)]
    return once + [c._replace(times=c.times * of.spec.train.microbatches) for c in parts]


def _over(
    of: Layout, over: tuple[str, ...], counts: dict[str, int], elements: int, itemsize: int
) -> Iterator[Collective]:
    """`counts`: kind -> times in a microbatch. Nothing where no axis is involved."""
    devices = math.prod(of.mesh.shape[axis] for axis in over)
    for kind, times in counts.items():
        if over and times:
            yield Collective(kind, over, elements * itemsize, times, devices)


def _gathered(of: Layout, dims: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """Elements of a weight on a device as it is used: whole over the axes of `embed`."""
    return of.elements(tuple("stream" if dim == "embed" else dim for dim in dims), shape)


def _weights(of: Layout) -> Iterator[Collective]:
    """Of each layer: gathered for the forward pass and again for the backward, whose gradients are scattered in f32."""
    layers, over = of.spec.model.layers, axes.axes_of("embed", of.mesh)
    for spec in param_specs(of.spec.model)["layers"].values():
        if "embed" in spec.dims:
            elements = _gathered(of, spec.dims[1:], spec.shape[1:])
            yield from _over(of, over, {"all-gather": 2 * layers}, elements, of.compute)
            yield from _over(of, over, {"reduce-scatter": layers}, elements, F32)


def _stream(of: Layout) -> Iterator[Collective]:
    """A branch gathers the normed stream and scatters its sum; backward the other way round, and gathers once more.

    Where a layer keeps nothing, the sum of its first branch is made again.
    """
    over, layers, full = axes.between("span", "length", of.mesh), of.spec.model.layers, of.spec.train.remat == "full"
    elements = of.activation(("length", of.spec.data.length), ("stream", of.spec.model.embed))
    counts = {"all-gather": 6 * layers + 1, "reduce-scatter": (4 + full) * layers + 1}  # + 1: above the last layer
    yield from _over(of, over, counts, elements, of.compute)
    # the rows of the embedding that each device knows, summed in f32
    yield from _over(of, over, {"reduce-scatter": 1, "all-gather": 1}, elements, F32)


def _keys(of: Layout) -> Iterator[Collective]:
    """Keys and values of the whole row, where its length is cut for attention too."""
    model, over = of.spec.model, axes.between("length", "keys", of.mesh)
    elements = of.activation(("keys", of.spec.data.length), ("kv_heads", model.kv_heads), ("head", model.head))
    counts = {"all-gather": 2 * 2 * model.layers, "reduce-scatter": 2 * model.layers}
    yield from _over(of, over, counts, elements, of.compute)


def _tables(of: Layout) -> Iterator[Collective]:
    """Embedding in f32, output table and last norm in the compute type, gradients in f32.

    One gather where the first two are the same.
    """
    model, over = of.spec.model, axes.axes_of("embed", of.mesh)
    elements = of.elements(("vocab", "stream"), (model.vocab, model.embed))
    same = model.tied and of.compute == F32
    yield from _over(of, over, {"all-gather": 1, "reduce-scatter": 1}, elements, F32)
    yield from _over(of, over, {"all-gather": not same}, elements, of.compute)
    yield from _over(of, over, {"all-gather": 1}, model.embed, of.compute)
    yield from _over(of, over, {"reduce-scatter": 1}, elements + model.embed, F32)


def _loss(of: Layout) -> Iterator[Collective]:
    """Of each token, over the devices that share the vocabulary: greatest score, total, score of the target."""
    over, tokens = axes.axes_of("vocab", of.mesh), of.activation(("length", of.spec.data.length))
    yield from _over(of, over, {"all-reduce": 3}, tokens, F32)


def _sums_of_gradients(of: Layout) -> Iterator[Collective]:
    """Of each parameter over the axes that do not cut it, once a step."""
    for name, (shape, _, dims) in of.leaves.items():
        if name.startswith("params/"):
            over = axes.not_cutting(dims, of.mesh)
            yield from _over(of, over, {"all-reduce": 1}, of.elements(dims, shape), F32)


def _dealt(of: Layout) -> Iterator[Collective]:
    """Muon's matrices, to the devices that work on whole ones and back, an axis at a time, in f32 once a step."""
    specs = param_specs(of.spec.model)["layers"].values() if of.spec.optim.name == "muon" else ()
    for spec in filter(is_orthogonal, specs):
        layers = axes.dealt_layers(spec.shape[0], spec.dims, of.mesh)
        elements = layers * of.elements(spec.dims[1:], spec.shape[1:])
        for dim in spec.dims:
            yield from _over(of, axes.axes_of(dim, of.mesh), {"all-to-all": 2}, elements, F32)


def sent_bytes(of: Layout) -> dict[tuple[tuple[str, ...], str], int]:
    """(mesh axes, kind) -> bytes each device sends in a step."""
    sums = Counter[tuple[tuple[str, ...], str]]()
    for each in collectives(of):
        sums[each.axes, each.kind] += each.sent
    return dict(sums)


# --- as text ---------------------------------------------------------------------------------------


def describe(of: Layout, recipe: str) -> str:
    """What `packtrain shape` prints."""
    spec, devices = of.spec, of.mesh.size
    padding = of.rows - spec.data.batch_rows
    padded = f", padded to {of.rows:,} ({padding / of.rows:.0%} of the work is padding)," if padding else ""
    lines = [
        f"{recipe} on {mesh_text(of.mesh.shape)}: {devices:,} device{'s' if devices > 1 else ''}",
        f"batch            {spec.data.batch_rows:,} rows{padded} of {spec.data.length:,} tokens, microbatches "
        f"{spec.train.microbatches}, {spec.train.precision}, remat {spec.train.remat}",
        f"FLOPs per token  {flops_per_token(spec) / 1e9:,.3f} G, forward and backward, rows full and causal",
        "", *_parameter_lines(spec.model), "", *_memory_lines(of), "", *_sent_lines(of),
    ]
    return "\n".join(lines)


def _parameter_lines(model: ModelConfig) -> list[str]:
    parts = parameters(model)
    return [f"parameters  {sum(parts.values()):>24,}", *(f"  {part:<12}{count:>22,}" for part, count in parts.items())]


def _memory_lines(of: Layout) -> list[str]:
    parts = memory(of)
    return [
        f"bytes on each device  {sum(parts.values()):>20,}  ({sum(parts.values()) / 2**30:,.2f} GiB)",
        *(f"  {part:<20}{count:>20,}" for part, count in parts.items()),
    ]


def _sent_lines(of: Layout) -> list[str]:
    sent, times = sent_bytes(of), Counter[tuple[tuple[str, ...], str]]()
    for each in collectives(of):
        times[each.axes, each.kind] += each.times
    return [
        f"bytes each device sends in a step, in rings (formula, not compiled)  {sum(sent.values()):>18,}",
        *(
            f"  {' x '.join(over):<26}{kind:<16}{times[over, kind]:>8,} times{count:>33,}"
            for (over, kind), count in sorted(sent.items())
        ),
    ]
