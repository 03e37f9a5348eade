"""A decoder-only transformer over plain trees of arrays: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Sizes in shape suffixes: B rows, L length, D embed, H heads, G key heads, K head, M mlp, V vocab.
Parameters are declared once, in `param_specs`, with named dims; layers are stacked on a `layer` dim always. Whether
they run by scan or unrolled is execution, and changes no shape.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.typing import DTypeLike

from packtrain.train import axes
from packtrain.train.attention import attend, windowed
from packtrain.train.axes import ParamSpec, gather, gathered, gathered_as, scatter_sum
from packtrain.train.config import ModelConfig, TrainConfig
from packtrain.train.matmul import project

Tree = Any
"""Nested dicts of arrays or specs."""
Batch = Mapping[str, Any]
"""tokens_BL, positions_BL, starts_BL, ends_BL; the loss needs targets_BL, weights_BL too, layers the rope table."""
Layer = Callable[[jax.Array, Tree], jax.Array]
"""(stream, weights of one layer) -> stream."""

ATTENTION = ("q", "k", "v", "attended", "middle")
DOTS = (*ATTENTION, "gate", "up")
REMAT = {"none": DOTS, "dots": DOTS, "attention": ATTENTION, "full": ()}
"""`train.remat` -> what a layer keeps for its backward pass besides its input, by name; the rest is made again.

`dots` is every result of a matmul or a sum over devices; elementwise work and what is gathered is made again, as in
arXiv:2205.05198 (weights as used, kept for all layers, would be the whole model on each device). `attention` also makes
the hidden units of the mlp again, `full` the whole layer. `none` keeps elementwise results too, where weights are used
as they are stored: on one device in f32.
"""


def param_specs(model: ModelConfig) -> dict[str, Any]:
    """Every parameter of the model: nested dict of ParamSpec. Logical shapes, whatever the mesh."""
    N, D, H, G, K, M = model.layers, model.embed, model.heads, model.kv_heads, model.head, model.mlp
    into, back = D**-0.5, (2 * N) ** -0.5  # each of 2N branches adds 1/(2N) of the stream's variance
    layers = {
        "attention_norm": ParamSpec((N, D), ("layer", "embed"), "ones"),
        "q": ParamSpec((N, D, H, K), ("layer", "embed", "heads", "head"), into),
        "k": ParamSpec((N, D, G, K), ("layer", "embed", "kv_heads", "head"), into),
        "v": ParamSpec((N, D, G, K), ("layer", "embed", "kv_heads", "head"), into),
        "out": ParamSpec((N, H, K, D), ("layer", "heads", "head", "embed"), back * (H * K) ** -0.5),
        "mlp_norm": ParamSpec((N, D), ("layer", "embed"), "ones"),
        "gate": ParamSpec((N, D, M), ("layer", "embed", "mlp"), into),
        "up": ParamSpec((N, D, M), ("layer", "embed", "mlp"), into),
        "down": ParamSpec((N, M, D), ("layer", "mlp", "embed"), back * M**-0.5),
    }
    if model.qk_norm:
        layers |= {name: ParamSpec((N, K), ("layer", "head"), "ones") for name in ("q_norm", "k_norm")}
    specs: dict[str, Any] = {
        "embedding": ParamSpec((model.vocab, D), ("vocab", "embed"), into),
        "layers": layers,
        "final_norm": ParamSpec((D,), ("embed",), "ones"),
    }
    if not model.tied:
        specs["unembedding"] = ParamSpec((model.vocab, D), ("vocab", "embed"), into)
    return specs


def name_of(path: tuple[Any, ...]) -> str:
    """A leaf's name: its keys joined by `/`, as in `layers/q`. Names key random numbers and checkpoints."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def init_params(model: ModelConfig, seed: jax.Array | int) -> Tree:
    """Starting weights, f32. Each comes from (seed, its name): no mesh and no order of creation enters."""

    def start(path: tuple[Any, ...], spec: ParamSpec) -> jax.Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, jnp.float32)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name_of(path).encode()))
        return spec.init * jax.random.normal(key, spec.shape, jnp.float32)

    return jax.tree.map_with_path(start, param_specs(model))


