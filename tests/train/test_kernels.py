"""Which attention kernel a run gets, how it is checked before the first step, and what can be said of those of others
without their device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from packtrain.core.errors import AttentionWrong, ConfigError, LayoutError
from packtrain.train.attention import attend, reference
from packtrain.train.config import ModelConfig, TrainConfig
from packtrain.train.kernels import BLOCKWISE_COST, resolved
from packtrain.train.selfcheck import check_attention
from packtrain.train.vendor import splash
from tests.train.tiny import packed_rows


@dataclass(frozen=True)
class Chip:
    """As much of a device as the choice looks at."""

    platform: str
    device_kind: str
    compute_capability: str = ""


CPU, TPU = Chip("cpu", "cpu"), Chip("tpu", "TPU v5e")
A100, H100 = Chip("gpu", "NVIDIA A100", "8.0"), Chip("gpu", "NVIDIA H100", "9.0")
B200, MI300 = Chip("gpu", "NVIDIA B200", "10.0"), Chip("gpu", "AMD Instinct MI300X", "gfx942")


def choose(asked: str, chip: Chip, precision: str = "bf16", packed_causal: bool = True) -> str:
    """The kernel's name, or the error as a person reads it."""
    train = TrainConfig(attention=asked, precision=precision)
    try:
        return resolved(train, chip, packed_causal).name
    except ConfigError as error:
        return error.render()


def test_automatic_choice() -> None:
    """CPU gets blockwise, a TPU splash where masks allow it; sm80 and everything else must ask for what is slow."""
    assert choose("auto", CPU) == choose("blockwise", A100) == "blockwise"
    assert choose("auto", TPU) == "splash"
    for chip, packed in ((A100, True), (MI300, True), (TPU, False)):
        text = choose("auto", chip, packed_causal=packed)
        assert chip.device_kind in text and "train.attention=blockwise works, but" in text and "60 bytes" in text
    assert BLOCKWISE_COST in resolved(TrainConfig(attention="blockwise"), A100).reason
    assert BLOCKWISE_COST not in resolved(TrainConfig(attention="blockwise"), CPU).reason


@pytest.mark.parametrize("chip", [H100, B200], ids=lambda chip: chip.device_kind)
def test_mosaic_needs_tokamax_and_bf16(chip: Chip) -> None:
    """sm90 and sm100 get mosaic; where tokamax is missing the extra is named, under f32 the way out."""
    text = choose("auto", chip)
    assert text == "mosaic" or ("packtrain[attention]" in text and "config.missing_extra" in text)
    assert "train.precision=bf16" in choose("auto", chip, precision="f32")


@pytest.mark.parametrize(("asked", "chip", "words"), [
    ("mosaic", A100, "needs sm90 or sm100; this is NVIDIA A100"), ("mosaic", CPU, "needs sm90 or sm100"),
    ("cudnn", CPU, "needs gpu"), ("splash", H100, "needs tpu"),
])
def test_a_kernel_on_the_wrong_device_is_refused(asked: str, chip: Chip, words: str) -> None:
    """Nothing is replaced in silence by what would work."""
    assert words in choose(asked, chip)


def test_causal_kernels_refuse_other_masks() -> None:
    """A window makes rows that are not causal within documents, which cuDNN and splash cannot express."""
    assert choose("cudnn", H100) == "cudnn"
    assert "causal masks only" in choose("cudnn", H100, packed_causal=False)
    assert "causal masks only" in choose("splash", TPU, packed_causal=False)


MODEL = ModelConfig(heads=4, kv_heads=2, head=8, window=5)
BLOCKWISE = TrainConfig(attention="blockwise", attention_block=8)


def test_a_right_kernel_passes_the_check() -> None:
    """Blockwise on packed rows with a window; the reference is not asked to agree with itself."""
    rows = packed_rows(rows=2, length=40)
    check_attention(rows.starts_BL, rows.ends_BL, MODEL, BLOCKWISE)
    check_attention(rows.starts_BL, rows.ends_BL, MODEL, TrainConfig(attention="reference"), kernel=blind)


