"""Our decoder and the ones of `transformers` are the same function of the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packtrain.train.config import ModelConfig, TrainConfig

pytestmark = pytest.mark.interop
torch = pytest.importorskip("torch", reason="torch is not installed; make soak-ci installs it")
transformers = pytest.importorskip("transformers", reason="transformers is not installed; make soak-ci installs it")

SIZES = {
    "vocab": 256, "layers": 3, "embed": 64, "heads": 4, "kv_heads": 2, "head": 16, "mlp": 96, "rope_theta": 10_000.0,
}
LENGTH = 48
TOLERANCE = 1e-4


def their_config(kind: type, **more: Any) -> Any:
    return kind(
        vocab_size=SIZES["vocab"], num_hidden_layers=SIZES["layers"], hidden_size=SIZES["embed"],
        num_attention_heads=SIZES["heads"], num_key_value_heads=SIZES["kv_heads"], head_dim=SIZES["head"],
        intermediate_size=SIZES["mlp"], rms_norm_eps=1e-6, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": SIZES["rope_theta"]}, attn_implementation="eager",
        initializer_range=0.2, **more,
    )


def our_params(theirs: Any, model: ModelConfig) -> dict[str, Any]:
    """Their weights in our shapes: matrices as [in, out], heads apart, layers stacked."""
    weights = {name: tensor.detach().numpy() for name, tensor in theirs.state_dict().items()}
    D, H, G, K = model.embed, model.heads, model.kv_heads, model.head

    def stacked(name: str, shape: tuple[int, ...]) -> np.ndarray:
        parts = [weights[f"model.layers.{n}.{name}.weight"] for n in range(model.layers)]
        return np.stack([part.T.reshape(shape) for part in parts])

    layers = {
        "attention_norm": stacked("input_layernorm", (D,)), "mlp_norm": stacked("post_attention_layernorm", (D,)),
        "q": stacked("self_attn.q_proj", (D, H, K)), "k": stacked("self_attn.k_proj", (D, G, K)),
        "v": stacked("self_attn.v_proj", (D, G, K)), "out": stacked("self_attn.o_proj", (H, K, D)),
        "gate": stacked("mlp.gate_proj", (D, model.mlp)), "up": stacked("mlp.up_proj", (D, model.mlp)),
        "down": stacked("mlp.down_proj", (model.mlp, D)),
    }
    if model.qk_norm:
        layers |= {f"{name}_norm": stacked(f"self_attn.{name}_norm", (K,)) for name in ("q", "k")}
    params = {"embedding": weights["model.embed_tokens.weight"], "layers": layers,
              "final_norm": weights["model.norm.weight"]}
    return params if model.tied else {**params, "unembedding": weights["lm_head.weight"]}


def our_logits(params: dict[str, Any], model: ModelConfig, tokens_BL: np.ndarray, documents: int) -> np.ndarray:
    """Each row packed with equal documents, each of which sees itself only."""
    import jax

    from packtrain.train.mesh import make_mesh
    from packtrain.train.model import forward

    rows, length = tokens_BL.shape
    each = length // documents
    positions_L = np.arange(length, dtype=np.int32)
    batch = {
        "tokens_BL": tokens_BL, "positions_BL": np.tile(positions_L % each, (rows, 1)),
        "starts_BL": np.tile(positions_L // each * each, (rows, 1)), "ends_BL": np.tile(positions_L + 1, (rows, 1)),
    }
    run = jax.jit(lambda params, batch: forward(params, batch, model, TrainConfig(), make_mesh({}, jax.devices()[:1])))
    return np.asarray(run(params, batch))


@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_logits_are_those_of_transformers(family: str, tied: bool, documents: int) -> None:
    """With random weights, logits agree to 1e-4: grouped queries, RoPE, SwiGLU, norms, with and without QK-norm, tied
    or not, and documents packed into one row give what each gives alone."""
    torch.manual_seed(7)
    config = their_config(getattr(transformers, f"{family}Config"), tie_word_embeddings=tied)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model = ModelConfig(**SIZES, qk_norm=family == "Qwen3", tied=tied)
    tokens_BL = np.random.default_rng(1).integers(0, SIZES["vocab"], (2, LENGTH), dtype=np.int32)
    with torch.no_grad():
        alone = theirs(torch.tensor(tokens_BL.reshape(2 * documents, -1), dtype=torch.int64)).logits.numpy()
    expected = alone.reshape(2, LENGTH, -1)
    found = our_logits(our_params(theirs, model), model, tokens_BL, documents)
    assert expected.std() > 0.5, "weights so small that anything would agree"
    assert np.abs(found - expected).max() < TOLERANCE
