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
from jax.sharding import Mesh

from packtrain.train.attention import attend, windowed
from packtrain.train.axes import ParamSpec, constrain, gathered
from packtrain.train.config import ModelConfig, TrainConfig
from packtrain.train.matmul import project

Tree = Any
"""Nested dicts of arrays or specs."""
Batch = Mapping[str, Any]
"""tokens_BL, positions_BL, starts_BL, ends_BL; the loss needs targets_BL, weights_BL too, layers the rope table."""
Layer = Callable[[jax.Array, Tree], jax.Array]
"""(stream, weights of one layer) -> stream."""

STREAM = ("rows", "length", "stream")


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


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x / rms(x) * scale over the last dim; statistics in f32. Source: arXiv:1910.07467."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return (x32 * inverse).astype(x.dtype) * scale


def rope_table(positions_BL: jax.Array, head: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of each position's angles, f32 [B, L, 1, K/2]. Computed once for all layers."""
    frequency = theta ** (-jnp.arange(0, head, 2, dtype=jnp.float32) / head)
    angles = positions_BL[:, :, None, None].astype(jnp.float32) * frequency
    # Without the barrier XLA computes them again in every layer that uses them.
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
    return cos, sin


def rotate(x_BLHK: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE with the halves of a head as pairs, as Llama weights of `transformers` expect. Source: arXiv:2104.09864."""
    cos, sin = table
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLHK.dtype)


def attention_branch(x_BLD: jax.Array, w: Tree, batch: Batch, model: ModelConfig, mesh: Mesh) -> jax.Array:
    """One layer's attention on the normed stream. `batch` carries the rope table and this site's key intervals."""
    q_BLHK, k_BLGK, v_BLGK = (project(x_BLD, w[name]) for name in ("q", "k", "v"))
    if model.qk_norm:
        q_BLHK = rms_norm(q_BLHK, w["q_norm"], model.norm_epsilon)
        k_BLGK = rms_norm(k_BLGK, w["k_norm"], model.norm_epsilon)
    q_BLHK, k_BLGK = rotate(q_BLHK, batch["rope"]), rotate(k_BLGK, batch["rope"])
    starts_BL, ends_BL = windowed(batch["starts_BL"], batch["ends_BL"], model.window)
    out_BLHK = attend(q_BLHK, k_BLGK, v_BLGK, starts_BL, ends_BL)
    out_BLHK = constrain(out_BLHK, ("rows", "length", "heads", "head"), mesh)
    return project(out_BLHK, w["out"], over=2)


def mlp_branch(x_BLD: jax.Array, w: Tree, mesh: Mesh) -> jax.Array:
    """SwiGLU. Source: arXiv:2002.05202."""
    hidden_BLM = jax.nn.silu(project(x_BLD, w["gate"])) * project(x_BLD, w["up"])
    return project(constrain(hidden_BLM, ("rows", "length", "mlp"), mesh), w["down"])


def block(x_BLD: jax.Array, w: Tree, batch: Batch, model: ModelConfig, mesh: Mesh) -> jax.Array:
    """One layer: x plus attention of its norm, plus mlp of the norm of that."""
    normed_BLD = rms_norm(x_BLD, w["attention_norm"], model.norm_epsilon)
    x_BLD = constrain(x_BLD + attention_branch(normed_BLD, w, batch, model, mesh), STREAM, mesh)
    normed_BLD = rms_norm(x_BLD, w["mlp_norm"], model.norm_epsilon)
    return constrain(x_BLD + mlp_branch(normed_BLD, w, mesh), STREAM, mesh)


def run_layers(x_BLD: jax.Array, layers: Tree, layer: Layer, train: TrainConfig) -> jax.Array:
    """The stacked layers in turn, by scan (one compiled body) or unrolled (larger program, faster on CPU)."""
    if train.remat == "full":
        layer = jax.checkpoint(layer)
    if not train.unroll:
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x_BLD, layers)[0]
    for n in range(len(jax.tree.leaves(layers)[0])):
        x_BLD = layer(x_BLD, jax.tree.map(lambda stacked, n=n: stacked[n], layers))
    return x_BLD


def hidden(params: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh) -> jax.Array:
    """The normed residual stream above the last layer, [B, L, D] in the compute type."""
    specs = param_specs(model)["layers"]
    compute = jnp.bfloat16 if train.precision == "bf16" else jnp.float32
    context = dict(batch) | {"rope": rope_table(batch["positions_BL"], model.head, model.rope_theta)}

    def layer(x_BLD: jax.Array, w: Tree) -> jax.Array:
        w = {name: gathered(w[name].astype(compute), specs[name].dims[1:], mesh) for name in w}
        return block(x_BLD, w, context, model, mesh)

    embedding_VD = gathered(params["embedding"], ("vocab", "embed"), mesh)
    x_BLD = constrain(embedding_VD[batch["tokens_BL"]].astype(compute), STREAM, mesh)
    x_BLD = run_layers(x_BLD, params["layers"], layer, train)
    return rms_norm(x_BLD, gathered(params["final_norm"].astype(compute), ("embed",), mesh), model.norm_epsilon)


def logits_of(x_BLD: jax.Array, params: Tree, model: ModelConfig, mesh: Mesh) -> jax.Array:
    """Scores of every vocabulary entry, f32 [B, L, V]."""
    table_VD = params["embedding" if model.tied else "unembedding"].astype(x_BLD.dtype)
    table_VD = gathered(table_VD, ("vocab", "embed"), mesh)
    logits_BLV = project(x_BLD, table_VD.T, out=jnp.float32)
    return constrain(logits_BLV, ("rows", "length", "vocab"), mesh)


def forward(params: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh) -> jax.Array:
    """Logits, f32 [B, L, V]. `batch` needs tokens_BL, positions_BL, starts_BL and ends_BL."""
    return logits_of(hidden(params, batch, model, train, mesh), params, model, mesh)
