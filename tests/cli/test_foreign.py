"""`train --from DIR` and `export --hf DIR`: what they refuse before anything is made."""

from __future__ import annotations

import json
import math
import pathlib

import pytest

from packtrain.checkpoint.interop import hf
from packtrain.cli import spec
from packtrain.train.config import ModelConfig
from tests.cli.home import said

MODEL = ModelConfig(vocab=384, layers=1, embed=8, heads=2, kv_heads=1, head=4, mlp=16, qk_norm=False)


def model_folder(folder: pathlib.Path, vocab: int = 257) -> pathlib.Path:
    """A model of zeros as Hugging Face keeps it; all tensors lie on the same bytes."""
    shapes = {m.name(0): m.their_shape(vocab) for m in hf.matrices(MODEL)}
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * math.prod(shape)]}
        for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / hf.CONFIG).write_text(json.dumps(hf.config_of(MODEL, vocab, 64, "float32")))
    (folder / hf.SINGLE).write_bytes(hf.fmt.header_bytes(header) + bytes(4 * vocab * MODEL.embed))
    return folder


def test_the_model_section_is_the_folders(
    home: pathlib.Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A size set beside --from is refused by its name, never recorded beside another value; what config.json does not
    decide is taken."""
    folder = model_folder(home / "m")
    begin = f"train.weights={folder}"
    assert spec.resolve("first-light", [begin, "model.logit_softcap=30"], store).model.logit_softcap == 30
    for setting in ("model.layers=3", "model={layers=3}"):
        code, _, errors = said(
            capsys, "train", "first-light", "--data", store, "--from", str(folder), "--set", setting
        )
        key = setting.split("=")[0]
        assert code == 78 and f"next:  leave {key} out" in errors and hf.CONFIG in errors


@pytest.mark.parametrize("mistake", ["vocabulary", "shapes", "truncated", "impossible"])
def test_a_bad_import_takes_no_name(
    mistake: str, home: pathlib.Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What headers and config.json tell is refused before there is a run: the same name is free afterwards."""
    folder = model_folder(home / "m", 200 if mistake == "vocabulary" else 257)
    config, single = json.loads((folder / hf.CONFIG).read_text()), folder / hf.SINGLE
    changes = {"shapes": {"intermediate_size": 32}, "impossible": {"num_key_value_heads": 3}}.get(mistake, {})
    (folder / hf.CONFIG).write_text(json.dumps(config | changes))
    if mistake == "truncated":
        single.write_bytes(single.read_bytes()[:-4])
    code, _, errors = said(capsys, "train", "first-light", "--data", store, "--from", str(folder))
    told = {
        "vocabulary": f"--tokenizer {folder}/tokenizer.json", "shapes": "[16, 8] in the files and [32, 8]",
        "truncated": "it ends before tensor", "impossible": "config.json describes a model that cannot be",
    }
    assert code == 78 and told[mistake] in errors and "model.vocab" not in errors
    assert not (home / "runs").exists()
