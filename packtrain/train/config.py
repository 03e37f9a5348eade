"""The model, its optimizer and the way it is trained. Contradictions fail here, at construction, and name the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from packtrain.core.errors import Contradiction, LayoutError

GRACE_SHARE = 0.8
"""Part of the grace that a last save may take; the rest is for ending."""
MESH_AXES = ("replica", "fsdp", "tensor", "context", "expert", "stage")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    vocab: int = 512
    """Rows of the embedding: the tokenizer's size padded to a multiple of 128."""
    layers: int = 4
    embed: int = 256
    heads: int = 4
    kv_heads: int = 4
    head: int = 64
    mlp: int = 768
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    qk_norm: bool = True
    tied: bool = True
    window: int = 0
    """Sliding window in tokens; 0: none."""
    logit_softcap: float = 0.0
    """Scores of the vocabulary are held within this by cap * tanh(score / cap), in training, evaluation and sampling;
    0: not held. Gemma 2 uses 30."""

    def __post_init__(self) -> None:
        for name in ("vocab", "layers", "embed", "heads", "kv_heads", "head", "mlp"):
            if (size := getattr(self, name)) < 1:
                raise Contradiction(
                    f"{name} is {size}; every size of a model is at least 1", where=f"model.{name}",
                    fix=f"set model.{name}={128 if name == 'vocab' else 1}, or more",
                )
        if self.vocab % 128:
            raise Contradiction(
                f"vocab {self.vocab} is not a multiple of 128", where="model.vocab",
                fix=f"set model.vocab={-(-self.vocab // 128) * 128}",
            )
        if self.logit_softcap < 0:
            raise Contradiction("a cap is at least 0", where="model.logit_softcap", fix="use 30, or 0 for none")
        if self.heads % self.kv_heads:
            raise Contradiction(
                f"{self.heads} query heads cannot share {self.kv_heads} key heads equally", where="model.kv_heads",
                fix="choose kv_heads that divides heads",
            )
        if self.head % 2:
            raise Contradiction(
                "RoPE rotates pairs, so model.head must be even", where="model.head", fix="use 64 or 128"
            )


class OptimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Literal["adamw", "muon", "adafactor"] = "adamw"
    """muon: matrices inside the layers by orthogonalised momentum, all else by AdamW. adafactor: next to no memory."""
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    decay_fraction: float = 0.2
    """wsd: the last part of the run over which the rate falls linearly to `final_fraction`."""
    final_fraction: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    """Of AdamW, also of what Muon leaves to it."""
    muon_momentum: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """On matrices only; norms and other vectors are not decayed."""
    clip_norm: float = 1.0
    """Global gradient norm; 0: no clipping."""
    master: Literal["f32", "bf16"] = "f32"
    """Type in which the weights are kept between steps."""
    moments: Literal["f32", "bf16"] = "f32"
    """Type in which momentum and second moment are kept between steps."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How what is kept in bf16 is rounded to it. To nearest, a weight stays where its updates are below half a step."""

    def __post_init__(self) -> None:
        if self.name == "adafactor" and self.moments == "bf16":
            raise Contradiction(
                "adafactor keeps no moments of the size of the weights", where="optim.moments",
                fix="leave optim.moments out; optim.master=bf16 is what saves memory there",
            )
        for name, low, high, default in _OPTIM_RANGES:
            if not low <= getattr(self, name) <= high:
                raise Contradiction(
                    f"{name} is {getattr(self, name):g}, outside {low:g} to {high:g}", where=f"optim.{name}",
                    fix=f"for example --set optim.{name}={default:g}",
                )


_BELOW_1 = 1 - 1e-9
_OPTIM_RANGES = (
    ("learning_rate", 0.0, 1e3, 1e-3), ("warmup_steps", 0, 1 << 40, 100), ("decay_fraction", 0.0, 1.0, 0.2),
    ("final_fraction", 0.0, 1.0, 0.0), ("beta1", 0.0, _BELOW_1, 0.9), ("beta2", 0.0, _BELOW_1, 0.95),
    ("muon_momentum", 0.0, _BELOW_1, 0.95),
    ("epsilon", 1e-30, 1.0, 1e-8), ("weight_decay", 0.0, 1e3, 0.1), ("clip_norm", 0.0, 1e9, 1.0),
)
"""Name, least, most, and what to try instead."""


class GuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    spike_sigmas: float = 6.0
    """A loss or gradient norm so many standard deviations above its running mean is a spike; 0: only non-finite."""
    warmup_updates: int = 100
    policy: Literal["skip", "stop", "rollback"] = "skip"
    skips_in_a_row_max: int = 16
    """Policy skip: so many bad batches one after the other are no bad batches; the run stops instead."""

    def __post_init__(self) -> None:
        if self.spike_sigmas < 0 or self.warmup_updates < 0 or self.skips_in_a_row_max < 1:
            raise Contradiction(
                "spike_sigmas and warmup_updates are at least 0, skips_in_a_row_max at least 1", where="guard",
                fix="guard.spike_sigmas=0 judges non-finite steps only",
            )


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: int = 1000
    minutes_max: float = 0.0
    """Hard cap on training time over all attempts: the run ends at the next agreed step; 0: none.
    Schedules read `step` alone."""
    microbatches: int = 1
    precision: Literal["f32", "bf16"] = "f32"
    """Compute type. Norms, softmax, loss, sums of gradients and the update are f32 all the same; how weights are kept
    between steps is `optim.master`."""
    unroll: bool = False
    """Run layers unrolled instead of by scan; the stacked parameters are the same."""
    remat: Literal["none", "dots", "attention", "full"] = "none"
    """What layers keep for the backward pass; see docs/train.md."""
    attention: Literal["auto", "blockwise", "reference", "mosaic", "cudnn", "splash"] = "auto"
    """The attention kernel; auto: the best one for the device, an error where that would be a slow one."""
    attention_block: int = 256
    """Queries, and keys, of a block of `blockwise`."""
    z_loss: float = 0.0
    """Weight of log(sum(exp(scores)))^2 in what is differentiated; PaLM uses 1e-4. Loss, bits per byte and guard are of
    the plain loss, without it."""
    loss_tokens: int = 0
    """Tokens whose vocabulary scores exist at one time, on each device; 0: as many as make 32 MiB, at least 512."""
    mesh: dict[str, int] = {}
    """Mesh axis -> size, for example {fsdp = 8}; empty: every device on fsdp."""
    worlds: dict[str, dict[str, int]] = {}
    """Number of nodes -> mesh, in place of `mesh`: what the run goes on with when nodes are lost. Made at launch
    (worlds.py); empty: any number, each on `mesh`."""
    weights: str = ""
    """Folder of Hugging Face's that a fresh run takes its weights from, the model section with them; empty: random."""
    eval_every_steps: int = 200
    eval_rows_max: int = 64
    """Rows of each held-out store used by an evaluation in the loop; the final one uses all."""
    sample_prompts: tuple[str, ...] = ()
    sample_tokens: int = 96
    sample_temperature: float = 0.8

    def __post_init__(self) -> None:
        _check_mesh(self.mesh, "train.mesh")
        for nodes, mesh in self.worlds.items():
            if not (nodes.isascii() and nodes.isdigit() and int(nodes)):
                raise Contradiction(
                    f"a world of {nodes!r} nodes", where="train.worlds", fix="keys are numbers of nodes, as in \"4\""
                )
            _check_mesh(mesh, f"train.worlds.{nodes}")
        if self.attention_block < 1:
            raise Contradiction(
                f"attention_block is {self.attention_block}; a block has at least 1 query",
                where="train.attention_block", fix="for example train.attention_block=256",
            )
        if self.steps < 1 or self.microbatches < 1 or self.minutes_max < 0:
            raise Contradiction(
                "steps and microbatches are at least 1, minutes_max at least 0", where="train", fix="raise them"
            )
        if self.z_loss < 0 or self.loss_tokens < 0:
            raise Contradiction(
                "z_loss and loss_tokens are at least 0", where="train", fix="use 0 for no z-loss, or chunks by size"
            )
        if min(self.eval_every_steps, self.eval_rows_max, self.sample_tokens, self.sample_temperature) < 0:
            raise Contradiction(
                "counts and the temperature of evaluations and samples are at least 0", where="train",
                fix="use 0 to switch an evaluation off, or for the likeliest token",
            )


def mesh_text(sizes: Mapping[str, int]) -> str:
    """As in "fsdp 4 x tensor 2"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "every axis 1"


def _check_mesh(mesh: dict[str, int], where: str) -> None:
    unknown = [axis for axis in mesh if axis not in MESH_AXES]
    if unknown:
        raise Contradiction(
            f"no mesh axis is called {unknown[0]!r}", where=where, fix=f"use one of {', '.join(MESH_AXES)}"
        )
    for axis, size in mesh.items():
        if size < 1:
            raise LayoutError(
                f"mesh axis {axis} is {size}; an axis has at least 1 device", where=f"{where}.{axis}",
                fix="leave the axis out",
            )