@jax.named_scope("norm")
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x / rms(x) * scale over the last dim, in f32 until the end: so the scale's gradient is summed over rows in f32.

    Source: arXiv:1910.07467.
    """
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return (x32 * inverse * scale.astype(jnp.float32)).astype(x.dtype)


def rope_table(positions_BL: jax.Array, head: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each position's angles, f32 [B, L, 1, K/2]. Computed once for all layers."""
    frequency = theta ** (-jnp.arange(0, head, 2, dtype=jnp.float32) / head)
    angles = positions_BL[:, :, None, None].astype(jnp.float32) * frequency
    # Without the barrier XLA computes them again in every layer that uses them.
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
    return cos, sin


@jax.named_scope("norm")
def rotate(x_BLHK: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE with the halves of a head as pairs, as Llama weights of `transformers` expect. Source: arXiv:2104.09864."""
    cos, sin = table
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLHK.dtype)


def attention_branch(
    x_BLD: jax.Array, w: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh
) -> jax.Array:
    """One layer's attention on the normed stream. `batch` carries the rope table and this site's key intervals."""
    q_BLHK, k_BLGK, v_BLGK = (checkpoint_name(project(x_BLD, w[name]), name) for name in ("q", "k", "v"))
    if model.qk_norm:
        q_BLHK = rms_norm(q_BLHK, w["q_norm"], model.norm_epsilon)
        k_BLGK = rms_norm(k_BLGK, w["k_norm"], model.norm_epsilon)
    q_BLHK, k_BLGK = rotate(q_BLHK, batch["rope"]), rotate(k_BLGK, batch["rope"])
    k_BSGK, v_BSGK = (gather(x, 1, "length", "keys", mesh) for x in (k_BLGK, v_BLGK))
    first = axes.first_of("length", x_BLD.shape[1], mesh)
    starts_BL, ends_BL = windowed(batch["starts_BL"], batch["ends_BL"], model.window, first)
    with jax.named_scope("attention"):
        out_BLHK = attend(q_BLHK, k_BSGK, v_BSGK, starts_BL, ends_BL, train)
    return project(out_BLHK, w["out"], over=2)


def mlp_branch(x_BLD: jax.Array, w: Tree) -> jax.Array:
    """SwiGLU. Source: arXiv:2002.05202."""
    gate_BLM, up_BLM = (checkpoint_name(project(x_BLD, w[name]), name) for name in ("gate", "up"))
    return project(jax.nn.silu(gate_BLM) * up_BLM, w["down"])


def block(x_BLD: jax.Array, w: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh) -> jax.Array:
    """One layer: x plus attention of its norm, plus mlp of the norm of that.

    The stream holds a span of each row. A branch needs the whole length and has some of the heads (hidden units), so
    its result is a part of a sum: gathered before, summed and cut again after (arXiv:2205.05198).
    """

    def normed(x_BLD: jax.Array, scale: jax.Array) -> jax.Array:
        return gather(rms_norm(x_BLD, scale, model.norm_epsilon), 1, "span", "length", mesh)

    part_BLD = attention_branch(normed(x_BLD, w["attention_norm"]), w, batch, model, train, mesh)
    x_BLD = checkpoint_name(x_BLD + scatter_sum(part_BLD, 1, "length", "span", mesh), "middle")
    return x_BLD + scatter_sum(mlp_branch(normed(x_BLD, w["mlp_norm"]), w), 1, "length", "span", mesh)


def run_layers(x_BLD: jax.Array, layers: Tree, layer: Layer, train: TrainConfig, plain: bool) -> jax.Array:
    """The stacked layers in turn, by scan (one compiled body) or unrolled (larger program, faster on CPU).

    `plain`: weights are used as they are stored, so nothing has to be made again but what `remat` says.
    """
    if train.remat != "none" or not plain:
        keep = jax.checkpoint_policies.save_only_these_names(*REMAT[train.remat])
        layer = jax.checkpoint(layer, policy=keep, prevent_cse=train.unroll)
    if not train.unroll:
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x_BLD, layers)[0]
    for n in range(len(jax.tree.leaves(layers)[0])):
        x_BLD = layer(x_BLD, jax.tree.map(lambda stacked, n=n: stacked[n], layers))
    return x_BLD


def embed(table_VD: jax.Array, tokens_BL: jax.Array, mesh: Mesh) -> jax.Array:
    """Each token's row of the table, [B, L, D] with a span of L."""
    if not axes.axes_of("vocab", mesh):
        return table_VD[tokens_BL]
    # A device knows some rows and gives 0 for the others.
    at_BL = tokens_BL - axes.first_of("vocab", len(table_VD), mesh)
    known_BL = (at_BL >= 0) & (at_BL < len(table_VD))
    rows_BLD = jnp.where(known_BL[..., None], table_VD[jnp.clip(at_BL, 0, len(table_VD) - 1)], 0)
    return scatter_sum(rows_BLD, 1, "length", "span", mesh)


def hidden(params: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh) -> jax.Array:
    """The normed residual stream above the last layer, [B, L, D] in the compute type: this device's rows, whole length.

    Takes a device's pieces of parameters and batch (see `axes.spread`).
    """
    specs = param_specs(model)["layers"]
    compute = jnp.bfloat16 if train.precision == "bf16" else jnp.float32
    context = dict(batch) | {"rope": rope_table(batch["positions_BL"], model.head, model.rope_theta)}

    def layer(x_BLD: jax.Array, w: Tree) -> jax.Array:
        w = {name: gathered_as(w[name], specs[name].dims[1:], compute, mesh) for name in w}
        return block(x_BLD, w, context, model, train, mesh)

    table_VD = gathered(params["embedding"], ("vocab", "embed"), mesh)
    x_BLD = embed(table_VD, batch["tokens_BL"], mesh).astype(compute)
    plain = mesh.size == 1 and compute == jnp.float32
    x_BLD = run_layers(x_BLD, params["layers"], layer, train, plain)
    scale_D = gathered_as(params["final_norm"], ("embed",), compute, mesh)
    return gather(rms_norm(x_BLD, scale_D, model.norm_epsilon), 1, "span", "length", mesh)


def output_table(params: Tree, model: ModelConfig, compute: DTypeLike, mesh: Mesh) -> jax.Array:
    """What hidden vectors are scored against: [V, D] as `gathered_as` gives it, this device's entries, each whole."""
    table_VD = params["embedding" if model.tied else "unembedding"]
    return gathered_as(table_VD, ("vocab", "embed"), compute, mesh)


def soft_capped(scores: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(scores / cap); a cap of 0: as they are. Source: arXiv:2408.00118."""
    return cap * jnp.tanh(scores / cap) if cap else scores


def logits_of(x_BLD: jax.Array, params: Tree, model: ModelConfig, mesh: Mesh) -> jax.Array:
    """Scores of the vocabulary entries that this device knows, f32 [B, L, V]. A loss never holds them all: loss.py."""
    scores_BLV = project(x_BLD, output_table(params, model, x_BLD.dtype, mesh).T, out=jnp.float32)
    return soft_capped(scores_BLV, model.logit_softcap)


def forward(params: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh) -> jax.Array:
    """Logits, f32 [B, L, V]. `batch` needs tokens_BL, positions_BL, starts_BL and ends_BL. All tensors are whole."""

    def local(params: Tree, batch: Batch) -> jax.Array:
        return logits_of(hidden(params, batch, model, train, mesh), params, model, mesh)

    given = places(model, mesh), axes.place(("rows", "length"), mesh)
    return axes.spread(local, mesh, given, axes.place(("rows", "length", "vocab"), mesh))(params, batch)


def places(model: ModelConfig, mesh: Mesh) -> Tree:
    """The piece of each parameter that a device holds, for `axes.spread`."""
    return jax.tree.map(lambda spec: axes.place(spec.dims, mesh), param_specs(model))
