"""Tokenizers keep every byte, know how many bytes each id stands for, and are the same wherever they are trained."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from packtrain.core.errors import BadValue, CorpusMissing
from packtrain.data.tokenizer import END_OF_DOCUMENT, KNOWN_ENDS, Tokenizer, byte_tokenizer, read_tokenizer, train_bpe
from tests.data.makers import PLATFORM, source_text

TEXTS = [source_text(i, 60).decode() for i in range(20)]
BPE = train_bpe(iter(TEXTS), 400)
BOTH = {"bpe": BPE, "byte": byte_tokenizer()}

spelled = st.sampled_from(
    [END_OF_DOCUMENT, "<|endoftext|>", "\r\n", "    ", "Ġ", "def x_1():\n", "é", "山", "🐴", "\x00"]
)
text = st.lists(st.one_of(st.text(max_size=12), spelled), max_size=8).map("".join)


@pytest.mark.parametrize("name", BOTH)
@given(text=text)
def test_every_byte_is_kept(name: str, text: str) -> None:
    """Text comes back from its ids, names of special tokens included, and the ids' bytes add up to the text's."""
    tokenizer = BOTH[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())
    assert tokenizer.end_of_document not in ids


def test_many_are_encoded_as_one() -> None:
    """Encoding a batch gives what encoding each text gives."""
    assert BPE.encode_many(TEXTS) == [BPE.encode(t) for t in TEXTS]
    assert BPE.encode_many([]) == [] and BPE.encode_many([""]) == [[]]


def test_byte_ids_are_bytes() -> None:
    """The byte tokenizer gives each byte its value as id, and 256 to the end of a document."""
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("aé\n") == list("aé\n".encode())
    library = tokenizers.Tokenizer.from_str(tokenizer.text)
    assert library.encode("aé\n<|").ids == tokenizer.encode("aé\n<|"), "the short cut for bytes changes nothing"
    assert (tokenizer.end_of_document, tokenizer.size, tokenizer.padded_size) == (256, 257, 384)
    assert tokenizer.token_bytes.tolist() == [1] * 256 + [0]


def test_sizes() -> None:
    """A trained tokenizer has the ids asked for where the text supports them, fewer otherwise; the padded size is the
    next multiple of 128."""
    assert (BPE.size, BPE.padded_size) == (400, 512)
    small = train_bpe(iter(["ab"]), 4096)
    assert 257 <= small.size < 300 and small.padded_size == 384
    with pytest.raises(BadValue, match="too few"):
        train_bpe(iter(TEXTS), 256)


def test_merges_serve_the_text() -> None:
    """Training helps: the corpus takes under half as many ids as bytes."""
    assert sum(map(len, BPE.encode_many(TEXTS))) < sum(len(t) for t in TEXTS) / 2


def test_training_is_the_same_everywhere() -> None:
    """Another process, with another hash seed and a single thread, trains the same tokenizer to the byte."""
    program = (
        "from tests.data.makers import source_text\nfrom packtrain.data.tokenizer import train_bpe\n"
        "print(train_bpe((source_text(i, 60).decode() for i in range(20)), 400).hash)"
    )
    for env in ({"PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "1"}, {"PYTHONHASHSEED": "2", "RAYON_NUM_THREADS": "3"}):
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == BPE.hash


def test_a_tokenizer_from_elsewhere(tmp_path: pathlib.Path) -> None:
    """A tokenizer.json as others ship it is read with its own end of document, without truncation, padding or added
    tokens."""
    inner = tokenizers.Tokenizer.from_str(BPE.text.replace(END_OF_DOCUMENT, "<|endoftext|>"))
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", BPE.end_of_document)]
    )
    inner.save(str(tmp_path / "t.json"))
    read = read_tokenizer(PLATFORM, str(tmp_path / "t.json"))
    assert read.end_of_document == BPE.end_of_document
    assert read.encode(TEXTS[0]) == BPE.encode(TEXTS[0])
    assert read.text == (tmp_path / "t.json").read_text()


def test_a_tokenizer_without_an_end_is_given_one(tmp_path: pathlib.Path) -> None:
    """Where no known name for the end of a document is there, one is added behind the other ids."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("abĠ")}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.save(str(tmp_path / "t.json"))
    read = read_tokenizer(PLATFORM, str(tmp_path / "t.json"))
    assert (read.end_of_document, read.size) == (3, 4)
    assert read.token_bytes.tolist() == [1, 1, 1, 0]


def test_bytes_of_a_fallback_tokenizer() -> None:
    """In a SentencePiece style vocabulary `<0x0A>` counts one byte, the word mark one space, other pieces
    themselves."""
    vocabulary = {"<unk>": 0, "</s>": 1, "<0x0A>": 2, "▁山": 3, "ab": 4}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<unk>", "</s>"])
    assert Tokenizer(inner.to_str()).token_bytes.tolist() == [0, 0, 1, 4, 2]


def test_added_words_count_their_bytes() -> None:
    """A word added to a byte-level vocabulary counts its UTF-8 bytes, a special token none."""
    inner = tokenizers.Tokenizer.from_str(BPE.text)
    inner.add_tokens([AddedToken("山道", normalized=False)])
    inner.add_special_tokens(["<|user|>"])
    tokenizer = Tokenizer(inner.to_str())
    assert tokenizer.token_bytes[400:].tolist() == [6, 0]
    assert tokenizer.encode("山道") == [400] and tokenizer.decode([400]) == "山道"


@pytest.mark.parametrize("text", ["", "{}", "not json", json.dumps({"version": "1.0", "model": {"type": "Nothing"}})])
def test_what_is_no_tokenizer(tmp_path: pathlib.Path, text: str) -> None:
    """A file that is no tokenizer.json is refused by name."""
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(BadValue, match="not a tokenizer") as caught:
        read_tokenizer(PLATFORM, str(tmp_path / "t.json"))
    assert "t.json" in caught.value.where


def test_tokenizers_that_cannot_count(tmp_path: pathlib.Path) -> None:
    """A tokenizer whose ids do not stand for known bytes, a binary file and a missing one are refused, each in its
    way."""
    inner = tokenizers.Tokenizer(models.WordPiece(vocab={"a": 0, "[UNK]": 1, KNOWN_ENDS[-1]: 2}, unk_token="[UNK]"))
    inner.decoder, inner.normalizer = decoders.WordPiece(), normalizers.Lowercase()
    with pytest.raises(BadValue, match="cannot be counted"):
        Tokenizer(inner.to_str())
    (tmp_path / "t.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BadValue, match="UTF-8"):
        read_tokenizer(PLATFORM, str(tmp_path / "t.json"))
    with pytest.raises(CorpusMissing):
        read_tokenizer(PLATFORM, str(tmp_path / "nothing.json"))
