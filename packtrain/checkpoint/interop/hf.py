"""Weights as Hugging Face keeps them: config.json and safetensors. Bytes to bytes, one matrix in memory at a time.

| | our dims | theirs |
|---|---|---|
| matrices | [layer, in..., out...], heads apart | one [out, in] for each layer, heads folded |
| embedding and head | [vocab, embed], vocab padded to a multiple of 128 | [vocab, embed], of the tokenizer's size |
| vectors | [layer, embed] | one [embed] for each layer |

The shape is Llama's, with norms of q and k Qwen3's, with a window Mistral's. Their names are those of `transformers`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.format import Box
from packtrain.checkpoint.reader import Checkpoint
from packtrain.core.errors import HfUnusable, UsageError
from packtrain.core.platform import Platform

SHARD_BYTES = 5 << 30
"""A file is no larger, but for a matrix that alone is: Hugging Face's own habit."""
HEADER_BYTES_MAX = 100 << 20
"""What the safetensors library itself accepts."""
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
KINDS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}
CODES = dict(fmt.DTYPES.values())
KNOWN = "; the models known are " + ", ".join(KINDS)


class Model(Protocol):
    """What is asked of `train.config.ModelConfig`."""

    @property
    def vocab(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def mlp(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def tied(self) -> bool: ...
    @property
    def window(self) -> int: ...
    @property
    def logit_softcap(self) -> float: ...


class Matrix(NamedTuple):
    """One tensor of ours as theirs. `ins`: how many of its dims (the layer aside) are what it takes; 0: as it lies."""

    theirs: str
    ours: str
    shape: tuple[int, ...]
    """Ours, of one layer; a vocabulary as padded."""
    ins: int = 0
    stacked: bool = True

    def name(self, layer: int) -> str:
        return f"model.layers.{layer}.{self.theirs}.weight" if self.stacked else f"{self.theirs}.weight"

    def their_shape(self, vocab: int) -> tuple[int, ...]:
        if self.ins:
            return math.prod(self.shape[self.ins :]), math.prod(self.shape[: self.ins])
        return self.shape if self.stacked or len(self.shape) == 1 else (vocab, self.shape[1])


def matrices(model: Model) -> list[Matrix]:
    D, H, G, K, M = model.embed, model.heads, model.kv_heads, model.head, model.mlp
    found = [
        Matrix("model.embed_tokens", "embedding", (model.vocab, D), stacked=False),
        Matrix("input_layernorm", "layers/attention_norm", (D,)),
        Matrix("self_attn.q_proj", "layers/q", (D, H, K), 1), Matrix("self_attn.k_proj", "layers/k", (D, G, K), 1),
        Matrix("self_attn.v_proj", "layers/v", (D, G, K), 1), Matrix("self_attn.o_proj", "layers/out", (H, K, D), 2),
        Matrix("post_attention_layernorm", "layers/mlp_norm", (D,)),
        Matrix("mlp.gate_proj", "layers/gate", (D, M), 1), Matrix("mlp.up_proj", "layers/up", (D, M), 1),
        Matrix("mlp.down_proj", "layers/down", (M, D), 1),
        Matrix("model.norm", "final_norm", (D,), stacked=False),
    ]
    if model.qk_norm:
        found += [Matrix(f"self_attn.{x}_norm", f"layers/{x}_norm", (K,)) for x in "qk"]
    if not model.tied:
        found.append(Matrix("lm_head", "unembedding", (model.vocab, D), stacked=False))
    return found


# --- config.json ---------------------------------------------------------------------------------------


def config_of(model: Model, vocab: int, length: int, dtype: str) -> dict[str, Any]:
    """`vocab`: entries without padding. `length`: longest row the model was trained on. Raises HfUnusable."""
    if model.logit_softcap or (model.qk_norm and model.window):
        what = "a soft-cap of its logits" if model.logit_softcap else "both norms of q and k and a window"
        raise HfUnusable(
            f"the model has {what}: none of {', '.join(KINDS)} does", where="model",
            fix="train one without, or use this one here",
        )
    kind = "qwen3" if model.qk_norm else "mistral" if model.window else "llama"
    return {
        "architectures": [KINDS[kind]], "model_type": kind, "vocab_size": vocab, "hidden_size": model.embed,
        "intermediate_size": model.mlp, "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head, "hidden_act": "silu",
        "max_position_embeddings": length, "rms_norm_eps": model.norm_epsilon, "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta}, "attention_bias": False,
        "tie_word_embeddings": model.tied, "dtype": dtype, "torch_dtype": dtype,
        **({"sliding_window": model.window} if model.window else {}),
    }


def model_of(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Their config.json as the fields of `ModelConfig`. Raises HfUnusable for what our model does not compute."""
    kind = config.get("model_type")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    foreign = [
        (kind not in KINDS, f"model_type {kind!r}{KNOWN}"),
        (bool(config.get("attention_bias") or config.get("mlp_bias")), "biases in its matrices"),
        (config.get("hidden_act", "silu") != "silu", f"the activation {config.get('hidden_act')!r}"),
        (rope.get("rope_type", rope.get("type", "default")) != "default", f"stretched positions ({rope})"),
        (bool(config.get("use_sliding_window")), "windows in some layers"),
        ("quantization_config" in config, "quantized weights"),
    ]
    if (first := next((text for is_so, text in foreign if is_so), None)) is not None:
        raise HfUnusable(f"the model has {first}", where=where, fix="choose a plain Llama, Mistral or Qwen3 model")
    try:
        heads = int(config["num_attention_heads"])
        return {
            "vocab": -(-int(config["vocab_size"]) // 128) * 128, "layers": int(config["num_hidden_layers"]),
            "embed": int(config["hidden_size"]), "heads": heads, "mlp": int(config["intermediate_size"]),
            "kv_heads": int(config.get("num_key_value_heads") or heads),
            "head": int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            "rope_theta": float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            "norm_epsilon": float(config["rms_norm_eps"]), "qk_norm": kind == "qwen3",
            "tied": bool(config.get("tie_word_embeddings", False)),
            "window": int(config.get("sliding_window") or 0) if kind == "mistral" else 0,
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise HfUnusable(
            f"config.json lacks a size or holds no number there: {error!r}", where=where, fix="download the model again"
        ) from error


# --- out -----------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """One tensor to be written: where from, and how large."""

    matrix: Matrix
    layer: int
    shape: tuple[int, ...]
    bytes: int


def export(
    platform: Platform, checkpoint: Checkpoint, model: Model, out: str, vocab: int, length: int,
    tokenizer: dict[str, bytes] | None = None, bf16: bool = False, shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write the weights of a checkpoint into the new folder `out`; names of the files. config.json comes last, so a
    folder that has one is whole.

    `tokenizer`: files to lie beside them. Raises UsageError where `out` is there and not empty, HfUnusable,
    CheckpointDamaged.
    """
    dtype = "bfloat16" if bf16 else checkpoint.specs["params/embedding"].dtype
    config = config_of(model, vocab, length, dtype)
    if platform.exists(out) and (not platform.is_dir(out) or platform.listdir(out)):
        raise UsageError("there is something already", where=out, fix="name a folder that is new or empty")
    platform.mkdir(out)
    shards = list(_shards(model, vocab, fmt.DTYPES[dtype][1].itemsize, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(platform, f"{out}/{name}", checkpoint, shard, dtype)
    files = dict(tokenizer or {})
    if len(shards) > 1:
        where = {w.matrix.name(w.layer): name for name, shard in zip(names, shards, strict=True) for w in shard}
        total = sum(w.bytes for shard in shards for w in shard)
        files[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": where})
    files[CONFIG] = _json(config)
    for name, data in files.items():
        platform.write_new(f"{out}/{name}", data)
    platform.fsync_dir(out)
    return [*names, *files]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _shards(model: Model, vocab: int, item_bytes: int, shard_bytes: int) -> Iterator[list[Written]]:
    shard: list[Written] = []
    for matrix, layer in _in_order(model):
        shape = matrix.their_shape(vocab)
        written = Written(matrix, layer, shape, math.prod(shape) * item_bytes)
        if shard and sum(w.bytes for w in shard) + written.bytes > shard_bytes:
            yield shard
            shard = []
        shard.append(written)
    yield shard


def _in_order(model: Model) -> Iterator[tuple[Matrix, int]]:
    """Layer after layer, as they are used."""
    known = matrices(model)
    yield from ((m, 0) for m in known if not m.stacked)
    yield from ((m, layer) for layer in range(model.layers) for m in known if m.stacked)


def _write_shard(platform: Platform, path: str, checkpoint: Checkpoint, shard: Sequence[Written], dtype: str) -> None:
    code, numpy_type = fmt.DTYPES[dtype]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for w in shard:
        entries[w.matrix.name(w.layer)] = {"dtype": code, "shape": w.shape, "data_offsets": [at, at + w.bytes]}
        at += w.bytes
    with platform.create(path) as file:
        file.write(fmt.header_bytes(entries))
        for w in shard:
            array = np.ascontiguousarray(_theirs(checkpoint, w), numpy_type)
            file.write(array.reshape(-1).view(np.uint8).data)
        file.fsync()


def _theirs(checkpoint: Checkpoint, w: Written) -> np.ndarray[Any, Any]:
    name, box = f"params/{w.matrix.ours}", fmt.whole(w.matrix.shape)
    if w.matrix.ins:
        found = checkpoint.read(name, ((w.layer, w.layer + 1), *box))
        return found.reshape(-1, w.shape[0]).T
    if w.matrix.stacked:
        return checkpoint.read(name, ((w.layer, w.layer + 1), *box))[0]
    return checkpoint.read(name, ((0, w.shape[0]), *box[1:]))


# --- in ------------------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


class Weights:
    """A folder of theirs, read by our names. Raises HfUnusable where it is not whole or not of a known model.

    `fields`: of `ModelConfig`. `vocab`: entries without padding.
    """

    def __init__(self, platform: Platform, folder: str) -> None:
        self._platform, self.folder = platform, folder
        config = _read_json(platform, f"{folder}/{CONFIG}")
        self.fields = model_of(config, f"{folder}/{CONFIG}")
        self.vocab = int(config["vocab_size"])
        self._stored = dict(_stored(platform, folder))

    def matched(self, model: Model) -> Weights:
        """Itself, once every tensor that `model` needs is there with its shape."""
        self._matrices = {f"params/{m.ours}": m for m in matrices(model)}
        for matrix, layer in _in_order(model):
            name, wanted = matrix.name(layer), matrix.their_shape(self.vocab)
            found = self._stored[name].shape if name in self._stored else None
            if found != wanted:
                raise HfUnusable(
                    f"tensor {name} is {'absent' if found is None else list(found)} there and {list(wanted)} in the "
                    "model configured", where=self.folder, fix="leave the model section to the folder's config.json",
                )
        return self

    def read(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """The elements of our tensor's `box`, f32; padding of the vocabulary is 0."""
        matrix = self._matrices[name]
        if matrix.stacked:
            (first, last), *rest = box
            return np.stack([self._layer(matrix, n)[_slices(rest)] for n in range(first, last)])
        found = self._tensor(matrix.name(0))
        short = matrix.shape[0] - len(found)
        return np.pad(found, ((0, short), *[(0, 0)] * (found.ndim - 1)))[_slices(box)]

    def _layer(self, matrix: Matrix, layer: int) -> np.ndarray[Any, Any]:
        found = self._tensor(matrix.name(layer))
        return found.T.reshape(matrix.shape) if matrix.ins else found

    def _tensor(self, name: str) -> np.ndarray[Any, Any]:
        stored = self._stored[name]
        size = math.prod(stored.shape) * stored.dtype.itemsize
        data = self._platform.read(stored.path, stored.offset, size)
        if len(data) != size:
            raise _broken(stored.path, f"tensor {name} ends early")
        return np.frombuffer(data, stored.dtype).reshape(stored.shape).astype(np.float32)


def _slices(box: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _stored(platform: Platform, folder: str) -> Iterator[tuple[str, _Stored]]:
    files = {SINGLE}
    if platform.exists(f"{folder}/{INDEX}"):
        files = {str(name) for name in _read_json(platform, f"{folder}/{INDEX}").get("weight_map", {}).values()}
    for name in sorted(files):
        if "/" in name or name.startswith("."):
            raise _broken(f"{folder}/{INDEX}", f"{name!r} is no file of this folder")
        yield from _header_of(platform, f"{folder}/{name}")


def _header_of(platform: Platform, path: str) -> Iterator[tuple[str, _Stored]]:
    try:
        length = int.from_bytes(platform.read(path, 0, 8), "little")
        if not 2 <= length <= HEADER_BYTES_MAX:
            raise ValueError(f"a header of {length} bytes")
        for name, entry in json.loads(platform.read(path, 8, length)).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                stored = _Stored(path, CODES[entry["dtype"]], tuple(map(int, entry["shape"])), 8 + length + int(start))
                if start < 0 or stop - start != math.prod(stored.shape) * stored.dtype.itemsize:
                    raise ValueError(f"{name} does not fit its bytes")
                yield name, stored
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(path, repr(error)) from error


def _read_json(platform: Platform, path: str) -> dict[str, Any]:
    try:
        found = json.loads(platform.read(path))
    except (OSError, ValueError) as error:
        raise _broken(path, str(error)) from error
    if not isinstance(found, dict):
        raise _broken(path, "no table of keys")
    return found


def _broken(path: str, what: str) -> HfUnusable:
    return HfUnusable(
        f"this cannot be read as a model of Hugging Face: {what}", where=path,
        fix="give the folder with config.json and *.safetensors; download it again if it is not whole",
    )
