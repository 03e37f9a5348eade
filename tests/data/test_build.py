"""A build's bytes depend on the corpus alone: not on cores, memory, kills or the size of its units of work."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from packtrain.core.errors import (
    BadValue,
    BuildFailed,
    BuildTaken,
    CorpusEmpty,
    CorpusMissing,
    CorruptInput,
    StoreDamaged,
)
from packtrain.data.build import REQUEST, BuildCard, BuildOptions, build
from packtrain.data.config import DataConfig, StoreUse
from packtrain.data.loader import held_out_batches, open_loader
from packtrain.data.show import show
from packtrain.data.signed import seal
from packtrain.data.store import Store
from packtrain.data.tokenizer import load_tokenizer
from tests.data.makers import PLATFORM, source_text, tree_bytes, write_corpus

DRIVER = pathlib.Path(__file__).with_name("build_driver.py")
OPTIONS = {"tokenizer": "bpe", "vocab": 400, "part_bytes": 6000, "workers": 1, "document_bytes_max": 4096}


def quiet(stage: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def make(paths: list[str], out: pathlib.Path, **options: Any) -> BuildCard:
    return build(PLATFORM, paths, str(out), BuildOptions(**{**OPTIONS, **options}), quiet)


def drive(
    paths: list[str], out: pathlib.Path, options: dict[str, Any], **order: Any
) -> subprocess.CompletedProcess[str]:
    text = json.dumps({"paths": paths, "out": str(out), "options": {**OPTIONS, **options}, **order})
    root = DRIVER.parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(DRIVER), text]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, start_new_session=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Sources with repeats and near-repeats, a long text, and JSON lines plain and compressed."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "src", 40)
    lines = b"".join(msgspec.json.encode({"text": source_text(500 + i, 12).decode()}) + b"\n" for i in range(60))
    (folder / "lines.jsonl").write_bytes(lines)
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(lines[:9000].rpartition(b"\n")[0]))
    (folder / "long.txt").write_bytes(source_text(900, 700))
    return [str(folder)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> pathlib.Path:
    out = tmp_path_factory.mktemp("built") / "out"
    make(corpus, out)
    return out


def texts_of(folder: pathlib.Path) -> list[bytes]:
    store, tokenizer = Store(str(folder)), load_tokenizer(str(folder))
    starts = store.document_starts.tolist()
    return [tokenizer.decode(store.read(a, b).tolist()).encode() for a, b in pairwise(starts)]


def read_card(out: pathlib.Path) -> dict[str, Any]:
    return json.loads((out / "card.json").read_text())


# --- what comes out -----------------------------------------------------------------------------------


def test_every_document_is_there_once(corpus: list[str], built: pathlib.Path) -> None:
    """Both stores together hold each distinct document of the corpus once, byte for byte; training in reading order."""
    folder = pathlib.Path(corpus[0])
    lines = [json.loads(line)["text"].encode() for line in (folder / "lines.jsonl").read_bytes().splitlines()]
    sources = [p.read_bytes() for p in sorted((folder / "src").rglob("*.py"), key=lambda p: (p.parent.name, p.name))]
    train, held = texts_of(built / "train"), texts_of(built / "held_out")
    long = [t for t in train + held if t not in lines and t not in sources]
    assert b"".join(sorted(long, key=(folder / "long.txt").read_bytes().index)) == (folder / "long.txt").read_bytes()
    distinct = list(dict.fromkeys(lines + sources))
    assert sorted(t for t in train + held if t not in long) == sorted(distinct)
    assert [t for t in train if t not in long] == [t for t in distinct if t not in held]


def test_the_cards_count_exactly(corpus: list[str], built: pathlib.Path) -> None:
    """Bytes, documents and tokens of the cards are those of the texts, and the bytes of the ids add up to them."""
    card = read_card(built)
    for name in ("train", "held_out"):
        texts, store = texts_of(built / name), Store(str(built / name))
        assert card[name] == msgspec.to_builtins(store.card)
        assert (store.card.documents, store.card.bytes) == (len(texts), sum(map(len, texts)))
        ids = store.read(0, len(store))
        assert int(load_tokenizer(str(built)).token_bytes[ids].sum()) == store.card.bytes
        assert int((ids == store.card.end_of_document).sum()) == store.card.documents
        assert store.verify() == []
    kept = card["train"]["bytes"] + card["held_out"]["bytes"]
    assert card["read_bytes"] == kept + card["repeated_bytes"]
    documents = sum(card[name]["documents"] for name in ("train", "held_out"))
    assert card["read_documents"] == documents + card["repeated_documents"]
    assert card["held_out_limit_bytes"] == int(0.05 * kept) <= card["held_out"]["bytes"] < 2 * int(0.05 * kept)
    assert 0 < card["held_out"]["xz_stream_bits_per_byte"] < card["held_out"]["xz_files_bits_per_byte"] < 8


def test_batches_come_out(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A built store trains, and its held-out batches count the text's bytes."""
    folder = shutil.copytree(built, tmp_path / "copy")
    vocab = load_tokenizer(str(folder)).padded_size
    config = DataConfig(stores=(StoreUse(path=str(folder / "train")),), batch_rows=4, length=64)
    assert open_loader(config, 0, vocab).batch(0).n_tokens == 4 * 64
    batches = held_out_batches(str(folder / "held_out"), 64, 4)
    assert sum(b.n_bytes for b in batches) == read_card(folder)["held_out"]["bytes"]


