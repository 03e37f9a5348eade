"""rung: one dial for size, from 10M to 64B parameters. Width, depth, batch, rate and horizon derive from it.

Command:  packtrain train rung:300m --data DIR
Hardware: any; the mesh is every device there is, on `fsdp`.
Time:     not measured.
Expect:   not measured.

The dial counts every parameter, embedding included, with the vocabulary of the data at hand. The formulas:

    aspect      embed / layers = 32 * (n / 10M)^(1/4), at most 128: small models are deep, large ones settle near the
                shapes of Llama (arXiv:2302.13971, arXiv:2407.21783)
    embed       a multiple of 128, of 256 from 1,024 and of 1,024 from 4,096, so that it divides over devices
    head        64 below 1,024 of embed, 128 from there
    key heads   a quarter of the query heads (half where 4 does not divide); 8 from 4,096 of embed, so that a tensor
                axis of 8 divides them (arXiv:2407.21783)
    mlp         8/3 embed (three matrices instead of two, arXiv:2002.05202), a multiple of 128 (256 from 1,024)
    tokens      20 n (arXiv:2203.15556)
    compute C   6 n * tokens
    rate        0.3118 C^-0.125, batch 0.2920 C^0.3271 tokens (arXiv:2401.02954, section 3.1)
    length      256 to 4,096, doubling each time n grows tenfold from 10M

Of the shapes within `TOLERANCE` of the dial the one wins whose aspect and count are nearest to what is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.core.errors import BadValue, Contradiction
from packtrain.data.config import DataConfig
from packtrain.recipes.spec import RunSpec
from packtrain.train.config import ModelConfig, OptimConfig, TrainConfig

SMALLEST, LARGEST = 10_000_000, 64_000_000_000
TOLERANCE = 0.10
TOKENS_PER_PARAMETER = 20
LAYERS = range(2, 161)
EMBED_MAX = 16_384
UNITS = {"m": 1_000_000, "b": 1_000_000_000}


def parse_dial(text: str) -> int:
    """`300m` -> 300,000,000; `1.3b` -> 1,300,000,000. Raises BadValue."""
    unit = UNITS.get(text[-1:].lower())
    try:
        n = round(float(text[:-1]) * (unit or 0))
    except (ValueError, OverflowError):
        n = 0
    if not SMALLEST <= n <= LARGEST:
        raise BadValue(
            f"{text!r} is not a size between 10m and 64b", where="rung:SIZE",
            fix="write it like rung:10m, rung:300m or rung:1.3b",
        )
    return n


def parameters(model: ModelConfig) -> int:
    """Every parameter of a decoder: embeddings (twice when untied), attention, mlp and norms."""
    attention = 2 * model.embed * model.head * (model.heads + model.kv_heads) + (2 * model.head if model.qk_norm else 0)
    layer = attention + 3 * model.embed * model.mlp + 2 * model.embed
    embeddings = model.vocab * model.embed * (1 if model.tied else 2)
    return model.layers * layer + embeddings + model.embed


def suggested_vocab(n: int) -> int:
    """Vocabulary when no data says otherwise: it grows with the model so that embeddings stay a small part of it."""
    for size_max, vocab in ((3e7, 4096), (2e8, 16_384), (2e9, 32_768), (2e10, 65_536)):
        if n < size_max:
            return vocab
    return 131_072


def _multiple(value: float, of: int) -> int:
    return max(1, round(value / of)) * of


def _widths() -> Iterator[int]:
    yield from range(128, 1024, 128)
    yield from range(1024, 4096, 256)
    yield from range(4096, EMBED_MAX + 1, 1024)


def _model(vocab: int, embed: int, layers: int) -> ModelConfig:
    head = 64 if embed < 1024 else 128
    heads = embed // head
    kv_heads = 8 if embed >= 4096 else heads // (4 if heads % 4 == 0 else 2)
    return ModelConfig(
        vocab=vocab, layers=layers, embed=embed, heads=heads, kv_heads=kv_heads, head=head,
        mlp=_multiple(8 * embed / 3, 128 if embed < 1024 else 256), tied=True,
    )


def aspect(n: int) -> float:
    return min(128.0, 32.0 * (n / SMALLEST) ** 0.25)


def shape(n: int, vocab: int) -> ModelConfig:
    """The model nearest to `n` parameters and its aspect. Raises Contradiction when the vocabulary is too large."""
    every = (_model(vocab, embed, layers) for embed in _widths() for layers in LAYERS)
    near = [model for model in every if _off(model, n) < TOLERANCE]
    if not near:
        raise Contradiction(
            f"no model of {n / 1e6:.0f}M parameters has a vocabulary of {vocab}", where="model.vocab",
            fix=f"build the data with --vocab {suggested_vocab(n)}, or choose a larger rung",
        )
    return min(near, key=lambda m: abs(math.log(m.embed / m.layers / aspect(n))) + 4 * _off(m, n))


def _off(model: ModelConfig, n: int) -> float:
    return abs(parameters(model) / n - 1)


def length(n: int) -> int:
    """Tokens a row: 256 at 10M, 512 at 100M, ... 4,096 from 64B; a power of two."""
    return min(4096, 256 * 2 ** round(math.log10(n / SMALLEST)))


def rung(n: int, vocab: int | None = None) -> RunSpec:
    """The complete configuration of the rung of `n` parameters; `vocab` is that of the data, when it is known."""
    compute_flops = 6.0 * n * TOKENS_PER_PARAMETER * n
    rows = _multiple(0.2920 * compute_flops**0.3271 / length(n), 8)
    steps = math.ceil(TOKENS_PER_PARAMETER * n / (rows * length(n)))
    return RunSpec(
        recipe=f"rung:{dial_text(n)}",
        model=shape(n, vocab or suggested_vocab(n)),
        optim=OptimConfig(
            learning_rate=float(f"{0.3118 * compute_flops**-0.125:.3g}"), warmup_steps=min(2000, max(20, steps // 50)),
            schedule="wsd",
        ),
        train=TrainConfig(
            steps=steps, precision="bf16" if n >= 100_000_000 else "f32",
            remat="full" if n >= 1_000_000_000 else "none",
            eval_every_steps=max(100, steps // 50),
        ),
        data=DataConfig(batch_rows=rows, length=length(n)),
        checkpoint=CheckpointConfig(every_s=600.0),
    )


def dial_text(n: int) -> str:
    """The inverse of `parse_dial`."""
    return f"{n / 1e9:.6g}b" if n >= 1_000_000_000 else f"{n / 1e6:.6g}m"
