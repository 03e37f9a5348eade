"""Small stores and corpora for the tests of this room."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from packtrain.core.platform import LocalPlatform
from packtrain.data.config import DataConfig, StoreUse
from packtrain.data.loader import Loader, open_loader
from packtrain.data.store import StoreWriter
from packtrain.data.tokenizer import FILE, Tokenizer, byte_tokenizer

PLATFORM = LocalPlatform()
BYTES = byte_tokenizer()
END = BYTES.end_of_document
VOCAB = BYTES.padded_size


def write_store(folder: pathlib.Path, documents: Sequence[bytes], tokenizer: Tokenizer = BYTES) -> str:
    """A store of these documents with a tokenizer.json of its own; -> its path."""
    writer = StoreWriter(PLATFORM, str(folder), "<u2")
    for text in documents:
        ids = np.array([*tokenizer.encode(text.decode()), tokenizer.end_of_document])
        writer.append(ids, np.array([len(ids)]), hashlib.blake2b(text, digest_size=16).digest(), len(text))
    writer.finish(tokenizer.hash, tokenizer.size, tokenizer.end_of_document)
    PLATFORM.write_new(str(folder / FILE), tokenizer.text.encode())
    return str(folder)


def write_token_store(folder: pathlib.Path, lengths: Sequence[int], seed: int = 0, dtype: str = "<u2") -> str:
    """A store of documents of these lengths in tokens (end of document included), of random bytes."""
    sizes = np.array(lengths)
    tokens = np.random.default_rng(seed).integers(0, 256, int(sizes.sum()))
    tokens[np.cumsum(sizes) - 1] = END
    writer = StoreWriter(PLATFORM, str(folder), dtype)
    writer.append(tokens, sizes, bytes(16 * len(sizes)), int(sizes.sum()) - len(sizes))
    writer.finish(BYTES.hash, BYTES.size, END)
    PLATFORM.write_new(str(folder / FILE), BYTES.text.encode())
    return str(folder)


def loader_of(
    stores: Sequence[str], rows: int, length: int, seed: int = 0, weights: Sequence[float] = (), **more: int
) -> Loader:
    uses = tuple(StoreUse(path=path, weight=weight) for path, weight in zip(stores, weights or [1.0] * len(stores)))
    return open_loader(DataConfig(stores=uses, batch_rows=rows, length=length, **more), seed, VOCAB, PLATFORM)


WORDS = [
    "def", "return", "self", "import", "for", "in", "if", "else", "class", "raise", "value", "index", "mule", "bell",
    "ridge", "snow", "river", "pack", "train",
]


def source_text(seed: int, lines: int) -> bytes:
    """Text with lines like those of a program, different for each seed."""
    random = np.random.default_rng(seed)
    out = []
    for _ in range(lines):
        words = random.integers(0, len(WORDS), int(random.integers(2, 7)))
        indent = "    " * int(random.integers(0, 3))
        out.append(indent + " ".join(WORDS[w] for w in words) + f" {random.integers(10**6)}")
    return ("\n".join(out) + "\n").encode()


def write_corpus(folder: pathlib.Path, files: int, seed: int = 0, lines: int = 40) -> str:
    """A folder of `files` sources, a tenth of them repeated and a tenth nearly repeated; -> its path."""
    for i in range(files):
        text = source_text(seed * 10_000 + i, lines + i % 7)
        path = folder / f"package_{i % 5}" / f"module_{i:04d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        if i % 10 == 3:
            path.with_name(f"again_{i:04d}.py").write_bytes(text)
        if i % 10 == 7:
            path.with_name(f"close_{i:04d}.py").write_bytes(text + b"# changed at the end\n")
    return str(folder)


def tree_bytes(folder: str | os.PathLike[str], but: Sequence[str] = ()) -> dict[str, bytes]:
    """Every file under a folder, by its path there."""
    root = pathlib.Path(folder)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*")) if path.is_file() and path.name not in but
    }