def test_show_tells_what_is_there(built: pathlib.Path) -> None:
    """`data show` prints counts, the xz figures and what verifying found, of one store and of the whole folder."""
    text = show(PLATFORM, str(built), verify=True)
    card = read_card(built)
    assert f"{card['held_out']['bytes']} bytes" in text and "xz -9e" in text and text.count("verified") == 2
    assert show(PLATFORM, str(built / "train")) in text.replace("\n  verified    every block matches its checksum", "")
    with pytest.raises(CorpusMissing):
        show(PLATFORM, str(built.parent))


# --- on what it does not depend -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"workers": 2}, {"part_bytes": 50_000}, {"range_bytes_max": 4000}])
def test_work_is_dealt_otherwise(corpus: list[str], built: pathlib.Path, tmp_path: pathlib.Path, options: dict) -> None:
    """Two workers, other units of work, or less memory (here: several ranges of hashes) give the same bytes."""
    make(corpus, tmp_path / "out", **options)
    assert tree_bytes(tmp_path / "out", but=[REQUEST]) == tree_bytes(built, but=[REQUEST])
    assert os.listdir(tmp_path) == ["out"], "the working folder is gone"


def finished_work(folder: pathlib.Path) -> dict[str, int]:
    """What is done in a build's working folder, and which file it is in."""
    return {str(p): p.stat().st_ino for p in folder.rglob("*") if p.suffix in (".json", ".tok")}


