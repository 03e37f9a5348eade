"""Weights as Hugging Face keeps them: config.json and safetensors. Bytes to bytes, one matrix in memory at a time.

| | our dims | theirs |
|---|---|---|
| matrices | [layer, in..., out...], heads apart | one [out, in] for each layer, heads folded |
| embedding and head | [vocab, embed], vocab padded to a multiple of 128 | [vocab, embed], of the tokenizer's size |
| vectors | [layer, embed] | one [embed] for each layer |

The shape is Llama's, with norms of q and k Qwen3's, with a window Mistral's. Their names are those of `transformers`.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.format import Box
from packtrain.checkpoint.reader import Checkpoint
from packtrain.core.errors import ExportFailed, HfUnusable, UsageError
from packtrain.core.platform import Platform

SHARD_BYTES = 5 << 30
"""A file is no larger, but for a matrix that alone is: Hugging Face's own habit."""
HEADER_BYTES_MAX = 100 << 20
"""What the safetensors library itself accepts."""
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
KINDS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}
FLOATS = {code: dtype for code, dtype in fmt.DTYPES.values() if code in ("F64", "F32", "F16", "BF16")}
"""What weights may be kept in; whole numbers and 8 bits are of quantized models, whose scales lie elsewhere."""
NEEDLESS = "rotary_emb.inv_freq"
"""Old folders keep the frequencies of RoPE, which follow from config.json."""
NAMED_MAX = 5
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
    rope = rope if isinstance(rope, dict) else {"type": rope}
    foreign = [
        (kind not in [*KINDS], f"model_type {json.dumps(kind)}{KNOWN}"),
        (bool(config.get("attention_bias") or config.get("mlp_bias")), "biases in its matrices"),
        (config.get("hidden_act", "silu") != "silu", f"the activation {json.dumps(config.get('hidden_act'))}"),
        (rope.get("rope_type", rope.get("type", "default")) != "default", f"stretched positions ({json.dumps(rope)})"),
        (bool(config.get("use_sliding_window")), "windows in some layers"),
        ("quantization_config" in config, "quantized weights"),
    ]
    if (first := next((text for is_so, text in foreign if is_so), None)) is not None:
        raise HfUnusable(f"the model has {first}", where=where, fix="choose a plain Llama, Mistral or Qwen3 model")
    read = _Numbers({"rope_theta": rope.get("rope_theta") or 10_000.0} | _given(config), where)
    heads, embed = read.size("num_attention_heads"), read.size("hidden_size")
    return {
        "vocab": -(-read.size("vocab_size") // 128) * 128, "layers": read.size("num_hidden_layers"),
        "embed": embed, "heads": heads, "mlp": read.size("intermediate_size"),
        "kv_heads": read.size("num_key_value_heads", heads), "head": read.size("head_dim", embed // heads),
        "rope_theta": read.positive("rope_theta"), "norm_epsilon": read.positive("rms_norm_eps"),
        "qk_norm": kind == "qwen3", "tied": bool(config.get("tie_word_embeddings", False)),
        "window": read.size("sliding_window") if kind == "mistral" and config.get("sliding_window") else 0,
    }


def _given(config: dict[str, Any]) -> dict[str, Any]:
    """Without what is null, which is as if it were not there."""
    return {key: value for key, value in config.items() if value is not None}


class _Numbers(NamedTuple):
    """Numbers of a config.json, each refused by its own name."""

    config: dict[str, Any]
    where: str

    def size(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < 1:  # True is no size, nor is "64"
            raise self._refused(f"{key} is {json.dumps(value)}, and must be a whole number of at least 1")
        return value

    def positive(self, key: str) -> float:
        value = self._value(key, None)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._refused(f"{key} is {json.dumps(value)}, and must be a number above 0")
        return float(value)

    def _value(self, key: str, default: int | None) -> Any:
        if key not in self.config and default is None:
            raise self._refused(f"{key} is missing")
        return self.config.get(key, default)

    def _refused(self, what: str) -> HfUnusable:
        return HfUnusable(
            f"{what} in config.json", where=self.where, fix="download the model again, or correct it there"
        )


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
    folder that has one is whole; what fails takes away what it wrote.

    `tokenizer`: files to lie beside them. Raises UsageError where `out` is there and not empty or cannot be a folder,
    ExportFailed where the machine refuses to write, HfUnusable, CheckpointDamaged.
    """
    dtype = "bfloat16" if bf16 else checkpoint.specs["params/embedding"].dtype
    config = config_of(model, vocab, length, dtype)
    shards = list(_shards(model, vocab, fmt.DTYPES[dtype][1].itemsize, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    files = dict(tokenizer or {})
    if len(shards) > 1:
        where = {w.matrix.name(w.layer): name for name, shard in zip(names, shards, strict=True) for w in shard}
        total = sum(w.bytes for shard in shards for w in shard)
        files[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": where})
    files[CONFIG] = _json(config)
    with _new_folder(platform, out, [*names, *files]):
        for name, shard in zip(names, shards, strict=True):
            _write_shard(platform, f"{out}/{name}", checkpoint, shard, dtype)
        for name, data in files.items():
            platform.write_new(f"{out}/{name}", data)
        platform.fsync_dir(out)
    return [*names, *files]


@contextmanager
def _new_folder(platform: Platform, out: str, names: Sequence[str]) -> Iterator[None]:
    """The folder `out`, empty; whatever ends the block early leaves none of `names` there, and no folder that was not
    there before."""
    try:
        was_there = platform.exists(out)
        if was_there and (not platform.is_dir(out) or platform.listdir(out)):
            raise UsageError("there is something already", where=out, fix="name a folder that is new or empty")
        platform.mkdir(out)
    except OSError as error:
        raise _refused(error, out) from error
    try:
        yield
    except FileExistsError as error:  # another export of this moment: the files are its own
        raise _refused(error, out) from error
    except BaseException as error:
        for name in names:
            with suppress(OSError):
                platform.unlink(f"{out}/{name}")
        if not was_there:
            with suppress(OSError):
                platform.rmdir(out)
        if isinstance(error, OSError):
            raise _refused(error, out) from error
        raise


def _refused(error: OSError, out: str) -> UsageError | ExportFailed:
    """A path that can never be a folder is the caller's mistake; all else may be better later."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP):
        return UsageError(f"no folder can be made here: {error.strerror}", where=out or '""', fix="give another path")
    return ExportFailed(
        f"the folder cannot be written: {error.strerror or error}", where=out,
        fix="free space or mend its permissions and give the same command, or name another folder",
    )


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


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Weights:
    """A folder of theirs, read by our names. Raises HfUnusable where it is not whole or not of a known model.

    `fields`: of `ModelConfig`. `vocab`: entries without padding.
    """

    def __init__(self, platform: Platform, folder: str) -> None:
        self._platform, self.folder = platform, folder
        _check_folder(platform, folder)
        config = _read_json(platform, f"{folder}/{CONFIG}")
        self.fields = model_of(config, f"{folder}/{CONFIG}")
        self.vocab = int(config["vocab_size"])
        self._stored = dict(_stored(platform, folder))

    def matched(self, model: Model) -> Weights:
        """Itself, once every tensor that `model` needs is there with its shape, and none that it has no use for."""
        self._matrices = {f"params/{m.ours}": m for m in matrices(model)}
        wanted = {matrix.name(layer): matrix.their_shape(self.vocab) for matrix, layer in _in_order(model)}
        for name, shape in wanted.items():
            found = self._stored[name].shape if name in self._stored else None
            if found != shape:
                raise self._other_model(
                    f"tensor {name} is {'absent' if found is None else list(found)} in the files and {list(shape)}"
                )
        tied = {"lm_head.weight"} if model.tied else set()
        extra = [name for name in self._stored if name not in {*wanted, *tied} and not name.endswith(NEEDLESS)]
        if extra:
            more = f" and {len(extra) - NAMED_MAX} more" * (len(extra) > NAMED_MAX)
            raise self._other_model(f"the files hold {', '.join(extra[:NAMED_MAX])}{more}, which do not belong")
        return self

    def _other_model(self, what: str) -> HfUnusable:
        return HfUnusable(
            f"{what} in the model that config.json describes", where=self.folder,
            fix="config.json and *.safetensors are of different models: download both again, into a new folder",
        )

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
        with np.errstate(over="ignore"):  # an f64 too large for f32 is named below
            found = np.frombuffer(data, stored.dtype).reshape(stored.shape).astype(np.float32)
        if not np.isfinite(found).all():
            raise HfUnusable(
                f"tensor {name} holds numbers that are not finite (NaN or infinity)", where=stored.path,
                fix="download the model again; if it was trained so, choose an earlier checkpoint of it",
            )
        return found


def _slices(box: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _check_folder(platform: Platform, folder: str) -> None:
    try:
        is_there, is_dir = platform.exists(folder), platform.is_dir(folder)
    except OSError as error:
        raise _broken(folder, error.strerror or str(error)) from error
    if not is_there:
        raise HfUnusable(f"there is no folder {folder}", where=folder, fix="check the path given with --from")
    if not is_dir:
        raise HfUnusable("this is a file", where=folder, fix=f"give its folder: --from {os.path.dirname(folder)}")


def _stored(platform: Platform, folder: str) -> Iterator[tuple[str, _Stored]]:
    files, index = {SINGLE}, f"{folder}/{INDEX}"
    if platform.exists(index):
        found = _read_json(platform, index).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise _broken(index, "its weight_map is no table of file names")
        files = set(found.values())
    for name in sorted(files):
        if "/" in name or "\0" in name or name.startswith("."):
            raise _broken(index, f"{json.dumps(name)} is no file of this folder")
        yield from _header_of(platform, f"{folder}/{name}")


def _header_of(platform: Platform, path: str) -> Iterator[tuple[str, _Stored]]:
    length = int.from_bytes(_bytes(platform, path, 0, 8), "little")
    if not 2 <= length <= HEADER_BYTES_MAX:
        raise _broken(path, f"it begins with a header of {length} bytes")
    entries, end = _table(_bytes(platform, path, 8, length), path), platform.size(path)
    for name, entry in entries.items():
        if name != "__metadata__":
            yield name, _placed(path, name, entry, 8 + length, end)


def _placed(path: str, name: str, raw: Any, data_at: int, end: int) -> _Stored:
    """Where a tensor lies in a file of `end` bytes whose data begin at `data_at`."""
    try:
        entry = msgspec.convert(raw, _Entry)
    except msgspec.ValidationError as error:
        raise _broken(path, f"the entry of tensor {name}: {error}") from error
    if entry.dtype not in FLOATS:
        raise HfUnusable(
            f"tensor {name} is of type {entry.dtype}; weights are read from {', '.join(FLOATS)}", where=path,
            fix="choose weights that are not quantized",
        )
    dtype, (start, stop) = FLOATS[entry.dtype], entry.data_offsets
    if start < 0 or min(entry.shape, default=0) < 0 or stop - start != math.prod(entry.shape) * dtype.itemsize:
        raise _broken(path, f"tensor {name} does not fit its bytes")
    if data_at + stop > end:
        raise _broken(path, f"it ends before tensor {name} does")
    return _Stored(path, dtype, entry.shape, data_at + start)


def _read_json(platform: Platform, path: str) -> dict[str, Any]:
    return _table(_bytes(platform, path), path)


def _bytes(platform: Platform, path: str, offset: int = 0, size: int = -1) -> bytes:
    try:
        return platform.read(path, offset, size)
    except FileNotFoundError as error:
        raise _broken(path, f"the folder has no {os.path.basename(path)}") from error
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from error


def _table(data: bytes, path: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _broken(path, "it is not JSON, or its header is not") from error
    if not isinstance(found, dict):
        raise _broken(path, "it is JSON, but no table of keys")
    return found


def _broken(path: str, what: str) -> HfUnusable:
    return HfUnusable(
        f"this cannot be read as a model of Hugging Face: {what}", where=path,
        fix="give the folder with config.json and *.safetensors; download it again if it is not whole",
    )