def blind(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array, train: TrainConfig) -> Any:
    """A kernel that sees earlier documents too, as AI-Hypercomputer/maxtext issue 4476 tells of one."""
    return reference(q, k, v, 0 * starts, ends)


def deaf(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array, train: TrainConfig) -> Any:
    """A kernel whose value is right and whose gradient forgets some values."""
    return reference(q, k, jnp.concatenate([v[:, :16], jax.lax.stop_gradient(v[:, 16:])], axis=1), starts, ends)


@pytest.mark.parametrize(("kernel", "name"), [(blind, "values"), (deaf, "dv")])
def test_a_wrong_kernel_is_found_before_the_first_step(kernel: Any, name: str) -> None:
    """A mask that is ignored, and a gradient that is wrong: an error with the tensor's name and a way out."""
    rows = packed_rows(rows=2, length=40)
    with pytest.raises(AttentionWrong) as caught:
        check_attention(rows.starts_BL, rows.ends_BL, MODEL, BLOCKWISE, kernel=kernel)
    assert f"({name};" in caught.value.what and "train.attention=blockwise" in caught.value.fix


def test_a_window_ignored_in_long_rows_is_found() -> None:
    """A mean over many keys is small beside the values of short documents in the same row: each query is held to its
    own."""
    at = np.arange(6144, dtype=np.int32)[None]
    starts = np.where(at < 2048, at - at % 4, 2048).astype(np.int32)
    model = ModelConfig(heads=1, kv_heads=1, head=8, window=2048)

    def windowless(q: jax.Array, k: jax.Array, v: jax.Array, _: Any, ends: jax.Array, train: TrainConfig) -> Any:
        return reference(q, k, v, jnp.asarray(starts[:, : q.shape[1]]), ends)

    with pytest.raises(AttentionWrong, match="values"):
        bf16 = TrainConfig(attention="blockwise", precision="bf16")
        check_attention(starts, at + 1, model, bf16, kernel=windowless)


# --- splash, as far as it goes without a TPU -------------------------------------------------------


def operands(length: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=(1, length, heads, 128)), dtype) for heads in (2, 1, 1)]


@functools.cache
def interpreted() -> Any:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array) -> Any:
        results = []
        for kernel in (functools.partial(splash, interpret=True), reference):
            out, pull = jax.vjp(lambda q, k, v, kernel=kernel: kernel(q, k, v, starts, ends), q, k, v)
            results.append((out, *pull(jnp.cos(q))))
        return results

    return jax.jit(both)


def test_splash_interpreted_equals_the_reference() -> None:
    """Two documents and a tail with no key, in value and gradient; a prefix mask, which it cannot express, is NaN."""
    at = np.arange(128, dtype=np.int32)[None]
    starts, ends = np.where(at >= 50, 50, 0).astype(np.int32), np.where(at < 100, at + 1, 0).astype(np.int32)
    found, wanted = interpreted()(*operands(128), starts, ends)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5)  # measured: 3e-6
    assert np.isnan(interpreted()(*operands(128), starts, np.maximum(ends, 3))[0][0]).all()


def test_splash_lowers_for_tpu() -> None:
    """Value and gradient lower for a TPU on a machine that has none; what the compiler there says is not known."""

    def step(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array) -> Any:
        train = TrainConfig(attention="splash", precision="bf16")
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, ends, train), q, k, v)
        return out, pull(out)

    intervals = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    lowered = jax.jit(step).trace(*operands(256, jnp.bfloat16), intervals, intervals).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 2


def test_splash_needs_whole_rows() -> None:
    """Queries cut over a context axis are refused, with the way out."""
    q, k, v = operands(128)
    with pytest.raises(LayoutError, match="context axis"):
        splash(q[:, :64], k, v, jnp.zeros((1, 64), jnp.int32), jnp.ones((1, 64), jnp.int32))
