"""From files to stores. (The first, simple form: everything in memory.)"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from packtrain.core.errors import CorpusEmpty, CorpusMissing
from packtrain.core.platform import Platform
from packtrain.data.store import Card, StoreWriter, token_dtype
from packtrain.data.tokenizer import FILE, byte_tokenizer, read_tokenizer, train_bpe

Progress = Callable[[str, int, int], None]


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokenizer: str = "bpe"
    """"bpe", "byte", or the path of a tokenizer.json."""
    vocab: int = 4096
    held_out_fraction: float = 0.05
    held_out_bytes_max: int = 500_000


def build(platform: Platform, paths: Sequence[str], out: str, options: BuildOptions, progress: Progress) -> Card:
    files = [f for path in paths for f in _files(platform, path)]
    texts = [platform.read(f) for f in files]
    kept = sorted({hashlib.blake2b(t, digest_size=16).digest(): t for t in texts if t}.items())
    if not kept:
        raise CorpusEmpty("no text", where=str(list(paths)), fix="name files with text in them")
    limit, held = min(options.held_out_bytes_max, options.held_out_fraction * sum(len(t) for _, t in kept)), 0
    n = 0
    while held < limit:
        held += len(kept[n][1])
        n += 1
    tokenizer = {"bpe": lambda: train_bpe((t.decode() for _, t in kept[n:]), options.vocab), "byte": byte_tokenizer}.get(
        options.tokenizer, lambda: read_tokenizer(platform, options.tokenizer))()
    platform.mkdir(out)
    platform.write_new(os.path.join(out, FILE), tokenizer.text.encode())
    for name, part in (("train", kept[n:]), ("held_out", kept[:n])):
        writer = StoreWriter(platform, os.path.join(out, name), token_dtype(tokenizer.size))
        for i, (digest, text) in enumerate(part):
            ids = np.array([*tokenizer.encode(text.decode()), tokenizer.end_of_document])
            writer.append(ids, np.array([len(ids)]), digest, len(text))
            progress(name, i + 1, len(part))
        card = writer.finish(tokenizer.hash, tokenizer.size, tokenizer.end_of_document)
        if name == "train":
            first = card
    return first


def _files(platform: Platform, path: str) -> list[str]:
    if not platform.exists(path):
        raise CorpusMissing("there is nothing here", where=path, fix="name a file or a folder that exists")
    if not platform.is_dir(path):
        return [path]
    return [f for name in platform.listdir(path) if not name.startswith((".", "__pycache__"))
            for f in _files(platform, os.path.join(path, name)) if f.endswith((".py", ".txt", ".md"))]
