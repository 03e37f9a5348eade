"""Numbers against `transformers`: a tiny model with random weights gives the same logits."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from packtrain.checkpoint.format import TensorSpec
from packtrain.checkpoint.interop import hf
from packtrain.core.platform import LocalPlatform
from packtrain.train.config import ModelConfig, TrainConfig
from packtrain.train.model import forward, init_params, name_of
from packtrain.train.saving import import_params
from packtrain.train.sections import Sections
from tests.train.tiny import mesh_of

TOLERANCE = 1e-4
BASE = {
    "vocab_size": 256, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0, "attention_bias": False, "initializer_range": 0.2,
}


def weights_of(theirs: dict[str, np.ndarray], model: ModelConfig) -> dict[str, Any]:
    """Their [out, in] matrices as our named dims, layers stacked."""
    D, K = model.embed, model.head

    def stack(name: str, shape: tuple[int, ...], turn: bool = True) -> np.ndarray:
        each = [theirs[f"model.layers.{n}.{name}.weight"] for n in range(model.layers)]
        return np.stack([(w.T if turn else w).reshape(shape) for w in each])

    layers = {
        "attention_norm": stack("input_layernorm", (D,), False),
        "mlp_norm": stack("post_attention_layernorm", (D,), False),
        "q": stack("self_attn.q_proj", (D, model.heads, K)), "k": stack("self_attn.k_proj", (D, model.kv_heads, K)),
        "v": stack("self_attn.v_proj", (D, model.kv_heads, K)), "out": stack("self_attn.o_proj", (model.heads, K, D)),
        "gate": stack("mlp.gate_proj", (D, model.mlp)), "up": stack("mlp.up_proj", (D, model.mlp)),
        "down": stack("mlp.down_proj", (model.mlp, D)),
    }
    if model.qk_norm:
        layers |= {f"{x}_norm": stack(f"self_attn.{x}_norm", (K,), False) for x in "qk"}
    params = {"embedding": theirs["model.embed_tokens.weight"], "final_norm": theirs["model.norm.weight"]}
    params["layers"] = layers
    return params if model.tied else params | {"unembedding": theirs["lm_head.weight"]}


def shaken(module: Any, torch: Any) -> Any:
    """Norm scales away from 1, so that leaving one out shows."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    return module.eval()


def batch_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    at = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return {"tokens_BL": tokens, "positions_BL": at, "starts_BL": np.zeros_like(at), "ends_BL": at + 1}


@pytest.mark.interop
@pytest.mark.parametrize(("kind", "tied", "window"), [
    ("Llama", False, 0), ("Llama", True, 0), ("Qwen3", False, 0), ("Mistral", False, 5),
])
def test_logits_equal_transformers(kind: str, tied: bool, window: int) -> None:
    """Llama, Qwen3 (norms of q and k) and Mistral (sliding window) with random weights: logits within 1e-4."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: interop-test)")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: interop-test)")
    torch.manual_seed(0)
    extra = {"sliding_window": window} if window else {}
    config = getattr(transformers, f"{kind}Config")(**BASE, tie_word_embeddings=tied, **extra)
    config._attn_implementation = "eager"
    theirs = shaken(getattr(transformers, f"{kind}ForCausalLM")(config), torch)
    model = ModelConfig(
        vocab=256, layers=3, embed=48, heads=6, kv_heads=2, head=8, mlp=80, norm_epsilon=1e-5, qk_norm=kind == "Qwen3",
        tied=tied, window=window,
    )
    tokens = np.random.default_rng(0).integers(0, 256, (2, 24), dtype=np.int32)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    params = weights_of({name: w.numpy() for name, w in theirs.state_dict().items()}, model)
    found = jax.jit(lambda p, b: forward(p, b, model, TrainConfig(), mesh_of()))(params, batch_of(tokens))
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)


class Held:
    """What export asks of a checkpoint, over arrays by name."""

    def __init__(self, params: Any) -> None:
        self._arrays = {f"params/{name_of(path)}": np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}
        self.specs = {name: TensorSpec(name, str(x.dtype), x.shape, ()) for name, x in self._arrays.items()}

    def read(self, name: str, box: Any) -> np.ndarray:
        return self._arrays[name][tuple(slice(*pair) for pair in box)]


def logits_of(params: Any, model: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    return jax.jit(lambda p, b: forward(p, b, model, TrainConfig(), mesh_of()))(params, batch_of(tokens))


KINDS = pytest.mark.parametrize(("qk_norm", "tied", "window"), [
    (False, False, 0), (False, True, 0), (True, True, 0), (False, False, 5),
])


@pytest.mark.interop
@KINDS
def test_what_is_exported_computes_the_same_there(
    tmp_path: pathlib.Path, qk_norm: bool, tied: bool, window: int
) -> None:
    """transformers opens an exported folder and gives our logits within 1e-4, for all entries but the padding."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: interop-test)")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: interop-test)")
    model = ModelConfig(
        vocab=256, layers=3, embed=48, heads=6, kv_heads=2, head=8, mlp=80, qk_norm=qk_norm, tied=tied, window=window,
        rope_theta=5_000.0, norm_epsilon=1e-5,
    )
    params = jax.tree.map(
        lambda x: x + 0.3 * np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32), init_params(model, 1)
    )
    hf.export(LocalPlatform(), Held(params), model, str(tmp_path / "hf"), 250, 64, shard_bytes=40_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    tokens = np.random.default_rng(0).integers(0, 250, (2, 24), dtype=np.int32)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    assert wanted.shape[-1] == 250
    found = np.asarray(logits_of(params, model, tokens))[..., :250]
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE * max(1, np.abs(wanted).max()))


@pytest.mark.interop
@pytest.mark.parametrize(("kind", "tied"), [("Llama", False), ("Qwen3", True), ("Mistral", False)])
def test_what_transformers_saves_computes_the_same_here(tmp_path: pathlib.Path, kind: str, tied: bool) -> None:
    """A folder that transformers wrote, imported on a mesh of four, gives its logits within 1e-4; padding gives 0."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: interop-test)")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: interop-test)")
    torch.manual_seed(0)
    extra = {"sliding_window": 5} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(**BASE | {"vocab_size": 250}, tie_word_embeddings=tied, **extra)
    config._attn_implementation = "eager"
    theirs = shaken(getattr(transformers, f"{kind}ForCausalLM")(config), torch)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    tokens = np.random.default_rng(0).integers(0, 250, (2, 24), dtype=np.int32)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    weights = hf.Weights(LocalPlatform(), str(tmp_path))
    spec = Sections(model=ModelConfig(**weights.fields))
    params = jax.device_get(import_params(weights, spec, mesh_of(fsdp=2, tensor=2)))
    found = np.asarray(logits_of(params, spec.model, tokens))
    np.testing.assert_allclose(found[..., :250], wanted, atol=TOLERANCE * max(1, np.abs(wanted).max()))
    assert found.shape[-1] == 256 and not found[..., 250:].any()
