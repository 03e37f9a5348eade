"""A run that begins with foreign weights: what it takes from their folder, and what it refuses."""

from __future__ import annotations

import json
import math
import pathlib

import pytest

from packtrain.checkpoint.interop import hf
from packtrain.core.errors import HfUnusable, TokenizerMismatch
from packtrain.core.platform import LocalPlatform
from packtrain.data.tokenizer import byte_tokenizer, check_foreign, train_bpe
from packtrain.train.config import ModelConfig

PLATFORM = LocalPlatform()


def test_the_ids_must_mean_the_same(tmp_path: pathlib.Path) -> None:
    """A folder that brings another tokenizer than the stores were built with is refused with the way to build them; one
    with the same, or with none, passes, but not with fewer ids than the stores need: both numbers are told."""
    stores, folder = byte_tokenizer(), str(tmp_path)
    check_foreign(PLATFORM, folder, 257, stores.hash, stores.size)
    with pytest.raises(TokenizerMismatch, match=f"of {stores.size} ids, and the weights know 200"):
        check_foreign(PLATFORM, folder, 200, stores.hash, stores.size)
    (tmp_path / "tokenizer.json").write_text(stores.text)
    check_foreign(PLATFORM, folder, 257, stores.hash, stores.size)
    (tmp_path / "tokenizer.json").write_text(train_bpe(["mules carry loaves"], 260).text)
    with pytest.raises(TokenizerMismatch, match="another tokenizer") as refused:
        check_foreign(PLATFORM, folder, 257, stores.hash, stores.size)
    assert f"--tokenizer {tmp_path}/tokenizer.json" in refused.value.fix


def test_another_model_than_the_folder_holds_is_refused(tmp_path: pathlib.Path) -> None:
    """The first tensor that the configured model needs in another shape is named, with both shapes."""
    model = ModelConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, head=4, mlp=16, qk_norm=False)
    config = hf.config_of(model, 256, 64, "float32")
    tensors = {
        m.name(0): {"dtype": "F32", "shape": m.their_shape(256), "data_offsets": [0, 4 * math.prod(m.their_shape(256))]}
        for m in hf.matrices(model)
    }
    (tmp_path / hf.CONFIG).write_bytes(json.dumps(config).encode())
    (tmp_path / hf.SINGLE).write_bytes(hf.fmt.header_bytes(tensors) + bytes(4 * 256 * 8))
    weights = hf.Weights(PLATFORM, str(tmp_path))
    assert weights.matched(model).fields["mlp"] == 16
    with pytest.raises(HfUnusable, match=r"mlp.gate_proj.weight is \[16, 8\] in the files and \[32, 8\]"):
        weights.matched(ModelConfig(**weights.fields | {"mlp": 32}))
