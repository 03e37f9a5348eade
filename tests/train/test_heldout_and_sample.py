"""Held-out figures against the store's own card, and generation against a plain forward pass."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from packtrain.core.errors import BadValue
from packtrain.data.store import Store
from packtrain.data.tokenizer import byte_tokenizer
from packtrain.train.heldout import HeldOut
from packtrain.train.mesh import make_mesh
from packtrain.train.model import forward, param_specs
from packtrain.train.sample import Sampler, draw
from packtrain.train.step import make_eval
from tests.train import rig
from tests.train.lowering import SHIPPED
from tests.train.test_worker import corpus
from tests.train.tiny import packed_rows

__all__ = ["corpus"]


@functools.cache
def one_device() -> jax.sharding.Mesh:
    return make_mesh({}, jax.devices()[:1])


def test_every_token_of_the_store_counts_once(corpus: str) -> None:
    """Zero weights give every token log(vocab) nats, so the sums must be the tokens and bytes on the store's card."""
    store = f"{corpus}/held_out"
    spec = rig.replace(rig.SPEC, data=rig.DataConfig(held_out=(store,), batch_rows=4, length=32))
    held_out, card = HeldOut(spec, one_device()), Store(store).card
    params = jax.tree.map(jnp.zeros_like, rig.fresh_state(one_device()).params)
    beats: list[int] = []
    total = held_out.sums(params, store, 0, lambda: beats.append(1))
    record = total.record(7, store, True)
    assert (record.tokens, total.n_bytes) == (card.tokens, card.bytes)
    assert record.loss == pytest.approx(math.log(spec.model.vocab), rel=1e-5)
    assert record.bits_per_byte == pytest.approx(math.log2(spec.model.vocab) * card.tokens / card.bytes, rel=1e-5)
    halves = HeldOut(rig.with_train(spec, microbatches=2), one_device())
    assert halves.sums(params, store, 0, lambda: None).record(7, store, True).loss == pytest.approx(record.loss, 1e-6)
    some = held_out.sums(params, store, 5, lambda: None)
    assert 0 < some.weight_sum <= 5 * 32 < card.tokens
    assert len(beats) > 2


def test_an_evaluation_takes_no_more_memory_than_training() -> None:
    """In four microbatches it holds a quarter of the activations at a time."""
    model = rig.msgspec.structs.replace(rig.SPEC.model, mlp=512)
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), param_specs(model),
    )
    rows = packed_rows(rows=16, length=64, vocab=model.vocab)
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in rows._asdict().items()}

    def temporary(microbatches: int) -> int:
        train = rig.with_train(rig.SPEC, microbatches=microbatches).train
        compiled = make_eval(model, train, one_device()).lower(params, batch).compile(SHIPPED)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4) < 0.6 * temporary(1)


@functools.cache
def sampler() -> Sampler:
    spec = rig.replace(rig.SPEC, data=rig.DataConfig(length=40))
    return Sampler(spec, one_device(), byte_tokenizer())


@functools.cache
def params() -> dict:
    return rig.fresh_state(one_device()).params


def test_greedy_text_is_what_the_model_finds_likeliest() -> None:
    """At temperature 0 each token is the likeliest real one in a plain forward pass over prompt and text, unpadded."""
    prompt = byte_tokenizer().encode("ab")
    new = sampler().continued(params(), prompt, 6, 0.0, jax.random.key(0))
    ids = np.array([[*prompt, *new]], np.int32)
    at = np.arange(ids.shape[1], dtype=np.int32)[None]
    batch = {"tokens_BL": ids, "positions_BL": at, "starts_BL": 0 * at, "ends_BL": at + 1}
    plain = rig.Quick(jax.jit(lambda p, b: forward(p, b, rig.SPEC.model, rig.SPEC.train, one_device())))
    likeliest_L = np.asarray(plain(params(), batch))[0, :, : byte_tokenizer().size].argmax(-1)
    assert new == likeliest_L[1:-1].tolist()


def test_text_follows_from_the_key() -> None:
    """The same key gives the same text, another key another; a text is no longer than a training row has room."""
    first, again, other = (sampler().text(params(), "ab", 99, 1.0, jax.random.key(n)) for n in (1, 1, 2))
    assert first == again != other
    assert len(sampler().continued(params(), [97, 98], 99, 1.0, jax.random.key(1))) == 38


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    """Ids beyond the tokenizer's are never drawn, however likely the model finds them."""
    logits_BV = np.zeros((400, 8), np.float32) + np.array([0, 0, 0, 0, 0, 99, 99, 99], np.float32)
    drawn_B = rig.Quick(jax.jit(draw))(logits_BV, jax.random.key(0), 1.0, 5)
    assert set(np.asarray(drawn_B).tolist()) == {0, 1, 2, 3, 4}


def test_a_prompt_longer_than_a_row_is_refused() -> None:
    """A prompt that fills a training row is refused with its length."""
    with pytest.raises(BadValue, match="50 tokens"):
        sampler().text(params(), "a" * 50, 5, 1.0, jax.random.key(0))
