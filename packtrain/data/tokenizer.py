"""Text to token ids and back, through `tokenizers`; how many bytes of text each id stands for.

Every tokenizer is one Hugging Face `tokenizer.json`: trained here (byte-level BPE), loaded from elsewhere, or the
byte tokenizer, which is BPE without merges. Text is never searched for special tokens: a document that spells one out
keeps it as plain text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from packtrain.core.errors import BadValue, CorpusMissing, TokenizerMismatch
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.data.signed import read_card
from packtrain.data.store import CARD, TOKENS, Card

FILE = "tokenizer.json"
END_OF_DOCUMENT = "<|end_of_document|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""What other people call it, in the order tried."""

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GPT-4's pattern (tiktoken, cl100k_base) with at most two digits a token: numbers fill small vocabularies
otherwise."""


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary. Source: GPT-2's `bytes_to_unicode`."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters, extra = [], 256
    for byte in range(256):
        if byte in plain:
            letters.append(chr(byte))
        else:
            letters.append(chr(extra))
            extra += 1
    return letters


class Tokenizer:
    """`text` is the content of a tokenizer.json; `where` names it in errors. Raises BadValue when it cannot serve."""

    def __init__(self, text: str, where: str = "") -> None:
        self._inner = _parse(text, where)
        self._inner.encode_special_tokens = True  # a document that spells out a special token keeps it as text
        self.text = text
        self.hash = hashlib.sha256(text.encode()).hexdigest()
        self.end_of_document = _find_end(self._inner, where)
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values()) + 1
        self.padded_size = -(-self.size // 128) * 128
        self.token_bytes = _token_bytes(self._inner, vocabulary, self.size, where)
        """[size] int32: bytes of text each id stands for; special tokens stand for none."""
        self._is_bytes = text == _byte_text()

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        if self._is_bytes:  # the library takes a microsecond a byte to find that there is nothing to merge
            return [list(text.encode()) for text in texts]
        return [e.ids for e in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens decode to nothing, broken UTF-8 to U+FFFD."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def keeps(self, text: bytes, ids: Sequence[int]) -> bool:
        """Whether the ids of a text say exactly it: as many bytes, and the same ones (a normalizer may lower cases)."""
        if self._is_bytes:
            return len(ids) == len(text)
        n_bytes = int(self.token_bytes[np.asarray(ids, np.int64)].sum(dtype=np.int64))
        return n_bytes == len(text) and self.decode(ids).encode() == text


def _parse(text: str, where: str) -> Any:
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise BadValue(
            f"this is not a tokenizer.json: {error}", where=where, fix="give a Hugging Face tokenizer.json"
        ) from error
    inner.no_padding()
    inner.no_truncation()
    return inner


def _find_end(inner: Any, where: str) -> int:
    for name in KNOWN_ENDS:
        found = inner.token_to_id(name)
        if found is not None:
            return int(found)
    raise BadValue(
        "the tokenizer has no token for the end of a document", where=where,
        fix=f"add one of {', '.join(KNOWN_ENDS)} to it as a special token",
    )


def _token_bytes(inner: Any, vocabulary: dict[str, int], size: int, where: str) -> npt.NDArray[np.int32]:
    shape = json.dumps(json.loads(inner.to_str())["decoder"])
    if '"ByteLevel"' in shape:
        letters = set(byte_letters())
        count = lambda token: len(token) if letters.issuperset(token) else len(token.encode())  # noqa: E731
    elif '"ByteFallback"' in shape:
        count = _fallback_bytes
    else:
        raise BadValue(
            "bits per byte cannot be counted: the tokenizer is neither byte-level nor with byte fallback", where=where,
            fix="use one with a ByteLevel or ByteFallback decoder, or train one here",
        )
    table = np.zeros(size, dtype=np.int32)
    for token, index in vocabulary.items():
        table[index] = count(token)
    for index, added in inner.get_added_tokens_decoder().items():
        table[index] = 0 if added.special else len(added.content.encode())
    return table


def _fallback_bytes(token: str) -> int:
    """SentencePiece style: `<0x0A>` is one byte, U+2581 one space, all else itself."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("\u2581", " ").encode())