def test_kills_leave_no_trace(corpus: list[str], built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Killed 17 times at effects on its files, each time going on, a build ends with the same bytes.

    In turn: 4 while reading, 4 up to the tokenizer, 4 around encoding, 3 while writing, 2 while tidying up at the end.
    """
    points = [9, 14, 26, 40, 84, 168, 211, 232, 130, 150, 152, 160, 100, 85, 95, 108, 20]
    done = drive(corpus, tmp_path / "out", {}, effects=points)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == [-signal.SIGKILL] * 17, "a kill came too late to matter"
    assert tree_bytes(tmp_path / "out") == tree_bytes(built)
    assert os.listdir(tmp_path) == ["out"]


def test_finished_work_is_kept(corpus: list[str], built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Killed with two workers busy, a build's workers die with it, and what was finished is not made again."""
    before: dict[str, int] = {}
    for stages in (30, 45):
        done = drive(corpus, tmp_path / "out", {"workers": 2}, stages=stages)
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        workers = json.loads(done.stdout.splitlines()[1])
        assert len(workers) == 2
        for pid in workers:
            if psutil.pid_exists(pid):
                psutil.Process(pid).wait(timeout=60)
        now = finished_work(tmp_path)
        assert set(before) < set(now) and all(now[path] == inode for path, inode in before.items())
        before = now
    make(corpus, tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == tree_bytes(built)


def test_ctrl_c_is_clean(corpus: list[str], built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """At Ctrl-C the build ends its workers, says in one message how to go on, exits 75, and goes on when asked
    again."""
    done = drive(corpus, tmp_path / "out", {"workers": 2}, stages=8, signal=signal.SIGINT)
    assert done.returncode == 75 and "Traceback" not in done.stderr, done.stderr
    assert "run.stopped_on_request" in done.stdout and "the same command goes on" in done.stdout
    assert json.loads(done.stdout.splitlines()[-2]) == 0, "a worker is left"
    make(corpus, tmp_path / "out", workers=1)
    assert tree_bytes(tmp_path / "out") == tree_bytes(built)


def test_a_finished_build_is_not_made_again(corpus: list[str], built: pathlib.Path) -> None:
    """Asked again, a build returns its card without reading a file; other workers or memory do not make it another."""
    stages: list[str] = []
    before = finished_work(built)
    options = BuildOptions(**{**OPTIONS, "workers": 2, "memory_bytes_max": 1 << 30})
    card = build(PLATFORM, corpus, str(built), options, lambda stage, done, total: stages.append(stage))
    assert seal(card) == (built / "card.json").read_bytes()
    assert set(stages) == {"list"} and finished_work(built) == before


def drop_files(folder: pathlib.Path) -> set[str]:
    return {path.parent.name for path in folder.rglob("*.drop")}


def test_ranges_of_hashes_change_in_between(corpus: list[str], built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A build that was dealt into five ranges of hashes or more goes on in one, with the same bytes."""
    assert drive(corpus, tmp_path / "out", {"range_bytes_max": 3000}, stages=30).returncode == -signal.SIGKILL
    (ranges,) = drop_files(tmp_path)
    assert int(ranges.removeprefix("drops-")) >= 5
    assert drive(corpus, tmp_path / "out", {}, stages=30).returncode == -signal.SIGKILL
    assert drop_files(tmp_path) == {ranges, "drops-1"}
    make(corpus, tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == tree_bytes(built)


def test_one_row_many_times(tmp_path: pathlib.Path) -> None:
    """A row that is most of a corpus is kept once, whatever the ranges, and costs one record a part in memory."""
    rows = [f"row {i} of those that are there once" for i in range(200)]
    lines = [json.dumps({"text": text}) for row in rows for text in (row, *["N/A"] * 20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    for name, options in (("one", {}), ("several", {"range_bytes_max": 20_000})):
        card = make([str(tmp_path / "rows.jsonl")], tmp_path / name, tokenizer="byte", **options)
        assert (card.read_documents, card.repeated_documents, card.repeated_bytes) == (4200, 3999, 3 * 3999)
        assert sorted(t for s in ("train", "held_out") for t in texts_of(tmp_path / name / s)) == sorted(
            [b"N/A", *(row.encode() for row in rows)]
        )
    assert tree_bytes(tmp_path / "one") == tree_bytes(tmp_path / "several")


# --- memory ---------------------------------------------------------------------------------------------


def test_memory_is_flat(tmp_path: pathlib.Path) -> None:
    """Eight times the corpus takes no more memory: of 7 MiB more text, under 2 MiB are seen in the peak."""
    peaks = []
    for mib in (1, 8):
        path = tmp_path / f"corpus{mib}.jsonl.gz"
        text = np.random.default_rng(mib).integers(97, 123, mib << 20).astype(np.uint8)
        text[::256] = 32
        lines = (b'{"text": "' + block.tobytes() + b'"}\n' for block in np.split(text, 64 * mib))
        path.write_bytes(gzip.compress(b"".join(lines), 1))
        done = drive([str(path)], tmp_path / f"out{mib}", {
            "tokenizer": "byte", "memory_bytes_max": 512 << 20, "part_bytes": 1 << 18, "document_bytes_max": 1 << 20,
            "held_out_bytes_max": 50_000,
        })
        assert done.returncode == 0, done.stdout + done.stderr
        peaks.append(json.loads(done.stdout.splitlines()[-1]))
    assert peaks[0] < 512 << 20 and peaks[1] - peaks[0] < 2 << 20, peaks


# --- what can go wrong ----------------------------------------------------------------------------------


def test_nothing_to_build(tmp_path: pathlib.Path) -> None:
    """A path that is not there, a folder without text, empty files, and a single document each end in their own
    error."""
    with pytest.raises(CorpusMissing, match="nothing here"):
        make([str(tmp_path / "none")], tmp_path / "out")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "pic.png").write_bytes(b"\x89PNG")
    with pytest.raises(CorpusEmpty, match="1 passed over"):
        make([str(tmp_path / "folder")], tmp_path / "out")
    (tmp_path / "folder" / "a.txt").write_bytes(b"")
    with pytest.raises(CorpusEmpty, match="no text"):
        make([str(tmp_path / "folder")], tmp_path / "out")
    (tmp_path / "folder" / "a.txt").write_bytes(b"one document\n")
    with pytest.raises(CorpusEmpty, match="cannot be split") as caught:
        make([str(tmp_path / "folder")], tmp_path / "out")
    assert "--document-bytes-max" in caught.value.fix and "--held-out-fraction 0" in caught.value.fix
    assert not (tmp_path / "out").exists()
    card = make([str(tmp_path / "folder")], tmp_path / "out", held_out_fraction=0.0)
    assert (card.train.documents, card.held_out.documents) == (1, 0)
    assert card.held_out.xz_files_bits_per_byte is None


def test_a_name_that_is_no_utf8_is_refused(tmp_path: pathlib.Path) -> None:
    """A file whose name is no text cannot be written into a card: it is named with escapes."""
    with open(os.fsencode(tmp_path) + b"/bad\xff.txt", "wb") as file:
        file.write(b"one document\n")
    with pytest.raises(CorruptInput, match="name") as caught:
        make([str(tmp_path)], tmp_path / "out")
    assert caught.value.where.endswith("bad\\xff.txt") and "rename" in caught.value.fix


@pytest.mark.parametrize("workers", [1, 2])
def test_corrupt_input(tmp_path: pathlib.Path, workers: int) -> None:
    """The first corrupt input in reading order is named; allowed ones are counted over all files and named in the
    card."""
    write_corpus(tmp_path / "src", 12)
    for i in (2, 3, 4):
        (tmp_path / "src" / f"package_{i}" / f"bad_{i}.py").write_bytes(b"x = 1\n\xff\n")
    options = {"workers": workers, "part_bytes": 2000}
    with pytest.raises(CorruptInput, match="UTF-8") as caught:
        make([str(tmp_path / "src")], tmp_path / "out", **options)
    assert "bad_2.py, line 2" in caught.value.where
    with pytest.raises(CorruptInput):
        make([str(tmp_path / "src")], tmp_path / "out", skip_max=2, **options)
    card = make([str(tmp_path / "src")], tmp_path / "out", skip_max=3, **options)
    assert card.skipped == 3
    assert all(f"bad_{i}.py" in named for i, named in zip((2, 3, 4), card.skipped_named, strict=True))


def test_the_folder_is_taken(corpus: list[str], built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A folder that holds something else is not touched, and one that another process is making is not made twice."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(BuildTaken, match="something else"):
        make(corpus, tmp_path / "out")
    with pytest.raises(BuildTaken, match="something else"):
        make(corpus, built, vocab=401)
    assert (tmp_path / "out" / "mine").read_text() == "keep"
    fingerprint = json.loads((built / REQUEST).read_text())["fingerprint"]
    work = tmp_path / f"two.building-{fingerprint[:12]}"
    work.mkdir()
    lock = PLATFORM.lock(str(work / "lock"), "")
    assert lock is not None
    with pytest.raises(BuildTaken, match="just now"):
        make(corpus, tmp_path / "two")
    lock.release()
    make(corpus, tmp_path / "two")


def test_options_that_cannot_work() -> None:
    """Options out of bounds are refused by name."""
    for name, value in {
        "vocab": 256, "skip_max": -1, "part_bytes": 5, "memory_bytes_max": 1000, "held_out_fraction": 0.6,
        "held_out_bytes_max": (64 << 20) + 1, "range_bytes_max": -1,
    }.items():
        with pytest.raises(BadValue) as caught:
            BuildOptions(**{name: value})
        assert name in caught.value.where


def test_a_tokenizer_that_is_not_there(tmp_path: pathlib.Path) -> None:
    """Is refused before anything is read or written."""
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(CorpusMissing, match="no tokenizer") as caught:
        make([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer=str(tmp_path / "none.json"))
    assert "none.json" in caught.value.where
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("normalizer", ["Strip", "Lowercase"])
def test_a_tokenizer_that_loses_bytes(tmp_path: pathlib.Path, normalizer: str) -> None:
    """A tokenizer that changes the text, in length or not, is refused with the option that allows it; when allowed, the
    card still counts the text's bytes."""
    import tokenizers

    write_corpus(tmp_path / "src", 12)
    inner = tokenizers.Tokenizer.from_str(load_byte_text())
    (tmp_path / "src" / "upper.py").write_text("UPPER = 1\n" * 30)
    inner.normalizer = getattr(tokenizers.normalizers, normalizer)()
    inner.save(str(tmp_path / "t.json"))
    options = {"tokenizer": str(tmp_path / "t.json")}
    with pytest.raises(BadValue, match="every byte") as caught:
        make([str(tmp_path / "src")], tmp_path / "out", **options)
    assert "--lossy" in caught.value.fix
    card = make([str(tmp_path / "src")], tmp_path / "out", lossless=False, **options)
    assert card.train.bytes + card.held_out.bytes + card.repeated_bytes == card.read_bytes


def load_byte_text() -> str:
    from packtrain.data.tokenizer import byte_tokenizer

    return byte_tokenizer().text


def test_no_room(corpus: list[str], tmp_path: pathlib.Path) -> None:
    """Where the machine refuses to write, the error names the place and says that the same command goes on."""
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(BuildFailed, match="cannot go on") as caught:
        make(corpus, tmp_path / "file" / "out")
    assert "file" in caught.value.where and "the same command" in caught.value.fix and caught.value.exit_code == 75


def test_damage_in_unfinished_work(corpus: list[str], built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A byte flipped in any file of unfinished work between a kill and going on is refused by the name of the file."""
    for stages, suffixes in ((12, ("0.json", ".rec", ".bands", ".zst")), (30, (".tok",))):
        assert drive(corpus, tmp_path / "out", {}, stages=stages).returncode == -signal.SIGKILL
        for suffix in suffixes:
            path = max(tmp_path.rglob(f"*{suffix}"), key=lambda path: (path.stat().st_size, path.name))
            whole = path.read_bytes()
            flipped = bytearray(whole)
            flipped[len(whole) // 3] ^= 1
            path.write_bytes(flipped)
            with pytest.raises(StoreDamaged) as caught:
                make(corpus, tmp_path / "out")
            assert path.name in caught.value.where, path
            path.write_bytes(whole)
    make(corpus, tmp_path / "out")
    assert tree_bytes(tmp_path / "out") == tree_bytes(built)
