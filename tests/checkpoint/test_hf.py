"""Weights to Hugging Face's files and back, without a framework: the same bits, and clear words for what is foreign."""

from __future__ import annotations

import errno
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from packtrain.checkpoint.interop import hf
from packtrain.checkpoint.publish import Gate, Save, carry
from packtrain.checkpoint.reader import Checkpoint, open_checkpoint
from packtrain.core.errors import ExportFailed, HfUnusable, UsageError
from packtrain.core.platform import File, LocalPlatform
from packtrain.core.units import NS
from packtrain.train.config import ModelConfig
from tests.checkpoint.worlds import make_run, part_of, tensor_of

LLAMA = ModelConfig(vocab=256, layers=3, embed=12, heads=6, kv_heads=2, head=4, mlp=20, qk_norm=False, tied=False)
QWEN = ModelConfig(vocab=256, layers=2, embed=12, heads=6, kv_heads=2, head=4, mlp=20, qk_norm=True, tied=True)
MISTRAL = ModelConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, head=6, mlp=10, qk_norm=False, window=5)
MODELS = pytest.mark.parametrize("model", [LLAMA, QWEN, MISTRAL], ids=["llama", "qwen3", "mistral"])
VOCAB = 200
PLATFORM = LocalPlatform()


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        f"params/{m.ours}": (model.layers, *m.shape) if m.stacked else m.shape for m in hf.matrices(model)
    }


def small(tensor: hf.fmt.LocalTensor) -> hf.fmt.LocalTensor:
    """Without the highest bit of each exponent: below 2, so finite in bf16 too."""
    return tensor._replace(array=(tensor.array.view(np.uint32) & ~np.uint32(1 << 30)).view(np.float32))


def saved(folder: pathlib.Path, model: ModelConfig) -> Checkpoint:
    """A published checkpoint of random bits."""
    run = str(folder / "run")
    log = make_run(PLATFORM, run)
    begun = log.begin(0, ("r00000",), "node")
    pieces = [small(tensor_of(name, "float32", shape)) for name, shape in shapes(model).items()]
    part = part_of(PLATFORM, pieces, f"{run}/buffer")
    about = {"data_index": 1, "seed": 7, "meta": {}}
    save = Save(1, begun.attempt, (part,), about, PLATFORM.boot_ns() + 60 * NS)
    return open_checkpoint(PLATFORM, run, carry(PLATFORM, log, run, save, Gate()))


def exported(folder: pathlib.Path, model: ModelConfig, **options: Any) -> tuple[Checkpoint, str, list[str]]:
    checkpoint, out = saved(folder, model), str(folder / "hf")
    return checkpoint, out, hf.export(PLATFORM, checkpoint, model, out, VOCAB, 64, **options)


def rewrite(out: str, **changes: Any) -> None:
    """Change keys of its config.json; None takes one away."""
    path = pathlib.Path(out) / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@MODELS
@pytest.mark.parametrize("shard_bytes", [1 << 30, 3000])
def test_export_and_import_give_the_same_bits(tmp_path: pathlib.Path, model: ModelConfig, shard_bytes: int) -> None:
    """In one file or many, every tensor comes back bit for bit, whole or by any box; the padding of the vocabulary,
    cut off on the way, comes back as zeros."""
    checkpoint, out, names = exported(tmp_path, model, shard_bytes=shard_bytes)
    assert (hf.INDEX in names) == (shard_bytes == 3000) == (hf.SINGLE not in names)
    weights = hf.Weights(PLATFORM, out)
    fields = {name: getattr(model, name) for name in weights.fields}
    assert weights.fields == fields and weights.vocab == VOCAB
    weights = weights.matched(model)
    for name, shape in shapes(model).items():
        wanted = checkpoint.read(name)
        if shape[0] == model.vocab:
            wanted = np.concatenate([wanted[:VOCAB], np.zeros_like(wanted[VOCAB:])])
        box = tuple((0, size) for size in shape)
        assert weights.read(name, box).tobytes() == wanted.tobytes(), name
        part = tuple((size // 3, size - size // 4) for size in shape)
        assert weights.read(name, part).tobytes() == wanted[tuple(slice(*pair) for pair in part)].tobytes(), name


def test_files_are_as_their_library_reads_them(tmp_path: pathlib.Path) -> None:
    """The safetensors library finds each matrix as [out, in] where the index says, files no larger than asked for."""
    checkpoint, out, names = exported(tmp_path, LLAMA, shard_bytes=3000, tokenizer={"tokenizer.json": b"{}"})
    assert names[0].startswith("model-00001-of-000") and {"tokenizer.json", "config.json"} <= set(names)
    index = json.loads((tmp_path / "hf" / hf.INDEX).read_text())
    for n in range(LLAMA.layers):
        name = f"model.layers.{n}.self_attn.o_proj.weight"
        with safe_open(f"{out}/{index['weight_map'][name]}", "numpy") as file:
            found = file.get_tensor(name)
        wanted = checkpoint.read("params/layers/out")[n].reshape(24, 12).T
        assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()
    sizes = [(tmp_path / "hf" / name).stat().st_size for name in names if name.endswith("safetensors")]
    largest = 4 * VOCAB * LLAMA.embed  # an embedding has a file of its own
    assert len(sizes) > 2 and all(size < 3000 + 4096 or size < largest + 4096 for size in sizes)
    total = sum(4 * math.prod(m.their_shape(VOCAB)) * (LLAMA.layers if m.stacked else 1) for m in hf.matrices(LLAMA))
    assert index["metadata"]["total_size"] == total


def test_bf16(tmp_path: pathlib.Path) -> None:
    """Asked for bf16, files hold rounded weights and config.json says so; reading gives them as f32."""
    checkpoint, out, _ = exported(tmp_path, QWEN, bf16=True)
    wanted = checkpoint.read("params/final_norm").astype(hf.fmt.DTYPES["bfloat16"][1]).astype(np.float32)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    found = hf.Weights(PLATFORM, out).matched(QWEN).read("params/final_norm", ((0, 12),))
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("changes", "named"), [
    ({"model_type": "gpt2"}, "model_type \"gpt2\""), ({"attention_bias": True}, "biases"),
    ({"hidden_act": "gelu"}, "activation \"gelu\""), ({"quantization_config": {}}, "quantized"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "stretched positions"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "12"}, "hidden_size is \"12\""), ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps is \"small\""), ({"rope_parameters": [1]}, "stretched"),
    ({"use_sliding_window": True}, "windows in some layers"),
])
def test_foreign_models_are_refused_by_name(tmp_path: pathlib.Path, changes: dict[str, Any], named: str) -> None:
    """What our model does not compute is named, never read as if it were something else."""
    _, out, _ = exported(tmp_path, LLAMA)
    rewrite(out, **changes)
    with pytest.raises(HfUnusable, match=named) as refused:
        hf.Weights(PLATFORM, out)
    assert refused.value.where and refused.value.fix