def byte_tokenizer() -> Tokenizer:
    """257 ids: id of a byte is its value, 256 ends a document."""
    return Tokenizer(_byte_text())


@cache
def _byte_text() -> str:
    inner = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(byte_letters())}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return str(inner.to_str(pretty=False))


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with at most `vocab` ids (256 bytes, the end of document, merges), the same for the same texts.

    Raises BadValue below 257. A sample too small to support `vocab` merges gives a smaller tokenizer.
    """
    if vocab < 257:
        raise BadValue(
            f"a byte-level vocabulary needs 256 bytes and the end of document, so {vocab} is too few", where="vocab",
            fix="ask for 257 or more, or use the byte tokenizer",
        )
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END_OF_DOCUMENT], initial_alphabet=byte_letters(), show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner.to_str(pretty=False))


def read_tokenizer(platform: Platform, path: str) -> Tokenizer:
    """The tokenizer.json at `path`; one that knows no end of document is given one. Raises CorpusMissing, BadValue."""
    if not platform.exists(path):
        raise CorpusMissing("there is no tokenizer here", where=path, fix="give the path of a tokenizer.json")
    try:
        text = platform.read(path).decode()
    except UnicodeDecodeError as error:
        raise BadValue(
            "the tokenizer is not UTF-8 text", where=path, fix="give a Hugging Face tokenizer.json"
        ) from error
    inner = _parse(text, path)
    if all(inner.token_to_id(name) is None for name in KNOWN_ENDS):
        inner.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
        text = inner.to_str(pretty=False)
    return Tokenizer(text, path)


def load_tokenizer(folder: str, platform: Platform | None = None) -> Tokenizer:
    """The tokenizer of a store, or of the folder that holds the stores.

    Raises CorpusMissing when neither has one, TokenizerMismatch when it is not the one the store was made with.
    """
    platform = platform or LocalPlatform()
    near = os.path.join(folder, FILE)
    path = near if platform.exists(near) else os.path.join(os.path.dirname(os.path.abspath(folder)), FILE)
    tokenizer = read_tokenizer(platform, path)
    if platform.exists(os.path.join(folder, TOKENS)):
        card, _ = read_card(platform, os.path.join(folder, CARD), Card)
        if card.tokenizer_hash != tokenizer.hash:
            raise TokenizerMismatch(
                f"the store was made with tokenizer {card.tokenizer_hash[:12]}, this one is {tokenizer.hash[:12]}",
                where=f"{path} for {folder}", fix="put back the tokenizer.json it was built with, or build again",
            )
    return tokenizer


def check_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """A model's vocabulary is the tokenizer's size padded to a multiple of 128, or a larger multiple:
    TokenizerMismatch."""
    if vocab < tokenizer.padded_size or vocab % 128:
        raise TokenizerMismatch(
            f"the model has {vocab} rows in its vocabulary, the tokenizer needs {tokenizer.padded_size}",
            where="model.vocab", fix=f"--set model.vocab={tokenizer.padded_size}",
        )


def check_foreign(platform: Platform, folder: str, vocab: int, store_hash: str, store_size: int) -> None:
    """The weights in `folder`, of `vocab` ids, know the ids of their own tokenizer, which has to be the stores'. Where
    the folder brings none, the stores' must at least have rows there. Raises TokenizerMismatch."""
    path = f"{folder}/{FILE}"
    if store_size > -(-vocab // 128) * 128:
        what = f"the stores were built with a tokenizer of {store_size} ids, and the weights know {vocab}"
    elif platform.exists(path) and read_tokenizer(platform, path).hash != store_hash:
        what = "the weights were trained with another tokenizer than the stores were built with"
    else:
        return
    raise TokenizerMismatch(what, where=path, fix=f"packtrain data build PATH... --out DIR --tokenizer {path}")
