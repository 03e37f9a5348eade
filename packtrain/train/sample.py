"""Text from a model: one prompt at a time, the whole generation one compiled program of fixed shape.

Each new token costs one forward pass over the row; there is no cache of keys. B rows, L length, D embed, V vocab.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.errors import BadValue, RunMissing
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.records import SampleDone
from packtrain.data.tokenizer import Tokenizer, load_tokenizer
from packtrain.train import axes
from packtrain.train.mesh import make_mesh
from packtrain.train.model import Batch, Tree, hidden, logits_of, places
from packtrain.train.saving import restore_params
from packtrain.train.sections import Sections, load

LENGTH_STEP = 64
"""Rows are as long as prompt and new tokens need, rounded up to this: few shapes, few compilations."""


def make_program(spec: Sections, mesh: Mesh) -> Callable[..., jax.Array]:
    """(params, tokens_BL, filled, key, temperature, limit) -> tokens_BL, drawn from position `filled` on.

    Whole on every process. Temperature 0 takes the likeliest token; ids from `limit` on (padding of the vocabulary)
    are never drawn.
    """

    def local(params: Tree, batch: Batch, at: jax.Array) -> jax.Array:
        x_BLD = axes.gather(hidden(params, batch, spec.model, spec.train, mesh), 1, "length", "keys", mesh)
        x_B1D = jax.lax.dynamic_slice_in_dim(x_BLD, at, 1, axis=1)
        return logits_of(x_B1D, params, spec.model, mesh)[:, 0]

    given = places(spec.model, mesh), axes.place(("rows", "length"), mesh), axes.place((), mesh)
    score = axes.spread(local, mesh, given, axes.place(("rows", "vocab"), mesh))

    def generate(
        params: Tree, tokens_BL: jax.Array, filled: jax.Array, key: jax.Array, temperature: jax.Array, limit: jax.Array
    ) -> jax.Array:
        B, L = tokens_BL.shape
        positions_BL = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (B, L))
        batch = {"positions_BL": positions_BL, "starts_BL": jnp.zeros_like(positions_BL), "ends_BL": positions_BL + 1}

        def fill(at: jax.Array, tokens_BL: jax.Array) -> jax.Array:
            logits_BV = score(params, batch | {"tokens_BL": tokens_BL}, at - 1)
            return tokens_BL.at[:, at].set(draw(logits_BV, jax.random.fold_in(key, at), temperature, limit))

        return jax.lax.fori_loop(filled, L, fill, tokens_BL)

    return jax.jit(generate, out_shardings=axes.replicated(mesh))


def draw(logits_BV: jax.Array, key: jax.Array, temperature: jax.Array, limit: jax.Array) -> jax.Array:
    """One id a row by the Gumbel trick; at temperature 0 the noise vanishes and the likeliest wins."""
    logits_BV = jnp.where(jnp.arange(logits_BV.shape[1]) < limit, logits_BV, -jnp.inf)
    noise_BV = jax.random.gumbel(key, logits_BV.shape, jnp.float32)
    return jnp.argmax(logits_BV + temperature * noise_BV, axis=-1).astype(jnp.int32)


class Sampler:
    """Continues prompts with the weights it is handed. All ranks call it with the same arguments."""

    def __init__(self, spec: Sections, mesh: Mesh, tokenizer: Tokenizer) -> None:
        self._spec, self._mesh, self._tokenizer = spec, mesh, tokenizer
        self._program = make_program(spec, mesh)

    def records(self, params: Tree, prompts: Sequence[str], step: int, final: bool) -> list[SampleDone]:
        """One for each prompt; the randomness comes from (seed, "sample", step)."""
        train = self._spec.train
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self._spec.seed), zlib.crc32(b"sample")), step)
        texts = [
            self.text(params, prompt, train.sample_tokens, train.sample_temperature, jax.random.fold_in(key, n))
            for n, prompt in enumerate(prompts)
        ]
        return [SampleDone(step=step, prompt=p, text=t, final=final) for p, t in zip(prompts, texts)]

    def text(self, params: Tree, prompt: str, tokens: int, temperature: float, key: jax.Array) -> str:
        """What follows `prompt`: at most `tokens`, fewer where the document ends or a training row would be full."""
        ids = self.continued(params, self._tokenizer.encode(prompt), tokens, temperature, key)
        end = self._tokenizer.end_of_document
        return self._tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)

    def check(self, prompts: Sequence[str]) -> None:
        """Raises BadValue for a prompt that leaves no room for a token: at the start, not at the first evaluation."""
        for prompt in prompts:
            self._room_after(self._tokenizer.encode(prompt), "train.sample_prompts")

    def _room_after(self, ids: list[int], where: str) -> int:
        room = self._spec.data.length - len(ids)
        if room < 1:
            raise BadValue(
                f"the prompt has {len(ids)} tokens and the model was trained on rows of {self._spec.data.length}",
                where=where, fix="shorten the prompt",
            )
        return room

    def continued(self, params: Tree, ids: list[int], tokens: int, temperature: float, key: jax.Array) -> list[int]:
        """The ids that follow `ids`, past the end of a document too. Raises BadValue when there is no room for one."""
        ids = ids or [self._tokenizer.end_of_document]
        tokens = min(tokens, self._room_after(ids, "prompt"))
        length = -(-(len(ids) + tokens) // LENGTH_STEP) * LENGTH_STEP
        rows = axes.devices_on("rows", self._mesh)
        tokens_BL = np.zeros((rows, length), np.int32)
        tokens_BL[:, : len(ids)] = ids
        filled_BL = self._program(params, tokens_BL, len(ids), key, temperature, self._tokenizer.size)
        return [int(id) for id in np.asarray(filled_BL)[0, len(ids) : len(ids) + tokens]]


def generate(
    run_folder: str, prompt: str, tokens: int = 96, temperature: float = 0.8, seed: int = 0,
    platform: Platform | None = None,
) -> str:
    """What the run's last published checkpoint writes after `prompt`, on one device. Raises RunMissing, BadValue."""
    platform = platform or LocalPlatform()
    spec = load(platform, run_folder)
    log = CommitLog(platform, os.path.join(run_folder, "commits"))
    commit = log.restore_point()
    if commit is None:
        raise RunMissing(
            "this run has published no checkpoint yet", where=run_folder, fix="let it train until its first save"
        )
    mesh = make_mesh({}, jax.devices()[:1])
    params = restore_params(open_checkpoint(platform, run_folder, commit), spec, mesh)
    sampler = Sampler(spec, mesh, load_tokenizer(spec.data.stores[0].path))
    return sampler.text(params, prompt, tokens, temperature, jax.random.key(seed))