def test_models_that_theirs_do_not_compute_are_not_written(tmp_path: pathlib.Path) -> None:
    """A soft-cap, or norms of q and k with a window: refused before anything is written. So is a folder in use."""
    checkpoint = saved(tmp_path, QWEN)
    for model in (ModelConfig(vocab=256, logit_softcap=30.0), ModelConfig(vocab=256, window=8)):
        with pytest.raises(HfUnusable):
            hf.export(PLATFORM, checkpoint, model, str(tmp_path / "hf"), VOCAB, 64)
    assert not (tmp_path / "hf").exists()
    with pytest.raises(UsageError):
        hf.export(PLATFORM, checkpoint, QWEN, str(tmp_path / "run"), VOCAB, 64)


@pytest.mark.parametrize("path", ["", "a file/x", "a file", "/proc/nope", "x" * 300])
def test_a_path_that_cannot_be_a_folder_to_write(tmp_path: pathlib.Path, path: str) -> None:
    """Nothing, a file, a folder below one, a name too long: a mistake of usage that says where."""
    (tmp_path / "a file").write_text("")
    with pytest.raises(UsageError) as refused:
        hf.export(PLATFORM, saved(tmp_path, QWEN), QWEN, path and str(tmp_path / path), VOCAB, 64)
    assert refused.value.where and refused.value.fix


class Full(LocalPlatform):
    """Has no room for `name`; or somebody presses Ctrl-C there."""

    def __init__(self, name: str, error: BaseException) -> None:
        self._name, self._error = name, error

    def create(self, path: str, mode: int = 0o644) -> File:
        file = super().create(path, mode)
        if path.endswith(self._name):
            file.close()
            raise self._error
        return file


@pytest.mark.parametrize("name", [hf.SINGLE, "tokenizer.json", hf.CONFIG])
@pytest.mark.parametrize("was_there", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.EFBIG, "File too large"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_a_failed_export_leaves_nothing(
    tmp_path: pathlib.Path, name: str, was_there: bool, error: BaseException
) -> None:
    """Wherever it fails, no file stays, nor a folder it made; the same command then works."""
    checkpoint, out = saved(tmp_path, QWEN), tmp_path / "hf"
    if was_there:
        out.mkdir()
    files = {"tokenizer.json": b"{}"}
    with pytest.raises(ExportFailed if isinstance(error, OSError) else KeyboardInterrupt):
        hf.export(Full(name, error), checkpoint, QWEN, str(out), VOCAB, 64, files)
    assert out.exists() == was_there and not list(out.glob("*"))
    hf.export(PLATFORM, checkpoint, QWEN, str(out), VOCAB, 64, files)
    read_all(str(out))


def test_another_export_of_the_moment_keeps_its_files(tmp_path: pathlib.Path) -> None:
    """A file that appears in the folder meanwhile was made by somebody else, and stays."""

    class Other(LocalPlatform):
        def mkdir(self, path: str, mode: int = 0o755) -> None:
            super().mkdir(path, mode)
            self.write_new(f"{path}/{hf.SINGLE}", b"theirs")

    checkpoint = saved(tmp_path, QWEN)
    with pytest.raises(UsageError):
        hf.export(Other(), checkpoint, QWEN, str(tmp_path / "hf"), VOCAB, 64)
    assert (tmp_path / "hf" / hf.SINGLE).read_bytes() == b"theirs"


def edit(out: str, change: Callable[[dict[str, Any], bytearray], bytes]) -> None:
    """Rewrite its one safetensors file: `change` edits the header and the data, and gives what is appended."""
    path = pathlib.Path(out) / hf.SINGLE
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:end]), bytearray(data[end:])
    more = change(header, body)
    path.write_bytes(hf.fmt.header_bytes(header) + body + more)


def add(name: str, code: str = "F32", data: bytes = bytes(4)) -> Callable[[dict[str, Any], bytearray], bytes]:
    def change(header: dict[str, Any], body: bytearray) -> bytes:
        at = len(body)
        header[name] = {"dtype": code, "shape": [4 // (4 if code == "F32" else 1)], "data_offsets": [at, at + 4]}
        return data

    return change


def put(name: str, value: float) -> Callable[[dict[str, Any], bytearray], bytes]:
    """One number of a tensor becomes `value`."""

    def change(header: dict[str, Any], body: bytearray) -> bytes:
        start = header[name]["data_offsets"][0]
        body[start : start + 4] = np.float32(value).tobytes()
        return b""

    return change


def read_all(out: str) -> None:
    weights = hf.Weights(PLATFORM, out)
    model = ModelConfig(**weights.fields)
    weights.matched(model)
    for name, shape in shapes(model).items():
        weights.read(name, tuple((0, size) for size in shape))


def test_tensors_without_a_place_are_refused(tmp_path: pathlib.Path) -> None:
    """Weights of a layer that config.json does not count, or of no model of ours, are named and never dropped; what
    follows from the rest (frequencies of RoPE, a tied head) may lie there."""
    _, out, _ = exported(tmp_path, QWEN)
    for needless in ("model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"):
        edit(out, add(needless))
        read_all(out)
    edit(out, add("model.layers.7.foo"))
    with pytest.raises(HfUnusable, match="the files hold model.layers.7.foo, which"):
        read_all(out)
    rewrite(out, num_hidden_layers=1)
    with pytest.raises(HfUnusable, match="model.layers.1.input_layernorm.weight, .* and 7 more"):
        read_all(out)


def test_types_that_are_no_weights_are_refused(tmp_path: pathlib.Path) -> None:
    """Integers and 8 bits are of quantized models: the tensor and its type are named."""
    _, out, _ = exported(tmp_path, QWEN)
    edit(out, add("model.norm.scale", "I8"))
    with pytest.raises(HfUnusable, match="model.norm.scale is of type I8"):
        hf.Weights(PLATFORM, out)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path: pathlib.Path, value: float) -> None:
    """One NaN or infinity in one tensor: it is named, and nothing begins with it."""
    _, out, _ = exported(tmp_path, QWEN)
    edit(out, put("model.layers.1.mlp.up_proj.weight", value))
    with pytest.raises(HfUnusable, match="model.layers.1.mlp.up_proj.weight holds numbers that are not finite"):
        read_all(out)


def damage(out: pathlib.Path, how: str) -> None:
    single = out / hf.SINGLE
    data = single.read_bytes()
    match how:
        case "ends before":
            single.write_bytes(data[:-40])
        case "it begins with a header":
            single.write_bytes(b"\xff" * 64)
        case "it is not JSON":
            single.write_bytes(bytes([32, *[0] * 7]) + b"{" * 64)
        case "no table of keys":
            (out / hf.CONFIG).write_text("[]")
        case "no config.json":
            (out / hf.CONFIG).unlink()
        case "no model.safetensors":
            single.unlink()
        case "is no file of this folder":
            (out / hf.INDEX).write_text(json.dumps({"weight_map": {"a": "../run/x"}}))
        case "no table of file names":
            (out / hf.INDEX).write_text(json.dumps({"weight_map": [1]}))
        case "of different models":
            rewrite(str(out), intermediate_size=40)


@pytest.mark.parametrize("said", [
    "ends before", "it begins with a header", "it is not JSON", "no table of keys", "no config.json",
    "no model.safetensors", "is no file of this folder", "no table of file names", "of different models",
])
def test_folders_that_are_not_whole_are_refused(tmp_path: pathlib.Path, said: str) -> None:
    """Cut, scrambled, missing or leading elsewhere: an error of one name that says what, with the file, and this before
    any weight is read."""
    _, out, _ = exported(tmp_path, LLAMA)
    damage(pathlib.Path(out), said)
    with pytest.raises(HfUnusable) as refused:
        weights = hf.Weights(PLATFORM, out)
        weights.matched(ModelConfig(**weights.fields))
    assert said in refused.value.render() and out in refused.value.where and "Error" not in refused.value.what


def test_a_path_that_is_no_folder(tmp_path: pathlib.Path) -> None:
    """A folder that is not there, or the config.json in it, is answered with that."""
    with pytest.raises(HfUnusable, match="there is no folder .*/nowhere"):
        hf.Weights(PLATFORM, str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HfUnusable) as refused:
        hf.Weights(PLATFORM, str(tmp_path / "config.json"))
    assert refused.value.fix == f"give its folder: --from {tmp_path}"
